"""Batch sizes and the queue of one model."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from dadplug.errors import UnavailableError
from dadplug.serving.cache import Ticket
from dadplug.serving.served_model import BatchLimit, RequestQueue, measured_latency


def test_the_limit_grows_by_one_below_the_goal_and_shrinks_by_a_tenth_above():
    limit = BatchLimit(0.05, maximum=8)
    for expected in (2, 3, 4):
        limit.record(limit.size, 0.01)
        assert limit.value == expected
    limit.record(4, 0.051)
    assert limit.value == pytest.approx(3.6)
    for _ in range(100):
        limit.record(limit.size, 0.06)
    assert limit.value == 1
    for _ in range(100):
        limit.record(limit.size, 0.01)
    assert limit.value == 8


def test_a_batch_below_the_limit_is_no_evidence_for_a_larger_one():
    limit = BatchLimit(0.05, maximum=64)
    limit.record(1, 0.01)
    for _ in range(10):
        limit.record(1, 0.01)
    assert limit.value == 2


def test_the_limit_settles_where_the_latency_is_the_goal():
    limit, sizes = BatchLimit(0.05, maximum=256), []
    for _ in range(400):
        limit.record(limit.size, 0.002 * limit.size)  # 25 samples take 0.05 s
        sizes.append(limit.size)
    assert min(sizes[100:]) >= 21
    assert max(sizes[100:]) <= 26
    sizes.clear()
    for _ in range(400):
        limit.record(limit.size, 0.008 * limit.size)  # the model becomes four times slower
        sizes.append(limit.size)
    assert min(sizes[50:]) >= 4
    assert max(sizes[50:]) <= 7


def test_a_backlog_does_not_count_against_the_batch():
    assert measured_latency(arrived=10.0, previous=9.0, done=10.5) == 0.5
    assert measured_latency(arrived=1.0, previous=9.0, done=10.5) == 1.5


def ticket(shape=(2,), deadline=1e9, dtype=np.float32):
    return Ticket(("m", 1, b""), np.zeros(shape, dtype), 0.0, deadline, [])


def test_a_batch_takes_what_waits_up_to_the_limit():
    queue = RequestQueue("m", most=100)
    tickets = [ticket() for _ in range(5)]
    for each in tickets:
        queue.put(each)
    queue.wait()
    assert queue.take(3, 0.0) == (tickets[:3], [])
    assert queue.take(3, 0.0) == (tickets[3:], [])
    assert queue.take(3, 0.0) == ([], [])


def test_only_inputs_of_one_shape_and_dtype_are_batched():
    queue = RequestQueue("m", most=100)
    tickets = [ticket((2,)), ticket((3,)), ticket((2,)), ticket((2,), dtype=np.int64)]
    for each in tickets:
        queue.put(each)
    queue.wait()
    assert queue.take(9, 0.0)[0] == [tickets[0], tickets[2]]
    assert queue.take(9, 0.0)[0] == [tickets[1]]
    assert queue.take(9, 0.0)[0] == [tickets[3]]


def test_requests_past_their_deadlines_are_not_computed():
    queue = RequestQueue("m", most=100)
    late, early = ticket(deadline=5.0), ticket(deadline=50.0)
    queue.put(late)
    queue.put(early)
    queue.wait()
    assert queue.take(9, 10.0) == ([early], [late])


def test_a_full_queue_refuses_requests():
    queue = RequestQueue("m", most=2)
    queue.put(ticket())
    queue.put(ticket())
    with pytest.raises(UnavailableError, match="2 requests wait for model 'm'"):
        queue.put(ticket())


def test_an_idle_queue_uses_no_processor_time():
    queue, spent = RequestQueue("m", most=2), []

    def wait():
        before = time.thread_time()
        queue.wait()
        spent.append(time.thread_time() - before)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)  # a loop that spins would use as much processor time
    queue.wake()
    thread.join(timeout=60)
    assert spent[0] < 0.05
