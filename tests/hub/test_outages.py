"""Outages: a hub that is away for long, links that are all cut, and a hub whose machine is replaced."""

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import hub_kits
import pytest
from cutting_relay import CuttingRelay, goes_by_way_of
from elastic_runs import ENDED, MortalHub, Run, presence, same_bits
from hub_sites import open_link, together, transports
from running_hub import RunningHub, TestSite, exchange, running_hub, until
from running_hub import together as sites_of
from sealed_sites import make_kits
from support import free_port

from dadplug.hub.server.status import Meter, snapshot
from dadplug.hub.site import connection
from dadplug.hub.site.link import HubLink

SEALED = {"sealed": True, "hub_at": None}


def uninterrupted(folder: Path, names: str, steps: int, **settings: object) -> dict[int, dict]:
    """Train over a hub that stays, where all sites have to stay; return the lines of the first site."""
    folder.mkdir()
    with running_hub(folder / "kits", tuple(names)) as hub:
        run = Run(folder, hub, **(settings | {"steps": steps, "min_sites": None}))
        run.start(names)
        run.end(names)
        return run.lines(names[0])


def no_step_is_lost(run: Run, folder: Path, names: str, **settings: object) -> None:
    """Check that all sites took part in all steps, with the bits of a training without an outage."""
    lines = [run.lines(name) for name in names]
    assert all(present == [*range(len(names))] for each in lines for present in presence(each).values()), run.state()
    reference = uninterrupted(folder, names, len(lines[0]), **settings)
    for each in lines:
        assert len(each) == len(lines[0])
        same_bits(reference, each)


# A hub that is away, in the end with another process


@pytest.mark.parametrize("entries", [{}, SEALED], ids=["plain", "sealed"])
def test_a_hub_that_is_away_for_longer_than_all_timeouts_costs_no_step(tmp_path, entries):
    """The hub is away for longer than a site waits for it where all have to stay, and than the timeout of a wait."""
    hub = MortalHub(tmp_path / "run", "abc", **entries)
    hub.start()
    run = Run(tmp_path / "run", hub, mode="rankdad", min_sites=2, site_timeout=3.0, timeout=4.0, gives_up=2.0)
    run.start("abc")
    run.await_step("a", 3)
    hub.process.kill()
    hub.process.wait(ENDED)
    time.sleep(7.0)
    assert all(process.poll() is None for process in run.processes.values()), run.state()
    hub.start()
    run.stop(5)
    told = run.end("abc")
    hub.process.kill()
    assert told.count("connecting again, for 24 h at most") >= 1
    assert "is connected again, after" in told
    no_step_is_lost(run, tmp_path / "reference", "abc", mode="rankdad")


def test_a_hub_that_is_stopped_by_sigterm_is_waited_for(tmp_path):
    """As `systemctl restart` does it; Ctrl-C ends the training."""
    hub = MortalHub(tmp_path / "run", "ab")
    command = [sys.executable, "-m", "dadplug", "hub", str(hub.kits / "hub"), "--journal", str(hub.journal)]
    run = Run(tmp_path / "run", hub, gives_up=1.0)
    for number, end in enumerate((signal.SIGTERM, signal.SIGINT)):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if not number:
            run.start("ab")
        else:
            time.sleep(2.0)
        run.await_step("a", max(run.lines("a"), default=0) + 3)
        process.send_signal(end)
        said = process.communicate(timeout=ENDED)[0]
        assert process.returncode == 0, said
        assert ("sites wait for another one" in said) == (end == signal.SIGTERM)
    told = run.end("ab", 1)
    assert "training pauses: the hub has ended: it has received SIGTERM; waiting for it to be started again" in told
    assert "the hub ends: it has received SIGINT" in told
    shared = min(map(len, map(run.lines, "ab")))
    lines = run.lines("a")
    same_bits(lines, {step: run.lines("b")[step] for step in range(shared)})
    assert all(present == [0, 1] for present in presence(lines).values())


@pytest.mark.parametrize("stated", ["option", "kit"])
def test_the_end_of_the_wait_for_a_hub_is_an_error(tmp_path, stated):
    hub = MortalHub(tmp_path / "run", "ab")
    hub.start()
    if stated == "kit":  # which a program cannot change
        for name in "ab":
            with (hub.kits / name / "policy.toml").open("a") as policy:
                policy.write("hub_timeout = 2\n")
    run = Run(tmp_path / "run", hub)
    for name, seconds in {"a": 3.0, "b": 2.0}.items():  # they may differ
        run.start(name, hub_timeout=seconds if stated == "option" else 1000.0)
    run.await_step("a", 3)
    hub.process.kill()
    text = run.end("ab", 1)
    assert "cannot be reached for 2 s" in text
    assert text.count("/dadplug/") <= 2 * 4, text  # frames of the traceback: what failed stands in its last line


