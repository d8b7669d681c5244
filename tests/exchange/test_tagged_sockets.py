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
from dadplug.exchange.framing import FramedConnection, PeerSockets, bytes_of, wait_together

LARGE = 9 << 20  # bytes, more than any kernel buffers


@pytest.fixture(params=[socket.AF_UNIX, socket.AF_INET], ids=["unix", "tcp"])
def ends(request) -> Iterator[tuple[PeerSockets, PeerSockets]]:
    if request.param == socket.AF_UNIX:
        first, second = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            first = socket.create_connection(listener.getsockname())
            second, _ = listener.accept()
    pair = (
        PeerSockets({1: first}, 60.0, {1: "0 and 1 differ"}, in_order=False),
        PeerSockets({0: second}, 60.0, {0: "1 and 0 differ"}, in_order=False),
    )
    yield pair
    for end in pair:
        end.close()


def content(size: int, seed: int) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def start(end: PeerSockets, tensor: torch.Tensor, rank: int, tag: int, sends: bool) -> framing.Message:
    return end.start(bytes_of(tensor), rank, tag, sends)


def test_messages_arrive_by_tag_in_any_order(ends):
    first, second = ends
    sent = {tag: content(size, tag) for tag, size in enumerate((1, 100_000, 3, 7, 70_000))}
    works = [start(first, each, 1, tag, True) for tag, each in sent.items()]
    for tag in (4, 0, 3, 1, 2):
        room = torch.zeros_like(sent[tag])
        assert start(second, room, 0, tag, False).wait()
        assert torch.equal(room, sent[tag])
    assert all(work.wait() for work in works)


def test_messages_of_one_tag_keep_their_order(ends):
    first, second = ends
    for expected_before in (True, False):
        rooms = [torch.zeros(5, dtype=torch.uint8) for _ in range(3)]
        works = [start(second, room, 0, 8, False) for room in rooms[: 3 * expected_before]]
        for number in range(3):
            start(first, torch.full((5,), number + 1, dtype=torch.uint8), 1, 8, True)
        works = works or [start(second, room, 0, 8, False) for room in rooms]
        for work in reversed(works):
            work.wait()
        assert [int(room[0]) for room in rooms] == [1, 2, 3]


