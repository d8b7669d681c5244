"""A hub that tells the sites different things, and members that send what no site sends."""

import functools
import itertools
import pickle
import re
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_site import LIE as FIRST
from fleet import Fleet, idles, same_bits
from hub_sites import TIMEOUT, linked, together
from msgspec.structs import astuple, replace
from sealed_sites import sealed_hub

from dadplug.errors import MismatchError, SealingError, SiteError, escaped
from dadplug.exchange import Traffic
from dadplug.exchange.rounds import Requirements
from dadplug.hub.site.elastic import ElasticTransport
from dadplug.hub.site.inbox import CALLS
from dadplug.hub.site.transport import HubTransport
from dadplug.hub.wire.messages import (
    FRESH,
    HEAD_BYTES,
    VERSION,
    Close,
    Drop,
    Exclude,
    Grow,
    Head,
    Hello,
    Join,
    Kind,
    Leave,
    Pause,
    Position,
    Refuse,
    RoundKind,
    Start,
    StartTerms,
    pack_control,
    read_control,
)

LIE = 3  # the round that the hub lies about


def without(*slots):
    return lambda close: replace(close, contributors=tuple(each for each in close.contributors if each not in slots))


class LyingHub:
    """Changes of what a hub announces of one round, by the slot of the site that gets them; None for nothing."""

    def __init__(self, relay, lies):
        self._relay, self._lies, self._honest = relay, lies, relay.sessions.announce
        relay.sessions.announce = self.announce

    def announce(self, message, soon=False):
        if not isinstance(message, Close) or message.step != LIE:
            self._honest(message, soon)
            return
        for session in self._relay.sessions.training:
            lie = self._lies.get(session.slot, lambda close: close)(message)
            for each in lie if isinstance(lie, list) else [lie]:
                session.send(pack_control(each, 0), soon)


def run_rounds(link, required, rounds=LIE + 2):
    """Take part in rounds; return the error with which this site ends, and how many rounds it has made."""
    transport, made = ElasticTransport(link, Traffic(), TIMEOUT, required), 0
    try:
        for number in range(rounds):
            gather = transport.gather([4] * 3, torch.float32)
            gather.payload.fill_(link.rank + 1)
            gather.launch()
            transport.rounds.close(admits=True)
            gather.wait()
            transport.rounds.end_step()
            made = number + 1
    except (MismatchError, SiteError) as error:
        link.leave(f"{type(error).__name__}: {error}")
        return error, made
    return None, made


DIFFERS = "got different information from the hub"
OMITS = r"has closed round 3 without what is present: site 1 \(b\)"


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize(
    ("lies", "skips", "first"),
    [
        ({0: without(1)}, True, DIFFERS),
        ({0: without(1), 1: without(0)}, True, DIFFERS),
        ({0: without(1)}, False, OMITS),
        (
            {0: lambda close: [Drop(1, LIE, "a lie"), without(1)(close)]},
            False,
            DIFFERS + "|shown other members than this site",
        ),
        ({0: lambda close: [Drop(1, LIE, "a lie"), close]}, True, r"with what has left: site 1 \(b\)"),
        ({0: lambda close: [Join(1, LIE), close]}, True, DIFFERS),
        (dict.fromkeys(range(3), lambda close: [Join(1, LIE), close]), False, OMITS),
        (dict.fromkeys(range(3), lambda close: [Join(1, LIE), without(1)(close)]), False, OMITS),
    ],
    ids=[
        "omits",
        "splits",
        "omits a member",
        "drops",
        "counts what has left",
        "joins",
        "counts a member that joins",
        "omits a member that joins",
    ],
)
def test_sites_that_were_told_different_things_all_end(tmp_path, lies, skips, first, sealed):
    with sealed_hub(tmp_path, sealed=sealed) as hub, linked(hub, 3) as links:
        LyingHub(hub.hub.relay, lies)
        required = Requirements(1, 60_000, skips, 300)
        found = together(lambda rank: run_rounds(links[rank], required), 3)
    assert all(isinstance(error, MismatchError | SealingError) for error, _ in found), found
    assert any(re.search(first, str(error)) for error, _ in found), found
    assert {made for _, made in found} <= {LIE - 1, LIE}


