"""Methods by the names that the benchmarks give them: a mode with options, or a peer (DDP and its hooks).

rankdad                                    a mode, at the benchmark's rank
rankdad:wire=bf16+error_feedback=true      with options of GradientReduction
dad:fused=true                             whose optimizer steps are those of `reduction.apply`
ddp, ddp-fp16, ddp-bf16, ddp-powersgd      DistributedDataParallel, alone and with torch's own hooks
alone                                      no other site
ddp:library=onednn                         linear layers by another library than MKL, see benchmarks/libraries.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from libraries import use_library
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import dadplug

PEERS = ("ddp", "ddp-fp16", "ddp-bf16", "ddp-powersgd")
SLOW = ("ddp", "ddp-fp16", "ddp-bf16", "dsgd")
"""Those that send whole gradients."""


def parse(name: str) -> tuple[str, dict[str, Any]]:
    """Take a method's name apart: the mode or peer, and its options."""
    method, _, settings = name.partition(":")
    pairs = (setting.split("=", 1) for setting in settings.split("+") if setting)
    return method, {key: _value(text) for key, text in pairs}


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


class Attached:
    """A model in training by a method.

    Args:
        model: the model.
        name: the method's name.
        rank: rank of the methods that have one.

    Attributes:
        model: what to call in training.
        reduction: the reduction of a mode; None for peers.
    """

    def __init__(self, model: nn.Module, name: str, rank: int = 4, **options: Any) -> None:
        method, own = parse(name)
        self.model, self.reduction = model, None
        self._fused = own.pop("fused", False)
        use_library(method, own.pop("library", options.pop("library", "mkl")))
        if method in PEERS:
            self.model = _ddp(model, method, rank)
        elif method != "alone":
            self.reduction = dadplug.GradientReduction(model, mode=method, **{"rank": rank} | options | own)

    def synchronize(self) -> None:
        """Wait until the gradients are agreed."""
        if self.reduction is not None:
            self.reduction.synchronize()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait until the gradients are agreed, and take the optimizer's step."""
        if self.reduction is not None and self._fused:
            self.reduction.apply(optimizer)
        else:
            self.synchronize()
            optimizer.step()

    def detach(self) -> None:
        """Take the method off the model."""
        if self.reduction is not None:
            self.reduction.detach()


def _ddp(model: nn.Module, method: str, rank: int) -> nn.Module:
    # PowerSGD's hook aborts with more than one bucket on gloo, so that it gets a single one.
    trained = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1000 if method == "ddp-powersgd" else 25)
    if method == "ddp-fp16":
        trained.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    elif method == "ddp-bf16":
        trained.register_comm_hook(dist.group.WORLD, _compress_to_bf16)
    elif method == "ddp-powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        trained.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return trained


def _compress_to_bf16(group, bucket):
    """Do what torch's `bf16_compress_hook` does, which refuses to be registered without CUDA, by its name.

    Without annotations, since torch compares them with types, and here they are strings.
    """
    return default_hooks._compress_hook(torch.bfloat16, group, bucket)
