"""Factors of convolutions, plain and transposed: whole samples of input and output deltas.

A convolution's weight gradient is ``grad W = sum over positions p of d_p u_p^T`` with d_p the deltas at an output
position and u_p the inputs that the kernel sees there, unfolded. Unfolded rows repeat an input as often as kernels
overlap, so the input stays folded here: a row of the factors is one sample, (channels x positions) numbers of input
and of deltas, from which `torch.ops.aten.convolution_backward` forms the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .factor import Form
from .registry import LayerFamily, Recorder, gradient_use, register_family

_FORWARD = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_UNFOLDING = 8  # by measurement, on layers of 32 to 256 channels
_FORWARD_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True)
class Geometry:
    """Geometry of a convolution, with one entry per spatial dimension.

    Attributes:
        stride: stride.
        padding: zeros before and after the input; of a transposed convolution, what is cut off its output.
        dilation: distance between the kernel's elements.
        transposed: whether it is a transposed convolution.
        output_padding: of a transposed convolution, what its output is longer by.
        groups: number of groups of channels that do not see one another.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve inputs of shape (batch, channels, positions…)."""
        dims = len(self.stride)
        if not self.transposed:
            return _FORWARD[dims](inputs, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        return _FORWARD_TRANSPOSED[dims](
            inputs, weight, bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation
        )

    def backward(self, deltas: Tensor, inputs: Tensor, weight: Tensor, wanted: Sequence[bool]) -> tuple[Tensor, ...]:
        """Compute the gradients of input and weight as far as `wanted` says."""
        gradients: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            deltas,
            inputs,
            weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
            (*wanted, False),
        )
        return gradients


@dataclass(frozen=True)
class ConvolutionForm(Form):
    """Form of a convolution, for inputs of one size.

    Attributes:
        geometry: the convolution's geometry.
        weight_shape: (out, in / groups, kernel…); of a transposed convolution (in, out / groups, kernel…).
        input_size: (channels, positions…) of the input.
        output_size: (channels, positions…) of the output.
    """

    geometry: Geometry
    weight_shape: tuple[int, ...]
    input_size: tuple[int, ...]
    output_size: tuple[int, ...]

    def widths(self, shape: tuple[int, int]) -> tuple[int, int]:
        return math.prod(self.output_size), math.prod(self.input_size)

    @property
    def may_be_dense(self) -> bool:
        return True

    @property
    def unfolding(self) -> int:
        return _UNFOLDING

    @property
    def positions(self) -> int:
        size = self.input_size if self.geometry.transposed else self.output_size
        return math.prod(size[1:]) * self.geometry.groups

    def gradient(self, deltas: Tensor, activations: Tensor) -> Tensor:
        if not deltas.shape[0]:
            return deltas.new_zeros(self.weight_shape)
        weight = deltas.new_empty(1).expand(self.weight_shape)  # only its shape and type count
        inputs, outputs = activations.unflatten(1, self.input_size), deltas.unflatten(1, self.output_size)
        with _reproducible():
            return self.geometry.backward(outputs, inputs, weight, (False, True))[1]

    def add_to(self, gradient: Tensor, deltas: Tensor, activations: Tensor) -> Tensor:
        return gradient.add_(self.gradient(deltas, activations))

    def bias_gradient(self, deltas: Tensor) -> Tensor:
        return self._by_channel(deltas).sum((0, 2))

    def bias_rows(self, deltas: Tensor) -> Tensor:
        return self._by_channel(deltas).sum(2)

    def _by_channel(self, deltas: Tensor) -> Tensor:
        by_channel: Tensor = deltas.unflatten(1, (self.output_size[0], math.prod(self.output_size[1:])))
        return by_channel

    def by_row(self, deltas: Tensor, activations: Tensor) -> tuple[Tensor, Tensor]:
        outer, windows = self._seen(deltas, activations)
        groups = self.geometry.groups
        windows = windows.unflatten(2, (groups, -1)).flatten(3)
        return outer.unflatten(2, (groups, -1)).transpose(1, 2), windows.transpose(1, 2)

    def unfold(self, deltas: Tensor, activations: Tensor) -> tuple[Tensor, Tensor]:
        return self._by_group(*self._seen(deltas, activations))

    def _seen(self, deltas: Tensor, activations: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers at each position, (rows, positions, channels), and what the kernel sees there."""
        inputs, outputs = activations.unflatten(1, self.input_size), deltas.unflatten(1, self.output_size)
        seen, seeing = (outputs, inputs) if self.geometry.transposed else (inputs, outputs)
        return seeing.flatten(2).transpose(1, 2), self._windows(seen, seeing.shape[2:])

    def _windows(self, seen: Tensor, positions: torch.Size) -> Tensor:
        """Return the inputs of the kernel at each position, of shape (batch, positions, channels, kernel)."""
        geometry, kernel = self.geometry, self.weight_shape[2:]
        windows = F.pad(seen, [pad for each in reversed(geometry.padding) for pad in (each, each)])
        for dim, size in enumerate(kernel):
            step, apart = geometry.stride[dim], geometry.dilation[dim]
            windows = windows.unfold(2 + dim, apart * (size - 1) + 1, step)[..., ::apart]
            windows = windows.narrow(2 + dim, 0, positions[dim])  # a large output padding leaves one too many
        dims = len(kernel)
        windows = windows.permute(0, *range(2, 2 + dims), 1, *range(2 + dims, 2 + 2 * dims))
        return windows.reshape(seen.shape[0], math.prod(positions), seen.shape[1], math.prod(kernel))

    def _by_group(self, outer: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Build separate rows for each group, with zeros in the columns of the other groups' deltas."""
        groups = self.geometry.groups
        windows = windows.reshape(-1, groups, windows.shape[2] // groups * windows.shape[3]).transpose(0, 1)
        outer = outer.reshape(-1, groups, outer.shape[2] // groups)
        if groups == 1:
            return outer.flatten(1), windows.flatten(0, 1)
        blocks = outer.new_zeros(groups, outer.shape[0], groups, outer.shape[2])
        for group in range(groups):
            blocks[group, :, group] = outer[:, group]
        return blocks.flatten(2).flatten(0, 1), windows.flatten(0, 1)


@contextmanager
def _reproducible() -> Iterator[None]:
    """Restrict cuDNN to deterministic algorithms, since every site needs bitwise equal results."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before


class ConvolutionWithFactors(torch.autograd.Function):
    """Convolution whose backward records the factors, and forms the weight gradient only on request."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        record: Recorder,
        weight_gradients: bool,
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.geometry = geometry
        ctx.record = record
        ctx.weight_gradients = weight_gradients
        return geometry.forward(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, deltas: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        use = gradient_use(ctx, ctx.weight_gradients)
        if use.record:
            form = ConvolutionForm(ctx.geometry, tuple(weight.shape), tuple(inputs.shape[1:]), tuple(deltas.shape[1:]))
            ctx.record(inputs.detach().flatten(1), deltas.detach().flatten(1), form)
        grad_bias = None
        wanted = ctx.needs_input_grad[0], use.weight
        grad_inputs = grad_weight = None
        if any(wanted):  # under autocast the deltas come in a narrower type than weight or input
            grad_inputs, grad_weight, _ = ctx.geometry.backward(
                deltas, inputs.to(deltas.dtype), weight.to(deltas.dtype), wanted
            )
            grad_inputs = grad_inputs.to(inputs.dtype) if wanted[0] else None
            grad_weight = grad_weight.to(weight.dtype) if wanted[1] else None
        if use.bias:
            grad_bias = deltas.flatten(2).sum((0, 2)).to(weight.dtype)
        return grad_inputs, grad_weight, grad_bias, None, None, None


_convolution: Callable[..., Tensor] = ConvolutionWithFactors.apply


def convolve(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    record: Recorder,
    weight_gradients: bool,
) -> Tensor:
    """Convolve inputs with or without a batch dimension, and record factors in backward."""
    batched = inputs.dim() == len(geometry.stride) + 2
    inputs = inputs if batched else inputs[None]
    outputs = _convolution(inputs, weight, bias, geometry, record, weight_gradients)
    return outputs if batched else outputs[0]


@register_family(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class Conv(LayerFamily):
    """Family of convolutions with any stride, padding, padding mode, dilation and groups."""

    methods = ("forward", "_conv_forward")

    def forward(self, module: nn.Module, record: Recorder, weight_gradients: bool, input: Tensor) -> Tensor:
        assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        dims = len(module.kernel_size)
        before_and_after = module._reversed_padding_repeated_twice  # last dimension first, as F.pad wants it
        lower, upper = before_and_after[-2::-2], before_and_after[::-2]
        if module.padding_mode != "zeros":
            input = F.pad(input, before_and_after, mode=module.padding_mode)
            padding = (0,) * dims
        elif lower != upper:  # "same" with an even kernel
            input = F.pad(input, before_and_after)
            padding = (0,) * dims
        else:
            padding = tuple(lower)
        geometry = Geometry(module.stride, padding, module.dilation, False, (0,) * dims, module.groups)
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        assert weight is not None
        return convolve(input, weight, bias, geometry, record, weight_gradients)


@register_family(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTranspose(LayerFamily):
    """Family of transposed convolutions with any stride, padding, output padding, dilation and groups."""

    methods = ("forward", "_output_padding")

    def forward(
        self,
        module: nn.Module,
        record: Recorder,
        weight_gradients: bool,
        input: Tensor,
        output_size: Sequence[int] | None = None,
    ) -> Tensor:
        assert isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
        stride, padding, dilation = module.stride, module.padding, module.dilation
        assert isinstance(padding, tuple)
        size = None if output_size is None else list(output_size)
        output_padding = module._output_padding(
            input, size, list(stride), list(padding), list(module.kernel_size), len(stride), list(dilation)
        )
        geometry = Geometry(stride, padding, dilation, True, tuple(output_padding), module.groups)
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        assert weight is not None
        return convolve(input, weight, bias, geometry, record, weight_gradients)


@register_family(
    "timm.layers.conv2d_same.Conv2dSame",
    "segmentation_models_pytorch.encoders._efficientnet.Conv2dStaticSamePadding",
)
class ConvOfOwnForward(LayerFamily):
    """Family of convolutions that prepare their input in a forward of their own, and then call torch's convolution.

    That forward runs. What it computes with a tensor that it makes of the weight, such as a standardised one, is left
    to autograd.
    """

    def forward(self, module: nn.Module, record: Recorder, weight_gradients: bool, *args: Any, **kwargs: Any) -> Tensor:
        with _CallsCaptured(module, record, weight_gradients):
            outputs: Tensor = type(module).forward(module, *args, **kwargs)
        return outputs


class _CallsCaptured(TorchFunctionMode):
    """Captures calls of torch's convolutions with weight and bias of a layer, while its forward runs."""

    def __init__(self, module: nn.Module, record: Recorder, weight_gradients: bool) -> None:
        super().__init__()
        self._given = record, weight_gradients
        self._parameters = module._parameters["weight"], module._parameters["bias"]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FORWARD.values():
            inputs, weight, bias, geometry = _arguments(*args, **kwargs)
            own = weight is self._parameters[0] and bias is self._parameters[1]
            if own and geometry is not None:
                return convolve(inputs, weight, bias, geometry, *self._given)
        return func(*args, **kwargs)


def _arguments(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Geometry | None]:
    """Return the arguments of a call of torch's convolution, with its geometry; None where its padding is a word."""
    dims = weight.dim() - 2

    def each(value: Any) -> tuple[int, ...]:
        return (value,) * dims if isinstance(value, int) else tuple(value) * (dims // len(value))

    if isinstance(padding, str):
        return input, weight, bias, None
    return input, weight, bias, Geometry(each(stride), each(padding), each(dilation), False, (0,) * dims, groups)
