"""Sealed messages: sizes, pieces, nonces, and what a hub cannot do with them without being found out."""

from __future__ import annotations

import multiprocessing
import os

import hub_kits
import pytest

from dadplug.errors import SealingError, SiteError
from dadplug.hub import sealing
from dadplug.hub.frames import SHORT_PIECE_BYTES, FrameReader, Head, Kind
from dadplug.hub.sealing import OVERHEAD, Keys, opened_offset, sealed_size

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
    reader = FrameReader(lambda head: None)
    return [frame for each in sealer.frames(head, memoryview(content)) for frame in reader.feed(each)]


def opened(opener, frames, size):
    """Return the message that frames hold."""
    content = bytearray(size)
    for head, body in frames:
        piece = opener.open(head, body)
        offset = opened_offset(head.offset)
        content[offset : offset + len(piece)] = piece
    return bytes(content)


def refusal(opener, frames, size=0):
    """Return the error that frames lead to."""
    return hub_kits.attempt(lambda: opened(opener, frames, size))


@pytest.mark.parametrize("size", SIZES)
def test_a_message_of_any_size_arrives_in_pieces_that_fill_frames(size, sealer, opener):
    message = os.urandom(size)
    frames = seal(sealer, message)
    assert all(OVERHEAD < len(frame.body) <= SHORT_PIECE_BYTES for frame in frames)
    assert all(len(frame.body) == SHORT_PIECE_BYTES for frame in frames[:-1])
    assert sum(len(frame.body) for frame in frames) == sealed_size(size)
    assert [frame.head.offset for frame in frames] == list(range(0, sealed_size(size), SHORT_PIECE_BYTES))
    assert opened(opener, frames, size) == message


def test_messages_of_several_exchanges_can_follow_each_other(sealer, opener):
    messages = [os.urandom(size) for size in SIZES]
    heads = [HEAD._replace(exchange=number % 3, step=number) for number in range(len(SIZES))]
    for message, head in zip(messages, heads, strict=True):
        assert opened(opener, seal(sealer, message, head), len(message)) == message


def test_equal_messages_do_not_look_equal(sealer):
    message = bytes(2 * CONTENT_BYTES)
    seen = [frame.body[8:] for _ in range(3) for frame in seal(sealer, message)]
    assert len({body[:16] for body in seen}) == 6


def test_what_is_sealed_does_not_hold_the_content(sealer):
    sentinel = b"an activation of a patient"
    assert all(sentinel not in frame.body for frame in seal(sealer, sentinel * 10000))


@pytest.mark.parametrize("size", [1, 100, CONTENT_BYTES])
def test_a_change_of_any_byte_is_found_out(size, sealer, opener):
    (frame,) = seal(sealer, os.urandom(size))
    length = len(frame.body)
    for position in {*range(0, length, max(1, length // 150)), *range(min(40, length)), length - 1}:
        altered = bytearray(frame.body)
        altered[position] ^= 1 << (position % 8)
        error = refusal(opener, [(frame.head, bytes(altered))], size)
        assert isinstance(error, SealingError), position
        assert "site 0 (a)" in str(error)
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
        assert isinstance(refusal(opener, [(frame.head._replace(**change), frame.body)], 7), SealingError), change
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
        error = refusal(make_keys(1).opener(0), frames, size)
        assert isinstance(error, SealingError), attack
        assert "altered, repeated, exchanged or left out" in str(error)
    assert opened(make_keys(1).opener(0), [*first, *second], size) == b"2" * size


def test_a_message_counts_as_its_sender_s_only(sealer):
    (frame,) = seal(sealer, b"content")
    (of_c,) = seal(make_keys(2).sealer(), b"content", HEAD._replace(slot=2))
    for slot, (head, body) in ((2, frame), (0, of_c)):
        error = refusal(make_keys(1).opener(slot), [(head._replace(slot=slot), body)], 7)
        assert isinstance(error, SealingError)
        assert NAMES[slot] in str(error)
    assert make_keys(1).opener(2).open(*of_c) == b"content"


def test_a_message_of_another_run_is_found_out(opener):
    frames = seal(make_keys(0, b"another run's secret of 32 bytes").sealer(), b"content")
    assert isinstance(refusal(opener, frames, 7), SealingError)


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
        assert isinstance(refusal(other, [(sent._replace(slot=0), first)], 5), SealingError)
    reply = answer.frame(Head(Kind.MESSAGE, 0), b"for a")
    assert back.open(Head.unpack(reply[:32])._replace(slot=1), reply[32:]) == b"for a"


def test_no_number_is_used_twice_and_keys_change(sealer, opener, monkeypatch):
    monkeypatch.setattr(sealing, "_PIECES_BITS", 2)
    message = os.urandom(5 * CONTENT_BYTES)
    frames = [frame for _ in range(4) for frame in seal(sealer, message)]
    assert [int.from_bytes(frame.body[:8], "big") for frame in frames] == list(range(20))
    assert opened(opener, frames, len(message)) == message
    secret = sealing.derive(make_keys(0).group, "sender", 0)
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
