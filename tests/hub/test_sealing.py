"""Sealed messages: sizes, pieces, nonces, and what a hub cannot do with them without being found out."""

import json
import multiprocessing
import os
from contextlib import contextmanager

import hub_kits
import numpy as np
import pytest
import support
import torch
import torch.distributed as dist
from frame_parts import Frame, read
from hub_sites import TIMEOUT, linked, open_link, receive, send, together, train, transports
from running_hub import running_hub, until
from sealed_sites import SENTINEL, SITES, flip, make_kits, opened, packed, sealed_hub, sealed_links
from torch import nn

from dadplug.adapm import ParameterManager
from dadplug.errors import SealingError, SiteError
from dadplug.exchange import gather_objects
from dadplug.hub.pki import provision
from dadplug.hub.pki.kits import Kit
from dadplug.hub.secure import sealing
from dadplug.hub.secure.epochs import AGREEMENT
from dadplug.hub.secure.sealing import OPEN_BYTES, OVERHEAD, Keys, opened_offset, sealed_size
from dadplug.hub.server.relay import Relay
from dadplug.hub.site.tunnel import Tunnel, tunnel_of
from dadplug.hub.wire.messages import SHORT_PIECE_BYTES, Head, Kind
from dadplug.hub.wire.streams import Tag

CONTENT_BYTES = SHORT_PIECE_BYTES - OVERHEAD  # of a piece
NAMES = {0: "a", 1: "b", 2: "c"}
SIZES = [
    0,
    1,
    CONTENT_BYTES - 1,
    CONTENT_BYTES,
    CONTENT_BYTES + 1,
    SHORT_PIECE_BYTES - 1,
    SHORT_PIECE_BYTES,
    SHORT_PIECE_BYTES + 1,
    1 << 20,
]
HEAD = Head(Kind.PAYLOAD, 0, step=3, exchange=5)


def make_keys(slot: int, group: bytes = b"g" * 32) -> Keys:
    """Return the secrets of a site; those of a pair are made of its slots."""
    pairs = {other: bytes(sorted((slot, other))) * 16 for other in NAMES if other != slot}
    return Keys(slot, NAMES, group, pairs)


@pytest.fixture
def sealer():
    return make_keys(0).sealer()


@pytest.fixture
def opener():
    return make_keys(1).opener(0)


def seal(sealer, content, head=HEAD):
    """Return the frames of a sealed message as a hub gets them."""
    return read(*sealer.frames(head, memoryview(content)))


def opened_message(opener, frames, size):
    """Return the message that frames hold."""
    content = bytearray(size)
    for head, body in frames:
        piece = opener.open(head, body)
        offset = opened_offset(head.offset)
        content[offset : offset + len(piece)] = piece
    return bytes(content)


def refused(opener, frames, size=0) -> str:
    """Check that frames are not what their site has sent; return the message."""
    with pytest.raises(SealingError) as caught:
        opened_message(opener, frames, size)
    return str(caught.value)


@pytest.mark.parametrize("size", SIZES)
def test_a_message_of_any_size_arrives_in_pieces_that_fill_frames(size, sealer, opener):
    message = os.urandom(size)
    frames = seal(sealer, message)
    assert all(OVERHEAD < len(frame.body) <= SHORT_PIECE_BYTES for frame in frames)
    assert all(len(frame.body) == SHORT_PIECE_BYTES for frame in frames[:-1])
    assert sum(len(frame.body) for frame in frames) == sealed_size(size)
    assert [frame.head.offset for frame in frames] == list(range(0, sealed_size(size), SHORT_PIECE_BYTES))
    assert opened_message(opener, frames, size) == message


def test_equal_messages_do_not_look_equal(sealer):
    message = bytes(2 * CONTENT_BYTES)
    seen = [frame.body[8:] for _ in range(3) for frame in seal(sealer, message)]
    assert len({body[:16] for body in seen}) == 6


