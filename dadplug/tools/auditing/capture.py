"""Capture of one step as other sites see it: the real exchange of a model, with twins in place of the other sites.

A site's twins send what it sends, so that one process sees what they see.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import SiteError
from ...exchange.factor_buckets import FactorPayload
from ...exchange.factory import SingleSite
from ...exchange.status import PeerNames
from ...exchange.traffic import Traffic
from ...exchange.transport import Gather, PendingSum, Transport
from ...hooks import LINEAR, Form, family_of
from ...local_steps import LocalSGD
from ...reduction import GradientReduction
from ...step.methods.base import GradientPath
from ...step.planning.plan import Plan

LOCAL = "localsgd"
"""Value of the option ``mode`` that stands for the deltas of `dadplug.LocalSGD`."""

# Options of the place of a site among others. They do not change what it sends of its data.
_PLACE = (
    "merge",
    "hierarchy",
    "min_sites",
    "site_timeout",
    "late",
    "patience",
    "timeout",
    "hub_timeout",
    "process_group",
    "state",
)


@dataclass(frozen=True, eq=False)
class Batch:
    """Batch of one site, with the model and the criterion that make gradients of it.

    Attributes:
        model: the model; it is copied where it is trained.
        criterion: function of outputs and targets that returns the loss.
        inputs: a tensor, or a tuple, list or mapping of tensors, whose first dimension is the samples.
        targets: the same.
    """

    model: nn.Module
    criterion: Callable[[Any, Any], Tensor]
    inputs: Any
    targets: Any

    def __len__(self) -> int:
        found = [each for each in tensors_of(self.inputs) if each.dim()]
        if not found:
            raise ValueError(
                "inputs must be a tensor, or a tuple, list or mapping of tensors, with samples as first dimension"
            )
        return len(found[0])

    @property
    def data(self) -> Tensor:
        """The tensor that attacks try to recover: the floating-point input with most values, else row numbers."""
        tensors = tensors_of(self.inputs)
        floating = [each for each in tensors if each.is_floating_point()]
        return max(floating, key=torch.Tensor.numel) if floating else tensors[0]

    def with_data(self, data: Tensor) -> Any:
        """Return the inputs with another tensor in the place of `data`; others are cut or repeated to its length."""
        own = self.data

        def exchange(each: Any) -> Any:
            if each is own:
                return data
            if not isinstance(each, Tensor):
                return each
            return each if len(each) == len(data) else each[:1].expand(len(data), *each.shape[1:])

        return _mapped(self.inputs, exchange)

    def part(self, rows: slice) -> Batch:
        """Return some of the samples."""

        def cut(each: Any) -> Any:
            return each[rows] if isinstance(each, Tensor) and each.dim() else each

        return replace(self, inputs=_mapped(self.inputs, cut), targets=_mapped(self.targets, cut))

    def loss(self, model: nn.Module) -> Tensor:
        """Compute the loss of a copy of the model."""
        return self.criterion(call(model, self.inputs), self.targets)

    @cached_property
    def is_text(self) -> bool:
        """Whether the data are row numbers of an embedding."""
        return not self.data.is_floating_point()


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model with its inputs: a mapping by keywords, a tuple or list by position."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def tensors_of(inputs: Any) -> list[Tensor]:
    """Return the tensors of inputs or targets."""
    if isinstance(inputs, Mapping):
        return [each for each in inputs.values() if isinstance(each, Tensor)]
    if isinstance(inputs, (tuple, list)):
        return [each for each in inputs if isinstance(each, Tensor)]
    return [inputs] if isinstance(inputs, Tensor) else []


def _mapped(inputs: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(inputs, Mapping):
        return {name: change(each) for name, each in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return tuple(change(each) for each in inputs)
    return change(inputs)


def kind_of(module: nn.Module) -> str:
    """Return ``"linear"``, ``"transposed"`` (a linear layer whose weight has the shape (in, out)), ``"table"`` or
    ``"convolution"``; empty for a layer without factors.
    """
    family = family_of(module)
    if family is None:
        return ""
    form = family.known_form(module)
    if form is None:
        return "convolution"
    if form.table_rows:
        return "table"
    return "transposed" if form.transposed else "linear" if form == LINEAR else ""


@dataclass(eq=False)
class LayerView:
    """View of one weight by an observer, with the truth that attacks on it are judged by.

    Attributes:
        name: name of the weight.
        layer: name of its layer in the model; empty for a parameter without one.
        module: the layer.
        path: the path of the gradient.
        fed_by_data: whether the layer's input needs no gradient, as the data themselves.
        inputs: rows of the layer's inputs as they are seen, of shape (k, in); row numbers of a table, of shape (k, 1);
            None where only a gradient is seen.
        deltas: rows of deltas, of shape (k, out); None where only a gradient is seen.
        form: how rows make the gradient; None where only a gradient is seen.
        bias: gradient of the bias; None where there is none.
        truth: the layer's inputs in the step, of shape (samples, …): for judging only.
        formed: the gradient as it is seen, in the weight's shape; None where it follows from the rows.
        transposed: whether the weight has the shape (in, out).
    """

    name: str
    layer: str
    module: nn.Module | None
    path: str
    fed_by_data: bool = False
    inputs: Tensor | None = None
    deltas: Tensor | None = None
    form: Form | None = None
    bias: Tensor | None = None
    truth: Tensor | None = field(default=None, repr=False)
    formed: Tensor | None = field(default=None, repr=False)
    transposed: bool = False

    @property
    def is_linear(self) -> bool:
        """Whether the gradient is a product of rows of deltas and rows of inputs."""
        return self.module is not None and kind_of(self.module) in ("linear", "transposed")

    @property
    def is_table(self) -> bool:
        """Whether the layer looks rows of a table up."""
        return self.module is not None and kind_of(self.module) == "table"

    @property
    def weight(self) -> Tensor:
        """The weight, which an observer has, too."""
        assert self.module is not None
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight.detach()

    @property
    def sends_rows(self) -> bool:
        """Whether the rows that are seen are those of the samples, and not mixtures of them."""
        return self.path in (GradientPath.FACTORS, GradientPath.ACTIVATIONS) and self.inputs is not None

    def gradient(self) -> Tensor:
        """Return the gradient of the weight as a matrix of shape (out, in)."""
        if self.inputs is not None and self.deltas is not None and self.is_linear:
            return self.deltas.T @ self.inputs
        assert self.formed is not None
        gradient = self.formed.to_dense() if self.formed.is_sparse else self.formed
        return gradient.T if self.transposed else gradient.flatten(1)

    @property
    def rows(self) -> int:
        """Rows of the layer's input in the step, which step headers and sizes of messages show."""
        return 0 if self.truth is None else self.truth.numel() // max(1, self.truth.shape[-1])

    def rows_of_truth(self) -> Tensor:
        """Return the layer's inputs as rows, of shape (rows, in)."""
        assert self.truth is not None
        return self.truth.reshape(-1, self.truth.shape[-1])


