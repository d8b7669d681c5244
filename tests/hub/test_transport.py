"""Transport over a real hub: gathers, sums, broadcasts and objects of all sites."""

from __future__ import annotations

import pytest
import torch
from hub_sites import links, together, transports


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gather_returns_every_payload_step_after_step(tmp_path, world_size):
    sizes = [3, 100_000, 0][:world_size]

    def use(transport):
        gather, found = transport.gather(sizes, torch.float32), []
        for step in range(5):
            gather.payload.copy_(torch.arange(sizes[transport.rank]) + 1000.0 * transport.rank + step)
            gather.launch()
            found.append([payload.clone() for payload in gather.wait()])
            transport.end_step()
        return found

    with links(tmp_path, world_size) as opened:
        every = transports(opened)
        results = together(lambda rank: use(every[rank]), world_size)
    expected = [[torch.arange(size) + 1000.0 * rank + step for rank, size in enumerate(sizes)] for step in range(5)]
    for found in results:
        for payloads, right in zip(found, expected, strict=True):
            assert all(torch.equal(*pair) for pair in zip(payloads, right, strict=True))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
def test_a_sum_is_that_of_all_sites_in_the_order_of_ranks(tmp_path, world_size, dtype):
    addends = [(torch.randn(50_001, generator=torch.Generator().manual_seed(rank)) * 100) for rank in range(world_size)]
    addends = [addend.to(dtype) for addend in addends]
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = addends[0].to(wide)
    for addend in addends[1:]:
        total = total + addend.to(wide)

    def use(transport):
        own = addends[transport.rank].clone()
        transport.all_reduce(own).wait()
        return own

    with links(tmp_path, world_size) as opened:
        every = transports(opened)
        results = together(lambda rank: use(every[rank]), world_size)
    assert all(torch.equal(found, total.to(dtype)) for found in results)


def test_broadcasts_and_objects(tmp_path):
    def use(transport):
        tensor = torch.full((2, 3), float(transport.rank + 1), requires_grad=True)
        transport.broadcast(tensor)
        content = transport.broadcast_bytes(bytes(range(256)) * 300 if transport.rank == 0 else b"ignored")
        objects = transport.gather_objects({"rank": transport.rank, "values": torch.ones(transport.rank)})
        return tensor.tolist(), content, [each["values"].tolist() for each in objects], transport.broadcast_bytes(b"")

    with links(tmp_path, 3) as opened:
        every = transports(opened)
        results = together(lambda rank: use(every[rank]), 3)
    assert results == [([[1.0] * 3] * 2, bytes(range(256)) * 300, [[], [1.0], [1.0, 1.0]], b"")] * 3
