"""Ways of training for benchmarks/local_steps.py: dadplug's, and peers written as their users would.

ddp, ddp-powersgd, rankdad:wire=bf16              as benchmarks/attach.py has them
localsgd:every=32+rank=32+wire=bf16               dadplug's local steps, with options of LocalSGD
mean:every=64                                     a peer: local SGD, the mean of parameters every 64 steps, fp32
diloco:every=32                                   a peer: DiLoCo, deltas in bf16, outer Nesterov momentum (0.7, 0.9)
mean:every=64+average=160, ddp:average=160        with any way: evaluations of torch's running average of the model,
                                                  over about 160 steps, updated after agreements
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from attach import Attached, parse
from libraries import use_library
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dadplug

UPDATED = 16
"""Steps between two updates of the running average of ways that agree in every step."""


class Way:
    """A model in training by a way.

    Args:
        model: the model.
        name: the way's name.
        rank: rank of the methods of gradients that have one.
        optimizer: the optimizer; by default Adam.

    Attributes:
        model: what to call in training.
        evaluated: what to call in evaluations.
        every: steps between two agreements.
    """

    def __init__(self, model: nn.Module, name: str, rank: int, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.optimizer = optimizer or torch.optim.Adam(model.parameters(), 1e-3)
        method, options = parse(name)
        use_library(method, options.get("library", "mkl"))
        self.every = options.get("every", 1)
        self._updated = UPDATED if self.every == 1 else self.every
        self._steps = 0
        self._averaged = None
        if window := options.pop("average", None):
            update = get_ema_multi_avg_fn(max(0.0, 1 - self._updated / window))
            self._averaged = AveragedModel(model, multi_avg_fn=update, use_buffers=True)
        self.evaluated = self._averaged or model
        self._sent = ALL_REDUCED.get(method, 0) * sum(each.numel() for each in model.parameters())
        self._local = self._peer = self._attached = None
        self.model = self._plain = model
        if method == "localsgd":
            options.pop("library", None)
            self._local = dadplug.LocalSGD(model, self.optimizer, **options)
        elif method in PEERS:
            self._peer = PEERS[method](model)
        else:
            self._attached = Attached(model, method, **({"rank": rank} | options))
            self.model = self._attached.model

    def step(self) -> None:
        """Take a step after backward."""
        self._steps += 1
        if self._local is not None:
            self._local.step()
        else:
            if self._attached is not None:
                self._attached.synchronize()
            self.optimizer.step()
        if self._peer is not None and self._steps % self.every == 0:
            self._peer.agree()
        if self._averaged is not None and self._steps % self._updated == 0:
            self._averaged.update_parameters(self._plain)

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a block in which the model that is evaluated is the sites' common one."""
        return nullcontext() if self._local is None or self._averaged is not None else self._local.agreed()

    def finish(self) -> None:
        """Let all steps that have been taken be part of the common model."""
        if self._local is not None:
            self._local.finish()

    def megabytes_sent(self) -> float | None:
        """Megabytes of payload that this site has sent, of peers what a ring sends; None where it is not counted."""
        counted = self._local or (self._attached and self._attached.reduction)
        if counted:
            return counted.traffic.bytes_in_steps / 1e6
        sites, rounds = dist.get_world_size(), self._steps // self.every
        return self._sent * rounds * 2 * (sites - 1) / sites / 1e6 or None

    def detach(self) -> None:
        """Remove the way from the model."""
        if self._local is not None:
            self._local.detach()
        if self._attached is not None:
            self._attached.detach()


class MeanOfParameters:
    """Local SGD: all parameters and running statistics are replaced by their mean, in fp32."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @torch.no_grad()
    def agree(self) -> None:
        average([parameter.data for parameter in self._model.parameters()], torch.float32)
        average(statistics_of(self._model), torch.float32)


class DiLoCo:
    """DiLoCo as published: SGD with Nesterov momentum on the mean delta, which travels in bf16."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._agreed = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
        self._outer = torch.optim.SGD(self._agreed, lr=0.7, momentum=0.9, nesterov=True)

    @torch.no_grad()
    def agree(self) -> None:
        deltas = [agreed - own for agreed, own in zip(self._agreed, self._model.parameters(), strict=True)]
        average(deltas, torch.bfloat16)
        for agreed, delta in zip(self._agreed, deltas, strict=True):
            agreed.grad = delta
        self._outer.step()
        for agreed, own in zip(self._agreed, self._model.parameters(), strict=True):
            own.copy_(agreed)
        average(statistics_of(self._model), torch.float32)


PEERS = {"mean": MeanOfParameters, "diloco": DiLoCo}
ALL_REDUCED = {"ddp": 4, "ddp-fp16": 2, "mean": 4, "diloco": 2}
"""Bytes of each parameter in an agreement."""


def statistics_of(model: nn.Module) -> list[Tensor]:
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def average(tensors: list[Tensor], dtype: torch.dtype) -> None:
    """Replace tensors by their mean over sites, in one all-reduce of a number format; there may be none."""
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(dtype)
    dist.all_reduce(flat)
    parts = (flat.float() / dist.get_world_size()).split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
