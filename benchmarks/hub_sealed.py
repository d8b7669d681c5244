"""Sealed training over slow links while a site is killed and returns, and a new one is added.

    sudo python benchmarks/hub_sealed.py                              three sites, 10 and 100 Mbit/s, dad and dsgd
    sudo python benchmarks/hub_sealed.py --rates 10mbit --modes rankdad --late skip --load 2
    python benchmarks/hub_sealed.py --rates none                      without root, on loopback

Each site is a network namespace of its own, behind a link of the given rate in both directions; the hub has a fast one.
Kits are made by `python -m dadplug provision`. Site c is killed (SIGKILL) and started again; then site d is added to
the project and started with its new kit. With `--load` other processes compute beside it.

Checked: all sites have the same parameters after each step, to the bit, and so has a run without sealing in which the
absent sites are idle instead. No site waits longer than `--most` seconds for a step, also not the one that returns and
the new one. What the hub receives, which it writes to a file after TLS, has no bytes of inputs or parameters in it; in
the run without sealing it has. Exits with an error otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from command import parser_of
from drive import check_rates, title
from kits import Programs, end
from link import may_make_links, run
from many_sites import Star

SITES = "abcd"
ADDRESS = "10.78.0.254"
BEGINNING = 24  # bytes that are looked for
LIMIT = 400.0  # seconds for a part of a run


# A site


def beginnings(tensors: Iterable[Any]) -> list[str]:
    """Return the first bytes of tensors, in hexadecimal digits."""
    return [each.detach().numpy().tobytes()[:BEGINNING].hex() for each in tensors]


def train(case: dict[str, Any]) -> None:
    """Train at one site, and log each step.

    Args:
        case: `kit`, folder of the kit; `folder`, of the run; `name` of the site; `mode`; `late`; `width` of the layers;
            `pace`, seconds between steps; `steps`, their number, or None for that in the file `last`; `idle`, steps in
            which the site is idle, or None where it may leave and return.
    """
    import torch
    from torch import nn

    import dadplug

    torch.set_num_threads(1)
    torch.manual_seed(SITES.index(case["name"]))  # the sites begin with the parameters of the first one
    width, idle, last = case["width"], case["idle"], Path(case["folder"]) / "last"
    model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 8))
    optimizer = torch.optim.Adam(model.parameters())
    dadplug.connect(kit=case["kit"], timeout=LIMIT)
    options = {} if idle is not None else {"min_sites": 1, "late": case["late"]}
    reduction = dadplug.GradientReduction(model, case["mode"], state={"optimizer": optimizer}, **options)
    cold, first = reduction.state_dict(), beginnings(model.parameters())
    with (Path(case["folder"]) / f"{case['name']}.log").open("a", buffering=1) as log:
        while (step := reduction.step) < (case["steps"] or (int(last.read_text()) if last.exists() else step + 1)):
            if idle and step - 1 in idle and step not in idle:
                reduction.load_state_dict(cold | {"step": step})  # a process that returns has no memory of errors
            chance = torch.Generator().manual_seed(1000 * step + reduction.site_rank)
            inputs = torch.randn(16, 64, generator=chance)
            optimizer.zero_grad()
            begin = time.monotonic()
            if step in (idle or ()):
                reduction.idle()
            else:
                nn.functional.mse_loss(model(inputs), inputs[:, :8].sin()).backward()
                reduction.synchronize()
            optimizer.step()
            seconds = time.monotonic() - begin
            content = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
            row = {"step": reduction.step - 1, "seconds": seconds, "present": list(reduction.present_sites)}
            row |= {"digest": hashlib.sha256(content).hexdigest(), "secrets": beginnings([inputs, *model.parameters()])}
            row["secrets"] += first
            first = []
            log.write(json.dumps(row) + "\n")
            time.sleep(case["pace"])
    reduction.detach()


def run_hub(kit: str, received: str) -> None:
    """Run a hub that writes all bytes of the frames that it receives to a file."""
    from dadplug.cli.commands import main as command
    from dadplug.hub.server.session import Session

    receive = Session.receive

    def receiving(session: Session, now: float) -> Any:
        frames, more = receive(session, now)
        for frame in frames:
            file.write(frame.packed)
        return frames, more

    with Path(received).open("wb") as file:
        Session.receive = receiving  # type: ignore[method-assign]
        sys.exit(command(["hub", kit]))


# Runs


class Run(Programs):
    """Processes of a hub and its sites.

    Args:
        folder: folder for all files, which is made.
        star: the links; None for loopback.
        sealed: whether messages are sealed.
        case: what is the same at all sites, see `train`.
    """

    def __init__(self, folder: Path, star: Star | None, sealed: bool, case: dict[str, Any]) -> None:
        from dadplug.processes import free_port

        super().__init__(folder, star, LIMIT)
        folder.mkdir()
        self._sealed = sealed
        self._case = {"folder": str(folder), "steps": None, "idle": None} | case
        self._hub = f"{ADDRESS if star else '127.0.0.1'}:{free_port()}"
        self.received = folder / "received"

    def make_kits(self, names: str) -> None:
        """Make the kits of sites that have none."""
        kind = "sealed = true" if self._sealed else f'hub_at = "{names[0]}"'
        self.provision(f'name = "study"\nhub = "{self._hub}"\nsites = {json.dumps(list(names))}\n{kind}\n')

    def start_hub(self) -> None:
        """Start the hub."""
        fields = [str(self.folder / "kits" / "hub"), str(self.received)]
        self.run("hub", None, [sys.executable, __file__, "--hub", *fields])

    def start(self, names: str, **fields: Any) -> None:
        """Start sites; fields are those of the case."""
        for name in names:
            case = self._case | {"kit": str(self.folder / "kits" / name), "name": name} | fields
            self.run(name, SITES.index(name), [sys.executable, __file__, "--site", json.dumps(case)])

    def await_step(self, name: str, present: str, more: int = 10) -> None:
        """Wait until a site has made some steps with some sites, one after the other."""
        wanted = [SITES.index(each) for each in present]

        def over() -> bool:
            rows = self.rows(name)[-more:]
            return len(rows) == more and all(row["present"] == wanted for row in rows)

        self.wait(f"steps of {present}", over)

    def finish(self) -> None:
        """Let all sites end after some more steps."""
        self.end_at(self.rows("a")[-1]["step"] + 10)
        sites = [each for name, each in self.processes.items() if name != "hub"]
        self.wait("the end", lambda: all(each.poll() == 0 for each in sites))


def with_changes(run: Run) -> None:
    """Train while site c is killed and returns, and site d is added."""
    run.make_kits("abc")
    run.start_hub()
    run.start("abc")
    run.await_step("a", "abc")
    run.kill("c")
    run.await_step("a", "ab", 3)
    run.start("c")
    run.await_step("a", "abc")
    run.make_kits("abcd")  # the hub reads the new roster by itself
    run.start("d")
    run.await_step("a", "abcd")
    run.finish()


def with_idle_sites(run: Run, present: dict[int, list[int]]) -> None:
    """Train the same steps with sites that are idle in those in which they were not present."""
    run.make_kits("abcd")
    run.start_hub()
    for slot, name in enumerate(SITES):
        run.start(name, steps=len(present), idle=[step for step in present if slot not in present[step]], late="wait")
    run.wait("the end", lambda: all(run.processes[name].poll() == 0 for name in SITES))


# Verdict


def found_in(received: Path, secrets: set[bytes]) -> int:
    """Return how many of some byte strings are in a file."""
    content = received.read_bytes()
    return sum(each in content for each in secrets)


def secrets_of(run: Run, most: int = 100) -> set[bytes]:
    """Return bytes of what sites have begun with and computed, from steps all over a run."""
    rows = [row for name in SITES for row in run.rows(name)]
    later = [each for row in rows for each in row["secrets"]]
    first = [each for row in rows if row["step"] == 0 for each in row["secrets"]]
    return {bytes.fromhex(each) for each in (*first, *later[:: max(1, len(later) // most)])}


def differences(rows: dict[str, list[dict[str, Any]]], others: Sequence[dict[str, Any]]) -> list[str]:
    """Return where parameters differ between sites, or from those of another run."""
    faults = []
    known = {row["step"]: row["digest"] for row in others}
    for name, own in rows.items():
        bad = [row["step"] for row in own if row["digest"] != known.get(row["step"])]
        faults += [f"the parameters of {name} differ in step {bad[0]} and {len(bad) - 1} others"] if bad else []
    return faults


def judge(run: Run, other: Run, most: float) -> list[str]:
    """Print what a run has taken, and return what is wrong with it."""
    rows = {name: run.rows(name) for name in SITES}
    faults = differences(rows, other.rows("a"))
    for name, own in rows.items():
        seconds = [row["seconds"] for row in own]
        place = seconds.index(max(seconds))
        print(
            f"  {name}: {len(own)} steps, median {statistics.median(seconds):.3f} s, "
            f"longest {seconds[place]:.2f} s (step {own[place]['step']})"
        )
        if seconds[place] > most:
            faults.append(f"{name} has waited {seconds[place]:.1f} s for step {own[place]['step']}")
    seen, open_seen = found_in(run.received, secrets_of(run)), found_in(other.received, secrets_of(other))
    size = run.received.stat().st_size / 1e6
    print(f"  the hub has received {size:.1f} MB, with {seen} secrets in them; without sealing {open_seen}", flush=True)
    faults += [f"{seen} secrets are readable at the hub"] * bool(seen)
    return faults + ["no secret is found without sealing, either: the search is blind"] * (not open_seen)


def compare(folder: Path, rate: str, mode: str, arguments: argparse.Namespace) -> list[str]:
    """Train with and without sealing, and return what is wrong."""
    print(f"{title(rate)}, {mode}, late={arguments.late!r}", flush=True)
    case = {"mode": mode, "late": arguments.late, "width": arguments.width, "pace": arguments.pace}
    star = None if arguments.loopback else Star(rate, len(SITES))
    with contextlib.ExitStack() as stack:
        if star is not None:
            stack.enter_context(star)
            run("ip", "netns", "exec", star.middle, "ip", "addr", "add", f"{ADDRESS}/24", "dev", "br0")
        sealed = stack.enter_context(Run(folder / "sealed", star, True, case))
        with_changes(sealed)
        present = {row["step"]: row["present"] for row in sealed.rows("a")}
        other = stack.enter_context(Run(folder / "open", None, False, case | {"pace": 0.0}))
        with_idle_sites(other, present)
        return [f"{title(rate)}, {mode}: {each}" for each in judge(sealed, other, arguments.most)]


def main() -> int:
    """Run it, and print the verdict."""
    parser = parser_of(
        __doc__,
        site=(None, argparse.SUPPRESS),
        hub={"nargs": 2, "help": argparse.SUPPRESS},
        rates="10mbit,100mbit",
        modes="dad,dsgd",
        late={"default": "wait", "choices": ("wait", "skip")},
        width=(256, "of the two hidden layers"),
        pace=(0.05, "seconds between steps"),
        load=(0, "processes that compute beside it"),
        most=(5.0, "seconds that a site may wait for a step"),
        out=(None, "folder for kits and logs; by default they are removed"),
    )
    arguments = parser.parse_args()
    if arguments.site:
        train(json.loads(arguments.site))
        return 0
    if arguments.hub:
        run_hub(*arguments.hub)
    arguments.loopback = not may_make_links()
    check_rates(parser, arguments.rates, arguments.loopback)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces go, too
    faults = []
    with contextlib.ExitStack() as stack:
        folder = Path(arguments.out or stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        for _ in range(arguments.load):
            stack.callback(end, subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        for rate in arguments.rates.split(","):
            for mode in arguments.modes.split(","):
                place = folder / f"{rate}-{mode}"
                place.mkdir()
                faults += compare(place, rate, mode, arguments)
    print(*(f"FAULT: {each}" for each in faults), "failed" if faults else "passed", sep="\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