# Links that are all cut


@contextmanager
def relayed(
    folder: Path, names: str, sealed: bool = False, **settings: object
) -> Iterator[tuple[RunningHub, list[CuttingRelay]]]:
    """Run a hub that each site reaches by a relay of its own."""
    with ExitStack() as opened:
        if sealed:
            make_kits(folder / "kits", names)
        hub = opened.enter_context(running_hub(folder / "kits", tuple(names), **settings))
        relays = [opened.enter_context(CuttingRelay(hub.address)) for _ in names]
        for name, relay in zip(names, relays, strict=True):
            goes_by_way_of(relay, folder / "kits" / name)
        yield hub, relays


@pytest.mark.parametrize(
    ("how", "min_sites", "sealed"),
    [("hold", 1, False), ("reset", 1, False), ("hold", None, False), ("reset", None, False), ("hold", 1, True)],
)
def test_a_cut_of_every_link_costs_no_step(tmp_path, how, min_sites, sealed):
    """All links are cut for much longer than a site may be silent; they are dead, or end, and nothing else happens."""
    folder = tmp_path / "run"
    folder.mkdir()
    with relayed(folder, "abc", sealed, site_timeout=2.0) as (hub, relays):
        run = Run(folder, hub, mode="rankdad", min_sites=min_sites, site_timeout=2.0, timeout=100.0, gives_up=100.0)
        run.start("abc")
        run.await_step("a", 3)
        for relay in relays:
            if how == "hold":
                relay.hold = True
            else:
                relay.cut(refuse=True)
        hub.await_line("no site can be heard", ENDED)
        if how == "hold":  # the hub finds out, too
            until(lambda: sum("lost: nothing has arrived for" in line for line in hub.log) >= 3, run.state, ENDED)
        time.sleep(6.0)
        assert snapshot(hub.hub, Meter())["waiting"].startswith("no site has been heard for ")
        for relay in relays:
            relay.hold = relay.refuse = False
        hub.await_line("sites can be heard again", ENDED)
        run.await_step("a", max(run.lines("a")) + 2)
        run.stop(5)
        assert re.search(r"the connection to the hub at .* is lost: ", run.end("abc"))  # sites find out, too
        assert not any("has left: silent" in line or "it has not reconnected" in line for line in hub.log), run.state()
    no_step_is_lost(run, tmp_path / "reference", "abc", mode="rankdad")


def test_a_check_of_the_way_to_the_hub_ends_no_outage(tmp_path):
    """It may come from the machine of the hub; a site that is heard ends it, and the others are awaited."""
    with running_hub(tmp_path / "kits", site_timeout=2.0) as hub:
        a, b = sites_of(hub)
        hub.await_line("no site can be heard")
        check = TestSite(hub.kit("a"), hub.address, "check")
        until(lambda: sum("(training) lost: nothing has arrived for 2 s" in line for line in hub.log) == 2)
        for _ in range(10):
            check.ping()
            time.sleep(0.05)
        assert not any("sites can be heard again" in line for line in hub.log)
        a.dial()
        hub.await_line("sites can be heard again")
        time.sleep(0.5)
        b.dial()
        exchange(a, b)


def test_a_site_that_does_not_come_back_from_a_cut_of_every_link_is_lost(tmp_path):
    with relayed(tmp_path, "abc", site_timeout=2.0) as (hub, relays):
        run = Run(tmp_path, hub, min_sites=2, site_timeout=2.0)
        run.start("abc")
        run.await_step("a", 3)
        for relay in relays:
            relay.hold = True
        hub.await_line("no site can be heard", ENDED)
        run.processes["c"].kill()
        time.sleep(3.0)
        for relay in relays[:2]:
            relay.hold = False
        hub.await_line("c has left", ENDED)
        run.await_step("a", max(run.lines("a")) + 3)
        run.stop(5)
        run.end("ab")
        lines = run.lines("a")
        assert presence(lines)[max(lines)] == [0, 1]
        same_bits(lines, run.lines("b"))


# The machine of the hub is replaced