@pytest.mark.parametrize("sealed", [True, False])
def test_a_payload_that_the_hub_withholds_as_if_it_were_for_another_site_ends_the_run(tmp_path, sealed):
    """Site a leaves b out of the round then, and the others do not."""

    def withheld(session, send):
        def sends(frame, soon=False):
            head = Head.unpack(frame[:HEAD_BYTES])
            lies = head.kind is Kind.PAYLOAD and (head.slot, head.step, session.slot) == (1, LIE, 0)
            send(head._replace(to=3).elsewhere if lies else frame, soon)

        return sends

    with sealed_hub(tmp_path, sealed=sealed) as hub, linked(hub, 3) as links:
        for session in hub.hub.relay.sessions.training:
            session.send = withheld(session, session.send)
        found = together(lambda rank: run_rounds(links[rank], Requirements(1, 60_000)), 3)
    assert all(isinstance(error, MismatchError | SealingError) for error, _ in found), found
    assert any(DIFFERS in str(error) for error, _ in found), found
    assert {made for _, made in found} <= {LIE - 1, LIE}


def test_a_start_in_the_middle_of_a_run_is_refused(tmp_path):
    with sealed_hub(tmp_path) as hub, linked(hub, 3) as links:
        hub.hub.relay.sessions["training", 0].send(pack_control(Start(Position(9, 0)), 0))
        with pytest.raises(SiteError, match="it starts a training that has begun"):
            links[0].converse(lambda: 1, TIMEOUT)
        assert "it starts a training that has begun" in str(links[1].await_loss(TIMEOUT))


def test_new_sites_in_a_round_that_is_closed_are_refused(tmp_path):
    with sealed_hub(tmp_path) as hub, linked(hub, 3) as links:
        LyingHub(hub.hub.relay, {0: lambda close: [close, Grow(LIE, ("a", "b", "c", "d"))]})
        found = together(lambda rank: run_rounds(links[rank], Requirements(1, 60_000)), 3)
    assert "it announces new sites in round 3, which is closed" in str(found[0][0])


def test_a_payload_of_the_next_round_is_none_of_the_round_before(tmp_path):
    """Deltas of local steps, which a member withholds: at the first site, those of the next round are there already."""
    with sealed_hub(tmp_path, sealed=False) as hub, linked(hub, 3) as links:
        waits, inbox = links[0].rounds._wait_for_close, links[0].inbox

        def arrived():
            return any(frames[0][0].slot == 2 for frames in inbox._early.values())

        def slowly(over, *rest):
            waits(over, *rest)
            waits(arrived, *rest)

        links[0].rounds._wait_for_close = slowly

        def run(rank):
            transport = ElasticTransport(links[rank], Traffic(), TIMEOUT, Requirements(1, 60_000))
            gather = transport.gather([4] * 3, torch.float32)
            gather.payload.fill_(rank + 1)
            if rank < 2:
                gather.launch()
            transport.rounds.end_step()  # after the next local step
            transport.rounds.close(admits=True)
            if rank == 2:
                gather.launch()
            return [] if rank == 2 else [float(each.sum()) for each in gather.wait()], sorted(transport.rounds.absent)

        first, second, _ = together(run, 3)
    assert first == second == ([4.0, 8.0, 0.0], [2])


def test_a_part_of_the_sites_that_is_smaller_than_min_sites_ends(tmp_path):
    """A hub that keeps two groups of sites apart: only the one with more than half of the sites can go on.

    It goes on if the other one learns first that it is too small, and ends if it learns first that the groups differ.
    """
    with sealed_hub(tmp_path) as hub, linked(hub, 3) as links:
        LyingHub(hub.hub.relay, {0: without(1, 2), 1: without(0), 2: without(0)})
        first, *others = together(lambda rank: run_rounds(links[rank], Requirements(2, 60_000, True, 300)), 3)
    assert first[1] == LIE - 1
    if re.search("has closed round 3 with 1 sites, and this run needs 2", str(first[0])):
        assert others == [(None, LIE + 2)] * 2
    else:
        assert all(re.search(DIFFERS, str(error)) for error, _ in (first, *others)), (first, *others)
        assert [made for _, made in others] == [LIE] * 2


# Members that lie: the others go on without them, or all are told what is invalid and of whom

LIES = {
    "samples -3": {2: -3},
    "samples 10**9": {2: 10**9},
    "samples 2**63-1": {2: (1 << 63) - 1},
    "step 0": {0: 0},
    "version 7": {1: 7},
    "fault 99": {4: 99},
    "culprit": {4: 3, 5: 1000},
    "finite": {6: 7},
    "batch": {11: -1},
    "flags": {13: 64},
    "rows": {-1: -5},
    "rows 2**40": {-1: 1 << 40},
}


