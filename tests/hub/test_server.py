"""The hub over loopback: sites that dial in, frames that are passed on, sites that leave."""

from __future__ import annotations

import os

import hub_kits
import pytest
from running_hub import TestSite, running_hub, together, until

from dadplug.errors import KitError
from dadplug.hub.pki.kits import Kit
from dadplug.hub.server.hub import Hub
from dadplug.hub.wire.frames import PIECE_BYTES, Kind
from dadplug.hub.wire.messages import Accept, Close, Drop, Join, Pause, Refuse, Start, Welcome


@pytest.fixture
def hub(tmp_path):
    with running_hub(tmp_path / "kits") as hub:
        yield hub


def test_training_starts_once_all_sites_are_here(hub):
    a = TestSite(hub.kit("a"), hub.address)
    assert a.answer == Welcome(False, 0, 2, 60_000, 5_000)
    assert a.action(Accept).slot == 0
    assert a.action(Pause).reason == "waiting for b"
    b = TestSite(hub.kit("b"), hub.address)
    for site in (a, b):
        start = site.action(Start)
        assert start.position.step == 0
        assert start.holders == (0, 1)
        assert [site.action(Join).slot for _ in range(2)] == [0, 1]


def test_payloads_are_passed_on_to_all_other_sites(tmp_path):
    with running_hub(tmp_path / "kits", sites=("a", "b", "c")) as hub:
        sites = together(hub, "abc")
        contents = [os.urandom(size) for size in (200_000, 1, 65_536)]
        for site, content in zip(sites, contents):
            site.send(Kind.PAYLOAD, content, exchange=7)
        for site in sites:
            got = {other.slot: b"" for other in sites if other is not site}
            while any(len(got[slot]) < len(contents[slot]) for slot in got):
                frame = site.take(Kind.PAYLOAD)
                assert (frame.head.step, frame.head.exchange) == (1, 7)
                assert frame.head.offset == len(got[frame.head.slot])
                got[frame.head.slot] += frame.body
            assert got == {slot: contents[slot] for slot in got}


def test_the_first_bytes_of_a_message_arrive_before_its_last_ones_are_sent(hub):
    a, b = together(hub)
    content = os.urandom(3 * PIECE_BYTES)
    a.send(Kind.PAYLOAD, content, wait=False)
    kept = [a.queue._kept.pop() for _ in range(2)]
    a.queue.unsent_bytes -= sum(map(len, kept))
    until(lambda: a.pump() or not a.queue.unsent_bytes)
    assert b.take(Kind.PAYLOAD).body == content[:PIECE_BYTES]
    for frame in reversed(kept):
        a.queue.append(frame)
    until(lambda: a.pump() or not a.queue.unsent_bytes)
    assert b.message(2 * PIECE_BYTES) == content[PIECE_BYTES:]


def test_a_step_closes_once_all_sites_have_ended_it(hub):
    a, b = together(hub)
    a.send(Kind.END)
    a.send(Kind.PAYLOAD, b"of the second step", step=2)
    a.send(Kind.END, step=2)  # nothing of b was needed
    assert b.message(18) == b"of the second step"
    assert hub.hub.relay.membership.step == 0
    b.send(Kind.END)
    for site in (a, b):
        assert site.action(Close) == Close(1, (0, 1), 0)
    b.send(Kind.END, step=2)
    for site in (a, b):
        assert site.action(Close) == Close(2, (0, 1), 0)


def test_frames_of_steps_that_are_closed_end_the_connection_with_a_reason(hub):
    a, b = together(hub)
    for site in (a, b):
        site.send(Kind.END)
    for site in (a, b):
        site.action(Close)
    a.send(Kind.PAYLOAD, b"late")
    for site in (a, b):
        drop = site.action(Drop)
        assert drop.slot == 0
        assert "a PAYLOAD frame of step 1, which is not open" in drop.reason


def test_the_reason_of_a_site_that_leaves_reaches_the_others(hub):
    a, b = together(hub)
    a.send(Kind.PAYLOAD, b"the last words")
    a.leave("ValueError: the data is damaged")
    assert b.message(14) == b"the last words"
    assert b.action(Drop) == Drop(0, 1, "ValueError: the data is damaged")
    assert a.action(Drop) == Drop(0, 1, "ValueError: the data is damaged")
    hub.await_line("a has left: ValueError: the data is damaged")


