"""The backend on AdaPM's own engine: on a stand-in for the bindings, in several processes, and on the real ones."""

import copy
import importlib.util
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import support
import torch
from fake_adapm import Cluster
from support import refuses
from torch import nn

from dadplug.adapm import AdaModel, Normal, ParameterManager, bindings
from dadplug.adapm.backends import TableSpec
from dadplug.adapm.bindings import BindingsBackend, Library


@pytest.fixture
def fake(monkeypatch):
    """A cluster of one node as the module adapm."""
    cluster = Cluster()
    monkeypatch.setitem(sys.modules, "adapm", cluster.module(0))
    monkeypatch.setattr(bindings, "start_scheduler", lambda keys: None)
    monkeypatch.setattr(bindings, "_set_up", False)
    for name in ("NUM_SERVER", "ROLE", "PS_ROOT_URI", "PS_ROOT_PORT", "NODE_HOST"):
        monkeypatch.setenv(f"DMLC_{name}", "")
    return cluster


def test_tables_share_the_keys_and_begin_with_their_first_values(fake):
    with ParameterManager(backend="adapm", technique="replication_only") as manager:
        wide = manager.table("wide", 3, rows=5, initialiser=Normal(seed=1))
        slim = manager.table("slim", 1, rows=7)
        expected = np.empty((5, 3), np.float32)
        Normal(seed=1)(np.arange(5), expected)
        assert torch.equal(wide.pull(torch.arange(5)), torch.from_numpy(expected))
        slim.push(torch.tensor([[6, 0], [6, 1]]), torch.ones(2, 2, 1))
        assert slim.pull(torch.arange(7)).flatten().tolist() == [1, 1, 0, 0, 0, 0, 2]
        assert torch.equal(wide.pull(torch.tensor([4])), torch.from_numpy(expected[4:]))
        keys, values = slim.owned()
        assert keys.tolist() == list(range(7))
        assert torch.equal(values, slim.pull(keys))
        wide.set(torch.tensor([2]), torch.full((1, 3), 0.1))
        assert torch.equal(wide.pull(torch.tensor([2])), torch.full((1, 3), 0.1))
        slim.intent(torch.tensor([3, 3]), 4)
        assert manager.advance_clock() == manager.current_clock == 1
        manager.wait_sync(everywhere=True)
        counts = manager.counts
        assert counts["pushed"] >= 5  # a set is one of them, or two where rounding needs them
        assert counts["pulled_remotely"] == counts["pushed_remotely"] == 0
    assert fake.calls[0] == (0, "setup", 12, 1, "replication_only")
    assert fake.calls[-1] == (0, "shutdown")
    with pytest.raises(RuntimeError, match="it has been closed"):
        slim.pull(torch.tensor([0]))
    manager.close()
    with ParameterManager(backend="adapm") as second, pytest.raises(RuntimeError, match="set up once in a process"):
        second.table("again", 1, rows=1).pull(torch.tensor([0]))


BAD = [
    (lambda t: t.push(torch.tensor([1]), torch.ones(1, 2, dtype=torch.float64)), ValueError, "must be float32"),
    (lambda t: t.pull(torch.tensor([1], dtype=torch.int32)), ValueError, r"must be int64 .* got torch.int32"),
    (lambda t: t.pull(torch.tensor([3, -1])), IndexError, r"key -1 \(position 1\) is out of range"),
    (lambda t: t.push(torch.tensor([-1]), torch.ones(1, 2)), IndexError, "key -1"),
    (lambda t: t.intent(torch.tensor([-1]), 1), IndexError, "key -1"),
    (lambda t: t.pull(torch.tensor([9])), IndexError, r"has keys 0 to 8"),
    (lambda t: t.push(torch.tensor([1]), torch.ones(2)), ValueError, "a row for each key"),
    (lambda t: t.push(torch.tensor([1]), torch.full((1, 2), torch.nan)), FloatingPointError, "NaN or Inf"),
    (lambda t: t.set(torch.tensor([1, 1]), torch.ones(2, 2)), ValueError, "a key occurs twice"),
    (lambda t: t.pull(torch.tensor([1]), out=torch.ones(1, 4)[:, ::2]), ValueError, "contiguous float32"),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD)
