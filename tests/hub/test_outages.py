"""Outages: a hub that is away for long, links that are all cut, and a hub whose machine is replaced."""

import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import forkserver
import hub_kits
import pytest
from cutting_relay import relayed_hub
from fleet import ENDED, Fleet, MortalHub, no_step_is_lost, presence, same_bits
from hub_sites import linked_by, together, transports
from running_hub import RunningHub, TestSite, exchange, running_hub, until
from running_hub import together as sites_of
from support import free_port

from dadplug.hub.server.status import Meter, snapshot
from dadplug.hub.site import connection
from dadplug.hub.site.link import HubLink

# A hub that is away, in the end with another process


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
def test_a_hub_that_is_away_for_longer_than_all_timeouts_costs_no_step(tmp_path, sealed):
    """The hub is away for longer than a site waits for it where all have to stay, and than the timeout of a wait."""
    hub = MortalHub(tmp_path / "run", "abc", sealed=sealed)
    settings = {"min_sites": 2, "site_timeout": 3.0, "timeout": 4.0, "gives_up": 2.0}
    with Fleet(tmp_path / "run", hub, mode="rankdad", **settings) as fleet:
        fleet.start("abc")
        fleet.await_step("a", 3)
        hub.kill()
        time.sleep(7.0)
        assert all(process.poll() is None for process in fleet.processes.values()), fleet.state()
        hub.start()
        fleet.stop(5)
        told = fleet.end("abc")
    assert told.count("connecting again, for 24 h at most") >= 1
    assert "is connected again, after" in told
    no_step_is_lost(fleet, tmp_path / "reference", "abc", mode="rankdad")


class CommandHub(MortalHub):
    """Process of the command of a hub."""

    def start(self, *_: object) -> None:
        command = ["-m", "dadplug", "hub", str(self.kits / "hub"), "--journal", str(self.journal)]
        self.process = forkserver.start(command)


def test_a_hub_that_is_stopped_by_sigterm_is_waited_for(tmp_path):
    """As `systemctl restart` does it; Ctrl-C ends the training."""
    hub = CommandHub(tmp_path / "run", "ab")
    with Fleet(tmp_path / "run", hub, gives_up=1.0) as fleet:
        fleet.start("ab")
        fleet.await_step("a", 3)
        for end in (signal.SIGTERM, signal.SIGINT):
            hub.process.send_signal(end)
            assert hub.process.wait(ENDED) == 0, hub.process.read()
            assert ("sites wait for another one" in "".join(hub.process.read())) == (end == signal.SIGTERM)
            if end == signal.SIGTERM:
                time.sleep(2.0)  # longer than a site waits where all have to stay
                hub.start()
                fleet.await_more("a", 3)
        told = fleet.end("ab", 1)
    assert "training pauses: the hub has ended: it has received SIGTERM; waiting for it to be started again" in told
    assert "the hub ends: it has received SIGINT" in told
    shared = min(map(len, map(fleet.lines, "ab")))
    lines = fleet.lines("a")
    same_bits(lines, {step: fleet.lines("b")[step] for step in range(shared)})
    assert all(present == [0, 1] for present in presence(lines).values())


@pytest.mark.parametrize("stated", ["option", "kit"])
def test_the_end_of_the_wait_for_a_hub_is_an_error(tmp_path, stated):
    hub = MortalHub(tmp_path / "run", "ab")
    for name in "ab" if stated == "kit" else "":  # which a program cannot change
        with (hub.kits / name / "policy.toml").open("a") as policy:
            policy.write("hub_timeout = 2\n")
    with Fleet(tmp_path / "run", hub) as fleet:
        for name, seconds in {"a": 3.0, "b": 2.0}.items():  # they may differ
            fleet.start(name, hub_timeout=seconds if stated == "option" else 1000.0)
        fleet.await_step("a", 3)
        hub.kill()
        text = fleet.end("ab", 1)
    assert "cannot be reached for 2 s" in text
    assert text.count("/dadplug/") <= 2 * 4, text  # frames of the traceback: what failed stands in its last line


# Links that are all cut


