"""Payloads with sparse deltas for some parameters and low-rank factors for others: whatever loses less.

In the first round each site codes the delta of each matrix both ways: its largest entries at the usual density, and
factors in int8 of the largest rank that takes no more bytes. The sites add up the squared errors, and all take the way
with the smaller sum, for the rest of the training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..exchange import Transport
from .delta_format import DeltaFormat
from .sparse_codec import SparseCode
from .sparse_format import SparseFormat

AUTO_DENSITY = 0.02
"""Share of the entries that is sent where entries are, with ``density="auto"``."""

_FACTOR_WIRE = "int8"


class AutoFormat:
    """Format of payloads in which each parameter's delta is sparse or of low rank.

    Args:
        decay: factor on the memory of sparse deltas in each round.
        error_feedback: whether to keep what is not sent.
        names: names of the sites by rank, for errors.

    Attributes:
        ranks: by name of each parameter that is sent as factors, their rank.
    """

    keeps_deltas = False  # factors overwrite them

    def __init__(self, decay: float, error_feedback: bool, names: Callable[[int], str] = str) -> None:
        self.ranks: dict[str, int] | None = None
        self._error_feedback = error_feedback
        self._sparse = SparseFormat(lambda number: AUTO_DENSITY, decay, error_feedback, names)
        self._factors: dict[int, DeltaFormat] = {}  # by rank
        self._rooms: dict[int, dict[torch.dtype, slice]] = {}  # of these in the payloads
        self._chosen: list[str] = []  # names that a choice was made for

    def begin_round(self, number: int) -> str:
        """Return what payloads depend on besides the tensors, as `SparseFormat.begin_round` does."""
        return self._sparse.begin_round(number) + ", auto"

    def choose(self, deltas: Mapping[str, Tensor], transport: Transport) -> None:
        """Choose how each delta is sent, together with the other sites, where no choice has been made for them.

        Args:
            deltas: this site's deltas by name.
            transport: the transport.
        """
        own = None if self.ranks is None or self._chosen != [*deltas] else self.ranks
        measured = {} if own is not None else {name: self.errors(delta) for name, delta in deltas.items()}
        errors = {name: each for name, each in measured.items() if each is not None}
        reports = transport.gather_objects({"ranks": own, "errors": errors})
        known = next((report["ranks"] for report in reports if report["ranks"] is not None), None)
        if known is None:
            known = {}
            for name in deltas:
                found = [report["errors"][name] for report in reports if name in report["errors"]]
                if found and sum(each["factors"] for each in found) < sum(each["entries"] for each in found):
                    known[name] = found[0]["rank"]
        self.ranks, self._chosen = known, [*deltas]

    def errors(self, delta: Tensor) -> dict[str, Any] | None:
        """Return the squared errors of both ways of sending a delta; None where factors would take more bytes.

        Args:
            delta: the delta; any shape.
        """
        nbytes, form = SparseCode(delta.numel(), AUTO_DENSITY).nbytes, DeltaFormat(_FACTOR_WIRE, 1, False)
        if delta.dim() < 2 or not delta.numel():
            return None
        rank = nbytes // sum(form.layout({"": delta}).values())
        if not rank or form.rank_of(delta) is None:
            return None
        left = {}
        for way, tried in (("entries", SparseFormat(lambda number: AUTO_DENSITY, 1.0, False)), ("factors", None)):
            found = tried or DeltaFormat(_FACTOR_WIRE, rank, False)
            found.begin_round(0)
            rooms = {dtype: torch.zeros(size, dtype=dtype) for dtype, size in found.layout({"": delta}).items()}
            found.encode({"": delta.clone()}, rooms)
            sent = found.decode({dtype: [room] for dtype, room in rooms.items()}, [1.0])[""]
            left[way] = float((delta - sent.to(delta.device)).double().square().sum())
        return {"rank": rank, **left}

    def layout(self, tensors: Mapping[str, Tensor]) -> dict[torch.dtype, int]:
        """Lay out the payloads for a set of tensors, as `DeltaFormat.layout` does."""
        ranks = self.ranks or {}
        for rank in sorted({*ranks.values()} - {*self._factors}):
            self._factors[rank] = DeltaFormat(_FACTOR_WIRE, rank, self._error_feedback)
        sizes = self._sparse.layout({name: each for name, each in tensors.items() if name not in ranks})
        self._rooms = {}
        for rank, form in sorted(self._factors.items()):
            self._rooms[rank] = {}
            for dtype, size in form.layout({n: each for n, each in tensors.items() if ranks.get(n) == rank}).items():
                start = sizes.get(dtype, 0)
                self._rooms[rank][dtype] = slice(start, start + size)
                sizes[dtype] = start + size
        return sizes

    def rate_of(self, name: str) -> float:
        """Return the outer rate of a parameter, as `SparseFormat.rate_of` does; that of factors is 1."""
        return 1.0 if name in (self.ranks or {}) else self._sparse.rate_of(name)

    def encode(self, deltas: Mapping[str, Tensor], payloads: Mapping[torch.dtype, Tensor]) -> None:
        """Encode this site's deltas, as `DeltaFormat.encode` does."""
        self._sparse.encode(deltas, payloads)
        for rank, rooms in self._rooms.items():
            self._factors[rank].encode(deltas, {dtype: payloads[dtype][room] for dtype, room in rooms.items()})

    def decode(self, payloads: Mapping[torch.dtype, Sequence[Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
        """Compute the mean of what all sites have sent, as `DeltaFormat.decode` does.

        Raises:
            MismatchError: if a payload is not what `encode` makes; it names the site and the tensor.
        """
        means = self._sparse.decode(payloads, weights)
        for rank, rooms in self._rooms.items():
            parts = {dtype: [each[room] for each in payloads[dtype]] for dtype, room in rooms.items()}
            means |= self._factors[rank].decode(parts, weights)
        return means

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the memories, and the choice."""
        factors = {rank: form.state_dict() for rank, form in self._factors.items()}
        return {**self._sparse.state_dict(), "ranks": self.ranks, "chosen": self._chosen, "factors": factors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._sparse.load_state_dict(state)
        self.ranks, self._chosen = state.get("ranks"), [*state.get("chosen", ())]
        self._factors = {}
        for rank, own in state.get("factors", {}).items():
            self._factors[rank] = DeltaFormat(_FACTOR_WIRE, rank, self._error_feedback)
            self._factors[rank].load_state_dict(own)