class Names:
    """Resolver of the name of a hub; a context manager of a test's monkeypatch.

    Attributes:
        found: addresses of the name.
        asked: how often it was resolved.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, *found: str) -> None:
        self.found, self.asked = list(found), 0
        resolve = socket.getaddrinfo

        def stub(host: Any, *arguments: Any, **options: Any) -> list[Any]:
            if host != name:
                return resolve(host, *arguments, **options)
            self.asked += 1
            if not self.found:
                raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
            return [each for address in self.found for each in resolve(address, *arguments, **options)]

        monkeypatch.setattr(socket, "getaddrinfo", stub)


def named_kits(folder: Path, names: str = "ab", **entries: Any) -> tuple[Path, int]:
    """Make kits whose hub has a name in DNS; return their folder and the port."""
    port = free_port()
    project = {"hub": f"hub.example.org:{port}", "hub_names": ["127.0.0.1", "127.0.0.2"], "hub_at": names[0]}
    return hub_kits.make(folder, **(project | {"sites": list(names)} | entries)), port


@contextmanager
def elsewhere(kits: Path, address: tuple[str, int]) -> Iterator[RunningHub]:
    """Run a hub with these kits at an address; at the end its connections are reset, and sites are told nothing."""
    with running_hub(kits, listen=address) as hub:
        yield hub
        hub.hub.relay.close = lambda *_: None


def exchanges(links: Sequence[HubLink], number: int) -> None:
    """Check that sites get what the others send."""
    every = transports(links)
    for found in together(lambda rank: every[rank].gather_objects((number, rank)), len(links)):
        assert found == [(number, rank) for rank in range(len(links))]


@contextmanager
def linked(kits: Path, names: str = "ab") -> Iterator[list[HubLink]]:
    """Link sites to the hub that their kits name."""
    links = together(lambda rank: open_link(kits, names[rank]), len(names))
    try:
        yield links
    finally:
        for link in links:
            link.close(0.1)


def test_a_hub_with_another_address_in_dns_goes_on(tmp_path, monkeypatch):
    """The name is resolved anew in each attempt, while it does not resolve, too; an address of IPv6 leads nowhere."""
    kits, port = named_kits(tmp_path / "kits")
    names = Names(monkeypatch, "hub.example.org", "127.0.0.1")
    with ExitStack() as opened:
        with elsewhere(kits, ("127.0.0.1", port)):
            links = opened.enter_context(linked(kits))
            exchanges(links, 0)
            names.found = []
        before = names.asked
        until(lambda: names.asked >= before + 4)
        with running_hub(kits, listen=("127.0.0.2", port)):
            names.found = ["::1", "127.0.0.2"]
            exchanges(links, 1)
            for link in links:
                link.close()


@pytest.mark.parametrize("impostor", ["another project", "no TLS", "silence"])
def test_what_answers_at_an_address_of_the_hub_and_is_not_the_hub_ends_nothing(tmp_path, monkeypatch, impostor):
    """A name has two addresses, and the first one still leads to a machine that has another service by now."""
    kits, port = named_kits(tmp_path / "kits")
    names = Names(monkeypatch, "hub.example.org", "127.0.0.1")
    monkeypatch.setattr(connection, "DIAL_SECONDS", 1.0)
    with ExitStack() as opened:
        with elsewhere(kits, ("127.0.0.1", port)):
            links = opened.enter_context(linked(kits))
            exchanges(links, 0)
        if impostor == "another project":
            other = hub_kits.make(tmp_path / "other", hub=f"hub.example.org:{port}", hub_names=["127.0.0.1"])
            opened.enter_context(running_hub(other, listen=("127.0.0.1", port)))
        else:
            server = opened.enter_context(socket.create_server(("127.0.0.1", port)))
            if impostor == "no TLS":
                Thread(target=lambda: answer_all(server), daemon=True).start()
        until(lambda: all(link.outage and "refused" not in link.outage.lower() for link in links), timeout=100)
        names.found = ["127.0.0.1", "127.0.0.2"]
        with running_hub(kits, listen=("127.0.0.2", port)):
            exchanges(links, 1)
            for link in links:
                link.close()


def answer_all(server: socket.socket) -> None:
    """Answer connections as a web server does that takes everything for HTTP."""
    with suppress(OSError):
        while True:
            connected, _ = server.accept()
            with connected, suppress(OSError):
                connected.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connected.recv(4096)


def test_a_hub_at_another_port_is_found_by_the_roster_that_is_copied_into_the_kits(tmp_path, monkeypatch, caplog):
    kits, port = named_kits(tmp_path / "kits", hub_names=["127.0.0.1"])
    Names(monkeypatch, "hub.example.org", "127.0.0.1")
    with ExitStack() as opened:
        with elsewhere(kits, ("127.0.0.1", port)):
            links = opened.enter_context(linked(kits))
            exchanges(links, 0)
        other = free_port()
        for name in ("hub", "a", "b"):
            path = kits / name / "roster.json"
            path.write_text(path.read_text().replace(str(port), str(other)))
        with running_hub(kits, listen=("127.0.0.1", other)):
            exchanges(links, 1)
            for link in links:
                link.close()
    assert f"the kit names another address of the hub: hub.example.org:{other}" in caplog.text
