"""Sites whose files differ: what decodes is the choice of site 0."""

import dataclasses

import torch
from torch import nn

import dadplug
from dadplug import schedules
from dadplug.schedules import Decoding, Encoding, Machine, Record

FIRST = Record(Decoding(few=64, strip=16, block=64, align=4, tile=64), Encoding(fat=12_345.0), tuned=True)
SECOND = Record(Decoding(few=0, tile=1 << 20), Encoding(fat=54_321.0, start_gram=1e5), tuned=True)


def trains_with_a_file(folder, mode, fused):
    """Train with a file of this site's own; return constants, the first difference and the weights."""
    import os

    import torch.distributed as dist

    rank = dist.get_rank()
    os.environ["DADPLUG_TUNING"] = f"{folder}/{rank}"
    schedules.forget()
    try:
        schedules.save([FIRST, SECOND][rank], Machine.this())
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(48, 40), nn.ReLU(), nn.Linear(40, 24))
        reduction = dadplug.GradientReduction(model, mode=mode, rank=3, dense="allreduce")
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 48, generator=generator)).square().mean().backward()
            if fused:
                reduction.apply(optimizer)
            else:
                reduction.synchronize()
                optimizer.step()
        used = reduction._planner._reducer._context.decoding
        own = schedules.current()
        difference = reduction.first_difference()
        reduction.detach()
        weights = [each.detach().clone() for each in model.parameters()]
        return dataclasses.asdict(used), own == [FIRST, SECOND][rank], difference, weights
    finally:
        schedules.forget()


def trains_in_all_ways(folder):
    ways = [("rankdad", False), ("rankdad", True), ("dad", False), ("auto", False)]
    return [trains_with_a_file(folder, *way) for way in ways]


def test_replicas_are_equal_where_files_differ(sites, tmp_path):
    first, second = sites(2).run(trains_in_all_ways, str(tmp_path))
    for (used, own, difference, weights), (used2, own2, difference2, weights2) in zip(first, second, strict=True):
        assert used == used2 == FIRST.decoding.values()
        assert own
        assert own2
        assert difference is None
        assert difference2 is None
        assert all(map(torch.equal, weights, weights2))
