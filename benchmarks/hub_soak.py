"""A training over a hub through proxies, with a fault at random every minute, that nobody looks after.

    python benchmarks/hub_soak.py --minutes 90                   three sites, a fault a minute; the seed is printed
    python benchmarks/hub_soak.py --minutes 5 --every 10         a short one
    python benchmarks/hub_soak.py --seed 7 --faults cut,kill     the same faults again, of some kinds

Each site trains with `min_sites=1` and connects through a proxy of its own, whose connections this program cuts, holds
and slows down. A program that ends with an error is started again after a second, as systemd does it. Faults:

    kill     a site's process is killed                    stop     it is stopped for 12 s, longer than `site_timeout`
    cut      a site's connections are reset                hold     they carry nothing for 8 s
    slow     they carry 100 kB/s for 15 s                  hub      the hub is killed, and started again after 2 s
    disk     the disk of the hub's journal and status is full for 10 s (as root: a small file system is mounted)
    expire   a site's certificate expires, its process is killed; after 10 s the certificate is renewed
    renew    the certificates of the hub and of a site are renewed while they are in use

Checked: parameters are equal to the bit at all sites in each step that is compared, each fault is followed by steps of
all sites within four minutes, and at the end no process has more memory (5 %), threads or descriptors than it had when
it had settled. Exits with an error if one of these fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from command import parser_of
from kits import end, hub_command, make_kits

SITES = ("a", "b", "c")
LOOK = 20  # steps between two comparisons
SETTLED = 90.0  # seconds of a process's life, before which its memory still grows
SAMPLE = 2.0  # seconds between two looks at what a process uses
PATIENCE = 240.0  # seconds for which all sites may be without steps after a fault
GROWTH = 1.05


# A site


def train(kit: str, log: str, last: str) -> None:
    """Train at one site until the step that the file `last` will name."""
    import torch
    from torch import nn

    import dadplug

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8)).double()
    optimizer = torch.optim.Adam(model.parameters())
    connection = dadplug.hub.pki.kits.Kit.load(kit)
    dadplug.connect(kit=kit, timeout=600)
    reduction = dadplug.GradientReduction(
        model, mode="dsgd", min_sites=1, site_timeout=8, state={"optimizer": optimizer}, timeout=300
    )
    chance = torch.Generator().manual_seed(os.getpid() + connection.slot)
    with Path(log).open("a", buffering=1) as file:
        while not (os.path.exists(last) and reduction.step >= int(Path(last).read_text())):
            inputs = torch.randn(16, 64, generator=chance, dtype=torch.float64)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), inputs[:, :8].sin()).backward()
            reduction.synchronize()
            optimizer.step()
            if reduction.step % LOOK == 0:
                content = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
                row = {"step": reduction.step, "hash": hashlib.sha256(content).hexdigest(), "time": time.time()}
                file.write(json.dumps(row | {"sites": list(reduction.present_sites)}) + "\n")
            time.sleep(0.02)
    torch.distributed.destroy_process_group()


# What lies between a site and the hub


class Wire:
    """Proxy of one site, in a thread of its own.

    Attributes:
        port: its port.
        held: whether nothing is passed on.
        rate: bytes per second that are passed on; 0 for no limit.
    """

    def __init__(self) -> None:
        self.port, self.held, self.rate = 0, False, 0.0
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        ready = threading.Event()

        async def serve() -> None:
            server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()
            await server.serve_forever()

        def run() -> None:
            with contextlib.suppress(asyncio.CancelledError, RuntimeError):
                self._loop.run_until_complete(serve())

        threading.Thread(target=run, daemon=True).start()
        ready.wait()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            host, _, port = head.split()[1].decode().rpartition(":")
            there = await asyncio.open_connection(host, int(port))
        except (OSError, asyncio.IncompleteReadError, ValueError):
            writer.close()
            return
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        self._writers |= {writer, there[1]}
        await asyncio.gather(self._pass_on(reader, there[1]), self._pass_on(there[0], writer))
        self._writers -= {writer, there[1]}

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while content := await reader.read(1 << 14):
                while self.held:
                    await asyncio.sleep(0.05)
                if self.rate:
                    await asyncio.sleep(len(content) / self.rate)
                writer.write(content)
                await writer.drain()
        writer.close()

    def cut(self) -> None:
        """Reset all connections."""

        def abort() -> None:
            for each in list(self._writers):
                each.transport.abort()

        self._loop.call_soon_threadsafe(abort)


# Processes that are started again


@dataclass
class Process:
    """Program that is started again after it has ended with an error.

    Attributes:
        name: its name.
        command: the command.
        out: file of its output.
        holds: time until which it is not started.
        samples: memory in kB, threads and descriptors of the present process, with its age, the oldest first.
    """

    name: str
    command: list[str]
    out: Path
    holds: float = 0.0
    started: float = 0.0
    starts: int = 0
    program: subprocess.Popen[bytes] | None = None
    samples: list[tuple[float, int, int, int]] = field(default_factory=list)
    done: bool = False

    def look(self) -> None:
        """Start the program if it is to run, and record what it uses."""
        now = time.monotonic()
        if self.program is not None and self.program.poll() is not None:
            self.done = self.program.returncode == 0
            self.program, self.holds = None, max(self.holds, now + 1.0)
        if self.program is None and not self.done and now >= self.holds:
            with self.out.open("ab") as out:
                self.program = subprocess.Popen(self.command, stdout=out, stderr=out)
            self.started, self.samples = now, []
            self.starts += 1
        age = now - self.started
        if self.program is not None and age > SETTLED + SAMPLE * len(self.samples):
            with contextlib.suppress(OSError, IndexError):
                folder = Path(f"/proc/{self.program.pid}")
                status = (folder / "status").read_text()
                memory, threads = (int(status.split(key)[1].split()[0]) for key in ("VmRSS:", "Threads:"))
                self.samples.append((age, memory, threads, len(os.listdir(folder / "fd"))))

    def signal(self, number: int) -> None:
        """Send a signal, if the program runs."""
        if self.program is not None:
            self.program.send_signal(number)

    def verdict(self) -> str:
        """Return what the present process has too much of, compared with its first quarter; empty if nothing."""
        if len(self.samples) < 8:
            return ""
        quarter = len(self.samples) // 4
        before = [max(each[place] for each in self.samples[:quarter]) for place in (1, 2, 3)]
        last = [min(each[place] for each in self.samples[-5:]) for place in (1, 2, 3)]
        found = []
        if last[0] > GROWTH * before[0]:
            found.append(f"memory from {before[0] / 1e3:.1f} to {last[0] / 1e3:.1f} MB")
        for place, what in ((1, "threads"), (2, "descriptors")):
            if last[place] > before[place]:
                found.append(f"{what} from {before[place]} to {last[place]}")
        return ", ".join(found)


class Soak:
    """Hub, sites and faults.

    Args:
        folder: folder of all files.
        seed: seed of the faults.
        kinds: kinds of faults.
    """

    def __init__(self, folder: Path, seed: int, kinds: list[str]) -> None:
        from dadplug.processes import free_port

        self.folder, self.kinds, self.chance = folder, kinds, random.Random(seed)
        self.kits, self.disk, self.last = folder / "kits", folder / "disk", folder / "last"
        make_kits(self.kits, "127.0.0.1", free_port(), SITES)
        self.disk.mkdir()
        self.mounted = "disk" in kinds and self._mount()
        if "disk" in kinds and not self.mounted:
            print("no faults of the kind disk: a file system can be mounted by root only")
            kinds.remove("disk")
        command = hub_command(self.kits, "--journal", str(self.disk / "journal"), "--status", str(self.disk / "status"))
        self.hub = Process("hub", command, folder / "hub.out")
        self.wires = {name: Wire() for name in SITES}
        self.sites = {name: self._site(name) for name in SITES}
        self.problems: list[str] = []
        self.hashes: dict[int, dict[str, str]] = {}
        self._read = dict.fromkeys(SITES, 0)
        self.newest = dict.fromkeys(SITES, 0)

    def _mount(self) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(self.disk)]
        return subprocess.run(command, capture_output=True).returncode == 0

    def _site(self, name: str) -> Process:
        policy = f'proxy = "http://127.0.0.1:{self.wires[name].port}"\n'
        (self.kits / name / "policy.toml").write_text(policy)
        files = [str(self.kits / name), str(self.folder / f"{name}.log"), str(self.last)]
        return Process(name, [sys.executable, __file__, "--site", *files], self.folder / f"{name}.out")

    def look(self) -> None:
        """Start what has ended, and compare what sites have written."""
        for each in (self.hub, *self.sites.values()):
            each.look()
        for name in SITES:
            path = self.folder / f"{name}.log"
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read[name])
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._read[name] += len(line)
                    row = json.loads(line)
                    self.newest[name] = row["step"]
                    self._compare(name, row["step"], row["hash"])

    def _compare(self, name: str, step: int, found: str) -> None:
        known = self.hashes.setdefault(step, {})
        if set(known.values()) - {found}:
            self.problems.append(f"step {step}: the parameters of {name} differ from those of {', '.join(known)}")
        known[name] = found

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.look()
            time.sleep(0.25)

    def recover(self, what: str) -> float:
        """Wait until all sites have made steps together again; return the seconds that it has taken."""
        begin, before = time.monotonic(), max(self.newest.values())
        while min(self.newest.values()) <= before:
            if time.monotonic() > begin + PATIENCE:
                self.problems.append(f"after {what}: no steps of {[n for n in SITES if self.newest[n] <= before]}")
                break
            self.wait(0.5)
        return time.monotonic() - begin

    def fault(self) -> str:
        """Let a fault happen, and end; return what it was."""
        kind, name = self.chance.choice(self.kinds), self.chance.choice(SITES)
        getattr(self, f"_{kind}")(name)
        return kind if kind in ("hub", "disk") else f"{kind} {name}"

    def _kill(self, name: str) -> None:
        self.sites[name].signal(signal.SIGKILL)

    def _stop(self, name: str) -> None:
        self.sites[name].signal(signal.SIGSTOP)
        self.wait(12)
        self.sites[name].signal(signal.SIGCONT)

    def _cut(self, name: str) -> None:
        self.wires[name].cut()

    def _hold(self, name: str) -> None:
        self.wires[name].held = True
        self.wait(8)
        self.wires[name].held = False

    def _slow(self, name: str) -> None:
        self.wires[name].rate = 1e5
        self.wait(15)
        self.wires[name].rate = 0.0

    def _hub(self, name: str) -> None:
        self.hub.holds = time.monotonic() + 2.0
        self.hub.signal(signal.SIGKILL)

    def _disk(self, name: str) -> None:
        with contextlib.suppress(OSError), (self.disk / "filling").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        self.wires[name].cut()  # so that there is something to write
        self.wait(10)
        (self.disk / "filling").unlink()
        (self.disk / "journal").unlink()  # as log rotation would

    def _expire(self, name: str) -> None:
        from dadplug.hub.pki.kits import current_time
        from dadplug.hub.pki.provision import renew

        renew(self.kits, name, days=1, now=current_time() - timedelta(days=3))
        self.sites[name].signal(signal.SIGKILL)
        self.wait(10)
        renew(self.kits, name, days=365)

    def _renew(self, name: str) -> None:
        from dadplug.hub.pki.provision import renew

        renew(self.kits, name, with_key=self.chance.random() < 0.5)
        renew(self.kits, "hub")

    def finish(self) -> None:
        """Let all sites end at one step, and check what processes have used."""
        self.wait(SETTLED + 45)
        for each in (self.hub, *self.sites.values()):
            if found := each.verdict():
                self.problems.append(f"{each.name}: {found}")
        self.last.write_text(str(max(self.newest.values()) + 10 * LOOK))
        until = time.monotonic() + PATIENCE
        while not all(each.done for each in self.sites.values()) and time.monotonic() < until:
            self.wait(0.5)
        self.problems += [f"{each.name} has not ended" for each in self.sites.values() if not each.done]

    def close(self) -> None:
        """End all processes."""
        for each in (*self.sites.values(), self.hub):
            if each.program is not None:
                each.signal(signal.SIGCONT)
                end(each.program)
        if self.mounted:
            subprocess.run(["umount", str(self.disk)])


KINDS = ("kill", "stop", "cut", "hold", "slow", "hub", "disk", "expire", "renew")


@contextlib.contextmanager
def running(seed: int, kinds: list[str]) -> Iterator[Soak]:
    """Run hub and sites in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), seed, kinds)
        try:
            yield soak
            if soak.problems:
                for each in (soak.hub, *soak.sites.values()):
                    lines = each.out.read_text(errors="replace").splitlines() if each.out.exists() else []
                    print(f"\n{each.name}, the last lines:", *lines[-15:], sep="\n    ")
        finally:
            soak.close()


