"""Wire formats: the number formats in which floating-point tensors are sent to other sites; and memory that lasts."""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..lowrank.dispatch import SCALE_SIZE, kernels_for
from ..support.registry import Registry

BLOCK = 512
"""Elements of a flat tensor that share a scale in a quantised format, at most."""


class WireFormat:
    """Format of payloads whose elements are cast to a type one by one. Made by `wire_format`.

    Attributes:
        dtype: type of a payload's elements.
        quantised: whether a row is encoded as a whole, as int8 with a scale; then its payload is longer than the row.
    """

    quantised = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dtype})"

    @property
    def itemsize(self) -> int:
        """Bytes of a payload's element."""
        return self.dtype.itemsize

    def row_size(self, width: int) -> int:
        """Return the number of payload elements of a row of `width` values."""
        return width

    def encode(
        self, rows: Tensor, out: Tensor | None = None, rounded: Tensor | None = None, rest: Tensor | None = None
    ) -> Tensor:
        """Encode rows.

        Args:
            rows: of shape (k, width), any floating-point type.
            out: contiguous place for the payload; new memory if None.
            rounded: contiguous place for the decoded values, in the shape and type of the rows; None if not wanted.
            rest: the same, for what rounding takes from the rows.

        Returns:
            A tensor of shape (k, row_size(width)) and type `dtype`.
        """
        payload = rows.to(self.dtype) if out is None else out.copy_(rows)
        if rounded is not None:
            rounded.copy_(payload)
        if rest is not None:
            torch.sub(rows, payload, out=rest)
        return payload

    def decode(self, payload: Tensor) -> Tensor:
        """Decode rows that `encode` has made.

        Args:
            payload: of shape (k, row_size(width)) and type `dtype`.

        Returns:
            The rows, of shape (k, width) and a floating-point type.
        """
        return payload

    def flat_size(self, count: int) -> int:
        """Return the number of payload elements of a flat tensor of `count` values."""
        return count

    def encode_flat(self, values: Tensor) -> Tensor:
        """Encode a flat tensor; in a quantised format by blocks, each with a scale of its own.

        Args:
            values: of shape (n,), any floating-point type.

        Returns:
            A tensor of shape (flat_size(n),) and type `dtype`.
        """
        return self.encode(values)

    def decode_flat(self, payload: Tensor, count: int) -> Tensor:
        """Decode what `encode_flat` has made.

        Args:
            payload: flat_size(count) elements of type `dtype`, in any shape.
            count: number of values.

        Returns:
            The values, of shape (count,) and a floating-point type.
        """
        return self.decode(payload.reshape(-1))


class QuantisedFormat(WireFormat):
    """Format of payloads whose rows are int8, -127 to 127, each followed by the four bytes of its float32 scale.

    A row with NaN or Inf is decoded as NaN.
    """

    quantised = True

    def __init__(self) -> None:
        super().__init__(torch.int8)

    def row_size(self, width: int) -> int:
        return width + SCALE_SIZE if width else 0

    def encode(
        self, rows: Tensor, out: Tensor | None = None, rounded: Tensor | None = None, rest: Tensor | None = None
    ) -> Tensor:
        count, width = rows.shape
        payload = rows.new_empty(count, self.row_size(width), dtype=torch.int8) if out is None else out
        if width:  # otherwise there is nothing to scale
            rows = (rows if rows.dtype == torch.float64 else rows.float()).detach().contiguous()
            kernels_for(rows).quantise(
                rows, payload, rows[:0] if rounded is None else rounded, rows[:0] if rest is None else rest
            )
        return payload

    def decode(self, payload: Tensor) -> Tensor:
        count, size = payload.shape
        rows = payload.new_empty(count, max(0, size - SCALE_SIZE), dtype=torch.float32)
        if size:
            kernels_for(payload).dequantise(payload.contiguous(), rows)
        return rows

    def blocks(self, count: int) -> tuple[int, int]:
        """Return number and width of the blocks of a flat tensor of `count` values, the last of which may be padded."""
        number = max(1, -(-count // BLOCK))
        return number, -(-count // number)

    def flat_size(self, count: int) -> int:
        number, width = self.blocks(count)
        return number * self.row_size(width)

    def encode_flat(self, values: Tensor) -> Tensor:
        number, width = self.blocks(len(values))
        missing = number * width - len(values)
        return self.encode((F.pad(values, (0, missing)) if missing else values).view(number, width)).view(-1)

    def decode_flat(self, payload: Tensor, count: int) -> Tensor:
        number, width = self.blocks(count)
        return self.decode(payload.view(number, self.row_size(width))).view(-1)[:count]


FORMATS: Registry[str, Callable[[torch.dtype], WireFormat]] = Registry("wire format")
"""Wire formats by the value of the option ``wire``; each is a function of the type of the tensors."""

FORMATS.register("fp32")(WireFormat)  # stands for the parameters' own type
FORMATS.register("bf16")(lambda _: WireFormat(torch.bfloat16))
FORMATS.register("int8")(lambda _: QuantisedFormat())


@functools.cache
def wire_format(name: str, dtype: torch.dtype = torch.float32) -> WireFormat:
    """Return the format in which tensors of a type are sent.

    Args:
        name: value of the option ``wire``: ``"fp32"`` (the tensors' own type), ``"bf16"`` or ``"int8"``.
        dtype: type of the tensors. Those of 16 bits and those of integers are sent as they are.

    Raises:
        ValueError: if there is no format of this name; the message lists the valid ones.
    """
    make = FORMATS[name]
    return make(dtype) if dtype.is_floating_point and dtype.itemsize > 2 else WireFormat(dtype)


_LEAST = 2048  # bytes; the memory of a smaller tensor would be less than half of a page


def lasting(shape: int | Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return zeros that are to last for many steps.

    On the CPU they have pages of their own. In the heap, small ones that last would lie between the activations that
    are freed, so that the gaps were too small for gradients, and the heap would grow.

    Args:
        shape: shape of the tensor.
        dtype: type of its elements.
        device: its device.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _LEAST or torch.device(device).type != "cpu" or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def copied(tensor: Tensor) -> Tensor:
    """Return a contiguous copy that is to last, for example from backward to the end of a step."""
    return lasting(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)


def rescale(rest: Tensor, before: Tensor | None, scale: float, expected: float) -> None:
    """Make the next memory of what was not sent of a gradient and of the memory before, in place.

    What was sent, times the scale, plus the next memory is what the gradient, times the scale, and the memory were.

    Args:
        rest: what was not sent of the gradient plus the memory over the expected scale.
        before: the memory before; None for zeros.
        scale: what the sum of all sites was multiplied by.
        expected: what it was expected to be multiplied by.
    """
    if scale != 1.0:
        rest.mul_(scale)
    if before is not None and scale != expected:
        rest.add_(before, alpha=1 - scale / expected)
