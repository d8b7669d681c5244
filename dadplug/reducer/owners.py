"""Owners of layers: which site merges the low-rank factors of which layer, the same at all sites.

Every site sends its factors of a layer to the owner, and the owner sends the merged ones to all. With rank r, a layer
m x n and S sites, a site sends r (m + n) numbers for a layer that it does not own and (S - 1) r (m + n) for one that
it owns: 2 (S-1)/S r (m + n) on average, less than twice the layer's factors for any number of sites.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class OwnedLayer:
    """A layer whose factors are merged by an owner.

    Attributes:
        name: name of the weight.
        out: height of the gradient as a matrix.
        width: its width.
        bias: number of elements of the bias gradient that is sent beside the factors.
        rank: largest number of rows that a site sends, and that the owner's result has.
    """

    name: str
    out: int
    width: int
    bias: int
    rank: int

    @property
    def size(self) -> int:
        """Numbers that a site sends to the owner."""
        return self.rank * (self.out + self.width) + self.bias


Owners = Mapping[str, int]
"""Rank of the owner of each layer, by name of the weight."""


def assign_owners(layers: Sequence[OwnedLayer], sites: int) -> dict[str, int]:
    """Assign each layer to the site that has least to merge so far, the largest layers first.

    Args:
        layers: the layers, in an order that is the same at all sites.
        sites: number of sites.
    """
    loads = [0] * sites
    owners: dict[str, int] = {}
    for layer in sorted(layers, key=lambda layer: -layer.size):  # stable
        owner = min(range(sites), key=loads.__getitem__)
        owners[layer.name] = owner
        loads[owner] += layer.size
    return owners


def numbers_sent(layers: Iterable[OwnedLayer], owners: Owners, sites: int) -> list[int]:
    """Predict how many numbers each site sends in a step, by rank.

    Args:
        layers: the layers.
        owners: their owners.
        sites: number of sites.
    """
    sent, owned = 0, [0] * sites
    for layer in layers:
        sent += layer.size
        owned[owners[layer.name]] += layer.size
    return [sent - own + (sites - 1) * own for own in owned]
