"""The hub's status, journal and command."""

import io
import json
import logging
import os
import signal
import socket
import threading
import time
from pathlib import Path

import forkserver
import hub_kits
import pytest
from cutting_relay import CuttingRelay
from running_hub import TIMEOUT, TestSite, close_step, running_hub, together, until
from support import free_port

from dadplug.errors import SiteError
from dadplug.exchange import rendezvous
from dadplug.exchange.rounds import Requirements
from dadplug.hub.pki.kits import Kit
from dadplug.hub.server import journal, status
from dadplug.hub.server.journal import Journal
from dadplug.hub.server.status import Meter, StatusFile, Terminal, late_sites, snapshot, table
from dadplug.hub.site.link import HubLink
from dadplug.hub.wire.messages import Drop, Joined, Kind, Receiving, RoundKind, Start, StartTerms
from dadplug.support import logs
from dadplug.tools.cli.commands import main

ROOT = Path(__file__).resolve().parents[2]


def test_the_status_tells_sites_steps_and_for_whom_training_waits(hub):
    a = TestSite(hub.kit("a"), hub.address)
    found = snapshot(hub.hub, Meter())
    assert [site["state"] for site in found["sites"]] == ["waiting", "absent"]
    assert found["waiting"] == "waiting for b"
    assert [bool(site["absent_since"]) for site in found["sites"]] == [False, True]
    assert found["waiting_since"] == found["sites"][1]["absent_since"]
    assert table(found)[-1] == f"waiting for b (since {found['waiting_since'][11:19]} UTC)"
    assert table(found)[3].endswith("UTC, has never connected")
    assert not found["started"]
    b = TestSite(hub.kit("b"), hub.address)
    for site in (a, b):
        site.action(Start)
    close_step([a, b])
    found = snapshot(hub.hub, Meter())
    assert [site["state"] for site in found["sites"]] == ["member", "member"]
    assert (found["step"], found["waiting"], found["started"]) == (1, "", True)
    b.cut()
    until(lambda: snapshot(hub.hub, Meter())["sites"][1]["state"] == "disconnected")
    assert any("a has joined" in line for line in found["journal"])
    assert json.loads(json.dumps(found)) == found


def test_the_status_shows_how_much_of_its_state_a_site_has(hub):
    alone = StartTerms(1, 0)
    a = TestSite(hub.kit("a"), hub.address, start=alone)
    position = a.action(Start).position
    b = TestSite(hub.kit("b"), hub.address, start=alone)
    for site in (a, b):
        site.control(Requirements(1, 60_000))
    b.control(Receiving(120_000_000, 688_000_000, 540_000))
    a.send(Kind.END, exchange=RoundKind.FIRST)
    text = "receives the state: 120 of 688 MB, 9 min left"
    until(lambda: snapshot(hub.hub, Meter())["sites"][1]["receives"] == text)
    assert table(snapshot(hub.hub, Meter()))[3].endswith(text)
    b.control(Joined(position))
    until(lambda: snapshot(hub.hub, Meter())["sites"][1]["receives"] == "")


def test_rates_are_bytes_by_second(hub):
    a, b = together(hub)
    meter, relay = Meter(), hub.hub.relay
    meter.rates(relay, 100.0)
    a.send(Kind.PAYLOAD, bytes(1_000_000))
    b.message(1_000_000)
    assert meter.rates(relay, 100.5) == [(0.0, 0.0)] * 2  # too early
    (from_a, to_a), (from_b, to_b) = meter.rates(relay, 104.0)
    assert 250_000 <= from_a < 260_000
    assert 250_000 <= to_b < 260_000
    assert max(to_a, from_b) < 1000
    assert meter.rates(relay, 108.0)[0][0] < 1000


def test_a_site_is_late_while_others_have_sent_more(hub):
    a, b = together(hub)
    relay = hub.hub.relay
    now = time.monotonic() + 5
    assert late_sites(relay, now) == {}
    a.send(Kind.PAYLOAD, b"content")
    b.message(7)
    [slot] = late_sites(relay, now)
    assert slot == 1
    assert late_sites(relay, time.monotonic()) == {}
    b.send(Kind.PAYLOAD, b"content")
    b.send(Kind.END)
    until(lambda: relay.sessions["training", 1].progress == (1, 0))
    assert list(late_sites(relay, time.monotonic() + 5)) == [0]