def main() -> None:
    """Run it, and print the faults and the verdict."""
    parser = parser_of(
        __doc__,
        site={"nargs": 3, "help": argparse.SUPPRESS},
        minutes=90.0,
        every=(60.0, "seconds from one fault to the next, at least"),
        seed={"type": int, "default": random.SystemRandom().randrange(1 << 30)},
        faults=(",".join(KINDS), "kinds of faults"),
    )
    arguments = parser.parse_args()
    if arguments.site:
        train(*arguments.site)
        return
    print(f"seed {arguments.seed}", flush=True)
    kinds = arguments.faults.split(",")
    assert set(kinds) <= set(KINDS), f"kinds of faults are {', '.join(KINDS)}"
    with running(arguments.seed, kinds) as soak:
        print(f"started after {soak.recover('the start'):.1f} s", flush=True)
        begin = time.monotonic()
        while time.monotonic() < begin + 60 * arguments.minutes:
            due = time.monotonic() + arguments.every
            what = soak.fault()
            took = soak.recover(what)
            step = max(soak.newest.values())
            print(
                f"{(time.monotonic() - begin) / 60:6.1f} min  {what:10} all again after {took:5.1f} s, step {step}",
                flush=True,
            )
            soak.wait(max(0.0, due - time.monotonic()))
        soak.finish()
        compared = sum(len(each) > 1 for each in soak.hashes.values())
        starts = ", ".join(f"{each.name} {each.starts}" for each in (soak.hub, *soak.sites.values()))
        print(f"{max(soak.newest.values())} steps, {compared} comparisons of sites; starts: {starts}")
        for each in (soak.hub, *soak.sites.values()):
            if each.samples:
                age, memory, threads, descriptors = each.samples[-1]
                print(
                    f"{each.name}: {memory / 1e3:.1f} MB, {threads} threads, {descriptors} descriptors, {age:.0f} s old"
                )
        problems = list(soak.problems)
    print("\n".join(problems) or "no problem")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