def test_what_the_bindings_would_take_for_something_else_does_not_reach_them(fake, call, kind, message):
    with ParameterManager(backend="adapm") as manager:
        table = manager.table("t", 2, rows=9)
        manager.table("next", 2, rows=9)  # a negative key, or one too large, would be one of another table
        before = table.pull(torch.arange(9))
        with pytest.raises(kind, match=message):
            call(table)
        assert torch.equal(table.pull(torch.arange(9)), before)


def test_the_stand_in_has_the_hazards():
    module = Cluster().module(0)
    module.setup(9, 1)
    worker = module.Worker(0, module.Server(torch.full((9,), 2)))
    worker.push(torch.tensor([1]), torch.ones(1, 2, dtype=torch.float64))
    got = torch.empty(2)
    worker.pull(torch.tensor([1]), got)
    assert got.tolist() == [0.0, 1.875]
    worker.intent(torch.tensor([-1]), 1)


@pytest.mark.parametrize(
    ("use", "kind", "message"),
    [
        (lambda m: m.table("t", 2), ValueError, "needs rows="),
        (lambda m: m.table("t", 0, rows=2), ValueError, "width and rows must be at least 1"),
        (lambda m: m.table("t", 1, rows=2**31), ValueError, "at most 2,147,483,647 keys"),
        (lambda m: [m.table("t", 1, rows=2) for _ in "ab"], ValueError, "there is a table 't' already"),
        (
            lambda m: (m.table("t", 1, rows=2).pull(torch.tensor([0])), m.table("u", 1, rows=2)),
            RuntimeError,
            "too late",
        ),
        (lambda m: m.wait_sync() or m._backend.engine.library, RuntimeError, "add the tables before"),
    ],
)
def test_what_the_library_cannot_do_is_told(fake, use, kind, message):
    with ParameterManager(backend="adapm") as manager, pytest.raises(kind, match=message):
        use(manager)


def test_options_that_are_not_there_and_missing_bindings_are_told(fake, monkeypatch):
    refuses(
        (
            lambda: ParameterManager(backend="adapm", technique="static"),
            r"technique 'static' is not one of AdaPM's: 'all', 'replication_only'",
        ),
        (lambda: ParameterManager(backend="adapt"), "unknown backend 'adapt'; valid ones are builtin, adapm"),
    )
    monkeypatch.setitem(sys.modules, "adapm", None)
    how = r"Build it from https://github\.com/alexrenz/AdaPM as its"
    refuses((lambda: ParameterManager(backend="adapm"), how), error=ImportError)


def test_a_model_has_torchs_results(fake):
    model = nn.Sequential(nn.Embedding(30, 4), nn.Flatten(), nn.Linear(12, 1))
    model.add_module("more", nn.Identity())
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.Adagrad(each.parameters(), lr=0.1) for each in (plain, model)]
    managed = AdaModel(model, optimizers[1], backend="adapm")
    for step in range(4):
        ids = torch.randint(30, (5, 3), generator=torch.Generator().manual_seed(step))
        for each, optimizer in zip((plain, managed), optimizers):
            optimizer.zero_grad()
            each(ids).square().mean().backward()
            if each is managed:
                managed.intent({"0.weight": ids}, managed.manager.current_clock)
                managed.synchronize()
            optimizer.step()
    state = managed.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
    managed.load_state_dict({name: value + 0.1 for name, value in state.items()})
    assert torch.equal(managed.state_dict()["0.weight"], state["0.weight"] + 0.1)
    managed.unwrap(optimizers[1])
    managed.manager.close()


class Nodes:
    """Two nodes in one process, each with the adapter."""

    def __init__(self, monkeypatch, rows=6, width=2):
        self.cluster = Cluster(2)
        self.engines = []
        for rank in range(2):
            monkeypatch.setattr(bindings, "_set_up", False)
            lengths = torch.full((rows,), width)
            library = Library(self.cluster.module(rank), lengths, "all", None, lambda: None)
            monkeypatch.setitem(sys.modules, "adapm", self.cluster.module(rank))
            engine = BindingsBackend("all", None, 60.0, 0.0)
            engine._start = lambda library=library: library
            engine.add_table(TableSpec("t", width, rows, Normal(), None, None))
            self.engines.append(engine)

    def pull(self, rank, *keys):
        out = np.full((len(keys), 2), np.nan, np.float32)
        waiting = self.engines[rank].pull(0, np.array(keys), out)
        if waiting is not None:
            waiting.wait()
        return out[:, 0].tolist()

    def push(self, rank, keys, number):
        return self.engines[rank].push(0, np.array(keys), np.full((len(keys), 2), number, np.float32))


