"""Collectives of the hub's process group, between threads of this process that are linked to a hub; every mode."""

import os
from datetime import timedelta

import forkserver
import hub_sites
import pytest
import support
import torch
import torch.distributed as dist
from hub_sites import links
from running_hub import running_hub
from torch._C import _distributed_c10d as c10d

from dadplug.errors import MismatchError, SiteError
from dadplug.hub.site.link import HubLink
from dadplug.hub.torch import HubGroup

WORLD = 3
SUM = dist.ReduceOp.SUM


def group_of(link) -> HubGroup:
    return HubGroup(link, range(link.world_size), link.rank, 20.0)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    with links(tmp_path_factory.mktemp("hub"), WORLD) as opened:
        yield opened


@pytest.fixture
def together(three):
    """Function that runs another one of a group at each site; returns the results by rank."""

    def at(link, function):
        group = group_of(link)
        result = function(group)
        group.barrier().wait()
        assert link.inbox.expected_bytes == link.inbox.early_bytes == 0  # no message is left over
        return result

    return lambda function: hub_sites.together(lambda rank: at(three[rank], function), WORLD)


def options(kind, **fields):
    found = kind()
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def reducing(operation):
    return options(c10d.AllreduceOptions, reduceOp=operation)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (SUM, [[111.0, 6.0]] * 3),
        (dist.ReduceOp.AVG, [[37.0, 2.0]] * 3),
        (dist.ReduceOp.PRODUCT, [[1000.0, 6.0]] * 3),
        (dist.ReduceOp.MIN, [[1.0, 1.0]] * 3),
        (dist.ReduceOp.MAX, [[100.0, 3.0]] * 3),
    ],
)
def test_an_allreduce_reduces_over_all_sites(operation, expected, together):
    def site(group):
        tensor = torch.tensor([10.0 ** group.rank(), group.rank() + 1.0])
        group.allreduce([tensor], reducing(operation)).wait()
        return tensor.tolist()

    assert together(site) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_16_bit_tensors_are_rounded_once(dtype, together):
    values = torch.randn(WORLD, 1000, generator=torch.Generator().manual_seed(1)).to(dtype)

    def site(group):
        tensor = values[group.rank()].clone()
        group.allreduce([tensor], reducing(SUM)).wait()
        return tensor

    expected = (values[0].float() + values[1].float() + values[2].float()).to(dtype)
    assert all(torch.equal(found, expected) for found in together(site))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float64, torch.bfloat16, torch.complex64]
)
def test_an_allgather_keeps_the_bits_of_every_type(dtype, together):
    def value(rank):
        return (torch.arange(6).reshape(2, 3) + rank - 2).to(dtype)

    def site(group):
        rooms = [torch.zeros(2, 3, dtype=dtype) for _ in range(WORLD)]
        group.allgather([rooms], [value(group.rank())], c10d.AllgatherOptions()).wait()
        return all(torch.equal(room, value(rank)) for rank, room in enumerate(rooms))

    assert together(site) == [True] * WORLD


def test_gathers_into_one_tensor_and_into_views(together):
    def site(group):
        own = torch.full((2,), float(group.rank()))
        flat = torch.zeros(2 * WORLD)
        group.all_gather_single(flat, own, c10d.AllgatherOptions()).wait()
        board = torch.zeros(2, WORLD)  # its columns are not contiguous
        group.allgather([list(board.T)], [own], c10d.AllgatherOptions()).wait()
        return flat.tolist(), board.tolist()

    assert together(site) == [([0.0, 0.0, 1.0, 1.0, 2.0, 2.0], [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])] * WORLD


