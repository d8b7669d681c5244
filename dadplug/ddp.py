"""Drop-in replacement for `torch.nn.parallel.DistributedDataParallel` whose gradients are agreed on by a dadplug mode.

It is a subclass, since trainers ask by ``isinstance`` whether a model is wrapped; nothing of torch's reducer is used.
`DistributedDataParallel.reduction` does the work. A backward pass through the outputs of a forward pass queues the
synchronization at its end, so that gradients are final when ``backward()`` returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._pytree import tree_leaves

from .model_sync import sameness
from .model_sync.replicated_model import Stateful
from .options import Options
from .reduction import GradientReduction
from .signature import takes_keywords_of

_WITHOUT_EFFECT = (
    "bucket_cap_mb",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "check_reduction",
)
"""Arguments of torch's class that are accepted, since scripts pass them, and that there is no need for here."""


class DistributedDataParallel(TorchDDP):
    """A model whose gradients are the same on all sites when ``backward()`` returns, as with torch's class.

    Parameters that a step does not use, several forward passes before a backward pass, and checkpointed activations
    need no argument. Inside `no_sync` gradients are accumulated.

    Args:
        module: the model, on its device.
        mode: name of a method, as in `dadplug.GradientReduction`.
        device_ids: None, or a list of the one device that the model is on.
        broadcast_buffers: whether rank 0's buffers replace those of other sites before each forward pass in training
            after which gradients are synchronized.
        process_group: the processes that are the sites; the default group where None.
        state: as in `dadplug.GradientReduction`, for sites that join in mid-training.
        options: the other options, see `dadplug.options.Options`. ``bucket_cap_mb``, ``find_unused_parameters``,
            ``gradient_as_bucket_view``, ``static_graph`` and ``check_reduction`` of torch's class have no effect.

    Attributes:
        module: the model.
        reduction: the `dadplug.GradientReduction`, with plan, traffic and quality.

    Raises:
        RuntimeError: if no parameter of the model needs gradients.
        ValueError: if an option is not valid, or the model is wrapped already.

    Example:
        >>> model = dadplug.DistributedDataParallel(model, mode="rankdad")
        >>> for inputs, targets in loader:
        ...     optimizer.zero_grad()
        ...     criterion(model(inputs), targets).backward()
        ...     optimizer.step()
    """

    reduction: GradientReduction

    @takes_keywords_of(Options)
    def __init__(
        self,
        module: nn.Module,
        mode: str = "rankdad",
        *,
        device_ids: list[int | torch.device] | None = None,
        broadcast_buffers: bool = True,
        process_group: dist.ProcessGroup | None = None,
        state: Mapping[str, Stateful] | None = None,
        **options: Any,
    ) -> None:
        nn.Module.__init__(self)  # not torch's DDP, whose constructor starts its own reducer
        options = {name: value for name, value in options.items() if name not in _WITHOUT_EFFECT}
        parameter = next((each for each in module.parameters() if each.requires_grad), None)
        if parameter is None:
            raise RuntimeError("DistributedDataParallel needs a model with a parameter that requires gradients")
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError(f"device_ids may have one device, that of the model, got {device_ids}")
        reduction = GradientReduction(module, mode, process_group=process_group, state=state, **options)
        self.module = module
        object.__setattr__(self, "reduction", reduction)  # which holds the model, and is none of its modules
        self.device, self.device_ids, self.output_device, self.dim = parameter.device, None, None, 0
        own = process_group or (dist.group.WORLD if dist.is_initialized() else None)
        self.process_group = own  # type: ignore[assignment]
        self.broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = True
        self.find_unused_parameters = self.static_graph = self.gradient_as_bucket_view = False
        self.mixed_precision = None
        self._queued = -1  # the backward pass at whose end gradients are synchronized
        self._steps = 0  # that this site had data for

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model. A backward pass through what it returns ends by a synchronization, unless in `no_sync`."""
        synchronizes = self.require_backward_grad_sync and torch.is_grad_enabled() and self.training
        options = self.reduction.options
        if synchronizes and self.broadcast_buffers and not options.sync_batchnorm and options.min_sites is None:
            self.reduction.broadcast_buffers()  # not where rank 0 may be absent
        outputs = self.module(*inputs, **kwargs)
        if self.require_backward_grad_sync and torch.is_grad_enabled():
            for leaf in tree_leaves(outputs):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._queue)
        return outputs

    def _queue(self, _: Tensor) -> None:
        """Synchronize at the end of the backward pass that is running, once."""
        now = torch._C._current_graph_task_id()
        if now != self._queued:
            self._queued = now
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._queued = -1
        self._steps += 1
        self.reduction.synchronize()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in ``.grad``: the next backward pass outside of the block synchronizes all of them."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            with self.reduction.no_sync():
                yield
        finally:
            self.require_backward_grad_sync = before

    @contextmanager
    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Iterator[None]:
        """Let sites have different numbers of batches inside a ``with`` block.

        A site that leaves the block takes part in the others' steps without data, and gets the parameters and buffers
        of the site that was the last at the end.

        Args:
            divide_by_initial_world_size: without effect: sites count by their samples, or as ``weighting`` says.
            enable: False for sites that are known to have equally many batches.
            throw_on_early_termination: not supported.

        Raises:
            ValueError: if `throw_on_early_termination` is set.
        """
        if throw_on_early_termination:
            raise ValueError("throw_on_early_termination is not supported: sites wait for each other at the end")
        begun = self._steps
        yield
        if not enable:
            return
        reduction = self.reduction
        reduction.join_without_steps()
        steps = reduction.gather_objects(self._steps - begun)
        if min(steps) < max(steps):
            last = steps.index(max(steps))
            own = sameness.tensors_of(self.module) if reduction.site_rank == last else None
            sameness.load_tensors(self.module, reduction.gather_objects(own)[last])

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Raise an error: the mode decides what is sent.

        Args:
            state: state of the hook.
            hook: the hook.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "there is no communication hook here: choose what is sent by mode= and wire=, as in mode='powersgd'"
        )

    def train(self, mode: bool = True) -> DistributedDataParallel:
        nn.Module.train(self, mode)
        return self

    def __getstate__(self) -> Any:
        raise TypeError("a DistributedDataParallel cannot be copied or pickled: use its module, or its state_dict()")

    def __setstate__(self, state: Any) -> None:
        raise TypeError("a DistributedDataParallel cannot be copied or pickled")
