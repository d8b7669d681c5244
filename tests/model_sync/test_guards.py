"""Checks of a model before anything is sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dadplug
from dadplug.hogwild.layout import check_model as check_hogwild_model


def _raised(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError, match="torch's") as caught:
        call()
    return str(caught.value)


def _fully_sharded() -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Linear(4, 3)
    model.__class__ = type("Sharded", (FullyShardedDataParallel,), {"__init__": nn.Module.__init__})
    return model


def _fully_sharded_in_place() -> nn.Module:
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        from torch.distributed._composable.fsdp import FSDPModule

    model = nn.Linear(4, 3)
    model.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})  # as `fully_shard` does it
    return model


def refuses_wrapped() -> list[str]:
    ddp = nn.parallel.DistributedDataParallel
    models = [ddp(nn.Linear(4, 3)), torch.compile(ddp(nn.Linear(4, 3))), nn.Sequential(nn.ReLU(), ddp(nn.Linear(4, 3)))]
    messages = [_raised(lambda model=model: dadplug.GradientReduction(model)) for model in models]
    model = models[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    others: list[Callable[[], object]] = [
        lambda: dadplug.LocalSGD(model, optimizer),
        lambda: dadplug.ParameterServer(model, optimizer),
        lambda: check_hogwild_model(model, [optimizer]),
    ]
    dadplug.GradientReduction(model.module).detach()  # the remedy
    return messages + [_raised(call) for call in others]


def test_a_model_in_ddp_is_refused_by_every_entry(sites):
    whole, compiled, part, *others = sites(2).run(refuses_wrapped)[0]
    assert "the model is wrapped in torch's DistributedDataParallel" in whole
    assert "(model.module)" in whole
    assert "wrapped in torch's DistributedDataParallel" in compiled
    assert "layer '1' is wrapped" in part
    assert "(model.1.module)" in part
    assert all(message == whole for message in others)


def test_a_model_in_fsdp_is_refused():
    assert "wrapped in torch's FullyShardedDataParallel" in _raised(lambda: dadplug.GradientReduction(_fully_sharded()))
    assert "fully_shard" in _raised(lambda: dadplug.GradientReduction(_fully_sharded_in_place()))


class _Reordered(nn.Module):
    """Two layers of one shape, defined in one order or the other."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(3, 3))


def refuses_another_order() -> str:
    with pytest.raises(dadplug.MismatchError) as caught:
        dadplug.GradientReduction(_Reordered("ba" if dist.get_rank() else "ab"))
    return str(caught.value)


def test_layers_in_another_order_are_told(sites):
    for message in sites(2).run(refuses_another_order):
        assert "has tensor a.weight, site 1" in message
        assert "has tensor b.weight. Define layers" in message
