"""The parameter manager between processes: exact sums, placement by intent, and errors that name who is at fault."""

import doctest
import gc
import importlib
import math
import os
import threading
import time

import pytest
import support
import torch
import torch.distributed as dist
from support import refuses

from dadplug.adapm import Columns, Constant, Normal, ParameterManager, Uniform, builtin
from dadplug.adapm.engine import ActionTiming, poisson_quantile
from dadplug.errors import MismatchError


@pytest.fixture
def alone():
    """A manager of one site."""
    with ParameterManager() as manager:
        yield manager


def stressed(technique, operations):
    benchmark = support.load(str(support.Path(__file__).parents[2] / "benchmarks" / "adapm_stress.py"))
    return benchmark.stress(operations, technique)


@pytest.mark.parametrize(
    ("world_size", "technique"),
    [(2, "all"), (3, "all"), (4, "all"), (3, "replication_only"), (3, "relocation_only"), (2, "static")],
)
def test_sums_are_exact_after_wait_sync(sites, world_size, technique):
    counts = sites(world_size).run(stressed, technique, 120_000 // world_size)
    moved, replicated = (sum(each[name] for each in counts) for name in ("moved", "replicated"))
    assert (moved > 0) == (technique in ("all", "relocation_only"))
    assert (replicated > 0) == (technique in ("all", "replication_only"))


def follows_intent():
    with ParameterManager(timeout=200) as manager:
        table = manager.table("words", 8, rows=1000, initialiser=Normal(seed=3))
        keys = torch.arange(100) + 100 * manager.rank  # half of them live elsewhere
        first = table.pull(keys)
        table.intent(keys, 0, 10)
        table.intent(torch.tensor([999]), 0, 10)  # both sites want it
        support.until(lambda: manager.counts["rows"] >= 101, timeout=200.0)
        manager.wait_sync(everywhere=True)
        before = manager.counts["pulled_remotely"]
        again = table.pull(keys)
        table.pull(torch.tensor([999]))
        assert torch.equal(first, again)
        remote = manager.counts["pulled_remotely"] - before
        replicas = manager.counts["replicas"]
        for _ in range(10):
            manager.advance_clock()
        manager.wait_sync(everywhere=True)
        manager.wait_sync(everywhere=True)
        return remote, replicas, manager.counts["replicas"]


def test_keys_are_here_when_they_have_been_announced(sites):
    results = sites(2).run(follows_intent)
    assert [remote for remote, _, _ in results] == [0, 0]
    assert sum(replicas for _, replicas, _ in results) == 1
    assert [left for _, _, left in results] == [0, 0]


def agrees_on_first_values():
    with ParameterManager() as manager:
        parts = [(3, Uniform(-1, 1, seed=5)), (2, Constant(0.5)), (2, Normal(seed=1))]
        table = manager.table("mixed", 7, initialiser=Columns(parts))  # any keys
        keys = torch.tensor([0, 7, 2**40 + 3, 2**62])
        values = table.pull(keys if manager.rank else keys.flip(0))
        manager.barrier()
        return (values if manager.rank else values.flip(0)), len(table.owned()[0])


def test_first_values_depend_on_seed_and_key_alone(sites):
    (first, here), (second, there) = sites(2).run(agrees_on_first_values)
    assert torch.equal(first, second)
    assert here + there == 4
    alone = ParameterManager().table("mixed", 3, initialiser=Uniform(-1, 1, seed=5))
    assert torch.equal(alone.pull(torch.tensor([0, 7, 2**40 + 3, 2**62])), first[:, :3])


@support.at_sites(3)
def test_set_replaces_values_at_all_sites() -> None:
    with ParameterManager() as manager:
        table = manager.table("set", 2, rows=20)
        keys = torch.arange(20)
        table.intent(keys, 0, 1000)
        table.push(keys, torch.ones(20, 2))
        manager.wait_sync(everywhere=True)
        if manager.rank == 0:
            table.set(keys, torch.full((20, 2), 50.0))
            assert (table.pull(keys) == 50).all()
            table.push(keys[:5], torch.ones(5, 2))
            assert (table.pull(keys[:5]) == 51).all()
        manager.wait_sync(everywhere=True)
        values = table.pull(keys)
        assert (values[:5] == 51).all()
        assert (values[5:] == 50).all()


@support.at_sites(2)
def test_several_threads_share_a_table() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ParameterManager() as manager:
        table = manager.table("threads", 3, rows=500)

        def work(number):
            keys = torch.arange(500)[torch.randperm(500, generator=torch.Generator().manual_seed(number))]
            for _ in range(20):
                table.push(keys, torch.ones(500, 3))
                table.intent(keys[:50], manager.current_clock, manager.current_clock + 3)
                assert table.pull(keys).min() >= 1
                manager.advance_clock()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        manager.wait_sync(everywhere=True)
        assert (table.pull(torch.arange(500)) == 2 * 4 * 20).all()


@support.at_sites(2)
def test_tables_that_differ_are_told() -> None:
    with ParameterManager() as manager, pytest.raises(MismatchError, match=r"table 0 of the manager is \('same',"):
        manager.table("same", 4 + manager.rank)


def test_one_site_needs_no_network(alone):
    table = alone.table("words", 4, rows=10, initialiser=Constant(2.0))
    keys = torch.tensor([[1, 2], [2, 9]])
    table.push(keys, torch.ones(2, 2, 4))
    table.intent(keys, 3)
    values = table.pull_async(keys).wait()
    assert values.shape == (2, 2, 4)
    assert values[..., 0].tolist() == [[3, 4], [4, 3]]
    assert alone.advance_clock() == alone.current_clock == 1
    alone.wait_sync(everywhere=True)
    table.set(torch.tensor([1]), torch.zeros(1, 4))
    assert table.owned()[0].tolist() == [1, 2, 9]
    assert table.pull(torch.empty(0, dtype=torch.int64)).shape == (0, 4)


def test_memory_is_close_to_the_values_own(alone):
    table = alone.table("words", 64, rows=100_000)
    table.pull(torch.arange(100_000))
    assert table.nbytes < 1.3 * 100_000 * 64 * 4


def test_unseen_keys_grow_the_table(alone):
    table = alone.table("any", 2, initialiser=Normal())
    keys = torch.randint(2**62, (50_000,))
    first = table.pull(keys)
    table.push(keys, torch.zeros(50_000, 2))
    assert torch.equal(table.pull(keys), first)
    assert alone.counts["rows"] == keys.unique().numel()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda t, k, v: t.pull(k.int()),
            ValueError,
            r"keys of table 'words' must be int64 .* use keys.long\(\).cpu\(\)",
        ),
        (lambda t, k, v: t.pull([1, 2]), TypeError, r"keys of table 'words' must be a tensor, got list"),
        (lambda t, k, v: t.pull(k + 8), IndexError, r"key 10 \(position 1\) is out of range: .* has keys 0 to 9"),
        (lambda t, k, v: t.push(k - 2, v), IndexError, r"key -1 \(position 0\) is out of range"),
        (lambda t, k, v: t.set(k + 8, v), IndexError, "key 10"),
        (lambda t, k, v: t.intent(k + 8, 0), IndexError, "key 10"),
        (lambda t, k, v: t.intent(k, 3, 2), ValueError, "an intent must end after it starts"),
        (lambda t, k, v: t.push(k, v.double()), ValueError, r"must be float32 .* use deltas.float\(\).cpu\(\)"),
        (lambda t, k, v: t.push(k, v[:1]), ValueError, r"must be of shape \(2, 4\), a row for each key, got \(1, 4\)"),
        (lambda t, k, v: t.push(k, v[:, :3]), ValueError, "must be of shape"),
        (lambda t, k, v: t.push(k, v * math.nan), FloatingPointError, r"of key 1 \(position 0\) .* hold NaN or Inf"),
        (lambda t, k, v: t.set(k, v * math.inf), FloatingPointError, "the values of key 1"),
        (lambda t, k, v: t.set(k * 0, v), ValueError, "a key occurs twice"),
        (lambda t, k, v: ParameterManager().table("t", 1, initialiser=3), ValueError, "must be a function of keys"),
        (lambda t, k, v: ParameterManager().table("t", 1, initialiser=0), ValueError, "must be a function of keys"),
        (
            lambda t, k, v: t.pull(k, out=v[:1]),
            ValueError,
            r"must be a contiguous float32 CPU tensor of",
        ),
    ],
)
def test_wrong_arguments_are_told_and_change_nothing(alone, call, error, message):
    table = alone.table("words", 4, rows=10)
    with pytest.raises(error, match=message):
        call(table, torch.tensor([1, 2]), torch.ones(2, 4))
    assert not table.pull(torch.arange(10)).any()