def test_a_site_sees_its_own_pushes_that_are_under_way(monkeypatch):
    nodes = Nodes(monkeypatch)
    assert nodes.push(0, [0], 1.0) is None
    assert nodes.push(0, [1, 2], 2.0) is not None  # key 1 is the other's
    assert nodes.cluster.values[1].tolist() == [0, 0]
    assert nodes.pull(0, 0, 1, 2, 1) == [1, 2, 2, 2]
    assert nodes.engines[0].counts == {"pulled": 4, "pulled_remotely": 4, "pushed": 3, "pushed_remotely": 2}


def test_set_holds_on_replicas_too(monkeypatch):
    nodes = Nodes(monkeypatch)
    big = 3e7
    nodes.push(0, [1], big).wait()
    nodes.engines[0].intend(0, np.array([1]), 0, 9)
    nodes.engines[0].flush()
    nodes.push(1, [1], 5.0)  # the replica at node 0 does not know of it
    assert nodes.engines[0].set(0, np.array([1, 2]), np.full((2, 2), 0.1, np.float32))[0]
    for engine in (*nodes.engines, nodes.engines[0]):
        engine.flush()
    assert (0, "set") not in nodes.cluster.calls  # the library's own would have become a delta
    first, second = nodes.pull(0, 1, 2)
    assert first == second == pytest.approx(0.1)
    assert nodes.pull(1, 1, 2) == [first, second]


def test_keys_that_do_not_rest_are_told(monkeypatch):
    nodes = Nodes(monkeypatch)
    flush = nodes.engines[0].flush

    def disturbed():
        flush()
        nodes.push(1, [1], 1.0)

    nodes.push(1, [1], 1.0)
    monkeypatch.setattr(nodes.engines[0], "flush", disturbed)
    with pytest.raises(RuntimeError, match="1 of 1 keys do not keep what they are set to"):
        nodes.engines[0].set(0, np.array([1]), np.zeros((1, 2), np.float32))


def test_calls_of_several_threads_come_one_after_the_other(monkeypatch):
    nodes = Nodes(monkeypatch)
    inside, most = [], []
    worker = nodes.engines[0].library._worker
    intent = worker.intent

    def slow(*args):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.001)
        inside.pop()
        return intent(*args)

    monkeypatch.setattr(worker, "intent", slow)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            pool.submit(nodes.engines[0].intend, 0, np.array([1]), 1, 2)
    assert len(worker.intents) == 20
    assert max(most) == 1


# A library in which a call that needs another process holds the GIL for ever, as the real one does.
HANGING = """
import ctypes, os, sys
sys.path.insert(0, {tests!r})
import fake_adapm
sys.modules[__name__] = fake_adapm.Cluster(2, alone=True).module(int(os.environ.get("SITE", 0)))
"""
SITE = """
import os, signal, time
os.environ["SITE"] = str(rank)
from dadplug.adapm import ParameterManager
from dadplug.adapm import bindings
bindings.start_scheduler = lambda keys: None
manager = ParameterManager(backend="adapm", timeout={timeout})
table = manager.table("t", 1, rows=4)
table.pull(torch.tensor([rank]))
"""


def run_hanging(tmp_path, code, timeout=30):
    (tmp_path / "adapm.py").write_text(HANGING.format(tests=str(Path(support.__file__).parent)))
    commands = support.site_scripts(SITE.format(timeout=timeout) + code, tmp_path)
    return support.run_programs(commands, timeout=150, env={"PYTHONPATH": str(tmp_path)}, destructors=True)


def test_a_call_that_waits_for_a_killed_site_ends_the_process_and_names_it(tmp_path):
    code = """
manager.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
table.pull(torch.tensor([1]))  # holds the GIL for ever
print("still here", flush=True)
"""
    first, _ = run_hanging(tmp_path, code)
    assert first.status == -signal.SIGKILL
    assert "still here" not in first.output
    assert "SiteError: site 1 (" in first.errors, first.errors
    assert "is gone, and site 0 (" in first.errors
    assert "in pull" in first.errors  # where it waited


