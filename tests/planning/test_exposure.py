"""Exposure in plans: the class that the rule gives to each parameter's messages."""

import pytest
import torch
from torch import nn

from dadplug import GradientReduction
from dadplug.step.planning.plan import AGGREGATED, PRIVATE, RAW, RECOVERABLE, exposure


@pytest.mark.parametrize(
    ("path", "shape", "change", "expected"),
    [
        ("factors", (8, 6), {"fed_by_data": True}, RAW),
        ("activations", (8, 6), {"fed_by_data": True}, RAW),
        ("factors", (8, 6), {}, RECOVERABLE),
        ("lowrank", (80, 60), {"rows": 16, "sent": 16, "fed_by_data": True}, RECOVERABLE),
        ("lowrank", (80, 60), {"rows": 17, "sent": 16, "fed_by_data": True}, AGGREGATED),
        ("powersgd", (80, 60), {"rows": 4, "sent": 4}, RECOVERABLE),
        ("allreduce", (80, 60), {"rows": 60}, RECOVERABLE),
        ("allreduce", (80, 60), {"rows": 61}, AGGREGATED),
        ("allreduce", (80, 3, 5, 4), {"rows": 60}, RECOVERABLE),
        ("allreduce", (80,), {}, AGGREGATED),
        ("topk", (80, 60), {"rows": 16}, RECOVERABLE),
        ("factors", (8, 6), {"fed_by_data": True, "private": True}, PRIVATE),
        ("frozen", (8, 6), {}, ""),
    ],
)
def test_rule(path, shape, change, expected):
    given = {"fed_by_data": False, "rows": 1, "sent": None, "private": False} | change
    assert exposure(path, shape, **given) == expected


def _classes(mode, rows, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 20))
    reduction = GradientReduction(model, mode=mode, **options)
    model(torch.randn(rows, 20)).square().mean().backward()
    reduction.synchronize()
    plan = reduction.plan
    assert all(row.exposure in str(plan) for row in plan)
    reduction.detach(discard=True)
    return [row.exposure for row in plan if len(row.shape) == 2]


def test_a_plan_shows_the_class_of_each_layer():
    assert _classes("dad", 8) == [RAW, RECOVERABLE]
    assert _classes("rankdad", 8, rank=8) == [RECOVERABLE, RECOVERABLE]
    assert _classes("rankdad", 8, rank=4) == [AGGREGATED, AGGREGATED]
    assert _classes("dsgd", 8) == [RECOVERABLE, RECOVERABLE]
    assert _classes("dsgd", 64) == [AGGREGATED, AGGREGATED]
    assert _classes("powersgd", 8, rank=4) == [AGGREGATED, AGGREGATED]


def test_tables_show_row_numbers():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(24, 2))
    reduction = GradientReduction(model, mode="rankdad", rank=1)
    model(torch.randint(0, 50, (4, 3))).square().mean().backward()
    reduction.synchronize()
    assert next(iter(reduction.plan)).exposure == RAW
    reduction.detach(discard=True)