STEPS = 10


@pytest.fixture(scope="module")
def idle_c(tmp_path_factory):
    """Function that returns the lines of a training in which c is idle from a step on; each is trained once."""

    @functools.cache
    def lines(mode: str, first: int) -> dict[int, dict]:
        present = {step: [0, 1, 2] if step < first else [0, 1] for step in range(STEPS)}
        return idles(tmp_path_factory.mktemp("idle"), "abc", present, mode=mode)

    return lines


def check_left_out(tmp_path, idle_c, reason, mode, sealed=True, **attack):
    """Check that two sites go on without a third one, from the step on in which it sends what is invalid."""
    with Fleet(tmp_path, sealed_hub(tmp_path, sealed=sealed), mode=mode, steps=STEPS) as fleet:
        fleet.start("c", **attack)
        lines, present = fleet.train("ab")
    assert present == {step: [0, 1, 2] if step < FIRST else [0, 1] for step in range(STEPS)}
    same_bits(lines, idle_c(mode, FIRST))
    assert reason in fleet.printed("a"), fleet.state()
    assert f"; messages are {'' if sealed else 'not '}sealed" in fleet.printed("a")
    refusals = f"a refuses c, which takes part already: {reason}", f"b refuses c, which takes part already: {reason}"
    assert any(each in line for line in fleet.hub.log for each in refusals), fleet.hub.log  # the first one, at least
    assert any("c has left: " in line for line in fleet.hub.log), fleet.hub.log


@pytest.mark.parametrize(("lies", "mode"), [*((each, "dad") for each in LIES), ("samples 10**9", "dsgd")])
def test_others_go_on_without_a_member_whose_header_is_invalid(tmp_path, idle_c, lies, mode):
    reason = "site 2 (c) announces " if lies == "rows 2**40" else "site 2 (c) has sent an invalid step header: "
    check_left_out(tmp_path, idle_c, reason, mode, lies=LIES[lies])


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize(
    ("harm", "mode"),
    [
        *itertools.product(["short", "long", "missing", "apart"], ["dad", "dsgd"]),
        *itertools.product(["samples", "rows"], ["dad"]),
    ],
)
def test_others_go_on_without_a_member_whose_payload_is_invalid(tmp_path, idle_c, harm, mode, sealed):
    lacks = "site 2 (c) has ended the round without its payload"
    reason = lacks if harm in ("short", "long", "missing", "apart") else "site 2 (c) has sent an invalid payload"
    check_left_out(tmp_path, idle_c, reason, mode, sealed, harm=harm)


@pytest.mark.parametrize("harm", ["twice", "besides"])
def test_what_a_member_sends_besides_is_ignored(tmp_path, idle_c, harm):
    with Fleet(tmp_path, sealed_hub(tmp_path), mode="dad", steps=STEPS) as fleet:
        lines, _ = fleet.train("ab", c={"harm": harm})
    same_bits(lines, idle_c("dad", STEPS))


@pytest.mark.parametrize("lies", ["samples -3", "fault 99"])
def test_all_are_told_whose_header_is_invalid_where_all_have_to_stay(tmp_path, lies):
    with Fleet(tmp_path, "ab", steps=10, min_sites=None) as fleet:
        fleet.start("a")
        fleet.start("b", lies=LIES[lies])
        fleet.end("ab", 1)
    for name in "ab":
        assert "MismatchError: site 1 (b) has sent an invalid step header: " in fleet.printed(name)


def left_out(
    tmp_path: Path, harm: Any, timeout: float = TIMEOUT, prepare: Any = lambda transport: None, collects: bool = False
) -> list[str]:
    """Let three sites gather numbers; check that the first two go on without the last one; return the hub's journal.

    Args:
        tmp_path: folder for the kits.
        harm: what the last site does with its transport and the gather, in place of its part.
        timeout: timeout of the sites.
        prepare: what each site does with its transport before.
        collects: whether the payloads are awaited before the round is closed, as those of a second round are.
    """

    def exchange(link):
        transport = ElasticTransport(link, Traffic(), timeout, Requirements(1, 60_000))
        gather = transport.gather([4] * 3, torch.float32)
        prepare(transport)
        if link.rank == 2:
            harm(transport, gather)
            return None
        gather.payload.fill_(link.rank + 1)
        gather.launch()
        if collects:
            gather.collect()
        transport.rounds.close(admits=not collects)
        return [each.tolist() for each in gather.wait()], transport.rounds.present

    with sealed_hub(tmp_path) as hub, linked(hub, 3) as links:
        found = together(lambda rank: exchange(links[rank]), 3)
        log = list(hub.log)
    assert found[:2] == [([[1.0] * 4, [2.0] * 4, [0.0] * 4], [0, 1])] * 2
    return log


