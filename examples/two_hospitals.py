"""Two hospitals train on their own digits over a hub. One of them is killed in mid-run, returns and takes part again.

    python examples/two_hospitals.py

runs everything on this machine: it makes kits, starts the hub and a process for each hospital, kills one hospital
(kill -9), starts it again, and compares the two models at the end. Each hospital has half of the digits' classes, so
that the accuracy shows when one is missing; with `--split iid` both have all classes.

What a hospital runs is in `hospital.py`, as it would run on a machine of its own.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from dadplug.processes import free_port

HOSPITAL = Path(__file__).with_name("hospital.py")
SITES = STAYS, LOST = "berlin", "lyon"
PROJECT = """
name = "digits"
hub = "127.0.0.1:{port}"
sites = ["berlin", "lyon"]
hub_at = "berlin"    # a member runs the hub, which may see the factors that rankdad sends
"""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mode", default="rankdad", help="method: rankdad, dad, dsgd, auto or topk (default: rankdad)")
    add("--split", default="by-class", help="how samples are assigned to hospitals: by-class, iid (default: by-class)")
    add("--steps", type=int, default=300, help="steps in which both hospitals take part (default: 300)")
    add("--kill-at", type=int, default=100, help="step after which lyon is killed; -1 for never (default: 100)")
    add("--seconds", type=float, default=2.0, help="seconds until it is started again (default: 2)")
    add("--pause", type=float, default=0.02, help="seconds between steps, to watch them (default: 0.02)")
    add("--out", type=Path, default=Path("logs/two_hospitals"), help="folder of results (default: logs/two_hospitals)")
    arguments = parser.parse_args()
    if arguments.kill_at >= arguments.steps:
        parser.error(f"--kill-at {arguments.kill_at} is not before the end, step {arguments.steps}")
    return arguments


# What starts the hub and the hospitals, and watches them.


class Tail:
    """Lines that are added to a file by another process."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.path, self._place = path, 0

    def new_lines(self) -> list[str]:
        if not self.path.exists():
            return []
        content = self.path.read_bytes()[self._place :]
        complete = content[: content.rfind(b"\n") + 1]
        self._place += len(complete)
        return complete.decode().splitlines()


class Launcher:
    """The hub and the hospitals on this machine, each a process; none is left when the context ends."""

    def __init__(self, arguments: argparse.Namespace, kits: Path) -> None:
        self.arguments, self.kits = arguments, kits
        self.processes: dict[str, subprocess.Popen] = {}
        self.journal = Tail(arguments.out / "hub.log")
        self.logs = {name: Tail(arguments.out / f"{name}.jsonl") for name in SITES}
        self.lines: dict[str, list[dict]] = {name: [] for name in SITES}
        self.events: list[tuple[float, str]] = []  # what was done to a site
        self._began = self._shown = time.time()
        self._step = -1  # that was shown last

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()

    def start(self, name: str, *command: object, output: int | None = None) -> None:
        # In a session of its own: Ctrl-C reaches only the launcher, which ends the others.
        command = (sys.executable, *map(str, command))
        self.processes[name] = subprocess.Popen(command, stdout=output, start_new_session=True)

    def start_hub(self) -> None:
        hub = ["-m", "dadplug", "hub", self.kits / "hub", "--journal", self.journal.path]
        self.start("hub", *hub, output=subprocess.DEVNULL)

    def start_site(self, name: str) -> None:
        options = [f"--{option}={getattr(self.arguments, option)}" for option in ("mode", "split", "steps", "pause")]
        self.start(name, HOSPITAL, "--kit", self.kits / name, "--log", self.logs[name].path, *options)

    def run(self) -> None:
        """Watch until both hospitals have ended, and meanwhile kill one and start it again."""
        while any(self.processes[name].poll() is None for name in SITES):
            time.sleep(0.05)
            self.read()
            self.kill_and_return()
            for name, process in self.processes.items():
                is_killed = name == LOST and len(self.events) == 1
                if process.poll() and not is_killed:
                    raise ChildProcessError(f"{name} has ended with status {process.returncode}")
        self.read()

    def kill_and_return(self) -> None:
        step = self.lines[LOST][-1]["step"] if self.lines[LOST] else -1
        if not self.events and step >= self.arguments.kill_at >= 0:
            self.processes[LOST].kill()
            self.record("killed")
        elif len(self.events) == 1 and time.time() > self.events[0][0] + self.arguments.seconds:
            self.start_site(LOST)
            self.record("started again")

    def record(self, event: str) -> None:
        self.events.append((time.time(), event))
        self.say(f"{LOST} is {event}")

    def read(self) -> None:
        for line in self.journal.new_lines():
            self.say("hub: " + line.partition("  ")[2])  # without the date
        for name, log in self.logs.items():
            self.lines[name] += map(json.loads, log.new_lines())
        terminal = sys.stdout.isatty()  # there, the progress stays in one line
        line = self.lines[STAYS][-1] if self.lines[STAYS] else {"step": -1}
        if line["step"] > self._step and time.time() > self._shown + (0.1 if terminal else 2.0):
            self._step, self._shown = line["step"], time.time()
            members = " ".join(name if slot in line["present"] else "-" * len(name) for slot, name in enumerate(SITES))
            text = f"step {line['step']:5}  {members}  loss {line['loss']:.4f}  accuracy {line['accuracy']:.3f}"
            self.say(text, "" if terminal else "\n")

    def say(self, text: str, end: str = "\n") -> None:
        erase = "\r\x1b[K" if sys.stdout.isatty() else ""
        print(f"{erase}{time.time() - self._began:5.1f} s  {text}", end=end, flush=True)


