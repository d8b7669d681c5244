"""Checks of a model before anything is sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import dadplug
from dadplug.hogwild.layout import check_model as check_hogwild_model
from dadplug.model_sync.structure import refuse_wrapped


def _raised(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError, match="torch's") as caught:
        call()
    return str(caught.value)


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


def refuses_sharded() -> tuple[str, str]:
    wrapped = fsdp.FullyShardedDataParallel(nn.Linear(4, 3), device_id=torch.device("cpu"))
    in_place = fsdp.fully_shard(nn.Linear(4, 3), mesh=init_device_mesh("cpu", (2,)))
    return _raised(lambda: dadplug.GradientReduction(wrapped)), _raised(lambda: dadplug.GradientReduction(in_place))


def test_a_model_in_fsdp_is_refused(sites):
    for wrapped, in_place in sites(2).run(refuses_sharded):
        assert "wrapped in torch's FullyShardedDataParallel" in wrapped
        assert "is sharded by torch's fully_shard" in in_place


def test_a_class_with_the_name_of_a_wrapper_is_not_one():
    refuse_wrapped(type("DistributedDataParallel", (nn.Module,), {})())


def refuses_another_order(of: str) -> str:
    """Build a model whose layers, or parameters, are defined in another order at site 1."""
    model, names = nn.Module(), ["a", "b"]
    for name in names[::-1] if dist.get_rank() else names:
        if of == "layers":
            model.add_module(name, nn.Linear(3, 3))
        else:
            model.register_parameter(name, nn.Parameter(torch.ones(3)))
    with pytest.raises(dadplug.MismatchError) as caught:
        dadplug.GradientReduction(model)
    return str(caught.value)


@pytest.mark.parametrize(("of", "first", "second"), [("layers", "a.weight", "b.weight"), ("parameters", "a", "b")])
def test_another_order_is_told(sites, of, first, second):
    for message in sites(2).run(refuses_another_order, of):
        assert f"has tensor {first}, site 1" in message
        assert f"has tensor {second}. Define layers" in message
