"""Collectives of torch.distributed over a hub, where sites leave: reductions over those that are present."""

from __future__ import annotations

import os

import forkserver
import pytest
import support
from running_hub import running_hub

HEAD = """
import os, signal, sys, time, torch, dadplug, torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
dadplug.connect(kit=sys.argv[1], timeout=200)
rank = dist.get_rank()
def reduced(value, operation):
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, operation)
    return tensor.item()
def kill():
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
def error(collective):
    try:
        collective()
    except dadplug.SiteError as found:
        return str(found)
reduction = dadplug.GradientReduction(model := nn.Linear(4, 4), mode="dad", min_sites=1, timeout=200)
def step():
    model.zero_grad()
    model(torch.ones(2, 4) * (rank + 1)).sum().backward()
    reduction.synchronize()
"""

LEAVES = """
value = 2.0 + rank
assert reduced(value, dist.ReduceOp.SUM) == 9
received = torch.tensor([value])
dist.broadcast(received, 0)
assert received.item() == 2
step()
if rank == 0 and sys.argv[2] == "before":
    kill()
if rank == 0:  # what it has sent does not count
    reduction._transport.link.rounds._wait_until = lambda *_: kill()
elif sys.argv[2] == "meanwhile":
    assert reduction._transport.link.await_loss(30)
assert reduced(value, dist.ReduceOp.SUM) == 7
assert reduced(value, dist.ReduceOp.AVG) == 3.5
assert reduced(-value, dist.ReduceOp.MAX) == -3
assert reduced(value, dist.ReduceOp.MIN) == 3
assert reduced(value, dist.ReduceOp.PRODUCT) == 12
work = dist.all_reduce(late := torch.tensor([value]), async_op=True)
work.wait()
assert late.item() == 7
dist.barrier()
dist.broadcast(received.fill_(value), 1)
assert received.item() == 3
step()
for collective in (
    lambda: dist.broadcast(received, 0),
    lambda: dist.all_gather([torch.zeros(1) for _ in range(3)], received),
    lambda: dist.all_gather_object([None] * 3, "x"),
    lambda: dist.broadcast_object_list(["x"], 0),
):
    text = error(collective)
    assert text is not None and text.startswith("site 0 (a) is gone, and a collective needs"), text
assert reduction.gather_objects(value) == [None, 3.0, 4.0]
step()
assert reduction.first_difference() is None
assert reduction.present_sites == [1, 2]
print("complete")
"""

RETURNS = """
first = reduction.step == 0
if not first:
    try:
        dist.barrier()
    except RuntimeError as found:
        print(found)
steps = over = 0
while not over:
    if first and rank == 1 and reduction.step == 3:
        kill()
    step()
    count = reduced(1.0, dist.ReduceOp.SUM)
    assert reduced(float(reduction.step), dist.ReduceOp.SUM) == count * reduction.step
    over = reduced(float(os.path.exists(sys.argv[2])), dist.ReduceOp.MIN)
    steps += 1
    if rank == 1 and not first and steps == 5:
        open(sys.argv[2], "w")
assert count == 2
assert reduction.present_sites == [0, 1]
assert reduction.first_difference() is None
print("complete")
"""


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_reductions_are_those_of_the_sites_that_are_present(tmp_path, when):
    script = tmp_path / "site.py"
    script.write_text(HEAD + LEAVES)
    with running_hub(tmp_path / "kits", ("a", "b", "c")) as hub:
        lost, *others = support.run_programs([[str(script), str(hub.kits / name), when] for name in "abc"])
    assert lost.status == -9, lost.errors
    for each in others:
        assert (each.status, each.output) == (0, "complete\n"), each.errors


def test_a_site_that_returns_takes_part_in_collectives_after_its_first_step(tmp_path):
    script, stop = tmp_path / "site.py", tmp_path / "stop"
    script.write_text(HEAD + RETURNS)
    with running_hub(tmp_path / "kits", ("a", "b")) as hub:

        def start(name: str) -> forkserver.Program:
            return forkserver.start([str(script), str(hub.kits / name), str(stop)], os.environ | support.ONE_THREAD)

        first, lost = start("a"), start("b")
        assert lost.wait(200) == -9, lost.read()
        again = start("b")
        for process in (again, first):
            assert process.wait(200) == 0, process.read()
            assert process.read()[0].endswith("complete\n")
        assert "it may not exchange anything before it has called synchronize()" in again.read()[0]
