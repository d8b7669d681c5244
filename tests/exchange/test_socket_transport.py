"""The sites' own connections: whole messages in order, whatever their size, and errors that name a site."""

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import support
import torch
import torch.distributed as dist
from support import refuses

import dadplug
from dadplug.exchange import Traffic, framing, handshake, open_transport
from dadplug.exchange.framing import FramedConnection, PeerSockets, bytes_of, wait_together
from dadplug.exchange.summed_buckets import GatheredBucket, summed_bucket
from dadplug.exchange.wire import WireFormat

SIZES = (1, 0, 100_000, 7, 3_000_000, 5)


def transport(timeout: float = 30.0):
    return open_transport(None, Traffic(), torch.device("cpu"), timeout)


def numbers(size: int, step: int, rank: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32) + 1000 * step + rank


def exchanges(streams: bool, slow: int) -> bool:
    """All payloads of a step leave before any is waited for, some larger than the kernel's buffers."""
    os.environ["DADPLUG_STREAMS"] = str(int(streams))
    meeting = transport()
    ranks = range(meeting.world_size)
    gathers = [meeting.gather([size + 3 * rank * (size > 0) for rank in ranks], torch.float32) for size in SIZES]
    uneven = meeting.gather([5 * (rank == 0) for rank in ranks], torch.bfloat16)  # only site 0 has something to say
    for step in range(3):
        for gather in gathers:
            gather.post()
            gather.payload.copy_(numbers(len(gather.payload), step, meeting.rank))
            gather.launch()
        uneven.payload.fill_(step)
        uneven.launch()
        if meeting.rank == slow:
            time.sleep(0.3)
        for size, gather in zip(SIZES, gathers, strict=True):
            for rank, payload in enumerate(gather.wait()):
                assert payload.equal(numbers(size + 3 * rank * (size > 0), step, rank)), (size, step, rank)
            assert gather.wait()[0].data_ptr() == gather.wait()[0].data_ptr()  # a second time changes nothing
        assert uneven.wait()[0].eq(step).all()
    peers = meeting.world_size - 1
    own = sum(4 * (size + 3 * meeting.rank * (size > 0)) for size in SIZES) + 10 * (meeting.rank == 0)
    assert meeting.traffic.total_bytes_sent == 3 * peers * own
    warm_up = meeting._last_payload.number - 3 * (len(SIZES) + 1)
    assert warm_up in ((1, 2) if streams else (0,))  # one where the machine is slow
    by_sockets = meeting._sockets is not None
    meeting.close()
    return by_sockets


@pytest.mark.parametrize("world_size", [2, 4])
def test_messages_of_any_size_come_whole_and_in_order(sites, world_size):
    assert all(sites(world_size).run(exchanges, True, 1))
    assert not any(sites(world_size).run(exchanges, False, 0))


@pytest.mark.parametrize("streams", ["0", "1"])
@support.at_sites(4)
def test_relayed_payloads_are_whole_and_no_site_sends_much_more_than_another(streams: str) -> None:
    """Two sites have much to say, one a little and one nothing; other exchanges leave before their second messages."""
    os.environ["DADPLUG_STREAMS"] = streams
    meeting = transport()
    sizes = [40_000, 3, 0, 20_000]
    relayed = meeting.relayed_gather(sizes, torch.float32)
    between = meeting.gather([5] * 4, torch.float32)
    before = meeting.traffic.total_bytes_sent
    for step in range(3):
        for gather in (relayed, between):
            gather.payload.copy_(numbers(len(gather.payload), step, meeting.rank))
            gather.launch()
        for gather, lengths in ((relayed, sizes), (between, [5] * 4)):
            gather.wait()  # again, it changes nothing
            for rank, (payload, size) in enumerate(zip(gather.wait(), lengths, strict=True)):
                assert torch.equal(payload, numbers(size, step, rank)), (step, rank)
    sent = (meeting.traffic.total_bytes_sent - before) / 3 / 4 - 15
    others = sum(sizes) - sizes[meeting.rank]
    assert sent == pytest.approx(1.5 * sizes[meeting.rank] + 0.5 * others, abs=20)  # directly: 3 times its own
    meeting.close()


