"""The sites' own connections: whole messages in order, whatever their size, and errors that name a site."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time

import pytest
import support
import torch
import torch.distributed as dist

import dadplug
from dadplug.exchange import Traffic, handshake, open_transport
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
    by_sockets = meeting._sockets is not None
    meeting.close()
    return by_sockets


@pytest.mark.parametrize("world_size", [2, 4])
def test_messages_of_any_size_come_whole_and_in_order(sites, world_size):
    assert all(sites(world_size).run(exchanges, True, 1))
    assert not any(sites(world_size).run(exchanges, False, 0))


def falls_back() -> bool:
    os.environ["DADPLUG_STREAMS"] = str(dist.get_rank())  # site 0 does not want to
    meeting = transport()
    gather = meeting.gather([2] * meeting.world_size, torch.float64)
    gather.payload.fill_(meeting.rank)
    gather.launch()
    assert [float(payload.sum()) for payload in gather.wait()] == [2.0 * rank for rank in range(meeting.world_size)]
    meeting.close()
    return meeting._sockets is None


def test_all_sites_go_by_gloo_where_one_cannot_do_otherwise(sites):
    assert all(sites(2).run(falls_back))


def meets_intruders(words: list[bytes]) -> bool:
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
    return meeting._sockets is not None and total == 3.0


@pytest.mark.parametrize("words", [[b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(64)], [b"x"] * 12], ids=["nonsense", "slow"])
def test_intruders_are_turned_away_and_delay_no_site(sites, words):
    assert sites(2).run(meets_intruders, words) == [True, True]


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
    assert all("are not at the same exchange" in words for words in sites(2).run(error_of, size, True, seconds))


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