@dataclass(frozen=True, eq=False)
class Observation:
    """Messages of one step, as an observer has them.

    Attributes:
        batch: the batch, for judging, with the model that the observer has, too.
        layers: what is seen of each weight, in the model's order.
        gradients: what is seen of the gradient of each trained parameter, by name.
        plan: the plan of the exchange; None for local steps.
        bytes_sent: payload of the site.
        private: whether the gradients were made by a differentially private mechanism.
        remarks: what the capture has left out of consideration.
        again: captures the same step with another batch; None where that is not possible.
    """

    batch: Batch
    layers: list[LayerView]
    gradients: dict[str, Tensor]
    plan: Plan | None
    bytes_sent: int
    private: bool = False
    remarks: tuple[str, ...] = ()
    again: Callable[[Batch], Observation] | None = None

    @cached_property
    def half(self) -> Observation | None:
        """The same step with the first half of the batch, without the other samples; None below 4."""
        if self.again is None or len(self.batch) < 4:
            return None
        return self.again(self.batch.part(slice(0, len(self.batch) // 2)))


class _Twins:
    """Mixin that puts twins in the place of the other sites."""

    model: nn.Module
    traffic: Any
    _transport: Transport

    def _open_transport(self, process_group: dist.ProcessGroup | None) -> Transport:
        device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        return TwinTransport(self.traffic, device)

    def observe(self, function: Callable[[str, list[FactorPayload]], None]) -> None:
        """Call a function with the rows of each unit that arrive from now on."""
        self._transport.observe = function


class _TwinReduction(_Twins, GradientReduction):
    """Gradient reduction between twins."""


class _TwinSteps(_Twins, LocalSGD):
    """Local steps of twins."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counter.first_batch = None  # twins have the same batch


class _Inputs:
    """Inputs of layers in the forward passes of a step, by name of the layer."""

    def __init__(self, model: nn.Module) -> None:
        self._found: dict[str, list[Tensor]] = {}
        self.fed: set[str] = set()
        self._hooks = []
        for name, module in model.named_modules():
            if module._parameters:
                hook = module.register_forward_pre_hook(self._recorder(name), with_kwargs=True)
                self._hooks.append(hook)

    def _recorder(self, name: str) -> Callable[..., None]:
        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            if given:
                self._found.setdefault(name, []).append(given[0].detach().clone())
                if not given[0].requires_grad:
                    self.fed.add(name)

        return record

    def of(self, name: str) -> Tensor | None:
        """Return the inputs of a layer; None where it had none, or of several shapes."""
        found = self._found.get(name, [])
        if not found or len({each.shape[1:] for each in found}) > 1:
            return None
        return torch.cat(found) if found[1:] else found[0]

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def capture(batch: Batch, mode: str, *, fused: bool = False, seed: int = 0, **options: Any) -> Observation:
    """Take one step with a copy of the model, or one round of local steps, and return what other sites see of it.

    Args:
        batch: the batch of the audited site.
        mode: a mode of `dadplug.GradientReduction`, or ``"localsgd"``.
        fused: whether the step is taken by ``reduction.apply(optimizer)``.
        seed: seed of dropout.
        options: the options of the reduction or of the local steps; of these also ``lr``, of the site's SGD.

    Raises:
        ValueError: if an option or its value is not valid.
    """
    own = {name: value for name, value in options.items() if name not in _PLACE}
    left_out = tuple(
        f"{name}= does not change what a site sends, and was left out" for name in options if name in _PLACE
    )
    devices = [batch.data.device] if batch.data.is_cuda else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        model = copy.deepcopy(batch.model)
        seen = _local_steps(batch, model, **own) if mode == LOCAL else _step(batch, model, mode, fused, **own)

    def again(other: Batch) -> Observation:
        return capture(other, mode, fused=fused, seed=seed, **options)

    return replace(seen, remarks=left_out, again=again)


def _step(batch: Batch, model: nn.Module, mode: str, fused: bool, **options: Any) -> Observation:
    """Take a step in which gradients are agreed on."""
    reduction = _TwinReduction(model, mode=mode, **options)
    payloads: dict[str, FactorPayload] = {}

    def observe(name: str, arrived: list[FactorPayload]) -> None:
        left, right, bias = arrived[0][:3]
        payloads[name] = FactorPayload(left.clone(), right.clone(), None if bias is None else bias.clone())

    reduction.observe(observe)
    inputs = _Inputs(model)
    try:
        with reduction.without_comparison():
            batch.loss(model).backward()
            if fused:
                reduction.apply(torch.optim.SGD(model.parameters(), lr=0.0))
            else:
                reduction.synchronize()
        plan, sent = reduction.plan, reduction.traffic.bytes_sent
        forms = {unit.name: getattr(unit, "form", None) for unit in reduction._planner.units}
    finally:
        inputs.remove()
        reduction.detach(discard=True)
    gradients = {
        name: parameter.grad.detach()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and parameter.requires_grad
    }
    views = [_view(model, row.parameter, row.path, inputs) for row in plan if row.path != GradientPath.FROZEN]
    layers = [view for view in views if view is not None]
    for view in layers:
        _fill(view, payloads.get(view.name), forms.get(view.name), gradients)
        if view.name not in gradients and view.inputs is not None and view.is_linear:
            gradients[view.name] = view.gradient().T if view.transposed else view.gradient()
    private = options.get("privacy") is not None
    return Observation(batch, layers, gradients, plan, sent, private)


def _local_steps(batch: Batch, model: nn.Module, *, lr: float = 0.1, **options: Any) -> Observation:
    """Take one round of local steps; the batch is divided among them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    given = {"every": 1, "overlap": False} | options
    local = _TwinSteps(model, optimizer, **given)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    steps = local.local_options.interval(0)
    if steps > len(batch):
        raise ValueError(
            f"every={steps} needs a batch of at least as many samples, a part for each step, got {len(batch)}"
        )
    inputs = _Inputs(model)
    try:
        bounds = [len(batch) * number // steps for number in range(steps + 1)]
        for start, end in itertools.pairwise(bounds):
            optimizer.zero_grad()
            batch.part(slice(start, end)).loss(model).backward()
            local.step()
        local.finish()
        sent = local.traffic.bytes_in_steps
    finally:
        inputs.remove()
        local.detach()
    scale = 1.0 / steps / lr / (local.local_options.outer_lr or 1.0) / (1 + local.local_options.outer_momentum)
    gradients = {
        name: (before[name] - parameter.detach()) * scale
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    views = [_view(model, name, LOCAL, inputs) for name in gradients]
    layers = [view for view in views if view is not None]
    for view in layers:
        _fill(view, None, None, gradients)
    return Observation(batch, layers, gradients, None, sent)


def _view(model: nn.Module, name: str, path: str, inputs: _Inputs) -> LayerView | None:
    """Return an empty view of a weight; None for biases and other parameters with one dimension."""
    layer, _, attribute = name.rpartition(".")
    module = model.get_submodule(layer)
    if dict(model.named_parameters())[name].dim() < 2 or attribute == "bias":
        return None
    kind = kind_of(module)
    known, truth = (module, inputs.of(layer)) if kind else (None, None)
    return LayerView(name, layer, known, path, layer in inputs.fed, truth=truth, transposed=kind == "transposed")


def _fill(view: LayerView, payload: FactorPayload | None, form: Form | None, gradients: Mapping[str, Tensor]) -> None:
    """Put what has been sent into a view."""
    prefix = f"{view.layer}." if view.layer else ""
    view.bias = gradients.get(f"{prefix}bias") if view.module is not None else None
    view.formed = gradients.get(view.name)
    if payload is None or not payload.left.numel():
        return
    view.form, view.deltas, view.inputs = form, payload.left, payload.right
    if view.transposed and not getattr(form, "transposed", False):  # as a matrix, the weight's rows are its inputs
        view.deltas, view.inputs = payload.right, payload.left


# Twins of the site, in place of the other sites

SITES = 2
"""Number of sites: with two, each can subtract its own part of a sum, and has that of the other."""

_FEW_BYTES = 1 << 20  # of which two sites gather sums, as they do over torch.distributed


class _TwinNames(PeerNames):
    def lost(self, error: BaseException, timeout: float, peer: int | None = None) -> SiteError:
        return SiteError(str(error))  # a twin cannot be lost


class _TwinGather(Gather):
    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, meter: Traffic) -> None:
        self.payload = torch.zeros(size, dtype=dtype, device=device)
        self._arrived = [self.payload, *(torch.zeros_like(self.payload) for _ in range(SITES - 1))]
        self._meter = meter

    def launch(self) -> None:
        self._meter.add((SITES - 1) * self.payload.numel() * self.payload.element_size())
        for other in self._arrived[1:]:
            other.copy_(self.payload)

    def wait(self) -> list[Tensor]:
        return self._arrived


class TwinTransport(SingleSite):
    """Transport without a network, whose other site sends to the bit what this one sends.

    The agreed gradient is that of one site then, after encoding and decoding by the formats of the network.

    Args:
        traffic: the meter.
        device: device of the tensors that are exchanged.
    """

    def __init__(self, traffic: Traffic, device: torch.device) -> None:
        names = _TwinNames(0, ["audited site", *(f"observer {number}" for number in range(1, SITES))])
        super().__init__(traffic, device, 1.0, names)

    def gather(self, sizes: Sequence[int], dtype: torch.dtype, **use: Any) -> Gather:
        return _TwinGather(sizes[0], dtype, self.device, self.traffic)

    def all_reduce(self, tensor: Tensor) -> PendingSum:
        self.traffic.add(int(self.ring * tensor.numel() * tensor.element_size()))
        tensor.mul_(SITES)
        return PendingSum()

    def gather_present(self, item: Any) -> dict[int, Any]:
        return dict.fromkeys(range(SITES), item)

    def prefers_gather(self, nbytes: int) -> bool:
        return nbytes <= _FEW_BYTES