def test_large_messages_cross_while_both_ends_wait_for_others(ends):
    """Both send more than the kernel takes, and expect the large message last, one of them while it arrives."""
    first, second = ends

    def exchange(end: PeerSockets, peer: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        sends = [start(end, content(LARGE, seed), peer, 1, True), start(end, content(9, seed + 1), peer, 2, True)]
        small, large = torch.zeros(9, dtype=torch.uint8), torch.zeros(LARGE, dtype=torch.uint8)
        start(end, small, peer, 2, False).wait()
        start(end, large, peer, 1, False).wait()
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
    end, sent = PeerSockets({0: other}, 60.0, {0: ""}, in_order=False), content(5000, 3)
    message = framing._HEADER.pack(framing._MAGIC, 1, 5000) + bytes(sent.tolist())
    raw.sendall(message[:3000])
    with pytest.raises(RuntimeError, match="timed out"):  # reads what has come
        start(end, torch.zeros(1, dtype=torch.uint8), 0, 2, False).wait(timedelta(milliseconds=1))
    room = torch.zeros_like(sent)
    work = start(end, room, 0, 1, False)
    if closes:
        raw.close()
        with pytest.raises(RuntimeError, match="closed by the other process"):
            work.wait()
        with pytest.raises(RuntimeError, match="closed by the other process"):
            start(end, room, 0, 1, False).wait()
    else:
        raw.sendall(message[3000:])
        work.wait()
        assert torch.equal(room, sent)
    end.close()
    raw.close()


def test_several_threads_wait_on_one_connection(ends):
    first, second = ends
    rooms = [torch.zeros(20_000, dtype=torch.uint8) for _ in range(12)]
    works = [start(second, room, 0, tag, False) for tag, room in enumerate(rooms)]
    with ThreadPoolExecutor(12) as pool:
        waits = [pool.submit(work.wait) for work in works]
        for tag in reversed(range(12)):
            start(first, content(20_000, tag), 1, tag, True)
        assert all(wait.result() for wait in waits)
    assert all(torch.equal(room, content(20_000, tag)) for tag, room in enumerate(rooms))


@pytest.mark.parametrize("early", [True, False])
def test_another_size_than_expected_is_reported(ends, early):
    first, second = ends
    if early:
        start(first, content(9, 0), 1, 1, True)
        start(first, content(2, 0), 1, 2, True)
        start(second, torch.zeros(2, dtype=torch.uint8), 0, 2, False).wait()
    work = start(second, torch.zeros(8, dtype=torch.uint8), 0, 1, False)
    if not early:
        start(first, content(9, 0), 1, 1, True)
    with pytest.raises(dadplug.MismatchError, match="1 and 0 differ"):
        work.wait()


def test_a_closed_connection_ends_all_waits(ends):
    first, second = ends
    late = content(6, 1)
    start(first, late, 1, 1, True)
    work = start(second, torch.zeros(4, dtype=torch.uint8), 0, 2, False)
    first.close()
    with pytest.raises(RuntimeError, match=r"closed by the other process|reset by peer"):
        work.wait()
    room = torch.zeros_like(late)
    assert start(second, room, 0, 1, False).wait()  # it came before the end
    assert torch.equal(room, late)
    for sends in (True, False):
        with pytest.raises(RuntimeError):
            start(second, torch.zeros(LARGE, dtype=torch.uint8), 0, 3, sends).wait()


def test_silence_is_a_timeout(ends):
    first, second = ends
    with pytest.raises(RuntimeError, match="timed out"):
        start(second, torch.zeros(4, dtype=torch.uint8), 0, 2, False).wait(timedelta(milliseconds=20))
    with pytest.raises(RuntimeError, match="timed out"):  # nobody reads it
        start(first, torch.zeros(LARGE, dtype=torch.uint8), 1, 2, True).wait(timedelta(milliseconds=20))


def test_closing_ends_the_waits_of_other_threads(ends):
    first, _ = ends
    works = [start(first, torch.zeros(4, dtype=torch.uint8), 1, tag, False) for tag in range(3)]
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
    seconds, polls = [0.0], []
    own, other = socket.socketpair()
    connection = FramedConnection(own, 6.0, "mismatch", False, lambda: None)

    class Poll:
        def register(self, *_: object) -> None:
            pass

        def poll(self, milliseconds: float) -> None:
            polls.append(milliseconds)
            if len(polls) == 1:
                seconds[0] = 1.0
                assert connection.send(memoryview(b"four"), 2).done
                seconds[0] = 6.01
            else:
                seconds[0] = 7.01

    monkeypatch.setattr(framing, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    monkeypatch.setattr(framing.select, "poll", Poll)
    with own, other, pytest.raises(RuntimeError, match="timed out"):
        connection.expect(memoryview(bytearray(4)), 1).wait()
    assert polls == pytest.approx([6001.0, 991.0])


@pytest.fixture
def connection() -> Iterator[tuple[FramedConnection, socket.socket]]:
    """A connection whose messages arrive in order, and its other end."""
    own, other = socket.socketpair()
    with own, other:
        yield FramedConnection(own, 60.0, "mismatch", True, lambda: None), other


def test_another_thread_may_end_the_last_message(connection):
    own, other = connection
    message = own.expect(memoryview(bytearray(4)), 1)
    assert own.lead()  # as the helper thread does
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(wait_together, [message], 60.0)
        other.sendall(framing._HEADER.pack(framing._MAGIC, 1, 4) + b"four")
        while not message.done:
            own.read()
        assert waits.result(60) is None
    assert bytes(message.body) == b"four"


def test_a_message_that_fails_ends_the_wait_for_those_of_other_connections(connection):
    own, other = connection
    silent, far = socket.socketpair()
    with silent, far:
        connections = [FramedConnection(silent, 60.0, "mismatch", True, lambda: None), own]
        messages = [each.expect(memoryview(bytearray(4)), 1) for each in connections]
        other.close()
        assert wait_together(messages, 60.0) is messages[1]


@pytest.mark.parametrize("header", [(1, 5), (2, 4)], ids=["size", "tag"])
def test_another_message_than_the_expected_one_is_told(connection, header):
    own, other = connection
    message = own.expect(memoryview(bytearray(4)), 1)
    other.sendall(framing._HEADER.pack(framing._MAGIC, *header) + b"four")
    with pytest.raises(dadplug.MismatchError, match="mismatch"):
        message.wait()
