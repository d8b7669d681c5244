"""Payloads of sparse deltas: the largest entries of each block in two bits, and the memory of all else.

With d_s what site s has done in a round, E_s its memory, and C the code of `SparseCode`:

    whole_s = d_s + decay E_s        sent_s = C(whole_s)        E_s <- whole_s - sent_s        mean = sum of w_s sent_s

The subtraction is exact. The memory takes the place of an outer momentum: what is often near the largest is sent soon,
and the rest fades.

**The outer rate** is the factor of the mean in the step of the agreed model. Where it is not fixed, it follows the
signs: an entry that is sent stands for more that waits in the memories, and a rate above 1 makes up for it, but only
where the sites go the same way.
Sums are taken by rank. Of the entries that are added to a sum that is not zero, n have its sign, and m the other one:

    agreement q = (n - m) / (n + m + 16)        rate = 1 + 1.5 max(0, q)

It costs no bytes, and is computed from whole numbers that all sites count alike, so that it has the same bits at all of
them.

Source: arXiv:2508.15706 (SparseLoCo), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import MismatchError
from ..exchange import Transport
from ..methods.feedback import ErrorFeedback
from .sparse_codec import SparseCode

_MEMINFO = Path("/proc/meminfo")
_FURTHEST = 1.5  # by which the outer rate exceeds 1 where all signs agree
_FEW = 16  # entries without an agreement, so that chance counts little where few entries are sent by several sites


def available_memory(device: torch.device) -> int | None:
    """Return the bytes of memory that a process can still take on a device; None where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None


def check_memory(model: nn.Module) -> None:
    """Raise ValueError if the memory of sparse deltas does not fit beside a model.

    Args:
        model: the model.
    """
    needed: dict[torch.device, int] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            size = max(parameter.dtype.itemsize, torch.float32.itemsize)
            needed[parameter.device] = needed.get(parameter.device, 0) + parameter.numel() * size
    for device, size in needed.items():
        room = available_memory(device)
        if room is not None and size > room:
            raise ValueError(
                f"the memory of what sparse deltas do not send takes {size / 1e9:.1f} GB on {device}, and "
                f"{room / 1e9:.1f} GB are available: take wire='int8' with rank=32 and error_feedback=False, or freeze "
                "a part of the model"
            )


def outer_rate(same: int, opposite: int) -> float:
    """Return the outer rate of a round of sparse deltas.

    Args:
        same: entries whose signs agree between sites.
        opposite: entries whose signs do not.
    """
    return 1.0 + _FURTHEST * max(0.0, (same - opposite) / (same + opposite + _FEW))


class _Slot(NamedTuple):
    """Place of a tensor in the payload."""

    shape: torch.Size
    dtype: torch.dtype
    code: SparseCode
    place: slice


class SparseFormat:
    """Format of the payloads of sparse deltas, with the memory of this site.

    Args:
        density: function of the number of the round, from 0, that returns the share of the entries that is sent.
        decay: factor on the memory in each round.
        error_feedback: whether to keep what is not sent.
        names: names of the sites by rank, for errors.

    Attributes:
        rate: outer rate of the deltas that were decoded last.
    """

    keeps_deltas = True  # `encode` only reads them, and may do so beside the next steps

    def __init__(
        self, density: Callable[[int], float], decay: float, error_feedback: bool, names: Callable[[int], str] = str
    ) -> None:
        self._density, self._decay, self._names = density, decay, names
        self._errors = ErrorFeedback(enabled=True)
        self._keeps = error_feedback
        self._slots: dict[str, _Slot] = {}
        self._changed: dict[str, Tensor] = {}  # memories, by the last call of `encode`
        self._means: dict[str, Tensor] = {}  # room for the next ones
        self._present = 0.0  # density of the layout
        self.rate = 1.0

    def begin_round(self, number: int) -> str:
        """Choose the density of a round; return what payloads depend on besides the tensors, as a text.

        Args:
            number: number of the round, the same on all sites.
        """
        self._present = self._density(number)
        return f"density {self._present!r}"

    def choose(self, deltas: Mapping[str, Tensor], transport: Transport) -> None:
        """Do nothing: all deltas are sparse."""

    def layout(self, tensors: Mapping[str, Tensor]) -> dict[torch.dtype, int]:
        """Lay out the payload for a set of tensors, as `DeltaFormat.layout` does."""
        self._slots, start = {}, 0
        for name, tensor in tensors.items():
            code = SparseCode(tensor.numel(), self._present)
            self._slots[name] = _Slot(tensor.shape, tensor.dtype, code, slice(start, start + code.nbytes))
            start += code.nbytes
        self._errors.retain(self._slots)
        return {torch.uint8: start}

    def encode(self, deltas: Mapping[str, Tensor], payloads: Mapping[torch.dtype, Tensor]) -> None:
        """Encode this site's deltas, and update its memory.

        Args:
            deltas: the deltas by name, contiguous and finite.
            payloads: room for the payload, by type.
        """
        self._changed = {}
        for name, slot in self._slots.items():
            delta, place = deltas[name], payloads[torch.uint8][slot.place]
            memory = self._errors.of(name, delta)
            room = place if place.device == delta.device else torch.empty_like(place, device=delta.device)
            slot.code.encode(delta.view(-1), memory.view(-1), self._decay, room)
            if room is not place:
                place.copy_(room)
            if self._keeps:
                self._changed[name] = memory
            else:
                memory.zero_()

    def rate_of(self, name: str) -> float:
        """Return the outer rate of a parameter in the round that was decoded last, where it is not fixed."""
        return self.rate

    def take_back(self, payloads: Mapping[torch.dtype, Tensor]) -> None:
        """Add what `encode` has just put into a payload to the memory again, for a payload that reached no site.

        Args:
            payloads: this site's payload, by type.

        Raises:
            ValueError: if it is not a valid code.
        """
        for name, memory in self._changed.items():
            slot = self._slots[name]
            slot.code.decode(payloads[torch.uint8][slot.place].to(memory.device), memory.view(-1), 1.0)

    def decode(self, payloads: Mapping[torch.dtype, Sequence[Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
        """Compute the mean of what all sites have sent, as `DeltaFormat.decode` does.

        The memory of the means is that of the last call.

        Raises:
            MismatchError: if a payload is not what `encode` makes; it names the site and the tensor.
        """
        means, parts, signs = {}, payloads[torch.uint8], torch.zeros(2, dtype=torch.int64)
        for name, slot in self._slots.items():
            mean = self._means.get(name)
            if mean is None or (mean.shape, mean.dtype, mean.device) != (slot.shape, slot.dtype, parts[0].device):
                mean = torch.empty(slot.shape, dtype=slot.dtype, device=parts[0].device)
            mean.zero_()
            for rank, weight in enumerate(weights):
                if weight:
                    try:
                        slot.code.decode(parts[rank][slot.place], mean.view(-1), weight, signs)
                    except ValueError as error:
                        raise MismatchError(
                            f"{self._names(rank)} has sent an invalid delta of parameter {name!r}: {error}. The round "
                            "is not applied: check that all sites run one version of dadplug, and the network between"
                        ) from None
            means[name] = mean
        self._means, self.rate = means, outer_rate(*signs.tolist())
        return {**means}

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the memory."""
        return {"errors": self._errors.state_dict()["errors"], "carries": {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._errors.load_state_dict({"reference": 0, "errors": state["errors"]})
