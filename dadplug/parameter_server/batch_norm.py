"""Batch normalisation by the rows of all sites, where sites do not wait for each other.

In synchronous steps sites exchange statistics in the middle of forward and backward. Here each contribution contains
those of its batches: of each layer mean and variance, and the sums of deltas that backward takes over all rows. A site
normalises a batch with its own rows and with what the others have committed last. Statistics are part of the log, so
that all replicas of one version have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import NonFiniteError
from ..exchange.factor_buckets import finite
from ..model_sync.batchnorm import SyncedForward
from ..model_sync.samples import SampleCounter

Packed = dict[str, Tensor]
"""By name of a layer: mean, sums of squares, number of rows, weight, two sums of deltas; 4 n + 2 for n channels."""


class CommittedBatchNorms:
    """Batch normalisations of a model, with the statistics of all sites.

    In train mode a layer normalises by mean and variance over the rows of its batch and over those that other sites
    have committed last. In eval mode it is unchanged.

    Args:
        model: the model; its layers derived from `nn.BatchNorm1d`, `2d` and `3d` are normalised so.
        site: rank of this site.
        sites: number of sites.
        samples: counter of the samples of a forward pass.
        by_samples: whether the weight of a site is its number of samples; otherwise all have the same.
        lifetime: number of versions after which the statistics of a site that has committed no others do not count.

    Attributes:
        version: version that this site is at.
    """

    def __init__(
        self, model: nn.Module, site: int, sites: int, samples: SampleCounter, by_samples: bool, lifetime: int
    ) -> None:
        self.version = 0
        self._site, self._sites = site, sites
        self._samples = samples
        self._lifetime = lifetime
        self._layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}
        self._passes: list[_Pass] = []  # since the last call of `keep`
        self._held = {name: _Means() for name in self._layers}  # since the last call of `pack`
        self._committed: dict[int, tuple[int, Packed]] = {}  # by site: version, and the last statistics
        self._forwards = [
            SyncedForward(layer, partial(self._sums, name), samples if by_samples else None)
            for name, layer in self._layers.items()
        ]

    def _sums(self, name: str) -> _KnownSums:
        """Return the sums over rows that the next batch of a layer is normalised with."""
        others = [
            packed[name]
            for site, (version, packed) in sorted(self._committed.items())
            if site != self._site and name in packed and self.version - version < self._lifetime
        ]
        return _KnownSums(partial(self._record, name), others)

    def _record(self, name: str, forward: bool, values: Tensor) -> None:
        self._passes.append(_Pass(self._samples.forwards, name, forward, values))

    def keep(self) -> None:
        """Count the passes since the last call to the next contribution."""
        for each in self._passes:
            self._held[each.name].add(each.values, each.forward)
        self._passes = []

    def drop(self, *, but_last: bool = False) -> None:
        """Forget the passes since the last call of `keep`, whose gradients have been cleared.

        Args:
            but_last: whether those of the last call of the model stay, whose backward pass is beginning.
        """
        last = self._samples.forwards if but_last else -1
        self._passes = [each for each in self._passes if each.number == last]

    def pack(self) -> Packed:
        """Return the means over the passes that count to the next contribution, and begin anew.

        Raises:
            NonFiniteError: if they hold NaN or Inf.
        """
        held, self._held = self._held, {name: _Means() for name in self._layers}
        packed = {name: means.pack() for name, means in held.items() if means.forwards}
        for name, values in packed.items():
            if not finite(values):
                raise NonFiniteError(
                    f"NaN or Inf in the statistics of {name!r} of this site. Nothing has been sent, and the other "
                    "sites go on; the batch is left out if you go on, too"
                )
        return packed

    def check(self, packed: Any) -> Packed:
        """Return the statistics of a contribution.

        Raises:
            ValueError: if they are not those of this model's layers.
        """
        if not isinstance(packed, dict):
            raise ValueError("statistics of batch normalisation are missing")
        for name, values in packed.items():
            if name not in self._layers:
                raise ValueError(f"statistics of {name!r}, which is no batch normalisation here")
            numbers = 4 * self._layers[name].num_features + 2
            if not isinstance(values, Tensor) or values.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"the statistics of {name!r} are no numbers")
            if tuple(values.shape) != (numbers,) or not finite(values):
                raise ValueError(f"the statistics of {name!r} are not {numbers} finite numbers")
            channels = self._layers[name].num_features
            if bool((values[channels : 2 * channels + 2] < 0).any()):  # sums of squares, number of rows, weight
                raise ValueError(f"the statistics of {name!r} are not possible")
        return packed

    def follow(self, site: int, packed: Packed, version: int) -> None:
        """Take over the statistics of a contribution that has been committed.

        Args:
            site: rank of its site.
            packed: result of `check`.
            version: version that it has been committed to.
        """
        self._committed[site] = version, packed

    def state_dict(self) -> dict[int, tuple[int, Packed]]:
        """Return by site the age in versions of its last statistics, and these."""
        return {site: (self.version - version, packed) for site, (version, packed) in self._committed.items()}

    def load_state_dict(self, state: Mapping[int, tuple[int, Packed]]) -> None:
        """Restore what `state_dict` returned, at the present version.

        Args:
            state: the state; sites that there are no more are left out.
        """
        self._committed = {
            site: (self.version - age, dict(packed)) for site, (age, packed) in state.items() if site < self._sites
        }

    def detach(self) -> None:
        """Restore the forward of the layers."""
        for forward in self._forwards:
            forward.restore()


class _Pass(NamedTuple):
    """Forward or backward pass of a layer.

    Attributes:
        number: number of the call of the model.
        name: name of the layer.
        forward: whether it is a forward pass.
        values: mean, sums of squares, number of rows and weight, or the sums of deltas of a backward pass.
    """

    number: int
    name: str
    forward: bool
    values: Tensor


@dataclass
class _Means:
    """Means over passes of a layer, in double precision.

    Attributes:
        rows: sum over forward passes of (sum of rows, sum of their squares, number of rows, weight).
        deltas: sum over backward passes of their sums of deltas.
        dtype: type of the layer's statistics.
        forwards: number of forward passes.
        backwards: number of backward passes.
    """

    rows: Tensor | float = 0.0
    deltas: Tensor | float = 0.0
    dtype: torch.dtype = torch.float32
    forwards: int = 0
    backwards: int = 0

    def add(self, values: Tensor, forward: bool) -> None:
        """Add a pass, see `_Pass`."""
        wide = values.double().cpu()
        if not forward:
            self.deltas = wide + self.deltas
            self.backwards += 1
            return
        mean, squares, rest = _split(wide)
        self.rows = torch.cat([mean * rest[0], squares + mean.square() * rest[0], rest]) + self.rows
        self.dtype = values.dtype
        self.forwards += 1

    def pack(self) -> Tensor:
        """Return the means as one vector, see `Packed`."""
        assert isinstance(self.rows, Tensor)
        sums, squares, rest = _split(self.rows / self.forwards)
        mean = sums / rest[0].clamp_min(1.0)
        spread = (squares - mean.square() * rest[0]).clamp_min(0.0)
        deltas = torch.zeros(2 * len(mean), dtype=torch.float64) + self.deltas / max(self.backwards, 1)
        return torch.cat([mean, spread, rest, deltas]).to(self.dtype)


def _split(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first and the second half of all but two numbers, and these."""
    first, second, rest = values.tensor_split([len(values) // 2 - 1, len(values) - 2])
    return first, second, rest


class _KnownSums:
    """Sums over rows that one batch of a layer is normalised with: its own, and the last of other sites.

    Args:
        record: called with whether a pass is a forward pass, and its values.
        others: statistics of other sites.
    """

    own_row = 0

    def __init__(self, record: Callable[[bool, Tensor], None], others: list[Tensor]) -> None:
        self._record = record
        self._others = others

    def of_forward(self, values: Tensor) -> Tensor:
        self._record(True, values)
        return torch.stack([values, *(each[: len(values)].to(values) for each in self._others)])

    def of_backward(self, values: Tensor) -> Tensor:
        self._record(False, values)
        return torch.stack([values, *(each[-len(values) :].to(values) for each in self._others)])