def test_wrong_options_and_closed_managers_are_told():
    manager, keys = ParameterManager(), torch.tensor([0])
    table = manager.table("words", 4)
    manager.close()
    manager.close()
    refuses(
        (lambda: table.pull(keys), "it has been closed", RuntimeError),
        (lambda: ParameterManager(technique="best"), "unknown technique 'best'; valid ones are 'all'"),
        (lambda: ParameterManager(timeout=0), "timeout must exceed 0"),
        (lambda: ParameterManager().table("t", 0), "width and rows must be at least 1"),
        (lambda: Uniform(1, 0), "low must not exceed high"),
        (lambda: Normal(std=-1), "std must be at least 0"),
        (lambda: ParameterManager().table("t", 4, initialiser=Columns([(3, Normal())])).pull(keys), "add up"),
    )


SITE = """
import os, signal, time
from dadplug.adapm import ParameterManager
manager = ParameterManager(timeout=200)
table = manager.table("words", 4, rows=100)
keys = torch.arange(100)
table.push(keys, torch.ones(100, 4))
manager.wait_sync(everywhere=True)
"""


def run(code, tmp_path, world_size=2, timeout=200):
    code = SITE + code
    return support.run_programs(support.site_scripts(code, tmp_path, world_size), timeout=timeout, destructors=True)