@pytest.mark.parametrize("size", [1, 100, CONTENT_BYTES])
def test_a_change_of_any_byte_is_found_out(size, sealer, opener):
    (frame,) = seal(sealer, os.urandom(size))
    length = len(frame.body)
    for position in {*range(0, length, max(1, length // 150)), *range(min(40, length)), length - 1}:
        altered = bytearray(frame.body)
        altered[position] ^= 1 << (position % 8)
        assert "site 0 (a)" in refused(opener, [(frame.head, bytes(altered))], size), position
    opener.open(frame.head, frame.body)  # a forgery does not spoil what follows


def test_a_change_of_the_head_is_found_out(sealer, opener):
    (frame,) = seal(sealer, b"content")
    for change in (
        {"kind": Kind.STATE},
        {"step": 4},
        {"exchange": 6},
        {"offset": SHORT_PIECE_BYTES},
        {"tag": 1},
        {"length": frame.head.length - 1},
    ):
        assert refused(opener, [(frame.head._replace(**change), frame.body)], 7), change
    assert opener.open(frame.head, frame.body) == b"content"


def test_pieces_count_in_the_order_in_which_they_were_sent(sealer):
    size = 3 * CONTENT_BYTES
    first, second = seal(sealer, b"1" * size), seal(sealer, b"2" * size)
    attacks = {
        "the second piece first": [first[1], first[0], first[2]],
        "a repeated piece": [first[0], first[0]],
        "a piece left out": [first[0], first[2]],
        "the end left out": [*first[:2], *second],
        "a message left out": second,
        "a repeated message": [*first, *first],
        "the next message's content": [first[0], (first[1].head, second[1].body)],
        "a piece in the place of another": [(first[1].head._replace(offset=0), first[1].body)],
        "an empty piece": [(first[0].head, b"")],
        "a short piece": [(first[0].head, first[0].body[:-1])],
        "a long piece": [(first[0].head, first[0].body + b"0")],
        "halves of two pieces": [(first[0].head, first[0].body[:100] + first[1].body[100:])],
    }
    for attack, frames in attacks.items():
        assert "altered, repeated, exchanged or left out" in refused(make_keys(1).opener(0), frames, size), attack
    assert opened_message(make_keys(1).opener(0), [*first, *second], size) == b"2" * size


def test_a_message_counts_as_its_sender_s_only(sealer):
    (frame,) = seal(sealer, b"content")
    (of_c,) = seal(make_keys(2).sealer(), b"content", HEAD._replace(slot=2))
    for slot, (head, body) in ((2, frame), (0, of_c)):
        assert NAMES[slot] in refused(make_keys(1).opener(slot), [(head._replace(slot=slot), body)], 7)
    assert make_keys(1).opener(2).open(*of_c) == b"content"


def test_a_message_of_another_run_is_found_out(opener):
    refused(opener, seal(make_keys(0, b"another run's secret of 32 bytes").sealer(), b"content"), 7)


def test_a_stream_of_two_sites_is_readable_to_them_only():
    context = b"stream"
    sealer, back = make_keys(0).pair(1, context)
    # In what a site sends, the slot of a MESSAGE names the receiver; in what the hub sends, the sender.
    sent = Head.unpack(sealer.frame(Head(Kind.MESSAGE, 1), b"for b")[:32])
    assert sent.slot == 1
    frame = sealer.frame(Head(Kind.MESSAGE, 1), b"for b, too")
    answer, opener = make_keys(1).pair(0, context)
    arrived = sent._replace(slot=0, length=len(frame) - 32)
    first = make_keys(0).pair(1, context)[0].frame(Head(Kind.MESSAGE, 1), b"for b")[32:]
    assert opener.open(sent._replace(slot=0), first) == b"for b"
    assert opener.open(arrived, frame[32:]) == b"for b, too"
    others = [
        make_keys(2).pair(0, context)[1],
        make_keys(1).pair(0, b"another stream")[1],
        make_keys(1).opener(0),
        back,
    ]
    for other in others:
        refused(other, [(sent._replace(slot=0), first)], 5)
    reply = answer.frame(Head(Kind.MESSAGE, 0), b"for a")
    assert back.open(Head.unpack(reply[:32])._replace(slot=1), reply[32:]) == b"for a"


def test_no_number_is_used_twice_and_keys_change(sealer, opener, monkeypatch):
    monkeypatch.setattr(sealing, "_PIECES_BITS", 2)
    message = os.urandom(5 * CONTENT_BYTES)
    frames = [frame for _ in range(4) for frame in seal(sealer, message)]
    assert [int.from_bytes(frame.body[:8], "big") for frame in frames] == list(range(20))
    assert opened_message(opener, frames, len(message)) == message
    secret = sealing.ChainKey(0, sealing.derive(make_keys(0).group, "sender", 0)).at(HEAD.step).key
    assert len({sealing.derive(secret, "pieces", index) for index in range(5)}) == 5
    # The fifth piece is the first one under the second key, and its number counts on.
    cipher = sealing.AESGCM(sealing.derive(secret, "pieces", 1))
    head, body = frames[4]
    assert cipher.decrypt((4).to_bytes(12, "big"), body[8:], head.pack()) == message[4 * CONTENT_BYTES :]


def test_a_second_sealer_of_the_same_keys_is_refused():
    keys = make_keys(0)
    keys.sealer()
    keys.pair(1, b"1")
    for again in (keys.sealer, lambda: keys.pair(1, b"1")):
        with pytest.raises(RuntimeError, match="repeat its nonces"):
            again()
    keys.pair(1, b"2")
    keys.pair(2, b"1")


def _seal_in_child(sealer, queue):
    try:
        sealer.frame(HEAD, b"x")
    except RuntimeError as error:
        queue.put(str(error))


def test_a_forked_process_cannot_seal(sealer):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_seal_in_child, args=(sealer, queue))
    child.start()
    child.join(200)
    assert "a forked process cannot seal" in queue.get()


def test_secrets_are_not_printed():
    keys = make_keys(0, b"SECRETSECRETSECRETSECRETSECRETSE")
    assert "SECRET" not in repr(keys)
    assert issubclass(SealingError, SiteError)


# What a hub reads and alters


class ReadingHub:
    """What a hub reads, and what it does to payloads and messages of streams.

    Attributes:
        seen: all frames that have passed through the hub.
        alter: function of a frame that returns those to pass on instead.
    """

    def __init__(self):
        self.seen: list[Frame] = []
        self.alter = lambda frame: [frame]

    def content(self, kind: Kind = Kind.PAYLOAD) -> bytes:
        """Return all that the hub has read of a kind, but for the agreement on keys."""
        return b"".join(body for head, body in self.seen if head.kind is kind and head.exchange < AGREEMENT)


@pytest.fixture
def reader(monkeypatch):
    reader = ReadingHub()
    take = Relay.take

    def take_and_read(relay, session, frame, now):
        frame = opened(frame)
        reader.seen.append(frame)
        for each in reader.alter(frame) if frame.head.kind in (Kind.PAYLOAD, Kind.MESSAGE) else [frame]:
            take(relay, session, packed(each), now)

    monkeypatch.setattr(Relay, "take", take_and_read)
    return reader


class Attack:
    """Attack of a hub on the messages of site 0 to site 1, each of which is a frame or several.

    Args:
        name: name of the method that attacks.
        kind: kind of the frames: payloads, or messages of streams.
    """

    def __init__(self, name: str, kind: Kind):
        self.name, self.kind = name, kind
        self.held: list[Frame] = []

    def __call__(self, frame):
        head = frame.head
        if self.kind is Kind.MESSAGE:
            meant = head.tag == Tag.DATA and head.slot == 1
        else:
            meant = head.exchange < AGREEMENT and head.slot == 0
        if head.kind is not self.kind or not meant:
            return [frame]
        self.held.append(frame)
        return getattr(self, self.name)(frame)

    @property
    def second(self) -> bool:
        return len(self.held) == 2

    def alter_content(self, frame):
        return [flip(frame)] if self.second else [frame]

    def alter_number(self, frame):
        return [flip(frame, 7)] if self.second else [frame]

    def alter_exchange(self, frame):
        return [frame._replace(head=frame.head._replace(exchange=6))]

    def repeat(self, frame):
        return [frame, frame]

    def leave_out(self, frame):
        return [] if self.second else [frame]

    def reorder(self, frame):
        return [] if len(self.held) == 1 else self.held[::-1]

    def splice(self, frame):
        """Put the second piece's content in the place of the first's."""
        return [] if len(self.held) == 1 else [self.held[0]._replace(body=frame.body), frame]

    def make_up(self, frame):
        return [frame._replace(body=bytes(len(frame.body)))]

    def cut(self, frame):
        return [Frame(frame.head._replace(length=10), frame.body[:10])]

    # Attacks on streams, whose bytes have to count on

    def repeat_later(self, frame):
        return [frame, frame._replace(head=frame.head._replace(offset=5))]

    def leave_out_first(self, frame):
        return [frame._replace(head=frame.head._replace(offset=0))] if self.second else []

    def replace(self, frame):
        return [frame._replace(body=self.held[0].body)]

    def grant(self, frame):
        """Make the data a grant of room."""
        return [frame._replace(head=frame.head._replace(tag=Tag.ROOM, offset=0))]


# Sealed streams of the parameter manager, over a hub that reads and alters what passes through it


@contextmanager
def streams(folder, sealed=True):
    """Run a hub and three sites; yield the sockets and tunnels of each."""
    with running_hub(make_kits(folder / "kits", sealed=sealed), SITES) as hub, linked(hub, 3) as links:
        made = transports(links)

        def open_all(rank):
            tunnel = tunnel_of(links[rank], TIMEOUT)
            sockets = tunnel.open(made[rank].gather_objects)
            made[rank].gather_objects(None)
            return sockets, tunnel

        found = together(open_all, 3)
        try:
            yield [sockets for sockets, _ in found], [tunnel for _, tunnel in found]
        finally:
            for _, tunnel in found:
                tunnel.close(0.2)


@pytest.mark.parametrize("sealed", [True, False])
def test_a_hub_finds_a_sentinel_only_in_streams_that_are_not_sealed(tmp_path, reader, sealed):
    content = SENTINEL * 8000  # several frames, more than the local buffers hold at times
    with streams(tmp_path, sealed) as (sockets, _):

        def exchange(rank):
            for peer in range(3):
                if peer != rank:
                    send(sockets[rank][peer], b"%d to %d" % (rank, peer) + content)
            return {peer: receive(sockets[rank][peer], len(content) + 6) for peer in range(3) if peer != rank}

        results = together(exchange, 3)
    for rank, found in enumerate(results):
        assert found == {peer: b"%d to %d" % (peer, rank) + content for peer in range(3) if peer != rank}
    count = sum(SENTINEL in frame.body for frame in reader.seen)
    assert not count if sealed else count > 6
    assert len(reader.content(Kind.MESSAGE)) > 6 * len(content)


@pytest.mark.parametrize("kind", ["alter_content", "repeat_later", "leave_out_first", "replace", "grant"])
def test_a_hub_that_tampers_with_a_stream_is_found_out(tmp_path, reader, kind):
    reader.alter = Attack(kind, Kind.MESSAGE)
    with streams(tmp_path) as (sockets, tunnels):
        for content in (b"first", b"after"):
            sockets[0][1].send(content)
        assert receive(sockets[1][0], 11) in (b"", b"first", b"firstafter")
        error = hub_kits.attempt(tunnels[1].check)
        assert "a sealed message of site 0 (a)" in str(error)
        assert type(error).__name__ == "SealingError"


def test_a_stream_is_not_readable_to_the_third_site(tmp_path, reader):
    """The hub sends site 2 what is meant for site 1."""

    def divert(frame):
        meant = frame.head.kind is Kind.MESSAGE and frame.head.slot == 1
        return [frame._replace(head=frame.head._replace(slot=2)) if meant else frame]

    reader.alter = divert
    with streams(tmp_path) as (sockets, tunnels):
        sockets[0][1].send(SENTINEL)
        assert receive(sockets[2][0], 1) == b""
        assert "a sealed message of site 0 (a)" in str(hub_kits.attempt(tunnels[2].check))


def test_a_tunnel_without_keys_is_refused_where_the_kit_requires_sealing(tmp_path):
    kit = Kit.load(make_kits(tmp_path / "kits") / "a")
    with pytest.raises(ValueError, match="keys are needed"):
        Tunnel(kit)


# Links whose kits require sealed messages, over a hub that reads and alters what passes through it


def gather(link, content: bytes, size: int, exchange: int) -> list[bytes]:
    """Send a message to all other sites, and return theirs, of equal size."""
    return [*link._swap(TIMEOUT, exchange, content, size).values()]


def outcome(link, content: bytes, exchange: int = 5) -> object:
    return hub_kits.attempt(lambda: gather(link, content, len(content), exchange))


@pytest.mark.parametrize("sealed", [True, False])
def test_a_hub_finds_a_sentinel_only_where_messages_are_not_sealed(tmp_path, reader, sealed):
    """The test without sealing shows that the search finds what it looks for."""
    values = torch.frombuffer(bytearray(SENTINEL * 10000), dtype=torch.uint8)
    with sealed_links(tmp_path, sealed=sealed) as links:

        def exchange(transport):
            one = transport.gather([len(values)] * 3, torch.uint8)
            one.payload.copy_(values)
            one.launch()
            assert all(torch.equal(each, values) for each in one.wait())
            total = torch.frombuffer(bytearray(SENTINEL), dtype=torch.int32).clone()
            transport.all_reduce(total).wait()
            assert torch.equal(total, 3 * torch.frombuffer(bytearray(SENTINEL), dtype=torch.int32))
            copy = values.clone() if transport.rank == 0 else torch.zeros_like(values)
            transport.broadcast(copy)
            assert torch.equal(copy, values)
            assert transport.broadcast_bytes(SENTINEL) == SENTINEL
            found = transport.gather_objects({"text": SENTINEL.decode(), "rank": transport.rank})
            assert [each["rank"] for each in found] == [0, 1, 2]
            transport.rounds.end_step()

        made = transports(links)
        together(lambda rank: exchange(made[rank]), 3)
    count = sum(SENTINEL in body for head, body in reader.seen)
    assert not count if sealed else count > 10
    assert not any(head.kind is Kind.SUMMAND for head, _ in reader.seen) or not sealed
    assert len(reader.content()) > 3 * len(values)


@pytest.mark.parametrize("sites", [("a", "b"), SITES])
def test_messages_of_all_sizes_arrive(tmp_path, sites):
    sizes = [0, 1, OPEN_BYTES - 1, OPEN_BYTES, OPEN_BYTES + 1, 1 << 16, (1 << 16) + 1, 1 << 20]
    messages = {(slot, size): os.urandom(size) for slot in range(len(sites)) for size in sizes}
    with sealed_links(tmp_path, sites) as links:

        def exchange(rank):
            for number, size in enumerate(sizes):
                found = gather(links[rank], messages[rank, size], size, 3 + number % 2)
                assert found == [messages[slot, size] for slot in range(len(sites)) if slot != rank]

        together(exchange, len(sites))


def test_messages_may_come_before_they_are_expected(tmp_path):
    with sealed_links(tmp_path, ("a", "b")) as (first, second):
        contents = [os.urandom(100000) for _ in range(3)]
        for exchange, content in enumerate(contents):
            first.send(exchange, memoryview(content))
        first.send(2, memoryview(contents[0]))
        for exchange in (2, 1, 0):
            buffer = bytearray(100000)
            second.wait([second.expect(0, exchange, memoryview(buffer))], TIMEOUT)
            assert buffer == contents[exchange]
        buffer = bytearray(100000)
        second.wait([second.expect(0, 2, memoryview(buffer))], TIMEOUT)
        assert buffer == contents[0]


@pytest.mark.parametrize(
    "kind",
    ["alter_content", "alter_number", "alter_exchange", "repeat", "leave_out", "reorder", "splice", "make_up", "cut"],
)
def test_a_hub_that_tampers_is_found_out_and_ends_the_link(tmp_path, reader, kind):
    content = os.urandom(4 * OPEN_BYTES)
    reader.alter = Attack(kind, Kind.PAYLOAD)
    with sealed_links(tmp_path, ("a", "b")) as links:
        results = together(lambda rank: outcome(links[rank], content), 2)
        assert isinstance(results[1], SealingError), results[1]
        assert "a sealed message of site 0 (a)" in str(results[1])
        assert "The hub, or who controls it" in str(results[1])
        with pytest.raises(SealingError):
            links[1].send(9, memoryview(b"more"))
        assert f"site 1 (b) is gone: SealingError: {results[1]}"[:900] in str(links[0].await_loss(TIMEOUT))


def test_a_hub_that_passes_one_site_s_message_off_as_another_s_is_found_out(tmp_path, monkeypatch):
    """The relay checks slots; this hub writes another sender into the frames that it sends."""
    from dadplug.hub.server.session import Session

    send = Session.send

    def pretend(session, frame, *soon):
        if session.channel == "training" and session.slot == 2 and frame[2] == Kind.PAYLOAD and len(frame) == 32 + 124:
            frame = frame[:4] + bytes([1 - frame[4]]) + frame[5:]
        send(session, frame, *soon)

    with sealed_links(tmp_path) as links:
        monkeypatch.setattr(Session, "send", pretend)
        results = together(lambda rank: outcome(links[rank], bytes([rank]) * 100), 3)
    assert isinstance(results[2], SealingError), results[2]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_hub_that_tampers_with_the_agreement_is_found_out(tmp_path, reader, number):
    def alter(frame):
        return [flip(frame, 40)] if (frame.head.slot, frame.head.exchange) == (1, AGREEMENT | number) else [frame]

    reader.alter = alter if number < 2 else lambda f: [flip(f, 20)] if f.head.exchange == AGREEMENT | 2 else [f]
    with sealed_hub(tmp_path, ("a", "b")) as hub:
        results = together(lambda rank: hub_kits.attempt(lambda: open_link(hub.kits, "ab"[rank], hub.address)), 2)
    assert isinstance(results[0], SealingError), results[0]
    assert "no key can be agreed on with site 1 (b)" in str(results[0])
    assert isinstance(results[1], SiteError)
    assert not reader.content()  # nothing was sent


def test_a_site_whose_kit_does_not_require_sealing_is_found_out_at_once(tmp_path, reader):
    kits = make_kits(tmp_path / "kits")
    roster = json.loads((kits / "b" / "roster.json").read_bytes())
    (kits / "b" / "roster.json").write_text(json.dumps(roster | {"sealed": False}))
    with running_hub(kits, SITES) as hub:

        def exchange(rank):
            link = open_link(kits, SITES[rank], hub.address)
            return gather(link, SENTINEL, len(SENTINEL), 1)

        results = together(lambda rank: hub_kits.attempt(lambda: exchange(rank)), 3)
    found = ("has a kit that requires sealed messages, and this site's kit does not", "messages that are not sealed")
    assert all(isinstance(each, SiteError) for each in results)
    assert all(any(reason in str(each) for reason in found) for each in results), results  # or the others' reason
    assert all(SENTINEL not in body for head, body in reader.seen if head.slot != 1)


def test_a_revoked_site_is_refused_by_sites_though_the_hub_accepts_it(tmp_path):
    kits = make_kits(tmp_path / "kits")
    revoked = (kits / "hub" / "revoked.pem").read_bytes()
    provision.revoke(kits, "b")
    (kits / "a" / "revoked.pem").write_bytes((kits / "hub" / "revoked.pem").read_bytes())
    (kits / "hub" / "revoked.pem").write_bytes(revoked)  # a hub that does not know, or does not want to
    with running_hub(kits, SITES) as hub:
        results = together(lambda rank: hub_kits.attempt(lambda: open_link(kits, SITES[rank], hub.address)), 3)
    assert "site 1 (b): its certificate has been revoked" in str(results[0])
    assert all(isinstance(each, SiteError) for each in results)


def test_two_runs_share_nothing(tmp_path, reader):
    content = SENTINEL * 100
    with sealed_hub(tmp_path, ("a", "b")) as hub:
        seen = []
        for _ in range(2):
            with linked(hub) as links:
                together(lambda rank: gather(links[rank], content, len(content), 1), 2)
            seen.append([frame for frame in reader.seen if frame.head.kind is Kind.PAYLOAD])
            reader.seen.clear()
        first, second = seen
        assert len(first) == len(second) == 8  # 3 messages of the agreement and one more, of each site
        assert not {frame.body for frame in first} & {frame.body for frame in second}
        # The hub repeats what it has recorded.
        record = {(frame.head.slot, frame.head.exchange): frame for frame in first}
        reader.alter = lambda frame: [record[frame.head.slot, frame.head.exchange]]
        results = together(lambda rank: hub_kits.attempt(lambda: open_link(hub.kits, "ab"[rank], hub.address)), 2)
    assert any(isinstance(each, SealingError) and "was shown other offers" in str(each) for each in results), results
    assert not any(hasattr(each, "send") for each in results)


def test_large_sums_are_formed_by_the_sites_to_the_same_bits(tmp_path, reader):
    addends = [torch.randn(50_000, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    totals = {}
    for sealed in (True, False):

        def add(transport):
            total = addends[transport.rank].clone()
            transport.all_reduce(total).wait()
            return total

        with sealed_links(tmp_path / str(sealed), sealed=sealed) as links:
            made = transports(links)
            totals[sealed] = together(lambda rank: add(made[rank]), 3)  # noqa: B023
        assert any(head.kind is Kind.SUMMAND for head, _ in reader.seen) is not sealed
    assert all(torch.equal(total, totals[True][0]) for total in totals[True] + totals[False])


def test_a_site_that_is_revoked_during_a_run_is_cut_off_by_sites_though_the_hub_keeps_it(tmp_path, caplog):
    with sealed_links(tmp_path) as links:
        folder = links[0].kit.folder
        (folder / "roster.json").write_bytes(b"damaged")
        provision.revoke(folder.parent, "b")
        (folder / "revoked.pem").write_bytes((folder.parent / "authority" / "revoked.pem").read_bytes())
        until(lambda: links[0].closed)
        with pytest.raises(SealingError, match=r"site 1 \(b\): its certificate has been revoked"):
            links[0].check()
        assert "roster.json is not a roster" in caplog.text


# Processes that train over a hub of a third party with sealed messages, from `dadplug.connect(kit=...)` on


MODES = ("dad", "dsgd", "rankdad")  # factors, sums, and compressed factors
PATIENT = np.random.default_rng(0).standard_normal(64).astype(np.float32)
PATIENT_BYTES = PATIENT[8:24].tobytes()


def trains(mode: str) -> tuple[list[torch.Tensor], float]:
    """Train on batches of which every one holds the patient's values; return the parameters and a metric."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 4))

    def loss(step: int) -> torch.Tensor:
        inputs = torch.randn(6, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        inputs[0] = torch.from_numpy(PATIENT)
        return nn.functional.cross_entropy(model(inputs), torch.arange(6) % 4)

    train(model, loss, 4, mode=mode, timeout=200.0)
    metric = torch.from_numpy(PATIENT.copy()) * (rank + 1)
    dist.all_reduce(metric)
    torch.testing.assert_close(metric, torch.from_numpy(PATIENT) * 6)
    assert gather_objects(PATIENT_BYTES) == [PATIENT_BYTES] * 3
    return [parameter.detach().clone() for parameter in model.parameters()], float(metric.sum())


def manage() -> float:
    """Push the patient's values to tables of the parameter manager."""
    rows = torch.from_numpy(PATIENT).repeat(50, 1)
    with ParameterManager(timeout=200) as manager:
        table = manager.table("values", 64, rows=50)
        table.push(torch.arange(50), rows)
        manager.wait_sync(everywhere=True)
        found = table.pull(torch.arange(50))
    torch.testing.assert_close(found, 3 * rows)
    return float(found.sum())


def test_a_hub_of_a_third_party_passes_on_what_it_cannot_read(tmp_path, reader):
    """The same training without sealing shows that the hub would find the sentinel in all kinds of messages."""
    results, found = {}, {}
    for sealed in (True, False):
        kits = make_kits(tmp_path / str(sealed), sealed=sealed)
        with running_hub(kits, SITES), support.Sites(3, kits=[kits / name for name in SITES]) as group:
            results[sealed] = [group.run(trains, mode) for mode in MODES] + [group.run(manage)]
        found[sealed] = {frame.head.kind for frame in reader.seen if PATIENT_BYTES in frame.body}
        assert any(frame.head.kind is Kind.SUMMAND for frame in reader.seen) is not sealed
        assert len(reader.content()) > 1_000_000
        reader.seen.clear()
    assert found[True] == set()
    assert found[False] == {Kind.PAYLOAD, Kind.MESSAGE}
    for of_sealed, of_plain in zip(results[True][:-1], results[False][:-1], strict=True):
        for (parameters, metric), (others, other) in zip(of_sealed, of_plain, strict=True):
            assert all(map(torch.equal, parameters, others))
            assert metric == other
    assert results[True][-1] == results[False][-1]
