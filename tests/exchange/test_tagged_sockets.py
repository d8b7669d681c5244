"""Tagged messages between two ends of a connection: any order, any size, several threads, and failures."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

import dadplug
from dadplug.exchange import framing
from dadplug.exchange.framing import TaggedConnection, TaggedMessage, TaggedSockets

LARGE = 9 << 20  # bytes, more than any kernel buffers


@pytest.fixture(params=[socket.AF_UNIX, socket.AF_INET], ids=["unix", "tcp"])
def ends(request) -> Iterator[tuple[TaggedSockets, TaggedSockets]]:
    if request.param == socket.AF_UNIX:
        first, second = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            first = socket.create_connection(listener.getsockname())
            second, _ = listener.accept()
    pair = (
        TaggedSockets({1: first}, 60.0, {1: "0 and 1 differ"}),
        TaggedSockets({0: second}, 60.0, {0: "1 and 0 differ"}),
    )
    yield pair
    for end in pair:
        end.close()


def content(size: int, seed: int) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_messages_arrive_by_tag_in_any_order(ends):
    first, second = ends
    sent = {tag: content(size, tag) for tag, size in enumerate((1, 100_000, 3, 7, 70_000))}
    works = [first.start(each, 1, tag, True) for tag, each in sent.items()]
    for tag in (4, 0, 3, 1, 2):
        room = torch.zeros_like(sent[tag])
        assert second.start(room, 0, tag, False).wait()
        assert torch.equal(room, sent[tag])
    assert all(work.wait() for work in works)


def test_messages_of_one_tag_keep_their_order(ends):
    first, second = ends
    for expected_before in (True, False):
        rooms = [torch.zeros(5, dtype=torch.uint8) for _ in range(3)]
        works = [second.start(room, 0, 8, False) for room in rooms[: 3 * expected_before]]
        for number in range(3):
            first.start(torch.full((5,), number + 1, dtype=torch.uint8), 1, 8, True)
        works = works or [second.start(room, 0, 8, False) for room in rooms]
        for work in reversed(works):
            work.wait()
        assert [int(room[0]) for room in rooms] == [1, 2, 3]


def test_large_messages_cross_while_both_ends_wait_for_others(ends):
    """Both send more than the kernel takes, and expect the large message last, one of them while it arrives."""
    first, second = ends

    def exchange(end: TaggedSockets, peer: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        sends = [end.start(content(LARGE, seed), peer, 1, True), end.start(content(9, seed + 1), peer, 2, True)]
        small, large = torch.zeros(9, dtype=torch.uint8), torch.zeros(LARGE, dtype=torch.uint8)
        end.start(small, peer, 2, False).wait()
        end.start(large, peer, 1, False).wait()
        for send in sends:
            send.wait()
        return large, small

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.submit(exchange, first, 1, 10), pool.submit(exchange, second, 0, 20)
        for received, seed in ((one.result(), 20), (other.result(), 10)):
            assert torch.equal(received[0], content(LARGE, seed))
            assert torch.equal(received[1], content(9, seed + 1))


@pytest.mark.parametrize("closes", [False, True])
def test_a_message_that_is_expected_while_it_arrives(closes):
    raw, other = socket.socketpair()
    end, sent = TaggedSockets({0: other}, 60.0, {0: ""}), content(5000, 3)
    message = framing._HEADER.pack(framing._TAGGED, 1, 5000) + bytes(sent.tolist())
    raw.sendall(message[:3000])
    with pytest.raises(RuntimeError, match="timed out"):  # reads what has come
        end.start(torch.zeros(1, dtype=torch.uint8), 0, 2, False).wait(timedelta(milliseconds=1))
    room = torch.zeros_like(sent)
    work = end.start(room, 0, 1, False)
    if closes:
        raw.close()
        with pytest.raises(RuntimeError, match="closed by the other process"):
            work.wait()
        with pytest.raises(RuntimeError, match="closed by the other process"):
            end.start(room, 0, 1, False).wait()
    else:
        raw.sendall(message[3000:])
        work.wait()
        assert torch.equal(room, sent)
    end.close()
    raw.close()


def test_several_threads_wait_on_one_connection(ends):
    first, second = ends
    rooms = [torch.zeros(20_000, dtype=torch.uint8) for _ in range(12)]
    works = [second.start(room, 0, tag, False) for tag, room in enumerate(rooms)]
    with ThreadPoolExecutor(12) as pool:
        waits = [pool.submit(work.wait) for work in works]
        for tag in reversed(range(12)):
            first.start(content(20_000, tag), 1, tag, True)
        assert all(wait.result() for wait in waits)
    assert all(torch.equal(room, content(20_000, tag)) for tag, room in enumerate(rooms))


@pytest.mark.parametrize("early", [True, False])
def test_another_size_than_expected_is_reported(ends, early):
    first, second = ends
    if early:
        first.start(content(9, 0), 1, 1, True)
        first.start(content(2, 0), 1, 2, True)
        second.start(torch.zeros(2, dtype=torch.uint8), 0, 2, False).wait()
    work = second.start(torch.zeros(8, dtype=torch.uint8), 0, 1, False)
    if not early:
        first.start(content(9, 0), 1, 1, True)
    with pytest.raises(dadplug.MismatchError, match="1 and 0 differ"):
        work.wait()


def test_a_closed_connection_ends_all_waits(ends):
    first, second = ends
    late = content(6, 1)
    first.start(late, 1, 1, True)
    work = second.start(torch.zeros(4, dtype=torch.uint8), 0, 2, False)
    first.close()
    with pytest.raises(RuntimeError, match=r"closed by the other process|reset by peer"):
        work.wait()
    room = torch.zeros_like(late)
    assert second.start(room, 0, 1, False).wait()  # it came before the end
    assert torch.equal(room, late)
    for sends in (True, False):
        with pytest.raises(RuntimeError):
            second.start(torch.zeros(LARGE, dtype=torch.uint8), 0, 3, sends).wait()


def test_silence_is_a_timeout(ends):
    first, second = ends
    with pytest.raises(RuntimeError, match="timed out"):
        second.start(torch.zeros(4, dtype=torch.uint8), 0, 2, False).wait(timedelta(milliseconds=20))
    with pytest.raises(RuntimeError, match="timed out"):  # nobody reads it
        first.start(torch.zeros(LARGE, dtype=torch.uint8), 1, 2, True).wait(timedelta(milliseconds=20))


def test_closing_ends_the_waits_of_other_threads(ends):
    first, _ = ends
    works = [first.start(torch.zeros(4, dtype=torch.uint8), 1, tag, False) for tag in range(3)]
    started = [threading.Event() for _ in works]

    def wait(number: int) -> str:
        started[number].set()
        try:
            works[number].wait()
        except RuntimeError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as pool:
        ended = [pool.submit(wait, number) for number in range(3)]
        for event in started:
            assert event.wait(60)
        first.shut_down()
        assert all("closed by this process" in each.result() for each in ended)
    first.close()


def test_a_wait_ends_one_timeout_after_the_last_byte(monkeypatch):
    """Bytes that the kernel accepts for a stopped process do not start the timeout again when it is over."""
    seconds = [0.0]
    monkeypatch.setattr(framing, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    own, other = socket.socketpair()
    with own, other:
        connection = TaggedConnection(own, 6.0, "mismatch", lambda: None)
        deadlines = []

        def read_until(work: TaggedMessage, deadline: float) -> None:
            deadlines.append(deadline)
            if len(deadlines) == 1:
                seconds[0] = 1.0
                assert connection.send(memoryview(b"four"), 2).done
            seconds[0] = deadline + 0.01

        monkeypatch.setattr(connection, "_read_until", read_until)
        with pytest.raises(RuntimeError, match="timed out"):
            connection.expect(memoryview(bytearray(4)), 1).wait()
    assert deadlines == [6.0, 7.0]