@pytest.mark.parametrize("steps", [0, 1])
def test_a_second_run_starts_on_the_same_hub_once_the_first_has_ended(hub, steps):
    a, b = together(hub)
    for site in (a, b) * steps:
        site.send(Kind.END)
    for site in (a, b) * steps:
        site.action(Close)
    a.leave()
    assert b.action(Drop) == Drop(0, 1 + steps, "")
    a = TestSite(hub.kit("a"), hub.address)
    assert a.action(Pause) == Pause((1,), "waiting for b to leave the last run")
    assert hub.hub.relay.membership.step == steps
    b.leave()
    b.action(Drop)
    b = TestSite(hub.kit("b"), hub.address)
    for site in (a, b):
        assert site.action(Start).position.step == 0
    a.send(Kind.PAYLOAD, b"once more")
    assert b.message(9) == b"once more"


def test_a_connection_that_is_cut_is_resumed_without_loss(hub):
    a, b = together(hub)
    content = os.urandom(3_000_000)
    a.send(Kind.PAYLOAD, content, wait=False)
    a.pump()
    first = b.message(65_536)  # a reset takes away what the hub has not read
    a.cut()
    b.cut()
    a.dial()
    assert a.answer.resumed
    a.send(Kind.PAYLOAD, b"end", exchange=1)
    b.dial()
    assert b.answer.resumed
    assert first + b.message(len(content) + 3 - len(first)) == content + b"end"
    assert "has left" not in "".join(hub.log)


def test_a_site_that_does_not_dial_again_is_dropped_after_the_grace(tmp_path):
    with running_hub(tmp_path / "kits", grace=0.3) as hub:
        a, b = together(hub)
        a.cut()
        drop = b.action(Drop)
        assert drop.slot == 0
        assert "its connection was lost" in drop.reason
        assert "not dialled again within 0.3 s" in drop.reason
        a.dial()
        assert isinstance(a.answer, Refuse)
        assert "the hub has given this site up: its connection was lost" in a.answer.reason


def test_a_silent_site_is_dropped(tmp_path):
    with running_hub(tmp_path / "kits", rules={"site_timeout": 2.0}) as hub:
        _, b = together(hub)
        until(lambda: b.ping() or hub.hub.relay.sessions.get(("training", 0)) is None)
        assert b.action(Drop) == Drop(0, 1, "silent for 2 s")


def test_a_name_used_twice_is_refused_with_the_reason_on_both_ends(hub):
    a, _ = together(hub)
    second = TestSite(hub.kit("a"), hub.address)
    assert isinstance(second.answer, Refuse)
    assert second.answer.reason.startswith("another process is connected as site 'a'; if it is dead, this one takes")
    assert second.answer.retry
    until(lambda: a.ping() or second.dial() or not second.answer.retry)  # the first process shows that it is alive
    assert second.answer.reason == "another process is connected as site 'a'"
    hub.await_line("a: another process is connected as site 'a'")
    a.pump()
    assert hub.hub.relay.sessions["training", 0].stream is not None


def test_a_new_process_takes_the_place_of_one_whose_connection_is_lost_at_once(hub):
    a, b = together(hub)
    a.cut()
    hub.await_line("connection to a (training) lost")
    assert isinstance(TestSite(hub.kit("a"), hub.address).answer, Welcome)
    assert b.action(Drop) == Drop(0, 1, "another process has dialled in as this site")


def test_all_sites_are_told_when_the_hub_ends(tmp_path):
    with running_hub(tmp_path / "kits") as hub:
        a, b = together(hub)
        hub.hub.stop("SIGTERM")
        for site in (a, b):
            assert site.action(Drop) == Drop(site.slot, 0, "the hub ends: SIGTERM")


def test_both_ends_acknowledge_what_they_have_received(hub):
    a, b = together(hub)
    a.send(Kind.PAYLOAD, bytes(5_000_000))
    until(lambda: a.pump() or a.queue.nbytes < 2_000_000)
    b.message(5_000_000)
    assert hub.hub.relay.sessions["training", 1].queue.nbytes > 5_000_000
    b.ping()
    until(lambda: hub.hub.relay.sessions["training", 1].queue.nbytes == 0)


def test_the_kit_of_a_site_and_foreign_addresses_are_refused(tmp_path):
    kits = hub_kits.make(tmp_path / "kits", hub="192.0.2.1:8470")
    with pytest.raises(KitError, match="is the kit of the site a"):
        Hub(Kit.load(kits / "a"))
    with pytest.raises(KitError, match=r"cannot listen at 192.0.2.1:8470: .*--listen HOST:PORT"):
        Hub(Kit.load(kits / "hub"))
    with pytest.raises(KitError, match=r"cannot listen at 192.0.2.1:0: [^;]*$"):
        Hub(Kit.load(kits / "hub"), listen=("192.0.2.1", 0))
