"""Sealed messages: sizes, pieces, nonces, and what a hub cannot do with them without being found out."""

from __future__ import annotations

import multiprocessing
import os

import hub_kits
import pytest

from dadplug.errors import SealingError, SiteError
from dadplug.hub import sealing
from dadplug.hub.frames import PIECE_BYTES, FrameReader, Head, Kind, frames
from dadplug.hub.sealing import OPEN_BYTES, OVERHEAD, Keys, sealed_size

NAMES = {0: "a", 1: "b", 2: "c"}
SIZES = [0, 1, OPEN_BYTES - 1, OPEN_BYTES, OPEN_BYTES + 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 1 << 20]


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


@pytest.mark.parametrize("size", SIZES)
def test_a_message_of_any_size_arrives_in_pieces_that_fit_frames(size, sealer, opener):
    message = os.urandom(size)
    pieces = list(sealer.seal(7, 3, memoryview(message)))
    assert all(OVERHEAD < len(piece) <= PIECE_BYTES for piece in pieces)
    assert sum(map(len, pieces)) == sealed_size(size)
    assert opener.open(7, 3, size, pieces) == message
    # Frames of 64 kB are exactly the pieces, so that a receiver can open each frame as it arrives.
    wire = b"".join(pieces)
    received = []
    reader = FrameReader(lambda head: None)
    for head, body in frames(Head(Kind.PAYLOAD, 0, exchange=7), memoryview(wire)):
        received += [frame.body for frame in reader.feed(head + bytes(body))]
    assert received == pieces


def test_pieces_can_be_opened_in_any_order(sealer, opener):
    message = os.urandom(3 * OPEN_BYTES + 5)
    pieces = list(sealer.seal(1, 0, message))
    opened = bytearray(len(message))
    for index in (2, 0, 3, 1):
        offset = index * OPEN_BYTES
        content = opener.open_piece(1, 0, len(message), offset, pieces[index])
        opened[offset : offset + len(content)] = content
    assert bytes(opened) == message


def test_equal_messages_do_not_look_equal(sealer):
    message = bytes(2 * OPEN_BYTES)
    seen = [piece[:-16][8:] for occurrence in range(3) for piece in sealer.seal(1, occurrence, message)]
    seen += [piece[:-16][8:] for piece in sealer.seal(1, 0, message)]  # a place that is used again
    assert len(set(seen)) == 8
    assert len({piece[:100] for piece in seen}) == 8