def test_gather_scatter_and_reduce_have_a_root(together):
    def site(group):
        rank = group.rank()
        rooms = [torch.zeros(2) for _ in range(WORLD)] if rank == 1 else []
        group.gather(
            [rooms] if rank == 1 else [], [torch.full((2,), 1.0 + rank)], options(c10d.GatherOptions, rootRank=1)
        ).wait()
        parts = [[torch.tensor([10.0 * other]) for other in range(WORLD)]] if rank == 2 else []
        share = torch.zeros(1)
        group.scatter([share], parts, options(c10d.ScatterOptions, rootRank=2)).wait()
        total = torch.tensor([1.0 + rank])
        group.reduce([total], options(c10d.ReduceOptions, rootRank=0, reduceOp=SUM)).wait()
        return [room.tolist() for room in rooms], float(share), float(total)

    assert together(site) == [
        ([], 0.0, 6.0),
        ([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], 10.0, 2.0),
        ([], 20.0, 3.0),
    ]


def test_a_reduce_scatter_gives_each_site_its_part(together):
    def site(group):
        rank = group.rank()
        parts = [torch.full((other + 1,), float(rank + 10 * other)) for other in range(WORLD)]
        listed, single = torch.zeros(rank + 1), torch.zeros(2)
        settings = options(c10d.ReduceScatterOptions, reduceOp=SUM)
        group.reduce_scatter([listed], [parts], settings).wait()
        group.reduce_scatter_single(single, torch.arange(6.0), settings).wait()
        return listed.tolist(), single.tolist()

    assert together(site) == [([3.0], [0.0, 3.0]), ([33.0] * 2, [6.0, 9.0]), ([63.0] * 3, [12.0, 15.0])]


def test_an_all_to_all_sends_a_part_to_each_site(together):
    def site(group):
        rank = group.rank()
        inputs = [torch.full((rank + other,), 10 * rank + other) for other in range(WORLD)]
        outputs = [torch.zeros(rank + other, dtype=torch.int64) for other in range(WORLD)]
        group.alltoall(outputs, inputs, c10d.AllToAllOptions()).wait()
        even = torch.zeros(WORLD, dtype=torch.int64)
        group.all_to_all_single(even, torch.arange(WORLD) + 10 * rank, [], [], c10d.AllToAllOptions()).wait()
        return [each.tolist() for each in outputs], even.tolist()

    assert together(site) == [
        (
            [[10 * other + rank] * (rank + other) for other in range(WORLD)],
            [10 * other + rank for other in range(WORLD)],
        )
        for rank in range(WORLD)
    ]


@pytest.mark.parametrize("row", [[3, 3, 2], [-1, -1, 2], [1 << 33] * 3], ids=str)
def test_a_site_that_sends_other_sizes_to_all_than_there_is_room_for_is_named(row, together):
    """Nothing is allocated by what it states."""

    def site(group):
        if group.rank() == 2:
            group._gather(torch.tensor(row), [WORLD] * WORLD, lambda parts: None, []).wait()
            return ""
        parts = [[torch.zeros(2, dtype=torch.float64) for _ in range(WORLD)] for _ in range(2)]
        with pytest.raises(MismatchError) as found:
            group.alltoall(*parts, c10d.AllToAllOptions())
        return str(found.value)

    for text in together(site)[:2]:
        assert text.startswith(f"site 2 (c) has sent an invalid list of sizes: it sends {row} elements to all")


def test_nothing_is_sent_for_empty_tensors(together, monkeypatch):
    sent, post = [], HubLink.post
    monkeypatch.setattr(
        HubLink, "post", lambda link, head, content, *soon: sent.append(head) or post(link, head, content, *soon)
    )

    def site(group):
        rooms = [torch.zeros(0) for _ in range(WORLD)]
        group.allgather([rooms], [torch.zeros(0)], c10d.AllgatherOptions()).wait()
        group.allreduce([torch.zeros(0, 3)], reducing(SUM)).wait()

    together(site)
    assert len(sent) == WORLD  # the barrier at the end


def test_a_tensor_may_change_once_its_collective_has_started(together):
    def site(group):
        own = torch.tensor([1.0 + group.rank()])
        rooms = [torch.zeros(1) for _ in range(WORLD)]
        work = group.allgather([rooms], [own], c10d.AllgatherOptions())
        own.zero_()
        work.wait()
        return [float(room) for room in rooms]

    assert together(site) == [[1.0, 2.0, 3.0]] * WORLD