@support.at_sites(2)
def test_all_sites_go_by_gloo_where_one_cannot_do_otherwise() -> None:
    os.environ["DADPLUG_STREAMS"] = str(dist.get_rank())  # site 0 does not want to
    meeting = transport()
    gather = meeting.gather([2] * meeting.world_size, torch.float64)
    gather.payload.fill_(meeting.rank)
    gather.launch()
    assert [float(payload.sum()) for payload in gather.wait()] == [2.0 * rank for rank in range(meeting.world_size)]
    meeting.close()
    assert meeting._sockets is None


@pytest.mark.parametrize("words", [[b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(64)], [b"x"] * 12], ids=["nonsense", "slow"])
@support.at_sites(2)
def test_intruders_are_turned_away_and_delay_no_site(words: list[bytes]) -> None:
    """Others call first, on one site's listener, and say nothing, nonsense, or one byte."""
    listen, intruders = handshake.listen, []

    def overheard(*arguments, **options):
        listener = listen(*arguments, **options)
        for each in words:
            intruders.append(socket.create_connection(listener.getsockname()))
            intruders[-1].sendall(each)
        return listener

    handshake.listen = overheard
    try:
        meeting = transport()
        gather = meeting.gather([1] * meeting.world_size, torch.float32)
        gather.payload.fill_(meeting.rank + 1)
        gather.launch()
        total = float(sum(gather.wait()))
    finally:
        handshake.listen = listen
    meeting.close()
    assert meeting._sockets is not None
    assert total == 3.0


def error_of(size: int, differs: bool, seconds: float = 0.0, timeout: float = 30.0) -> str:
    """Return the error of an exchange in which sizes differ, or site 1 does not take part.

    Args:
        size: number of elements.
        differs: whether the sites have different sizes.
        seconds: time between launch and wait.
        timeout: time after which a site is silent.
    """
    meeting, message = transport(), ""
    gather = meeting.gather([size + differs * meeting.rank] * meeting.world_size, torch.float32)
    meeting.timeout = timeout
    try:
        if differs or meeting.rank == 0:
            gather.launch()
            time.sleep(seconds)
            gather.wait()
    except (dadplug.MismatchError, dadplug.SiteError) as error:
        message = str(error)
    dist.barrier()
    meeting.close()
    return message


@pytest.mark.parametrize(("size", "seconds"), [(4, 0.0), (1 << 20, 0.5)], ids=["small", "found by the helper thread"])
def test_sites_at_different_exchanges_are_told_so(sites, size, seconds):
    assert all("do not make the same calls" in words for words in sites(2).run(error_of, size, True, seconds))


def test_silence_ends_after_the_timeout(sites):
    first, _ = sites(2).run(error_of, 4, False, 0.0, 1.0)
    assert "site 1 (" in first
    assert "has not answered for 1 s" in first


def test_a_forked_child_does_not_hold_a_dead_sites_connections(tmp_path):
    """The connection closes with the process, and not with its child, which ends when the other site knows."""
    known = tmp_path / "known"
    code = f"""
import os, pathlib, signal, time, warnings
from dadplug.exchange import Traffic, open_transport
warnings.simplefilter("ignore")
meeting = open_transport(None, Traffic(), torch.device("cpu"), 40)
gather = meeting.gather([4, 4], torch.float32)
gather.launch()
gather.wait()
if rank == 1:
    if os.fork() == 0:
        os.close(1)
        os.close(2)
        started = time.monotonic()
        while not pathlib.Path({str(known)!r}).exists() and time.monotonic() < started + 60:
            time.sleep(0.05)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
gather.launch()
try:
    gather.wait()
except dadplug.SiteError as error:
    print(error)
    pathlib.Path({str(known)!r}).touch()
    os._exit(0)
"""
    finished = support.run_programs(support.site_scripts(code, tmp_path, 2), timeout=200)
    assert "site 1 (" in finished[0].output  # gloo of older releases prints lines of its own before
    assert "is gone" in finished[0].output  # otherwise it has not answered for 40 s


def child_status(garbage: str) -> int:
    """The exit status of a forked child that collects garbage, -1 if it does not end."""
    meeting = transport()
    gc.collect()
    gc.disable()
    loop = [meeting]
    loop.append(loop)  # found by the collector only
    if garbage == "transport":
        del meeting, loop
    elif garbage == "group":  # closed already, and still held
        loop[0] = meeting.group
        meeting.close()
        del meeting, loop
    child = os.fork()
    if child == 0:
        if garbage == "closed":
            meeting.close()
        gc.collect()
        os._exit(0)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return -1
    gc.enable()
    gc.collect()
    dist.barrier()
    return os.waitstatus_to_exitcode(ended[1])


