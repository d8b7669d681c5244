"""Inbox: pieces of messages find their buffers, in whatever order they and their receivers come."""

from __future__ import annotations

import random

import pytest

from dadplug.errors import MismatchError
from dadplug.hub.site.rounds import Inbox
from dadplug.hub.wire.frames import PIECE_BYTES, Head, Kind

KEY = Kind.PAYLOAD, 1, 7


def deliver(inbox: Inbox, content: bytes, offset: int = 0, key: tuple[Kind, int, int] = KEY) -> None:
    head = Head(key[0], key[1], 1, key[2], offset, len(content))
    room = inbox.room(head)
    room[:] = content
    inbox.complete(head, room)


def cut(content: bytes) -> list[tuple[int, bytes]]:
    return [(start, content[start : start + 16]) for start in range(0, len(content), 16)]


def test_messages_go_to_buffers_in_the_order_in_which_both_come():
    chance = random.Random(4)
    for _ in range(200):
        inbox = Inbox(["a", "b", "c"], 0)
        sizes = {
            (Kind.PAYLOAD, slot, number): [chance.randrange(1, 40) for _ in range(4)]
            for slot in (1, 2)
            for number in (3, 4)
        }
        sizes[Kind.SUM, 0, 5] = [chance.randrange(1, 40) for _ in range(4)]
        contents = {key: [chance.randbytes(size) for size in each] for key, each in sizes.items()}
        pieces = {key: [piece for content in each for piece in cut(content)] for key, each in contents.items()}
        wanted = {key: list(each) for key, each in sizes.items()}
        posted = {key: [] for key in sizes}
        while any(pieces.values()) or any(wanted.values()):
            key = chance.choice(list(sizes))
            if chance.random() < 0.5 and wanted[key]:
                posted[key].append(inbox.expect(key, memoryview(bytearray(wanted[key].pop(0)))))
            elif pieces[key]:
                offset, content = pieces[key].pop(0)
                deliver(inbox, content, offset, key)
        for key, messages in posted.items():
            assert all(message.done for message in messages)
            assert [bytes(message.buffer) for message in messages] == contents[key]
        assert inbox.expected_bytes == inbox.early_bytes == 0


def test_a_buffer_that_is_posted_while_a_frame_arrives_gets_it():
    inbox = Inbox(["a", "b"], 0)
    head = Head(Kind.PAYLOAD, 1, 1, 7, 0, 4)
    room = inbox.room(head)
    message = inbox.expect(KEY, memoryview(bytearray(4)))
    room[:] = b"1234"
    inbox.complete(head, room)
    assert message.done
    assert bytes(message.buffer) == b"1234"


def test_a_frame_that_was_lost_before_its_end_counts_once():
    inbox = Inbox(["a", "b"], 0)
    message = inbox.expect(KEY, memoryview(bytearray(4)))
    inbox.room(Head(Kind.PAYLOAD, 1, 1, 7, 0, 4))[:2] = b"12"  # then the connection was lost
    assert message.received == 0
    deliver(inbox, b"1234")
    assert bytes(message.buffer) == b"1234"


@pytest.mark.parametrize(("offset", "size"), [(0, 5), (2, 2), (0, 9)])
@pytest.mark.parametrize("early", [False, True])
def test_a_message_of_another_size_is_an_error_that_names_its_sender(offset, size, early):
    inbox = Inbox(["a", "b"], 0)
    steps = [lambda: inbox.expect(KEY, memoryview(bytearray(4))), lambda: deliver(inbox, bytes(size), offset)]
    first, second = reversed(steps) if early else steps
    first()
    with pytest.raises(MismatchError, match=r"site 1 \(b\) sends site 0 \(a\) another message"):
        second()


def test_early_messages_take_bounded_memory():
    inbox = Inbox(["a", "b"], 0, limit=10 * PIECE_BYTES)
    for number in range(10):
        deliver(inbox, bytes(PIECE_BYTES), 0, (Kind.PAYLOAD, 1, number))
    assert inbox.early_bytes == 10 * PIECE_BYTES
    with pytest.raises(MismatchError, match=r"most recently from site 1 \(b\)"):
        inbox.room(Head(Kind.PAYLOAD, 1, 1, 11, 0, 1))
    inbox.expect((Kind.PAYLOAD, 1, 3), memoryview(bytearray(PIECE_BYTES)))
    deliver(inbox, bytes(PIECE_BYTES))
