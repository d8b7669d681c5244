"""Drop-in replacement for `torch.nn.parallel.DistributedDataParallel` whose gradients are agreed on by a dadplug mode.

It is a subclass, since trainers ask by ``isinstance`` whether a model is wrapped; nothing of torch's reducer is used.
`DistributedDataParallel.reduction` does the work. A backward pass that follows a forward pass queues the
synchronization at its end, so that gradients are final when ``backward()`` returns.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

from .exchange.restrictions import METRICS, declared
from .hooks import eager
from .options import Options
from .reduction import GradientReduction
from .step.model_sync import sameness
from .step.model_sync.private import is_private
from .step.model_sync.replicated_model import Stateful
from .step.model_sync.structure import is_managed, mark_managed, weak_hook
from .support.refusals import refuse
from .support.signature import takes_keywords_of

_WITHOUT_EFFECT = (
    "dim",
    "bucket_cap_mb",
    "bucket_cap_mb_list",
    "batched_grad_copy",
    "check_reduction",
    "delay_all_reduce_named_params",
    "param_to_hook_all_reduce",
    "skip_all_reduce_unused_params",
)
"""Arguments of torch's class that change its speed or memory, and not its results; scripts pass them."""


class DistributedDataParallel(TorchDDP):
    """A model whose gradients are the same on all sites when ``backward()`` returns, as with torch's class.

    Parameters that a step does not use, several forward passes before a backward pass, backward passes inside of
    forward, and checkpointed activations need no argument. Inside `no_sync` gradients are accumulated.

    A copy (``copy.deepcopy``) and an unpickled model are wrapped, too. They begin to exchange gradients, by a reduction
    of their own, in the first forward pass whose gradients are to be synchronized. Before, they exchange nothing, so
    that a moving average of the model may be evaluated at one site alone.

    Args:
        module: the model, on its device.
        arguments: the name of a method, or further arguments of torch's class by position, from ``device_ids`` on.
        mode: name of a method, as in `dadplug.GradientReduction`.
        device_ids: None, or a list of the GPU that the model is on; inputs are then moved to it.
        output_device: None, or the same GPU.
        broadcast_buffers: whether all sites get the buffers of rank 0 at the start and before each forward pass in
            training after which gradients are synchronized; with ``min_sites`` only at the start.
        forward_sync_buffers: False to get rank 0's buffers only at the start.
        init_sync: True: sites start from the parameters of rank 0.
        process_group: the processes that are the sites; the default group where None.
        device_mesh: the same as a mesh of one dimension.
        find_unused_parameters: without effect.
        gradient_as_bucket_view: without effect.
        static_graph: without effect.
        mixed_precision: None: use `torch.autocast` and ``wire``.
        state: as in `dadplug.GradientReduction`, for sites that join in mid-training.
        keywords: the other options, see `dadplug.options.Options`. ``check_finite`` is False if it is left out: NaN and
            Inf arrive in ``.grad`` at all sites, as with torch's class, where a GradScaler looks for them. Further
            arguments of torch's class have no effect.

    Attributes:
        module: the model.

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

    _reduction: GradientReduction | None
    device: torch.device

    @takes_keywords_of(Options)
    def _wrap(
        self,
        module: nn.Module,
        *,
        mode: str = "rankdad",
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        broadcast_buffers: bool | None = True,
        forward_sync_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device_mesh: Any = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        mixed_precision: None = None,
        state: Mapping[str, Stateful] | None = None,
        **options: Any,
    ) -> None:
        """Wrap a model; the arguments are those of the class."""
        refuse(
            (not init_sync, "init_sync=False: sites start from equal parameters, those of rank 0. Leave it out"),
            (
                mixed_precision is not None,
                "mixed_precision: compute under torch.autocast, and send with wire='bf16', in place of it",
            ),
            (
                isinstance(module, DistributedDataParallel),
                "the model is wrapped in DistributedDataParallel already: use it as it is",
            ),
        )
        if not any(each.requires_grad for each in module.parameters()):
            raise RuntimeError("DistributedDataParallel needs a model with a parameter that requires gradients")
        self.module, self.dim = module, 0
        self.device, self.device_ids = _place(module, device_ids, output_device)
        self.device_type, self.output_device = self.device.type, self.device_ids[0] if self.device_ids else None
        if device_mesh is not None:
            if process_group is not None:  # in torch's words
                raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
            if device_mesh.ndim != 1:
                raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
            process_group = device_mesh.get_group()
        self.device_mesh = device_mesh
        self.process_group = process_group or _default_group()
        each_step = broadcast_buffers is not False if forward_sync_buffers is None else forward_sync_buffers
        self.broadcast_buffers = each_step
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.gradient_as_bucket_view, self.mixed_precision = gradient_as_bucket_view, None
        if "synchronize" in options:
            raise Options.unknown("synchronize")
        kept = {name: value for name, value in options.items() if name not in _WITHOUT_EFFECT}
        self._options: dict[str, Any] = {"mode": mode, "check_finite": False} | kept
        self._clear()
        own = [] if each_step or forward_sync_buffers is not None else [name for name, _ in module.named_buffers()]
        self._build(state, own)

    @takes_keywords_of(_wrap)
    def __init__(self, module: nn.Module, *arguments: Any, **keywords: Any) -> None:
        nn.Module.__init__(self)  # not torch's DDP, whose constructor starts its own reducer
        Joinable.__init__(self)
        self._wrap(module, **_named(arguments, keywords))

    def _clear(self) -> None:
        """Begin as one that has no reduction."""
        object.__setattr__(self, "_reduction", None)  # which holds the model, and is none of its modules
        self._joins = False  # in a block of `join`
        self._divides = False  # the sum by the initial number of sites, in such a block
        self._shares = False  # buffers, since the last step

    def _build(self, state: Mapping[str, Stateful] | None = None, own_buffers: Collection[str] = ()) -> None:
        """Build the reduction, with all sites.

        Args:
            state: objects of the program whose state a site needs to join.
            own_buffers: names of the buffers that each site starts with its own of.
        """
        ignored = self.parameters_to_ignore
        for name, parameter in self.module.named_parameters():
            if name in ignored:
                mark_managed(parameter, True)
        with _without(self.module, {*ignored, *own_buffers}):
            reduction = GradientReduction(
                self.module, process_group=self.process_group, state=state, synchronize="backward", **self._options
            )
        reduction.before_idle = weak_hook(self._before_idle)
        ends, this = reduction.backward_end, weakref.proxy(self)
        assert ends is not None
        ends.end, ends.wants = weak_hook(self._end_backward), lambda: this.require_backward_grad_sync
        ends.forward_decides, ends.expects = True, False  # until there is a forward pass
        object.__setattr__(self, "_reduction", reduction)

    @property
    def reduction(self) -> GradientReduction:
        """The reduction, with plan, traffic and quality. That of a copy is built at first use, with all sites."""
        if self._reduction is None:
            self._build()
        assert self._reduction is not None
        return self._reduction

    # Forward and backward

    @eager(nested=True)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model. A backward pass that follows ends with a synchronization, unless in `no_sync`."""
        transformed = torch._C._functorch.peek_interpreter_stack() is not None  # by torch.func: no pass of training
        synchronizes = self.require_backward_grad_sync and torch.is_grad_enabled() and not transformed
        if self._join_config.enable:
            self._notify(synchronizes)
        if self.device_ids:
            inputs, kwargs = tree_map(self._move, (inputs, kwargs))
        if synchronizes:
            if self._reduction is None and any(each.requires_grad for each in self.module.parameters()):
                self._build()
            self._check_module()
            joins = self._joins or self._join_config.enable  # where others take part without a forward pass
            if self._expect() and (self._shares if joins else self.training):
                self._share_buffers()
        return self.module(*inputs, **kwargs)

    def _expect(self) -> bool:
        """Let the next backward pass synchronize; return whether there is a reduction."""
        if self._reduction is not None and (ends := self._reduction.backward_end) is not None:
            ends.begin()
            ends.expects = True
        return self._reduction is not None

    def _before_idle(self) -> None:
        """Take part in what precedes the forward passes of the other sites."""
        if self.training and not (self._joins or self._join_config.enable):
            self._share_buffers()

    def _check_module(self) -> None:
        """Raise RuntimeError if another model, whose gradients are not averaged, is in the place of `module`."""
        model = None if self._reduction is None else self._reduction.model
        if model not in (None, self.module) and next(model.parameters()) is not next(self.module.parameters()):
            raise RuntimeError("another model is in the place of .module: wrap that one, after reduction.detach()")

    def _move(self, leaf: Any) -> Any:
        moves = isinstance(leaf, (Tensor, PackedSequence))
        return leaf.to(self.device, non_blocking=True) if moves else leaf

    def _end_backward(self) -> None:
        """Synchronize at the end of a backward pass."""
        reduction = self.reduction
        assert reduction.backward_end is not None
        reduction.backward_end.expects, self._shares = False, True
        reduction.end_backward()
        self._divide()

    def _divide(self) -> None:
        """Count sites that have left a block of `join` as sites with gradients of zero, if it says so."""
        reduction = self.reduction
        joins = self._divides and (self._joins or self._join_config.enable)
        if joins and reduction.options.weighting == "uniform" and reduction.contributors:
            share = len(reduction.contributors) / reduction.world_size
            for parameter in self.module.parameters() if share < 1.0 else ():
                if parameter.grad is not None and not (is_managed(parameter) or is_private(parameter)):
                    parameter.grad.mul_(share)

    def _share_buffers(self) -> None:
        """Replace the buffers of all sites by those of the first one that had data in the last step."""
        reduction, self._shares = self.reduction, False
        if not self.broadcast_buffers or reduction.options.sync_batchnorm or reduction.options.min_sites is not None:
            return  # with min_sites any site may be absent
        with _without(self.module, self.parameters_to_ignore):
            if 0 in (reduction.contributors or [0]):
                reduction.broadcast_buffers()
            else:  # rank 0 has no data any more, and its buffers are old
                sameness.take_over(reduction, reduction.contributors[0], sameness.dense_buffers(reduction.shared))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in ``.grad``: the next backward pass outside of the block synchronizes all of them."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            with nullcontext() if self._reduction is None else self._reduction.no_sync():
                yield
        finally:
            self.require_backward_grad_sync = before

    # Sites with different numbers of batches

    @contextmanager
    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Iterator[None]:
        """Let sites have different numbers of batches inside a ``with`` block.

        A site that leaves the block takes part in the others' steps without data, and gets the parameters and buffers
        of the site that was the last at the end. `torch.distributed.algorithms.join.Join` works, too; it costs two
        small exchanges for each forward pass.

        Args:
            divide_by_initial_world_size: whether gradients are divided by the number of all sites, so that those
                without batches count as zeros; otherwise by the number of sites that have batches. Without effect with
                ``weighting="samples"``, where sites count by their samples.
            enable: False for sites that are known to have equally many batches.
            throw_on_early_termination: not supported.

        Raises:
            ValueError: if `throw_on_early_termination` is set.
        """
        if throw_on_early_termination:
            raise ValueError("throw_on_early_termination is not supported: sites wait for each other at the end")
        reduction, self._joins, self._divides = self.reduction, enable, divide_by_initial_world_size
        begun = reduction.step
        try:
            yield
            ended = reduction.step - begun
            while enable and self._step_without_data():
                pass
        finally:
            self._joins = False
        steps = reduction.gather_objects(ended, int, "number of steps") if enable else [0]
        if min(steps) < max(steps):
            sameness.take_over(reduction, steps.index(max(steps)), sameness.tensors_of(reduction.shared))

    def _step_without_data(self) -> list[int]:
        """Take part in a step of sites that have batches; return their ranks."""
        reduction = self.reduction
        with reduction.without_comparison():
            if reduction.contributors:
                self._share_buffers()
            self.module.zero_grad()
            reduction.idle()
            self._divide()
        self._shares = bool(reduction.contributors)
        return reduction.contributors

    def _notify(self, synchronizes: bool) -> bool:
        """Inform the sites that have left a block of `Join` of a forward pass; return whether a step follows it."""
        if work := Join.notify_join_context(self):
            work.wait()
        return self._any_synchronizes(synchronizes)

    def _any_synchronizes(self, own: bool) -> bool:
        flag = torch.tensor([float(own)], device=self.device)
        with declared(METRICS):
            dist.all_reduce(flag, group=self.process_group)
        return bool(flag.item())

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what `torch.distributed.algorithms.join.Join` calls at sites that have no batches left.

        Args:
            kwargs: ``divide_by_initial_world_size``, as in `join`.
        """
        self._divides = kwargs.get("divide_by_initial_world_size", True)
        return _Hook(self)

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> Any:
        return self.process_group

    # What the Accelerator calls

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return self.reduction.step

    def make_equal(self) -> None:
        """Make what may differ between the sites' models equal, before an evaluation or a checkpoint: nothing."""

    def site_state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of this site, besides the model."""
        return self.reduction.state_dict()

    def load_site_state(self, state: dict[str, Any]) -> None:
        """Restore what `site_state` has returned."""
        self.reduction.load_state_dict(state)

    def load_site_states(self, states: Sequence[dict[str, Any] | None]) -> None:
        """Restore this site's state from those of all sites, by rank, as a checkpoint of other sites holds them."""
        self.reduction.load_states(states)

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not _default_group():
            raise RuntimeError("a copy needs the default process group, and this model has another: copy its module")
        left_out = ("process_group", "_reduction", "device_mesh")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        self.process_group, self.device_mesh = _default_group(), None
        self._clear()

    # What trainers call besides

    @property
    def reducer(self) -> _Reducer:  # type: ignore[override]
        """Reducer to which trainers announce a backward pass without a forward pass of its own."""
        return _Reducer(self)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}

    def _set_static_graph(self) -> None:
        self.static_graph = True

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

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self.register_comm_hook(None, comm_hook_type)

    def _register_buffer_comm_hook(self, state: Any, hook: Any, comm_hook_location: Any = None) -> None:
        self.register_comm_hook(state, hook)

    def _register_fused_optim(self, optim: Any, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        raise RuntimeError("there is no fused optimizer here: use reduction.apply(optimizer) of a GradientReduction")

    def _update_process_group(self, new_process_group: Any) -> None:
        raise RuntimeError(
            "the process group cannot be replaced: wrap model.module anew, after model.reduction.detach()"
        )

    def train(self, mode: bool = True) -> DistributedDataParallel:
        nn.Module.train(self, mode)
        return self


class _Hook(JoinHook):
    """Hook for a site that has left a block of `Join`, while others have batches."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = wrapper

    def main_hook(self) -> None:
        """Take part in what follows a forward pass of others."""
        if self._wrapper._any_synchronizes(False):
            self._wrapper._step_without_data()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Get the parameters and buffers of a site that was the last.

        Args:
            is_last_joiner: whether this one was.
        """
        self._wrapper._join_config = _JoinConfig.construct_disabled_join_config()
        reduction = self._wrapper.reduction
        last = reduction.gather_objects(is_last_joiner, bool, "end of its data")
        if True in last and False in last:
            sameness.take_over(reduction, last.index(True), sameness.tensors_of(reduction.shared))


class _Reducer:
    """Reducer with the calls by which Lightning and Accelerate announce a backward pass."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = wrapper

    def prepare_for_backward(self, tensors: Sequence[Tensor]) -> None:
        """Let the next backward pass synchronize, also one whose forward pass was in `no_sync` or has not ended yet.

        Args:
            tensors: without effect.
        """
        self._wrapper._expect()

    def _rebuild_buckets(self) -> bool:
        return False


def _named(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Name positional arguments: the mode, or those of torch's class."""
    if not arguments:
        return keywords
    names = list(inspect.signature(TorchDDP.__init__).parameters)[2:]
    named = {"mode": arguments[0]} if isinstance(arguments[0], str) else dict(zip(names, arguments, strict=False))
    if len(named) < len(arguments):
        raise TypeError("after the mode, or after the arguments of torch's class, arguments have to be named")
    if doubled := sorted(named.keys() & keywords.keys()):
        raise TypeError(f"DistributedDataParallel got {doubled[0]!r} twice, by position and by name")
    return named | keywords


def _default_group() -> Any:
    """Return the default process group; None where there is none."""
    return dist.group.WORLD if dist.is_initialized() else None


def _place(
    module: nn.Module, device_ids: Sequence[int | torch.device] | None, output_device: int | torch.device | None
) -> tuple[torch.device, list[int] | None]:
    """Return the device of a model, and the number of the GPU to which inputs are moved; None for no moves.

    Raises:
        ValueError: if the arguments name another device than that of the model.
    """
    devices = {each.device for each in module.parameters()}
    device = next(each.device for each in module.parameters() if each.requires_grad)
    named = [*(device_ids or []), *([] if output_device is None else [output_device])]
    numbers = [each if isinstance(each, int) else torch.device(each).index for each in named]
    if not numbers:
        return device, None
    if (
        len(device_ids or []) > 1
        or devices != {torch.device(device.type, device.index)}
        or {*numbers} != {device.index}
    ):
        where = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"device_ids={device_ids} and output_device={output_device} may name one GPU, that of the model, which is "
            f"on {where}: move the model there before, or leave them out"
        )
    return device, numbers[:1]


@contextmanager
def _without(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Take parameters and buffers with some names out of a model, inside a ``with`` block."""
    hidden = []
    for prefix, part in module.named_modules() if names else ():
        for table in (part._parameters, part._buffers):
            for name in [each for each in table if f"{prefix}.{each}".lstrip(".") in names]:
                hidden.append((table, name, table.pop(name)))
    try:
        yield
    finally:
        for table, name, tensor in hidden:
            table[name] = tensor