EXAMPLE = {
    "project": "study",
    "address": "127.0.0.1:8470",
    "step": 12,
    "waiting": "",
    "sites": [
        {"name": "bavaria", "state": "member", "step": 12, "late_seconds": 0.0, "missed_steps": 3}
        | {"bytes_per_second_from": 1_500_000, "bytes_per_second_to": 0},
        {
            "name": "b",
            "state": "absent",
            "step": 0,
            "late_seconds": 7.4,
            "missed_steps": 0,
            "epsilon": "1.2",
            "delta": 1e-5,
        }
        | {"bytes_per_second_from": 0, "bytes_per_second_to": 0},
    ],
}


def test_the_table_has_a_line_for_each_site():
    lines = table(EXAMPLE)
    assert lines[0] == "study at 127.0.0.1:8470: step 12, 1 of 2 sites"
    assert lines[1].split() == ["site", "state", "step", "from", "MB/s", "to", "MB/s", "late"]
    assert lines[2].split() == ["bavaria", "member", "12", "1.50", "0.00", "3", "steps", "missed"]
    assert lines[3].split() == ["b", "absent", "0", "0.00", "0.00", "7", "s,", "epsilon", "1.2,", "delta", "1e-05"]
    assert table(EXAMPLE | {"waiting": "waiting for b"})[4:] == ["waiting for b"]


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_table_is_drawn_in_place_and_the_journal_above_it(monkeypatch):
    monkeypatch.setattr(status.shutil, "get_terminal_size", lambda: os.terminal_size((40, 20)))
    output = FakeTerminal()
    terminal = Terminal(output)
    terminal.write_line("first")
    terminal.show(EXAMPLE)
    before = output.getvalue()
    assert before.startswith("first\nstudy at")
    assert max(map(len, before.splitlines())) <= 39
    terminal.show(EXAMPLE)
    assert output.getvalue() == before
    terminal.write_line("second")
    assert output.getvalue()[len(before) :].startswith("\x1b[4F\x1b[Jsecond\nstudy at")


def test_without_a_terminal_there_are_lines_only():
    output = io.StringIO()
    terminal = Terminal(output)
    terminal.show(EXAMPLE)
    terminal.write_line("a has joined")
    assert output.getvalue() == "a has joined\n"


def test_the_status_file_is_replaced_as_a_whole_and_a_failure_told_once(tmp_path):
    complaints: list[str] = []
    path = tmp_path / "status.json"
    file = StatusFile(path, complaints.append)
    file.write(EXAMPLE)
    with path.open() as before:
        file.write(EXAMPLE | {"step": 13})
        assert json.load(before)["step"] == 12
    assert json.loads(path.read_text())["step"] == 13
    assert list(tmp_path.iterdir()) == [path]
    missing = StatusFile(tmp_path / "missing" / "status.json", complaints.append)
    for _ in range(3):
        missing.write(EXAMPLE)
    assert len(complaints) == 1
    assert "cannot be written" in complaints[0]


def test_the_journal_counts_refusals_beyond_the_first_ones():
    lines: list[str] = []
    log = Journal(lines.append)
    for _ in range(journal._REFUSALS + 490):
        log.refuse("198.51.100.7:1", "the other end does not speak TLS", 100.0)
    assert len(lines) == journal._REFUSALS
    log.end_period(105.0)
    assert len(lines) == journal._REFUSALS
    log.end_period(111.0)
    assert lines[-1].endswith("refused 490 more connections within 10 s")
    log.refuse("198.51.100.7:1", "again", 112.0)
    assert lines[-1].endswith("refused 198.51.100.7:1: again")
    assert "UTC  refused" in lines[0]


@pytest.fixture
def kits(tmp_path):
    return hub_kits.make(tmp_path / "kits", hub=f"127.0.0.1:{free_port()}", hub_names=[])


