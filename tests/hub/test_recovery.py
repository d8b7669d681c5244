"""Recovery of a run at a restarted hub, by what sites report that a test plays."""

from __future__ import annotations

import json
import os
from pathlib import Path

import forkserver
import hub_kits
import mortal_hub
import pytest
import support
from elastic_site import Case
from hub_sites import TIMEOUT, open_link, together, transports
from json_lines import read_lines
from running_hub import TestSite, free_port, running_hub, until

from dadplug.errors import SiteError
from dadplug.hub.site.tunnel import check_tunnel, tunnel_of
from dadplug.hub.torch import HubStore
from dadplug.hub.wire.frames import Kind
from dadplug.hub.wire.messages import Close, Continue, Drop, Position, Repeat, Report

LIFE, STEP = 77, 5  # of the hub before
BEFORE, LAST = Position(LIFE, STEP - 1), Position(LIFE, STEP)


def report(position: Position, before: Position, min_sites: int = 1) -> Report:
    """Return the report of a site that has got every frame."""
    everyone, counts = (0, 1, 2), (0, 0, 0)
    return Report(LIFE, position, before, everyone, (), (), counts, counts, False, min_sites, 500, False, 200)


def returned(hub, name: str, position: Position, before: Position) -> TestSite:
    """Return a site that has dialled the new hub, and reported."""
    site = TestSite(hub.kit(name), hub.address, position=position)
    site.control(report(position, before))
    return site


def test_a_round_whose_only_witness_is_lost_during_its_repetition_is_open_again(tmp_path):
    with running_hub(tmp_path / "kits", ("a", "b", "c"), site_timeout=20.0) as hub:
        a = returned(hub, "a", LAST, BEFORE)
        b, c = (returned(hub, name, BEFORE, Position(LIFE, STEP - 2)) for name in "bc")
        for site in (a, b, c):
            assert site.action(Repeat).position == LAST
        a.leave("its program was stopped")
        hub.await_line("a has left")
        for site in (b, c):
            site.send(Kind.END, step=STEP)  # the repetition
        for site in (b, c):
            assert site.action(Continue).position == BEFORE
            assert site.action(Drop).slot == 0
            site.send(Kind.END, step=STEP)
        for site in (b, c):
            close = site.action(Close)
            assert (close.step, close.contributors) == (STEP, (1, 2))


# Training that goes on over a hub that is killed and started again: the same bits as with one hub


ENDED = 60.0  # seconds for a process, on a busy machine


class Training:
    """Processes of a hub and of its sites.

    Args:
        folder: folder for kits and logs.
        names: names of the sites.
        settings: fields of `Case` for all of them.
    """

    def __init__(self, folder: Path, names: str, **settings: object) -> None:
        folder.mkdir()
        self.folder, self.names = folder, names
        self.settings = {"stop": str(folder / "stop")} | settings
        hub_kits.make(folder / "kits", hub=f"127.0.0.1:{free_port()}", hub_names=[], sites=list(names), hub_at=names[0])
        self.sites: dict[str, forkserver.Program] = {}
        self.hub: forkserver.Program | None = None

    def start_hub(self, point: str = "never", count: int = 0) -> forkserver.Program:
        kit, journal = self.folder / "kits" / "hub", self.folder / "journal"
        command = [mortal_hub.__file__, str(kit), str(journal), point, str(count)]
        self.hub = forkserver.start(command, os.environ | support.ONE_THREAD)
        return self.hub

    def start(self, name: str, **fields: object) -> None:
        case = {"kit": str(self.folder / "kits" / name), "log": str(self.folder / f"{name}.log")}
        self.sites[name] = forkserver.start(
            Case(**(case | self.settings | fields)).start(),  # type: ignore[arg-type]
            os.environ | support.ONE_THREAD,
        )

    def lines(self, name: str) -> dict[int, dict]:
        return {line["step"]: line for line in read_lines(self.folder / f"{name}.log")}

    def await_step(self, name: str, step: int) -> None:
        until(lambda: max(self.lines(name), default=-1) >= step, self.state, ENDED)

    def state(self) -> str:
        printed = {name: site.read()[1] for name, site in self.sites.items()}
        return f"{printed}\n{(self.folder / 'journal').read_text()}"

    def end(self, steps: int = 5) -> list[dict[int, dict]]:
        """Let the sites end some steps from now, and return their lines."""
        last = max(max(self.lines(name), default=0) for name in self.names) + steps
        (self.folder / "stop").write_text(str(last))
        for name, site in self.sites.items():
            assert site.wait(ENDED) == 0, (name, self.state())
        assert self.hub is not None
        self.hub.kill()
        return [self.lines(name) for name in self.names]


