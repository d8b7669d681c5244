"""The backend on AdaPM's own engine in several processes: lost sites are named, and processes end."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path

import pytest
import support

from dadplug.adapm import bindings

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