def test_the_command_serves_sites_until_it_gets_a_signal(kits, tmp_path):
    command = f"{kits}/hub --status {tmp_path}/status.json --journal {tmp_path}/journal.log --site-timeout 7 --grace 3"
    process = forkserver.start(["-m", "dadplug", "hub", *command.split()], folder=ROOT)
    try:
        until(lambda: (tmp_path / "status.json").exists() or process.poll() is not None)
        address = Kit.load(kits / "a").roster.address()
        sites = [TestSite(Kit.load(kits / name), address) for name in "ab"]
        for site in sites:
            assert (site.answer.min_sites, site.answer.timeout_ms, site.answer.grace_ms) == (2, 7000, 3000)
            site.action(Start)
        until(lambda: json.loads((tmp_path / "status.json").read_text())["started"])
        process.send_signal(signal.SIGTERM)
        for site in sites:
            assert site.action(Drop).reason == "the hub ends: it has received SIGTERM"
        process.wait(TIMEOUT)
    finally:
        process.kill()
    output, errors = process.read()
    assert process.returncode == 0, errors
    log = (tmp_path / "journal.log").read_text()
    assert (output, errors) == (log, "")
    for event in ("listens at 127.0.0.1", "a has joined", "training starts", "b has left: the hub ends"):
        assert event in log
    found = json.loads((tmp_path / "status.json").read_text())
    assert [site["state"] for site in found["sites"]] == ["absent", "absent"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("a", "is the kit of the site a"),
        ("hub --listen nowhere", "must be HOST:PORT"),
        ("hub --listen 192.0.2.1:8470", "cannot listen at 192.0.2.1:8470"),
        ("hub --grace 0", "grace=0.0: it has to be positive"),
        ("missing", "is not a folder"),
    ],
)
def test_what_the_command_cannot_do_is_one_line(kits, capsys, arguments, reason):
    assert main(["hub", *f"{kits}/{arguments}".split()]) == 1
    printed = capsys.readouterr()
    assert reason in printed.err
    assert printed.err.count("\n") == 1


# What a site tells at once: a hub that it cannot reach, sites that are lost and back, names that do not resolve


@pytest.fixture
def unresolved(monkeypatch):
    def fail(*arguments, **settings):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)


def test_troubles_are_told_at_once_and_again_at_growing_intervals(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    troubles = logs.Troubles(logging.getLogger("dadplug.test"))
    troubles.begin("hub", "the hub is lost")
    for second in range(40):
        now[0] = 100.0 + second
        troubles.begin("hub", "the hub is lost")
        troubles.remind()
    troubles.end("hub", "the hub is back")
    troubles.end("hub", "the hub is back")
    troubles.begin("pause", "waiting for a", changes=True)
    troubles.begin("pause", "waiting for a", changes=True)
    troubles.begin("pause", "waiting for a, b", changes=True)
    now[0] += 3 * 3600
    troubles.remind()
    now[0] -= 1.5 * 3600
    troubles.end("pause", "the others are here")
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "the hub is lost",
        "for 5 s: the hub is lost",
        "for 15 s: the hub is lost",
        "for 35 s: the hub is lost",
        "the hub is back, after 39 s",
        "waiting for a",
        "waiting for a, b",
        "for 3 h: waiting for a, b",
        "the others are here, after 90 min",
    ]


def test_a_hub_whose_name_does_not_resolve_is_named_as_such(tmp_path, unresolved, caplog):
    kit = Kit.load(hub_kits.make(tmp_path / "kits") / "a")
    with pytest.raises(SiteError, match=r"the DNS name hub\.example\.org does not resolve"):
        HubLink.open(kit, timeout=0.3)
    assert "the DNS name hub.example.org does not resolve" in caplog.text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_meeting_point_whose_name_does_not_resolve_is_named_as_such(unresolved, rank):
    with pytest.raises(SiteError, match=r"the DNS name site0\.example\.org does not resolve") as found:
        rendezvous._open_store("site0.example.org", 29500, rank, 0.2, "site")
    assert "did not reach" not in str(found.value)


def test_a_site_tells_that_the_hub_and_another_site_are_lost(tmp_path, caplog):
    with running_hub(tmp_path / "kits") as hub, CuttingRelay(hub.address) as relay:
        other = []
        thread = threading.Thread(target=lambda: other.append(TestSite(hub.kit("b"), hub.address)))
        thread.start()
        link = HubLink.open(hub.kit("a"), timeout=60.0, address=relay.address)
        thread.join()
        relay.cut()
        until(lambda: "is lost" in caplog.text and "connecting again" in caplog.text)
        until(lambda: "is connected again, after" in caplog.text)
        other[0].leave("no data\n\x1b[2Jforged")
        assert link.await_loss(60.0) is not None
        assert r"site 1 (b) is lost: no data\n\x1b[2Jforged" in caplog.text
        link.close()
