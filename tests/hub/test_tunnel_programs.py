"""Programs with a parameter manager at sites with kits: no ports, and errors that name who is at fault."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import support
from running_hub import running_hub

NAMES = ("bavaria", "saxony", "tyrol")

HEAD = """
import os, signal, sys, time, torch, dadplug
from dadplug.adapm import ParameterManager
torch.set_num_threads(1)
dadplug.connect(kit=sys.argv[1], timeout=200)
"""
WORKS = """
with ParameterManager(timeout=200) as manager:
    table = manager.table("words", 4, rows=30)
    keys = torch.arange(30)
    table.push(keys, torch.ones(30, 4))
    manager.wait_sync(everywhere=True)
    assert (table.pull(keys) == 3).all()
    files = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    own = {os.readlink(each) for each in files if os.path.lexists(each)}
    lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/self/net/{name}").readlines()[1:]]
    listening = [line for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own]
    connections = [line for line in lines if f"socket:[{line[9]}]" in own]
    print("ports:", len(listening), "connections:", len(connections))
    manager.barrier()
"""
ENDS = """
with ParameterManager(timeout=200) as manager:
    table = manager.table("words", 4, rows=30)
    manager.barrier()
    if manager.rank == 1:
        LAST
    while True:
        table.pull(torch.arange(30))
"""


def run(folder: Path, program: str, **options):
    """Run a program at all sites; return what came of it, by rank."""
    script = folder / "site.py"
    script.write_text(HEAD + program)
    with running_hub(folder / "kits", NAMES, **options) as hub:
        return support.run_programs([[str(script), str(hub.kits / name)] for name in NAMES])


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs /proc")
def test_sums_arrive_and_no_site_opens_a_port(tmp_path):
    for each in run(tmp_path, WORKS):
        assert each.status == 0, each.errors
        ports, connections = map(int, re.findall(r"\d+", each.output))
        assert ports == 0
        assert 1 < connections <= 3  # all of them to the hub


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ('raise ValueError("the scanner is broken")', "ValueError: the scanner is broken"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "its connection was lost"),
    ],
)
def test_the_others_name_the_site_that_has_gone(tmp_path, last, reason):
    first, _, third = run(tmp_path, ENDS.replace("LAST", last), grace=0.5)
    for each in (first, third):
        assert each.status == 1
        last_line = each.errors.strip().splitlines()[-1]
        assert re.search(rf"SiteError: site 1 \(saxony\) is gone: {reason}", last_line), each.errors


def test_the_bindings_are_refused(tmp_path):
    program = """
import types
sys.modules["adapm"] = types.ModuleType("adapm")
try:
    ParameterManager(backend="adapm")
except ValueError as error:
    print(error)
"""
    for each in run(tmp_path, program):
        assert each.status == 0, each.errors
        assert "which a hub does not carry" in each.output
