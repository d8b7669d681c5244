"""Model in the place of one that torch's DistributedDataParallel wraps, whose optimizer takes local steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Joinable

from ..ddp import DistributedDataParallel
from ..step.model_sync.private import load_shared_state, shared_state
from ..step.model_sync.replicated_model import Stateful
from .local_sgd import LocalSGD
from .options import LocalOptions


class LocalModel(DistributedDataParallel):
    """A model whose optimizer takes local steps, for libraries that wrap the models that they train.

    Args:
        module: the model, on its device.
        optimizer: the optimizer of the model; each of its steps is a local step.
        state: as in `LocalSGD`.
        in_trainer: as in `LocalSGD`.
        options: the other options, see `LocalOptions`.

    Attributes:
        module: the model.

    Raises:
        ValueError: as in `LocalSGD`, or for synchronous steps first.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        state: Mapping[str, Stateful] | None = None,
        in_trainer: bool = False,
        **options: Any,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        own = LocalOptions.create(**options)
        if own.warm_up:
            raise ValueError(
                f"warm_up={own.warm_up}: synchronous steps need their gradients before they are clipped. Leave warm_up "
                "out, or use LocalSGDStrategy or LocalSGDRunner"
            )
        self.module = module
        self.require_backward_grad_sync = True
        self.broadcast_buffers = False
        self.device = next(module.parameters()).device
        local = LocalSGD(module, optimizer, state=state, in_trainer=in_trainer, **vars(own))
        local.follow_optimizer()
        object.__setattr__(self, "_reduction", local)  # which holds the model, and is none of its modules

    @property
    def reduction(self) -> Any:
        """The `LocalSGD`, with traffic and agreements."""
        return self._reduction

    @property
    def steps(self) -> int:
        steps: int = self.reduction.steps
        return steps

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients; nothing is sent anyway."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextmanager
    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Iterator[None]:
        """Let sites have different numbers of batches inside a ``with`` block, after which their models are equal."""
        yield
        if enable:
            self.reduction.finish()

    def make_equal(self) -> None:
        """Agree on one model, before an evaluation, a checkpoint, and at the end; all sites must call it."""
        self.reduction.finish()

    def site_state(self) -> dict[str, Any]:
        return {"local": self.reduction.state_dict(), "optimizer": shared_state(self.reduction.optimizer)}

    def load_site_state(self, state: Mapping[str, Any]) -> None:
        load_shared_state(self.reduction.optimizer, state["optimizer"])
        self.reduction.load_state_dict(state["local"])

    def load_site_states(self, states: Sequence[Mapping[str, Any] | None]) -> None:
        rank = self.reduction.site_rank
        own = states[rank] if rank < len(states) else None
        if own is not None:
            load_shared_state(self.reduction.optimizer, own["optimizer"])
        self.reduction.load_states([state and state["local"] for state in states])

    def __getstate__(self) -> dict[str, Any]:
        raise RuntimeError("a model with local steps cannot be copied or pickled: copy its module")