def test_memory_that_a_member_has_announced_and_not_sent_is_not_taken(tmp_path):
    def exchange(link):
        transport = ElasticTransport(link, Traffic(), TIMEOUT, Requirements(1, 60_000))
        gather = transport.gather([4, 4, 1 << 29], torch.uint8)
        if link.rank < 2:
            gather.payload.fill_(link.rank + 1)
            gather.launch()
        else:
            link.send(gather.exchange, memoryview(b"a part of it"))
        transport.rounds.close(admits=True)
        return link.rank < 2 and ([int(each.max()) for each in gather.wait()], transport.rounds.present)

    with sealed_hub(tmp_path) as hub, linked(hub, 3) as links:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = together(lambda rank: exchange(links[rank]), 3)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert found[:2] == [([1, 2, 0], [0, 1])] * 2
    assert grown < 256 << 10


def test_a_site_that_hears_late_of_a_round_leaves_out_the_same_member(tmp_path):
    """The member without a payload has left by then, which others did not know when they left it out."""
    heard = []

    def prepare(transport):
        link, end = transport.link, transport.link.rounds.end

        def hear_late(*arguments):
            absent = end(*arguments)
            if link.rank == 0:
                link.converse(lambda: int(2 not in link.gone), 10.0)
                heard.append(2 in link.gone)
            return absent

        link.rounds.end = hear_late

    def leave(transport, gather):
        transport.rounds.close(admits=True)
        transport.link.close()

    left_out(tmp_path, leave, 20.0, prepare)
    assert heard[-1]


def test_a_payload_of_the_next_round_does_not_stand_for_one_that_is_missing(tmp_path):
    """It may arrive before a site goes on after the close, so that only this one would take it."""

    def prepare(transport):
        link, wait = transport.link, transport.link.rounds._wait_for_close

        def hear_more(*arguments):
            wait(*arguments)
            link.converse(lambda: int(link.rank == 0 and not link.inbox.early_bytes), TIMEOUT)

        if link.rank < 2:
            link.rounds._wait_for_close = hear_more

    def send_late(transport, gather):
        transport.link.rounds.end(TIMEOUT, None, RoundKind.FIRST)
        transport.link.send(gather.exchange, memoryview(bytes(16)))

    left_out(tmp_path, send_late, prepare=prepare)


def make_other_calls(transport, gather):
    transport.link.send(CALLS, memoryview(b"elsewhere"))
    transport.link.converse(lambda: int(not transport.link.rounds.dropped), TIMEOUT)


@pytest.mark.parametrize("collects", [True, False], ids=["before the close", "by the close"])
@pytest.mark.parametrize(
    ("harm", "timeout", "reason"),
    [
        (lambda transport, gather: time.sleep(3.0), 1.0, "it has sent nothing in step 1 for 1 s"),
        (make_other_calls, TIMEOUT, "it does not make the same calls"),
    ],
    ids=["nothing", "other calls"],
)
def test_a_member_that_others_wait_for_in_vain_is_dropped(tmp_path, harm, timeout, reason, collects):
    """It is connected; payloads of a second round are awaited before the round is closed, others by its close."""
    log = left_out(tmp_path, harm, timeout, collects=collects)
    assert any(f"c has left: 2 sites refuse it: {reason}" in each for each in log)


def test_a_site_that_makes_other_calls_and_does_not_state_which_is_named(tmp_path):
    """Where all have to stay."""

    def exchange(link):
        gather = HubTransport(link, Traffic(), 0.5).gather([4] * 3, torch.float32)
        if link.rank == 2:
            link.send(gather.exchange + 1, memoryview(bytes(16)))
            return link.converse(lambda: int(not link.gone), TIMEOUT)
        gather.launch()
        with pytest.raises(MismatchError, match=r"site 2 \(c\) is in an exchange that it does not state\. Every site"):
            gather.wait()
        return link.leave("it has found the liar")

    with sealed_hub(tmp_path, sealed=False) as hub, linked(hub, 3) as links:
        together(lambda rank: exchange(links[rank]), 3)


