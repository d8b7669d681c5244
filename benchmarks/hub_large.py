"""A sealed training of BERT-large's size over slow links through squid, with faults and without an operator.

    sudo python benchmarks/hub_large.py                                              758 MB, 10 Mbit/s; about 45 minutes
    sudo python benchmarks/hub_large.py --rate 100mbit --megabytes 76 --cut 10 --stop 20 --timeout 5      two minutes

Three sites, each a network namespace behind a link of the given rate, reach the hub by its name through squid
(apt-get install squid), which alone can resolve it. They train linear layers by rankdad with `min_sites=1`. The hub is
killed while the parameters of the first site are on their way to the others, and started again. After some steps
together each of these happens, and steps together follow again without any action at a site:

1. All links carry nothing for `--cut` seconds.
2. The hub is stopped, and after `--stop` seconds its kit is started at another address, which its name then has.
3. Site c is killed, and started again: it gets all parameters from another site.

Checked: parameters are equal to the bit at all sites after each step that two of them have made, the sites that stay
leave out no step, and no process but the one that is killed ends before the end. Exits with an error otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from command import parser_of
from drive import title
from kits import Programs, hub_command
from link import run
from many_sites import Star

SITES = "abc"
NAME = "hub.study.test"
HUBS = ("10.78.0.254", "10.78.0.252")
PROXY = "10.78.0.253"
LIMIT = 2700.0  # seconds for a part of a run
BLOCK = 4096  # width of a layer


# A site


def train(kit: str, log: str, megabytes: float, timeout: float, last: str) -> None:
    """Train at one site until the step that the file `last` names."""
    import torch
    from torch import nn

    import dadplug

    torch.set_num_threads(1)
    torch.manual_seed(sum(log.encode()))  # another start at each site: they get that of the first one
    width = min(BLOCK, int((megabytes * 1e6 / 4) ** 0.5))
    layers = [nn.Linear(width, width) for _ in range(round(megabytes * 1e6 / 4 / width**2))]
    model = nn.Sequential(nn.Linear(64, width), *layers, nn.Linear(width, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    dadplug.connect(kit=kit)
    reduction = dadplug.GradientReduction(model, "rankdad", rank=4, min_sites=1, timeout=timeout)
    while not Path(last).exists() or reduction.step < int(Path(last).read_text()):
        inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(1000 * reduction.step + ord(log[-5])))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs[:, :8].sin()).backward()
        begin = time.monotonic()
        reduction.synchronize()
        seconds = time.monotonic() - begin
        optimizer.step()
        digest = hashlib.sha256()
        for each in model.parameters():
            digest.update(each.detach().numpy().data)
        row = {"step": reduction.step - 1, "seconds": seconds, "present": list(reduction.present_sites)}
        with Path(log).open("a") as file:
            file.write(json.dumps(row | {"digest": digest.hexdigest()}) + "\n")
    reduction.detach()


# The run


class Run(Programs):
    """A proxy, a hub, and sites.

    Args:
        folder: folder for all files.
        star: the links.
        megabytes: size of the parameters.
        timeout: option of the reduction.
    """

    def __init__(self, folder: Path, star: Star, megabytes: float, timeout: float) -> None:
        super().__init__(folder, star, LIMIT)
        self._case = [str(megabytes), str(timeout)]
        self.provision(
            f'name = "study"\nhub = "{NAME}:8470"\nsites = {json.dumps(list(SITES))}\nsealed = true\n'
            f'proxy = "http://{PROXY}:3128"\n'
        )
        (folder / "squid.conf").write_text(
            f"http_port {PROXY}:3128\npid_filename {folder}/squid.pid\ncoredump_dir {folder}\nshutdown_lifetime 0\n"
            f"access_log none\ncache_log {folder}/cache.log\ncache deny all\nhosts_file {folder}/hosts\n"
            "acl hub port 8470\nhttp_access allow CONNECT hub\nhttp_access deny all\n"
        )

    def name_hub(self, address: str) -> None:
        """Let the name of the hub stand for an address."""
        (self.folder / "hosts").write_text(f"{address} {NAME}\n")

    def start_proxy(self) -> None:
        """Start squid."""
        self.run("squid", None, ["squid", "-N", "-f", str(self.folder / "squid.conf")])

    def read_hosts(self) -> None:
        """Let squid read the names again."""
        self.processes["squid"].send_signal(signal.SIGHUP)

    def start_hub(self, address: str) -> None:
        """Start the hub at an address."""
        self.run("hub", None, hub_command(self.folder / "kits", "--listen", f"{address}:8470"))

    def start_site(self, name: str) -> None:
        """Start the program of a site."""
        files = [str(self.folder / part) for part in (f"kits/{name}", f"{name}.log", "last")]
        fields = [*files[:2], *self._case, files[2]]
        self.run(name, SITES.index(name), [sys.executable, __file__, "--site", *fields])

    def wait(self, what: str, over: Callable[[], bool]) -> None:
        """Wait until a condition holds, while no program ends with an error."""
        begin = time.monotonic()
        super().wait(what, over)
        print(f"  {what} after {time.monotonic() - begin:.0f} s, step {self._step()}", flush=True)

    def _step(self) -> int:
        rows = self.rows("a")
        return rows[-1]["step"] if rows else -1

    def await_steps(self, what: str, count: int, present: str = SITES) -> None:
        """Wait until sites have made some more steps together."""
        first, wanted = self._step(), [SITES.index(each) for each in present]

        def over() -> bool:
            together = [row for row in self.rows("a") if row["step"] > first and row["present"] == wanted]
            return len(together) >= count

        self.wait(what, over)

    def has_started(self) -> bool:
        """Return whether the hub has started the training."""
        return "training starts" in (self.folder / "hub.out").read_text()

    def finish(self) -> None:
        """Let all sites end after some more steps."""
        self.end_at(self._step() + 10)
        self.wait("the end", lambda: all(self.processes[name].poll() == 0 for name in SITES))


def with_faults(found: Run, star: Star, arguments: argparse.Namespace) -> None:
    """Train while links are cut, the hub moves, and a site is killed."""
    found.name_hub(HUBS[0])
    found.start_proxy()
    found.start_hub(HUBS[0])
    for name in SITES:
        found.start_site(name)
    found.wait("all sites are connected", found.has_started)
    time.sleep(4 * arguments.megabytes / float(arguments.rate.removesuffix("mbit")))  # for half of the parameters
    found.kill("hub")
    found.start_hub(HUBS[0])
    found.await_steps("the hub was killed; all sites have begun", arguments.steps)
    inside = ("ip", "netns", "exec", star.middle, "ip", "link", "set", "br0")
    run(*inside, "down")
    time.sleep(arguments.cut)
    run(*inside, "up")
    found.await_steps(f"all links were cut for {arguments.cut:g} s; steps together", arguments.steps)
    hub = found.processes.pop("hub")
    hub.terminate()
    hub.wait()
    time.sleep(arguments.stop)
    found.name_hub(HUBS[1])
    found.read_hosts()
    found.start_hub(HUBS[1])
    found.await_steps(f"the hub was away for {arguments.stop:g} s and has moved; steps together", arguments.steps)
    found.kill("c")
    found.await_steps("site c was killed; steps of the others", arguments.steps, "ab")
    found.start_site("c")
    found.await_steps("site c was started again; steps together", arguments.steps)
    found.finish()


def judge(found: Run) -> list[str]:
    """Return what is wrong with a run."""
    faults, digests = [], {row["step"]: row["digest"] for row in found.rows("a")}
    for name in SITES:
        rows = found.rows(name)
        steps = [row["step"] for row in rows]
        bad = [row["step"] for row in rows if digests.get(row["step"]) != row["digest"]]
        faults += [f"the parameters of {name} differ from those of a in step {bad[0]}"] if bad else []
        if name != "c" and steps != list(range(len(steps))):
            faults.append(f"{name} has left out or repeated steps")
        seconds = [row["seconds"] for row in rows]
        print(
            f"  {name}: {len(rows)} steps, median wait {statistics.median(seconds):.2f} s, longest {max(seconds):.0f} s"
        )
    return faults


@contextlib.contextmanager
def running(star: Star, *case: float) -> Iterator[Run]:
    """Make a run in a folder of its own, which squid can enter, and end its processes."""
    folder = Path(tempfile.mkdtemp(prefix="dadplug-large-"))
    folder.chmod(0o777)
    try:
        with Run(folder, star, *case) as found:
            yield found
    finally:
        shutil.rmtree(folder)


def main() -> int:
    """Run it, and print the verdict."""
    parser = parser_of(
        __doc__,
        site={"nargs": 5, "help": argparse.SUPPRESS},
        rate=("10mbit", "of each link, in mbit, as tc writes it"),
        megabytes=(758.0, "of parameters"),
        cut=(60.0, "seconds for which all links carry nothing"),
        stop=(600.0, "seconds for which there is no hub"),
        timeout=(300.0, "option of the reduction; transfers take longer"),
        steps=(5, "steps together between two faults"),
    )
    arguments = parser.parse_args()
    if arguments.site:
        kit, log, megabytes, timeout, last = arguments.site
        train(kit, log, float(megabytes), float(timeout), last)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces go, too
    print(f"{title(arguments.rate)}, {arguments.megabytes:g} MB of parameters", flush=True)
    with Star(arguments.rate, len(SITES)) as star:
        run("ip", "netns", "exec", star.middle, "ip", "link", "set", "lo", "up")
        for address in (*HUBS, PROXY):
            run("ip", "netns", "exec", star.middle, "ip", "addr", "add", f"{address}/24", "dev", "br0")
        with running(star, arguments.megabytes, arguments.timeout) as found:
            with_faults(found, star, arguments)
            faults = judge(found)
    print(*(f"FAULT: {each}" for each in faults), "failed" if faults else "passed", sep="\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