def test_a_call_that_waits_for_a_stopped_site_ends_the_process_after_the_timeout(tmp_path):
    code = """
manager.barrier()
import subprocess, torch.distributed as dist
pids = [None, None]
dist.all_gather_object(pids, os.getpid())
if rank == 1:
    waits = f"while kill -0 {pids[0]} 2> /dev/null; do sleep 0.1; done; kill -CONT {pids[1]}"
    subprocess.Popen(["sh", "-c", waits])
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(0)
table.pull(torch.tensor([1]))
"""
    first, _ = run_hanging(tmp_path, code, timeout=3)
    assert first.status == -signal.SIGKILL
    assert "has not returned for 3 s; site 1 (" in first.errors, first.errors


def test_an_error_is_shown_at_once_although_others_are_still_at_work(tmp_path):
    code = """
from dadplug.runners.management import give_back
from dadplug.adapm import AdaModel
manager.barrier()
if rank == 1:
    try:
        try:
            raise ValueError("the data is damaged")
        finally:
            class Managed:
                manager = manager
                close = lambda self: None
            start = time.monotonic()
            give_back(Managed(), None, interrupted=True)
    finally:
        print("gave up" if time.monotonic() - start < 20 else "waited", flush=True)
table.pull(torch.tensor([1]))
"""
    first, second = run_hanging(tmp_path, code)
    assert "ValueError: the data is damaged" in second.errors
    assert "gave up" in second.output
    assert "site 1 (" in first.errors


def test_sites_that_do_not_come_to_the_end_are_named(tmp_path):
    code = """
if rank == 1:
    raise OSError("the disk is full")
manager.close()
"""
    first, _ = run_hanging(tmp_path, code)
    assert "is gone: OSError: the disk is full" in first.errors, first.errors


@pytest.mark.parametrize("ends", ["the library", "the site"])
def test_the_schedulers_watcher_ends_without_a_word(tmp_path, monkeypatch, capfd, ends):
    wait = "pass" if ends == "the library" else "__import__('time').sleep(60)"
    (tmp_path / "adapm.py").write_text(f"def scheduler(keys, threads): {wait}\n")
    (tmp_path / "torch.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    watcher = bindings.start_scheduler(3)
    if ends == "the site":
        watcher.stdin.close()
    watcher.wait(60)
    assert capfd.readouterr().err == ""


REAL = """
from dadplug.adapm import AdaModel, Normal, ParameterManager
torch.manual_seed(0)
ids = torch.randint(20, (8, 6, 3), generator=torch.Generator().manual_seed(5))
def make():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(40, 4), nn.Flatten(), nn.Linear(12, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
plain, optimizer = make()
for step in range(8):
    both = torch.cat([ids[step] * 2, ids[step] * 2 + 1])
    optimizer.zero_grad()
    plain(both).square().mean().backward()
    optimizer.step()
model, optimizer = make()
managed = AdaModel(model, optimizer, backend="adapm", timeout=60)
manager = managed.manager
for step in range(8):
    mine = ids[step] * 2 + rank
    managed.intent({"0.weight": mine}, manager.current_clock)
    optimizer.zero_grad()
    managed(mine).square().mean().backward()
    managed.synchronize()
    optimizer.step()
state = managed.state_dict()
for name, value in plain.state_dict().items():
    torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
managed.load_state_dict({name: value + 0.1 for name, value in state.items()})
again = managed.state_dict()
torch.testing.assert_close(again["0.weight"], state["0.weight"] + 0.1, rtol=0, atol=1e-6)
managed.unwrap(optimizer)
manager.close()
print("equal", flush=True)
"""


@pytest.mark.skipif(importlib.util.find_spec("adapm") is None, reason="needs AdaPM's bindings, a module adapm")
def test_two_sites_on_the_real_library_are_one_process(tmp_path):
    for each in support.run_programs(support.site_scripts(REAL, tmp_path), timeout=60):
        assert each.status == 0, each.errors
        assert "equal" in each.output