def test_a_forked_child_leaves_process_groups_alone(sites):
    """Destructors of process groups wait for threads, which a child such as a loader's worker does not have."""
    two = sites(2)
    for garbage in ("transport", "group", "closed"):
        assert two.run(child_status, garbage) == [0, 0], garbage


def sums(dtype_name: str, sizes: tuple[int, ...]) -> tuple[bool, list[float]]:
    meeting = transport()
    dtype = getattr(torch, dtype_name)
    bucket = summed_bucket(sizes, meeting, WireFormat(dtype))
    totals = []
    for step in range(2):
        for index, size in enumerate(sizes):
            gradient = None if index == meeting.rank else torch.full((size,), step + index + 1.0, dtype=dtype)
            bucket.fill(index, gradient, 0.5)
        bucket.launch()
        totals = [float(part.double().sum()) for part in bucket.wait()]
    meeting.close()
    return isinstance(bucket, GatheredBucket), totals


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("sizes", [(3, 4), (300_000, 8)])
def test_a_dense_bucket_sums_alike_whether_gathered_or_reduced(sites, dtype, sizes):
    results = sites(2).run(sums, dtype, sizes)
    small = sum(sizes) * getattr(torch, dtype).itemsize <= 1 << 20
    assert results == [(small, [0.5 * 2 * sizes[0], 0.5 * 3 * sizes[1]])] * 2


# Tagged messages between two ends of a connection: any order, any size, several threads, and failures


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
        PeerSockets({1: first}, 60.0, in_order=False),
        PeerSockets({0: second}, 60.0, in_order=False),
    )
    yield pair
    for end in pair:
        end.close()


def content(size: int, seed: int) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def start(end: PeerSockets, tensor: torch.Tensor, rank: int, tag: int, sends: bool) -> framing.Message:
    connection = end.connections[rank]
    return (connection.send if sends else connection.expect)(bytes_of(tensor), tag)


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
    end, sent = PeerSockets({0: other}, 60.0, in_order=False), content(5000, 3)
    message = framing._HEADER.pack(framing._MAGIC, 1, 5000) + bytes(sent.tolist())
    raw.sendall(message[:3000])
    with pytest.raises(RuntimeError, match="timed out"):  # reads what has come
        start(end, torch.zeros(1, dtype=torch.uint8), 0, 2, False).wait(timedelta(milliseconds=1))
    room = torch.zeros_like(sent)
    work = start(end, room, 0, 1, False)
    if closes:
        raw.close()
        refuses(
            (lambda: work.wait(), "closed by the other process"),
            (lambda: start(end, room, 0, 1, False).wait(), "closed by the other process"),
            error=RuntimeError,
        )
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
    with pytest.raises(dadplug.MismatchError):
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
    with pytest.raises(RuntimeError, match="timed out"):  # the other site reads nothing
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
    connection = FramedConnection(own, 6.0, False, lambda: None)

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
    assert polls == pytest.approx([2001.0, 991.0])  # the first up to the comparison of the calls


@pytest.fixture
def connection() -> Iterator[tuple[FramedConnection, socket.socket]]:
    """A connection whose messages arrive in order, and its other end."""
    own, other = socket.socketpair()
    with own, other:
        yield FramedConnection(own, 60.0, True, lambda: None), other


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
        connections = [FramedConnection(silent, 60.0, True, lambda: None), own]
        messages = [each.expect(memoryview(bytearray(4)), 1) for each in connections]
        other.close()
        assert wait_together(messages, 60.0) is messages[1]


@pytest.mark.parametrize("header", [(1, 5), (2, 4)], ids=["size", "tag"])
def test_another_message_than_the_expected_one_is_told(connection, header):
    own, other = connection
    message = own.expect(memoryview(bytearray(4)), 1)
    other.sendall(framing._HEADER.pack(framing._MAGIC, *header) + b"four")
    with pytest.raises(dadplug.MismatchError):
        message.wait()
