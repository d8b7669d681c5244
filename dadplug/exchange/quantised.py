"""Numbers as int8 codes with a scale a row, in buckets of factors and of dense gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..lowrank import dequantise, quantise
from .buckets import Slot
from .payload import FactorPayload, finite
from .transport import Gather, Transport

SCALE = torch.float32.itemsize  # bytes behind the codes of a row
_BLOCK = 512  # elements of a dense gradient that share a scale


def pack(rows: Tensor) -> Tensor:
    """Turns rows into codes.

    Args:
        rows: of shape (k, width), any floating-point type.

    Returns:
        int8 of shape (k, width + 4): codes, and the bytes of the row's scale.
    """
    codes = torch.empty(rows.shape, dtype=torch.int8, device=rows.device)
    if not rows.shape[1]:  # nothing needs no scale
        return codes
    scales = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    quantise(rows.float(), codes, scales)
    return torch.cat([codes, scales.view(torch.int8).view(-1, SCALE)], 1)


def unpack(packed: Tensor) -> Tensor:
    """Turns what `pack` made back into rows, float32 of shape (k, width)."""
    if not packed.shape[1]:
        return packed.float()
    codes = packed[:, :-SCALE].contiguous()
    scales = packed[:, -SCALE:].clone(memory_format=torch.contiguous_format).view(torch.float32).view(-1)
    rows = torch.empty(codes.shape, device=codes.device)
    dequantise(codes, scales, rows)
    return rows


class CodedSlot(Slot):
    """Room for one layer's rows as codes; see `Slot`."""

    def __init__(self, out: int, width: int, bias: int, world_size: int) -> None:
        super().__init__(out + SCALE if out else 0, width + SCALE, bias + SCALE if bias else 0, world_size)

    def pack(self, share: FactorPayload) -> FactorPayload:
        bias = None if share.bias is None else pack(share.bias[None])[0]
        return FactorPayload(pack(share.left), pack(share.right), bias)

    def unpack(self, share: FactorPayload) -> FactorPayload:
        bias = None if share.bias is None else unpack(share.bias[None])[0]
        return FactorPayload(unpack(share.left), unpack(share.right), bias)


class CodedBucket:
    """Dense gradients of several parameters, gathered as codes and summed by each site in the same order.

    What rounding takes away is kept, and added to the next step's gradient, once `commit` says that the step counts. It
    sends (S - 1) bytes a number to S - 1 sites, where an all-reduce in single precision sends 8 (S - 1) / S.

    Args:
        sizes: number of elements of each gradient.
        transport: the transport.
        feedback: whether what rounding takes away is kept.

    Attributes:
        lost: rounding memory: what rounding has taken away, without the loss scale, one flat tensor a gradient.
    """

    def __init__(self, sizes: Sequence[int], transport: Transport, feedback: bool = True) -> None:
        self._transport = transport
        self._feedback = feedback
        numbers = -(-sum(sizes) // _BLOCK) * _BLOCK
        self._rows = torch.zeros(numbers // _BLOCK, _BLOCK, device=transport.device)
        *self._parts, self._padding = self._rows.view(-1).split([*sizes, numbers - sum(sizes)])
        self._sizes = list(sizes)
        self._lost, self._next = (torch.zeros_like(self._rows) if feedback else self._rows[:0] for _ in range(2))
        self._loss_scales = [1.0] * len(self._sizes)
        self._gather: Gather | None = None

    @property
    def lost(self) -> Sequence[Tensor]:
        return self._cut(self._lost)

    def _cut(self, rows: Tensor) -> Sequence[Tensor]:
        return rows.view(-1)[: sum(self._sizes)].split(self._sizes)

    def fill(self, index: int, gradient: Tensor | None, weight: float, loss_scale: float = 1.0) -> None:
        """Put a gradient into its place, times the site's weight, with what it lost before; None counts as zero.

        Args:
            index: its place.
            gradient: the gradient.
            weight: the site's weight.
            loss_scale: the factor that the gradient contains.
        """
        part = self._parts[index]
        if self._feedback:
            torch.mul(self.lost[index], loss_scale, out=part)
            self._loss_scales[index] = loss_scale
        else:
            part.zero_()
        if gradient is not None and weight != 0.0:
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            part.add_(gradient.reshape(-1).to(part), alpha=weight)

    def finite(self, index: int) -> bool:
        """Says whether a filled part holds neither NaN nor Inf."""
        return finite(self._parts[index])

    def launch(self) -> None:
        """Starts the exchange."""
        self._padding.zero_()  # the sums of the last step are there, and may have been NaN
        packed = pack(self._rows)
        if self._feedback:
            torch.sub(self._rows, unpack(packed), out=self._next)
        if self._gather is None:
            self._gather = self._transport.gather([packed.numel()] * self._transport.world_size, torch.int8)
        self._gather.payload.copy_(packed.view(-1))
        self._gather.launch()

    def wait(self) -> Sequence[Tensor]:
        """Waits for the sums, one flat tensor a gradient; they hold until the next `fill`."""
        assert self._gather is not None
        self._rows.zero_()
        for payload in self._gather.wait():
            self._rows += unpack(payload.view(len(self._rows), -1))
        return self._parts

    def commit(self, kept: Sequence[bool]) -> None:
        """Replace the rounding memory by what rounding took away in this step.

        Args:
            kept: for each gradient, whether the step counts; otherwise its memory stays as it was.
        """
        if not self._feedback or not any(kept):
            return
        self._lost, self._next = self._next, self._lost
        for now, before, keep, loss_scale in zip(
            self.lost, self._cut(self._next), kept, self._loss_scales, strict=True
        ):
            if not keep:
                now.copy_(before)
            elif loss_scale != 1.0:
                now.div_(loss_scale)
