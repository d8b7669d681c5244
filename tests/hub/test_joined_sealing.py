"""Processes that train over a hub of a third party with sealed messages, from `dadplug.connect(kit=...)` on."""

from __future__ import annotations

import numpy as np
import support
import torch
import torch.distributed as dist
from running_hub import running_hub
from sealed_sites import SITES, make_kits
from torch import nn

import dadplug
from dadplug.adapm import ParameterManager
from dadplug.hub.frames import Kind
from dadplug.hub.relay import Relay

MODES = ("dad", "dsgd", "rankdad")  # factors, sums, and compressed factors
PATIENT = np.random.default_rng(0).standard_normal(64).astype(np.float32)
SENTINEL = PATIENT[8:24].tobytes()


def train(mode: str) -> tuple[list[torch.Tensor], float]:
    """Train on batches of which every one holds the patient's values; return the parameters and a metric."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 4))
    reduction = dadplug.GradientReduction(model, mode=mode, timeout=200.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        inputs = torch.randn(6, 64, generator=generator)
        inputs[0] = torch.from_numpy(PATIENT)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), torch.arange(6) % 4).backward()
        reduction.synchronize()
        optimizer.step()
    assert reduction.first_difference() is None
    metric = torch.from_numpy(PATIENT.copy()) * (rank + 1)
    dist.all_reduce(metric)
    torch.testing.assert_close(metric, torch.from_numpy(PATIENT) * 6)
    records: list = [None] * 3
    dist.all_gather_object(records, SENTINEL)
    assert records == [SENTINEL] * 3
    return [parameter.detach().clone() for parameter in model.parameters()], float(metric.sum())


def manage() -> float:
    """Push the patient's values to tables of the parameter manager."""
    rows = torch.from_numpy(PATIENT).repeat(50, 1)
    with ParameterManager(timeout=200) as manager:
        table = manager.table("values", 64, rows=50)
        table.push(torch.arange(50), rows)
        manager.wait_sync(everywhere=True)
        found = table.pull(torch.arange(50))
    torch.testing.assert_close(found, 3 * rows)
    return float(found.sum())


def test_a_hub_of_a_third_party_passes_on_what_it_cannot_read(tmp_path, monkeypatch):
    """The same training without sealing shows that the hub would find the sentinel in all kinds of messages."""
    seen: list = []
    take = Relay.take

    def take_and_read(relay, session, frame, now):
        seen.append((session.channel, frame.head.kind, bytes(frame.body)))
        take(relay, session, frame, now)

    monkeypatch.setattr(Relay, "take", take_and_read)
    results, found = {}, {}
    for sealed in (True, False):
        kits = make_kits(tmp_path / str(sealed), sealed=sealed)
        with running_hub(kits, SITES), support.Sites(3, kits=[kits / name for name in SITES]) as group:
            results[sealed] = [group.run(train, mode) for mode in MODES] + [group.run(manage)]
        found[sealed] = {(channel, kind) for channel, kind, body in seen if SENTINEL in body}
        kinds = {kind for _, kind, _ in seen}
        assert (Kind.SUMMAND in kinds) is not sealed
        assert sum(len(body) for channel, _, body in seen if channel == "training") > 1_000_000
        seen.clear()
    assert found[True] == set()
    assert found[False] == {("training", Kind.PAYLOAD), ("parameters", Kind.MESSAGE)}
    for of_sealed, of_plain in zip(results[True][:-1], results[False][:-1], strict=True):
        for (parameters, metric), (others, other) in zip(of_sealed, of_plain, strict=True):
            assert all(map(torch.equal, parameters, others))
            assert metric == other
    assert results[True][-1] == results[False][-1]