@pytest.mark.parametrize("size", [1, 100, OPEN_BYTES + 1])
def test_a_change_of_any_byte_is_found_out(size, sealer, opener):
    message = os.urandom(size)
    pieces = list(sealer.seal(5, 2, message))
    whole = b"".join(pieces)
    for position in {*range(0, len(whole), max(1, len(whole) // 150)), *range(40), len(whole) - 1}:
        if position >= len(whole):
            continue
        altered = bytearray(whole)
        altered[position] ^= 1 << (position % 8)
        parts = [bytes(altered[i : i + PIECE_BYTES]) for i in range(0, len(altered), PIECE_BYTES)]
        with pytest.raises(SealingError, match=r"of a \(exchange 5\)"):
            opener.open(5, 2, size, parts)
    assert opener.open(5, 2, size, pieces) == message  # a forgery does not spoil what follows


def test_a_piece_is_good_for_its_place_only(sealer, opener):
    size = 3 * OPEN_BYTES
    first = list(sealer.seal(5, 0, b"1" * size))
    second = list(sealer.seal(5, 1, b"2" * size))
    other = list(sealer.seal(6, 0, b"3" * size))
    longer = list(sealer.seal(5, 0, b"4" * (size + OPEN_BYTES)))
    attacks = {
        "reordered pieces": [first[1], first[0], first[2]],
        "a repeated piece": [first[0], first[0], first[2]],
        "a piece left out": [first[0], first[2]],
        "the end left out": first[:2],
        "a piece too many": [*first, first[2]],
        "a piece of the message after": [first[0], second[1], first[2]],
        "the message after": second,
        "another exchange": other,
        "a longer message": longer[:3],
        "an empty piece": [first[0], b"", *first[1:]],
        "a short piece": [first[0][:-1], *first[1:]],
        "a long piece": [first[0] + b"0", *first[1:]],
        "two pieces exchanged by halves": [first[0][:100] + first[1][100:], *first[1:]],
    }
    for attack, pieces in attacks.items():
        error = hub_kits.attempt(lambda: opener.open(5, 0, size, pieces))  # noqa: B023 (called at once)
        assert isinstance(error, SealingError), attack
    assert opener.open(5, 0, size, first) == b"1" * size


def test_a_message_counts_as_its_sender_s_only(sealer):
    message = b"0" * 100
    (piece,) = sealer.seal(1, 0, message)
    (of_c,) = make_keys(2).sealer().seal(1, 0, message)
    for slot, found in ((2, piece), (0, of_c)):
        with pytest.raises(SealingError, match=NAMES[slot]):
            make_keys(1).opener(slot).open(1, 0, len(message), [found])
    assert make_keys(1).opener(2).open(1, 0, len(message), [of_c]) == message


def test_a_message_of_another_run_is_found_out(opener):
    message = b"0" * 100
    with pytest.raises(SealingError, match="altered, repeated, exchanged or left out"):
        opener.open(1, 0, 100, make_keys(0, b"another run's secret of 32 bytes").sealer().seal(1, 0, message))


def test_a_message_to_one_site_is_not_readable_to_others_nor_sent_back():
    pieces = list(make_keys(0).sealer(to=1).seal(1, 0, b"for b"))
    assert make_keys(1).opener(0, pair=True).open(1, 0, 5, pieces) == b"for b"
    for opener in (make_keys(2).opener(0, pair=True), make_keys(1).opener(0), make_keys(0).opener(1, pair=True)):
        with pytest.raises(SealingError):
            opener.open(1, 0, 5, pieces)


def test_no_number_is_used_twice_and_keys_change(sealer, opener, monkeypatch):
    monkeypatch.setattr(sealing, "_PIECES_BITS", 2)
    message = os.urandom(5 * OPEN_BYTES)
    pieces = [piece for occurrence in range(4) for piece in sealer.seal(1, occurrence, message)]
    assert [int.from_bytes(piece[:8], "big") for piece in pieces] == list(range(20))
    for occurrence in (3, 0, 2, 1):  # over changes of the key, forth and back
        assert opener.open(1, occurrence, len(message), pieces[5 * occurrence : 5 * occurrence + 5]) == message
    secret = sealing.derive(make_keys(0).group, "sender", 0)
    keys = {sealing.derive(secret, "pieces", index) for index in range(5)}
    assert len(keys) == 5
    # The fifth piece is the first one under the second key, and its number counts on.
    cipher = sealing.AESGCM(sealing.derive(secret, "pieces", 1))
    place = sealing.Place(0, 1, 0, len(message))
    assert cipher.decrypt((4).to_bytes(12, "big"), pieces[4][8:], place.pack(4 * OPEN_BYTES)) == message[-OPEN_BYTES:]


def test_a_second_sealer_of_the_same_keys_is_refused():
    keys = make_keys(0)
    keys.sealer()
    keys.sealer(to=1)
    for to in (None, 1):
        with pytest.raises(RuntimeError, match="repeat its nonces"):
            keys.sealer(to)
    keys.sealer(to=2)


def _seal_in_child(sealer, queue):
    try:
        list(sealer.seal(1, 0, b"x"))
    except RuntimeError as error:
        queue.put(str(error))


def test_a_forked_process_cannot_seal(sealer):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_seal_in_child, args=(sealer, queue))
    child.start()
    child.join(20)
    assert "a forked process cannot seal" in queue.get()


def test_secrets_are_not_printed():
    keys = make_keys(0, b"SECRETSECRETSECRETSECRETSECRETSE")
    assert "SECRET" not in repr(keys)
    assert issubclass(SealingError, SiteError)