# What is shown at the end.


def report(lines: dict[str, list[dict]]) -> None:
    """Print each hospital's accuracy, the digest of its model and the steps that it took part in; then the pauses."""
    print(f"\nhospital  accuracy  {'digest of the model':20}  took part in steps")
    for slot, name in enumerate(SITES):
        last = lines[name][-1]
        steps = ", ".join(f"{part[0]['step']} to {part[-1]['step']}" for part in stays(lines[STAYS], slot))
        print(f"{name:8}  {last['accuracy']:8.4f}  {last['digest']:20}  {steps}")
    equal = len({lines[name][-1]["digest"] for name in SITES}) == 1
    print(f"The two models are {'equal, to the bit' if equal else 'DIFFERENT'}.")
    gaps = [after["time"] - before["time"] for before, after in pairwise(lines[STAYS])]
    print(f"A step takes {1e3 * statistics.median(gaps):.0f} ms (median), the longest {max(gaps):.2f} s.")
    for number, (before, after) in enumerate(pairwise(len(line["present"]) for line in lines[STAYS])):
        if after < before:
            print(f"Pause of {STAYS} when {LOST} was lost: {gaps[number]:.2f} s.")
        elif after > before:  # in the step before it takes part, it gets its state
            print(f"Pause of {STAYS} when {LOST} returned: {max(gaps[max(0, number - 2) : number + 1]):.2f} s.")


def stays(lines: list[dict], slot: int) -> list[list[dict]]:
    """Return the lines of the steps in which a site took part, a list for each of its stays."""
    parts: list[list[dict]] = [[]]
    for line in lines:
        if slot in line["present"]:
            parts[-1].append(line)
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def draw(launcher: Launcher, path: Path) -> None:
    """Draw loss, accuracy and members over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    loss, right, members = figure.subplots(3, 1, sharex=True, height_ratios=(4, 3, 1.3))
    first = launcher.lines[STAYS][0]["time"]
    for slot, name in enumerate(SITES):
        for part in stays(launcher.lines[name], slot):
            times = [line["time"] - first for line in part]
            window = [[line["loss"] for line in part[max(0, end - 10) : end]] for end in range(1, len(part) + 1)]
            loss.plot(times, [*map(statistics.fmean, window)], color=f"C{slot}")  # smoothed
            members.barh(slot, times[-1] - times[0], left=times[0], height=0.7, color=f"C{slot}")
    lines = launcher.lines[STAYS]
    right.plot([line["time"] - first for line in lines], [line["accuracy"] for line in lines], color="black")
    for (moment, event), side in zip(launcher.events, ("right", "left"), strict=False):
        for axes in (loss, right, members):
            axes.axvline(moment - first, color="grey", linestyle=":")
        place = {"xytext": (moment - first, 0.96), "textcoords": ("data", "axes fraction"), "va": "top", "ha": side}
        loss.annotate(f" {LOST} is {event} ", (moment - first, 1), color="grey", **place)
    loss.set(ylabel="training loss", yscale="log", title=f"{launcher.arguments.mode}: members, loss and accuracy")
    right.set(ylabel="held-out accuracy")
    members.set(yticks=range(len(SITES)), yticklabels=SITES, xlabel="seconds since the first step")
    members.invert_yaxis()
    for axes in (loss, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def write_table(lines: list[dict], path: Path) -> None:
    """Write members, loss and accuracy of every tenth step as text, where matplotlib is not installed."""
    rows = [f"{'seconds':>7} {'step':>6}  {'loss':>8}  {'accuracy':>8}  members"]
    for line in lines[::10]:
        members = " ".join(SITES[slot] for slot in line["present"])
        seconds = line["time"] - lines[0]["time"]
        rows.append(f"{seconds:7.1f} {line['step']:6}  {line['loss']:8.4f}  {line['accuracy']:8.4f}  {members}")
    path.write_text("\n".join(rows) + "\n")


def launch(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        project, kits = Path(folder) / "project.toml", Path(folder) / "kits"
        project.write_text(PROJECT.format(port=free_port()))
        provision = [sys.executable, "-m", "dadplug", "provision", str(project), "--out", str(kits)]
        subprocess.run(provision, check=True, stdout=subprocess.DEVNULL)
        with Launcher(arguments, kits) as launcher:
            launcher.say(f"kits for the hub, {STAYS} and {LOST} are made")
            launcher.start_hub()
            for name in SITES:
                launcher.start_site(name)
            launcher.run()
    report(launcher.lines)
    path = arguments.out / "two_hospitals.png"
    try:
        draw(launcher, path)
    except ImportError:
        path = path.with_suffix(".txt")
        write_table(launcher.lines[STAYS], path)
    print(f"Members and loss over time: {path}")


def main() -> int:
    arguments = parse()
    for number in (signal.SIGTERM, signal.SIGHUP):  # end the other processes, too
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        launch(arguments)
    except KeyboardInterrupt:
        return 130
    except (ChildProcessError, subprocess.CalledProcessError) as error:  # that process has printed the reason
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