def check_named(finished, reason, survivors=(0, 2)):
    """Each survivor names site 1, and why it is gone."""
    for rank in survivors:
        assert "SiteError: site 1 (" in finished[rank].errors, finished[rank].errors
        assert reason in finished[rank].errors, finished[rank].errors


def test_a_killed_site_is_named_by_all_whatever_they_wait_for(tmp_path):
    code = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    if rank == 0:
        table.pull(keys)
    elif rank == 2:
        table.push(keys, torch.ones(100, 4))
    else:
        manager.wait_sync(everywhere=True)
"""
    check_named(run(code, tmp_path, 4), "is gone", (0, 2, 3))


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("raise OSError('the disk is full')", "is gone: OSError: the disk is full"),
        ("pass", "it exited first. Unequal numbers of batches? Use reduction.join()"),
    ],
    ids=["raises", "ends"],
)
def test_a_pull_does_not_wait_for_a_site_that_has_left(tmp_path, end, reason):
    finished = run(f"if rank == 1:\n    {end}\nwhile rank == 0: table.pull(keys)", tmp_path)
    assert (finished[1].status == 0) == (end == "pass")
    check_named(finished, reason, [0])


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("raise OSError('the disk is full')", "OSError: the disk is full"),
        ("sys.exit(3)", "it exited first"),
        ("manager.close(); time.sleep(8)", "is gone: "),  # its process lives when the others end
        ("pass", "it exited first"),
    ],
    ids=["raises", "exits", "closes", "ends"],
)
def test_a_barrier_does_not_wait_for_a_site_that_has_left(tmp_path, end, reason):
    code = f"""
import sys, time
manager.wait_sync(everywhere=True)
if rank == 1:
    {end}
else:
    start = time.monotonic()
    try:
        manager.wait_sync(everywhere=True)
    finally:
        assert time.monotonic() - start < 15, "the timeout of 300 s has not been cut short"
"""
    check_named(run(code, tmp_path, 3), reason)


def test_a_silent_site_is_named_after_the_timeout(tmp_path):
    code = """