def test_works_may_be_awaited_in_any_order_and_by_futures(together):
    def site(group):
        tensors = [torch.tensor([float(number)]) for number in range(6)]
        works = [group.allreduce([tensor], reducing(SUM)) for tensor in tensors]
        futures = [work.get_future() for work in works[::2]]
        for work in reversed(works[1::2]):
            work.wait()
        for work, future in zip(works[::2], futures, strict=True):
            assert future.wait()[0] is not None
            assert work.is_completed()
            assert work.is_success()
        return [float(tensor) for tensor in tensors]

    assert together(site) == [[3.0 * number for number in range(6)]] * WORLD


def test_a_lost_site_is_named_by_wait_and_by_the_future(tmp_path):
    with links(tmp_path) as (link, other):
        group = group_of(link)
        other.leave("ValueError: no data")
        for ask in (lambda work: work.wait(), lambda work: work.get_future().wait()):
            work = group.allreduce([torch.ones(1)], reducing(SUM))
            with pytest.raises(RuntimeError, match=r"site 1 \(b\) is gone: ValueError: no data"):
                ask(work)
            assert isinstance(work.exception(), SiteError)
            assert not work.is_success()


def test_a_wait_has_a_timeout_of_its_own(tmp_path):
    with links(tmp_path) as (link, _), pytest.raises(SiteError, match=r"has not answered for 0\.01 s"):
        group_of(link).barrier().wait(timedelta(seconds=0.01))


def test_groups_do_not_take_each_others_messages(together):
    def site(first):
        second = group_of(first._link)
        order = (first, second) if first.rank() else (second, first)
        tensors = {group: torch.tensor([1.0 if group is first else 10.0]) for group in order}
        works = [group.allreduce([tensors[group]], reducing(SUM)) for group in order]
        for work in works:
            work.wait()
        return float(tensors[first]), float(tensors[second])

    assert together(site) == [(3.0, 30.0)] * WORLD


def test_a_group_of_one_site_sends_nothing_and_takes_no_channel(three, monkeypatch):
    monkeypatch.setattr(HubLink, "new_channel", None)
    monkeypatch.setattr(HubLink, "send", None)
    alone = HubGroup(three[2], [2], 0, 1.0)
    tensor, rooms = torch.tensor([4.0]), [torch.zeros(1)]
    alone.allreduce([tensor], reducing(SUM)).wait()
    alone.allgather([rooms], [tensor], c10d.AllgatherOptions()).wait()
    alone.barrier().wait()
    assert (tensor.item(), rooms[0].item()) == (4.0, 4.0)


def test_other_groups_are_refused(three):
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] of 3: over the hub a process group holds all sites, or one"):
        HubGroup(three[0], [0, 1], 0, 1.0)


@pytest.mark.parametrize(
    ("misuse", "error", "reason"),
    [
        (lambda group: group.send([torch.ones(1)], 1, 0), RuntimeError, "has collectives only"),
        (
            lambda group: group.allgather([[torch.zeros(3)] * WORLD], [torch.zeros(2)], c10d.AllgatherOptions()),
            ValueError,
            "has 2 elements, not 3",
        ),
        (
            lambda group: group.allreduce([torch.ones(1, dtype=torch.int64)], reducing(dist.ReduceOp.BXOR)),
            ValueError,
            "SUM, AVG, PRODUCT, MIN and MAX",
        ),
        (
            lambda group: group.allreduce_coalesced([torch.ones(1), torch.ones(1).long()], reducing(SUM)),
            ValueError,
            r"have one type over the hub, got \['torch.float32', 'torch.int64'\]",
        ),
    ],
    ids=["messages between two sites", "another size than agreed", "an unknown operation", "two types"],
)
def test_what_is_refused_sends_nothing(together, misuse, error, reason):
    def site(group):
        with pytest.raises(error, match=reason):
            misuse(group)

    together(site)


# Collectives of torch.distributed over a hub, where sites leave: reductions over those that are present


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
    reduction._transport.link.rounds._wait_for_close = lambda *_: kill()
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
    with running_hub(tmp_path / "kits", ("a", "b", "c"), policy={"allow_pickle": True}) as hub:
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