def reference(folder: Path, names: str, steps: int, mode: str) -> list[str]:
    """Return the digests of a run with one hub."""
    folder.mkdir()
    with running_hub(folder / "kits", tuple(names)) as hub:
        sites = []
        for name in names:
            case = Case(str(hub.kits / name), str(folder / name), mode, steps, min_sites=None)
            sites.append(forkserver.start(case.start(), os.environ | support.ONE_THREAD))
        for site in sites:
            assert site.wait(ENDED) == 0, site.read()
    return [json.loads(line)["digest"] for line in (folder / names[0]).read_text().splitlines()]


@pytest.mark.parametrize(
    ("mode", "names", "min_sites", "points"),
    [
        ("rankdad", "abc", 3, [("frame", 61), ("close", 5), ("frame", 1)]),
        ("dad", "ab", 1, [("close", 4), ("frame", 22)]),
        ("dsgd", "abc", None, [("frame", 40), ("close", 2)]),
    ],
)
def test_a_hub_that_is_killed_anywhere_costs_no_step(tmp_path, mode, names, min_sites, points):
    training = Training(tmp_path / "run", names, mode=mode, min_sites=min_sites)
    for number, (point, count) in enumerate(points):
        hub = training.start_hub(point, count)
        if not number:
            for name in names:
                training.start(name)
        assert hub.wait(ENDED) == -9, training.state()
    training.start_hub()
    lines = training.end()
    assert all(line["present"] == [*range(len(names))] for each in lines for line in each.values())
    expected = reference(tmp_path / "reference", names, len(lines[0]), mode)
    for each in lines:
        assert [line["digest"] for line in each.values()] == expected


# Connections beside that of training over a hub that is killed and started again: they end with an error


RESTARTED = "has been restarted"


def test_the_store_and_the_messages_of_parameters_end_and_training_goes_on(tmp_path):
    kits = tmp_path / "kits"
    hub_kits.make(kits, hub=f"127.0.0.1:{free_port()}", hub_names=[], sites=["a", "b"], hub_at="a")
    command = [mortal_hub.__file__, str(kits / "hub"), str(tmp_path / "journal"), "never", "0"]
    hub = forkserver.start(command, os.environ | support.ONE_THREAD)
    links = together(lambda rank: open_link(kits, "ab"[rank]))
    sites = transports(links)
    try:
        stores = [HubStore(link.kit, TIMEOUT) for link in links]
        stores[0].set("key", b"value")
        assert stores[1].get("key") == b"value"
        streams = together(lambda rank: sites[rank].open_streams(TIMEOUT)[1 - rank])
        pass_on(*streams)
        tunnels = [tunnel_of(link, TIMEOUT) for link in links]
        hub.kill()
        hub.wait(TIMEOUT)
        hub = forkserver.start(command, os.environ | support.ONE_THREAD)
        assert together(lambda rank: sites[rank].gather_objects(rank)) == [[0, 1]] * 2
        for store in stores:
            with pytest.raises(SiteError, match=RESTARTED):
                store.get("key")
        for link, tunnel in zip(links, tunnels, strict=True):
            until(lambda tunnel=tunnel: tunnel.closed)
            with pytest.raises(SiteError, match=RESTARTED):
                check_tunnel(link)
        assert [receive(stream) for stream in streams] == [b"", b""]  # their ends
        pass_on(*together(lambda rank: sites[rank].open_streams(TIMEOUT)[1 - rank]))  # over the new hub
        others = [HubStore(link.kit, TIMEOUT) for link in links]
        others[0].set("key", b"new")
        assert others[1].get("key") == b"new"
        for store in others:
            store.close()
        assert together(lambda rank: sites[rank].gather_objects(-rank)) == [[0, -1]] * 2
    finally:
        for link in links:
            link.close(0.1)
        hub.kill()


def receive(stream) -> bytes:
    stream.setblocking(True)
    stream.settimeout(TIMEOUT)
    return stream.recv(100)


def pass_on(first, second) -> None:
    """Send bytes from one end of a stream to the other."""
    first.send(b"a row")
    assert receive(second) == b"a row"