import subprocess, torch.distributed as dist
pids = [None, None]
dist.all_gather_object(pids, os.getpid())
if rank == 1:
    waits = f"while kill -0 {pids[0]} 2> /dev/null; do sleep 0.1; done; kill -CONT {pids[1]}"
    subprocess.Popen(["sh", "-c", waits])
    os.kill(os.getpid(), signal.SIGSTOP)
backend = manager._backend
backend.timeout = backend._network._timeout = 2.0
while True:
    table.pull(keys)
"""
    check_named(run(code, tmp_path), "has not answered for 2 s", [0])


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ("raise OSError('the disk is full')", "is gone: OSError: the disk is full"),
        ("raise SystemExit(3)", "is gone: SystemExit: 3"),
        ("continue", "is gone: it has closed its parameter manager, while this site waits for it"),
    ],
)
def test_a_site_that_leaves_its_block_early_ends_the_barriers_of_the_others(tmp_path, ends, reason):
    code = f"""
with manager:
    for step in range(3):
        if rank == 1 and step == 2:
            {ends}
        manager.wait_sync(everywhere=True)
"""
    check_named(run(code, tmp_path, 3, timeout=100), reason)  # the manager's timeout would name the site too


def test_sites_leave_in_peace(tmp_path):
    for each in run("manager.barrier()\nmanager.close()", tmp_path, 3):
        assert each.status == 0, each.errors


@pytest.mark.parametrize("rate", [0.01, 1.0, 20.0, 400.0, 5000.0])
def test_the_window_is_a_quantile_of_poisson(rate):
    counts = torch.poisson(torch.full((200_000,), rate))
    share = float((counts <= poisson_quantile(rate)).float().mean())
    assert share >= 0.9997
    assert float((counts <= poisson_quantile(rate) - 1).float().mean()) < 1


def test_the_window_follows_the_pace():
    timing = ActionTiming()
    assert timing.window == poisson_quantile(10)
    timing.observe(0, 100)
    assert timing.window == poisson_quantile(100)
    for clock in range(101, 200):
        timing.observe(clock - 2, clock)
    assert timing.window == poisson_quantile(timing._mean) < 10
    before = timing.window
    for _ in range(50):
        timing.observe(199, 199)  # at rest
    assert timing.window == before


@support.at_sites(2)
def test_no_thread_works_on_tables_while_the_interpreter_ends():
    manager = ParameterManager(timeout=100)
    manager.table("t", 2, rows=4)
    manager.barrier()
    named = [thread for thread in threading.enumerate() if thread.name == "dadplug-adapm"]
    assert len(named) == 1
    builtin._end_at_exit()
    assert not named[0].is_alive()


PARTS = ("managed_weight", "manager", "model", "shards", "store", "timeline")


@pytest.mark.parametrize("name", [*(f"adapm.{part}" for part in PARTS), "data", "models"])
def test_examples_run(name):
    results = doctest.testmod(importlib.import_module(f"dadplug.{name}"))
    assert results.attempted > 0
    assert results.failed == 0


@support.at_sites(2)
def test_dropped_managers_end_their_threads_and_connections():
    def use(keep=None):
        manager = ParameterManager(interval=0.001)
        table = manager.table("words", width=2, rows=10)
        if keep is not None:
            keep.append(table)
        table.push(torch.arange(10), torch.ones(10, 2))
        manager.barrier()
        assert torch.equal(table.pull(torch.arange(10)), torch.full((10, 2), 2.0))
        manager.barrier()

    def resources():
        gc.collect()
        deadline = time.monotonic() + 5
        while any(each.name == "dadplug-adapm" for each in threading.enumerate()) and time.monotonic() < deadline:
            time.sleep(0.01)
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    gc.freeze()
    use()
    before = resources()
    for _ in range(3):
        use()
    assert resources() == before
    kept: list = []
    use(kept)
    gc.collect()
    assert kept.pop().pull(torch.arange(4)).shape == (4, 2)  # a table keeps its manager's connections
    dist.barrier()
    assert resources() == before