@pytest.mark.parametrize("size", [0, 3])
def test_others_go_on_without_a_member_whose_part_of_a_collective_is_invalid(tmp_path, size):
    def exchange(link):
        ElasticTransport(link, Traffic(), TIMEOUT, Requirements(1, 60_000))
        buffers = [memoryview(bytearray([link.rank] * 4)) for _ in range(3)]
        if link.rank == 2:
            link.send(9, memoryview(bytes(size)))
            return link.rounds.end(TIMEOUT, None)
        return link.rounds.gather(9, buffers, TIMEOUT), [bytes(each)[0] for each in buffers[:2]]

    with sealed_hub(tmp_path) as hub, linked(hub, 3) as links:
        found = together(lambda rank: exchange(links[rank]), 3)
    assert found == [({2}, [0, 1])] * 2 + [set()]


def test_a_run_ends_where_too_few_sites_are_left(tmp_path):
    with Fleet(tmp_path, "ab", steps=10, min_sites=2) as fleet:
        fleet.start("a")
        fleet.start("b", harm="short")
        fleet.end("a", 1)
        fleet.processes["b"].kill()
    assert "1 of 2 sites are left, and this run needs 2" in fleet.printed("a")


# Texts that act on terminals, or look like other lines of a log


HARMFUL = "no data\n2026-01-01 00:00:00 UTC  all is well\r\x1b[2J\x1b]0;title\x07\x9b31m\u202egnp\u2066\x00\u2028x"
TEXTS = [
    Leave(HARMFUL),
    Drop(1, 1, HARMFUL),
    Exclude(1, HARMFUL),
    Pause((1,), HARMFUL),
    Refuse(HARMFUL, HARMFUL, False),
    Grow(1, ("a", HARMFUL)),
    Hello(VERSION, 1, FRESH, "training", release=HARMFUL, place=HARMFUL, start=StartTerms(2, 1000)),
]


@pytest.mark.parametrize("message", TEXTS, ids=lambda each: type(each).__name__)
def test_texts_of_messages_can_be_printed_and_keep_their_bound(message):
    found = read_control(pack_control(message, 0)[HEAD_BYTES:], 3)
    texts = [text for each in astuple(found) for text in (each if isinstance(each, tuple) else (each,))]
    texts = [each for each in texts if isinstance(each, str)]
    assert all(each.isprintable() for each in texts), texts
    assert any(r"no data\n2026-01-01" in each and r"\x1b[2J" in each and r"\u202e" in each for each in texts), texts
    long = read_control(pack_control(Leave("\U000e0001" * 1999), 0)[HEAD_BYTES:], 3)
    assert len(long.reason) == 2000


def test_no_text_of_a_member_acts_on_the_terminal_of_another_site(tmp_path, caplog):
    """Its reason to leave, and where it says that it is in the program."""

    def exchange(link):
        if link.rank == 1:
            link.send(CALLS, memoryview(HARMFUL.encode()))
            link.leave(HARMFUL)
            return None
        with pytest.raises((SiteError, MismatchError)) as caught:
            link.rounds.gather(9, [memoryview(bytearray(4)) for _ in range(3)], TIMEOUT)
        return str(caught.value), link.inbox.place_of(1)

    with sealed_hub(tmp_path, sealed=False) as hub, linked(hub, 3) as links:
        for link in links:
            link.wait_for_hub(TIMEOUT)
        found = together(lambda rank: exchange(links[rank]), 3)
        lines = [*hub.log, *caplog.messages, *(text for each in found if each for text in each)]
    assert any(r"no data\n2026-01-01" in each for each in lines), lines
    assert all(each.isprintable() for each in lines), lines


def test_errors_hold_nothing_that_acts_on_terminals():
    error = MismatchError(HARMFUL)
    assert str(error) == HARMFUL.splitlines()[0] + "\n" + escaped(HARMFUL.partition("\n")[2])
    assert pickle.loads(pickle.dumps(error)).args == error.args
    assert str(SiteError("plain\n\ttext \N{GREEK SMALL LETTER ALPHA}")) == "plain\n\ttext \N{GREEK SMALL LETTER ALPHA}"