@pytest.mark.parametrize(
    ("how", "min_sites", "sealed"),
    [("hold", 1, False), ("reset", 1, False), ("hold", None, False), ("reset", None, False), ("hold", 1, True)],
)
def test_a_cut_of_every_link_costs_no_step(tmp_path, how, min_sites, sealed):
    """All links are cut for much longer than a site may be silent; they are dead, or end, and nothing else happens."""
    served = relayed_hub(tmp_path / "run", "abc", sealed, site_timeout=2.0, grace=2.0)
    settings = {"min_sites": min_sites, "site_timeout": 2.0, "timeout": 100.0, "gives_up": 100.0}
    with Fleet(tmp_path / "run", served, mode="rankdad", **settings) as fleet:
        hub, relays = fleet.hub, fleet.hub.relays
        fleet.start("abc")
        fleet.await_step("a", 3)
        for relay in relays:
            if how == "hold":
                relay.hold = True
            else:
                relay.cut(refuse=True)
        hub.await_line("no site can be heard", ENDED)
        if how == "hold":  # the hub finds out, too
            until(lambda: sum("lost: nothing has arrived for" in line for line in hub.log) >= 3, fleet.state, ENDED)
        time.sleep(4.0)
        assert snapshot(hub.hub, Meter())["waiting"].startswith("no site has been heard for ")
        for relay in relays:
            relay.hold = relay.refuse = False
        hub.await_line("sites can be heard again", ENDED)
        fleet.await_more("a", 2)
        fleet.stop(5)
        assert re.search(r"the connection to the hub at .* is lost: ", fleet.end("abc"))  # sites find out, too
        assert not any("has left: silent" in line or "it has not reconnected" in line for line in hub.log), (
            fleet.state()
        )
    no_step_is_lost(fleet, tmp_path / "reference", "abc", mode="rankdad")


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
    served = relayed_hub(tmp_path, "abc", site_timeout=2.0)
    with Fleet(tmp_path, served, min_sites=2, site_timeout=2.0) as fleet:
        hub, relays = fleet.hub, fleet.hub.relays
        fleet.start("abc")
        fleet.await_step("a", 3)
        for relay in relays:
            relay.hold = True
        hub.await_line("no site can be heard", ENDED)
        fleet.processes["c"].kill()
        time.sleep(3.0)
        for relay in relays[:2]:
            relay.hold = False
        hub.await_line("c has left", ENDED)
        fleet.await_more("a", 3)
        fleet.finish("ab", 5)


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


@pytest.mark.parametrize("meanwhile", ["no name", "another project", "no TLS", "silence"])
def test_a_hub_with_another_address_in_dns_goes_on(tmp_path, monkeypatch, meanwhile):
    """The name is resolved anew in each attempt.

    Before it has the new address, it does not resolve; or it has two addresses, and the first one still leads to a
    machine that has another service by now, which ends nothing.
    """
    kits, port = named_kits(tmp_path / "kits")
    names = Names(monkeypatch, "hub.example.org", "127.0.0.1")
    monkeypatch.setattr(connection, "DIAL_SECONDS", 1.0)
    with ExitStack() as opened:
        with elsewhere(kits, ("127.0.0.1", port)):
            links = opened.enter_context(linked_by(kits))
            exchanges(links, 0)
            names.found = [] if meanwhile == "no name" else names.found
        before = names.asked
        if meanwhile == "no name":
            until(lambda: names.asked >= before + 4)
        elif meanwhile == "another project":
            other = hub_kits.make(tmp_path / "other", hub=f"hub.example.org:{port}", hub_names=["127.0.0.1"])
            opened.enter_context(running_hub(other, listen=("127.0.0.1", port)))
        else:
            server = opened.enter_context(socket.create_server(("127.0.0.1", port)))
            if meanwhile == "no TLS":
                Thread(target=lambda: answer_all(server), daemon=True).start()
        until(lambda: all(link.outage and "refused" not in link.outage.lower() for link in links), timeout=100)
        names.found = ["::1" if meanwhile == "no name" else "127.0.0.1", "127.0.0.2"]  # of IPv6 leads nowhere
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
            links = opened.enter_context(linked_by(kits))
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
