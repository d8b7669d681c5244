"""Owners of layers: which sites merge the low-rank factors of which layer, the same at all sites.

Every site sends its factors of a layer to the owner, and the owner sends the merged ones to all. With rank r, a layer
m x n and S sites, a site sends r (m + n) numbers for a layer that it does not own and (S - 1) r (m + n) for one that
it owns: 2 (S-1)/S r (m + n) on average, less than twice the layer's factors for any number of sites.

Where a few large layers cannot balance the sites, results are relayed: the owner sends each site a part, which passes
it on to the others. Then every site sends 2 (S-1)/S r (m + n) numbers, in three messages that wait for one another.

Or layers are divided: each site merges a part of the rows of both factors, which takes as many numbers at each site.
The owner then only computes the coefficients by which all parts are merged, from sums over sites of the Gram matrices,
k (k + 1) + 2 numbers with k = S r + q rows: q are kept of what earlier steps have dropped.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from ...lowrank.dispatch import part_size

_GRAM_SHARE = 0.1  # of the layers' other numbers: more would make the bytes grow with the number of sites
_LEAST_GAIN = 10_000  # numbers that division or relays save at the busiest site, since they take further latencies
_GAIN = 0.8  # of the numbers without it


@dataclass(frozen=True)
class Ownership:
    """Sites that merge a layer.

    Attributes:
        rank: rank of the owner; if the layer is divided, of the site that computes the coefficients.
        divided: whether each site merges a part of the layer.
        kept: rows that are kept of what the merge drops, and merged with those of the next step; each site keeps its
            part of them.
        relayed: whether each site gets a part of the owner's result, and passes it on to the others.
    """

    rank: int
    divided: bool = False
    kept: int = 0
    relayed: bool = False

    def numbers_of_rows(self, rows: int, widths: Sequence[int], site: int, sites: int) -> int:
        """Return how many numbers a site sends of a layer's factors, and of what merging them needs.

        Args:
            rows: rows that a site contributes, and that the result has.
            widths: height and width of the gradient.
            site: rank of the site.
            sites: number of sites.
        """
        if not self.divided:
            return round(rows * sum(widths) * self._copies(site, sites))
        parts = 2 * (sites - 1) * rows * sum(part_size(width, sites) for width in widths)
        if site == self.rank:
            return parts + coefficients(rows, sites, self.kept) * (sites - 1)
        return parts + gram_numbers(rows, sites, self.kept)

    def numbers_of_bias(self, bias: int, site: int, sites: int) -> int:
        """Return how many numbers a site sends of a bias gradient of some elements."""
        return 2 * (sites - 1) * part_size(bias, sites) if self.divided else round(bias * self._copies(site, sites))

    def _copies(self, site: int, sites: int) -> float:
        """Return how many times a site sends a layer: to its owner, or as the owner to all others."""
        if self.relayed:  # once to its owner and a part to all but the owner, or as the owner two parts to all others
            return 2 * (sites - 1) / sites
        return sites - 1 if self.rank == site else 1


@dataclass(frozen=True)
class OwnedLayer:
    """A layer whose factors are merged by an owner.

    Attributes:
        name: name of the weight.
        out: height of the gradient as a matrix.
        width: its width.
        bias: number of elements of the bias gradient that is sent beside the factors.
        rank: largest number of rows that a site sends, and that the owner's result has.
        kept: rows that are kept of what the merge drops.
    """

    name: str
    out: int
    width: int
    bias: int
    rank: int
    kept: int = 0

    @property
    def size(self) -> int:
        """Numbers that a site sends to the owner."""
        return self.rank * (self.out + self.width) + self.bias


Owners = Mapping[str, Ownership]
"""Ownership of each layer, by name of the weight."""


def deal(owners: Owners, assigned: Owners, sizes: Mapping[str, int], present: Sequence[int]) -> Owners:
    """Let sites that are present own the layers of absent ones.

    An owner that is present keeps its layers, and so what it has kept of them, unless one would have more than twice as
    much to merge as needed; the layers are then dealt as they were assigned first.

    Args:
        owners: the present owners, by name of the layer.
        assigned: the owners where all sites are present.
        sizes: sizes of the layers.
        present: ranks of the sites that are present.
    """
    kept, anew = (_without_absent(each, sizes, present) for each in (owners, assigned))
    busiest = [max(_loads(each, sizes).values(), default=0) for each in (kept, anew)]
    return kept if busiest[0] <= 2 * busiest[1] else anew


def _without_absent(owners: Owners, sizes: Mapping[str, int], present: Sequence[int]) -> Owners:
    found = {name: owner for name, owner in owners.items() if owner.rank in present}
    loads = _loads(found, sizes)
    for name in sorted(owners.keys() - found.keys(), key=lambda name: (-sizes[name], name)):
        rank = min(present, key=lambda rank: (loads[rank], rank))
        found[name] = replace(owners[name], rank=rank)
        loads[rank] += sizes[name]
    return found


def _loads(owners: Owners, sizes: Mapping[str, int]) -> Counter[int]:
    loads: Counter[int] = Counter()
    for name, owner in owners.items():
        loads[owner.rank] += sizes[name]
    return loads


def stacked_rows(rank: int, sites: int, kept: int) -> int:
    """Return how many rows are merged: those of each site, and those kept of what earlier steps have dropped."""
    return sites * rank + kept


def gram_numbers(rank: int, sites: int, kept: int = 0) -> int:
    """Return the numbers of two symmetric matrices with a row for each row that is merged, and of their scales."""
    rows = stacked_rows(rank, sites, kept)
    return rows * (rows + 1) + 2


def coefficients(rank: int, sites: int, kept: int = 0) -> int:
    """Return the numbers of two matrices with a row for each row that is merged, and a column for each result.

    The results are the rows that are sent, and those that are kept.
    """
    return 2 * stacked_rows(rank, sites, kept) * (rank + kept)


def assign_owners(
    layers: Sequence[OwnedLayer], sites: int, divide: bool = True, relays: bool = False
) -> dict[str, Ownership]:
    """Assign each layer to the site that has least to merge so far, the largest layers first.

    The largest ones are divided where that takes clearly fewer numbers at the busiest site, else results are relayed
    where that does.

    Args:
        layers: the layers, in an order that is the same at all sites.
        sites: number of sites.
        divide: whether layers may be divided.
        relays: whether results may be relayed.
    """
    ordered = sorted(layers, key=lambda layer: -layer.size)  # stable
    best = whole = _assign(ordered, sites, set())
    before = least = sum(busiest_numbers(layers, whole, sites))
    room = _GRAM_SHARE * 2 * sum(layer.size for layer in layers)
    grams = itertools.accumulate(gram_numbers(layer.rank, sites, layer.kept) for layer in ordered)
    most = sum(gram <= room for gram in grams) if divide else 0
    counts = set(range(1, 9)) | {2**power for power in range(4, most.bit_length())} | {most}
    for count in sorted(count for count in counts if 0 < count <= most):
        tried = _assign(ordered, sites, {layer.name for layer in ordered[:count]})
        numbers = sum(busiest_numbers(layers, tried, sites))
        if numbers < least:
            best, least = tried, numbers
    if _pays(least, before):
        return best
    relayed = relay(whole)
    return relayed if relays and _pays(sum(busiest_numbers(layers, relayed, sites)), before) else whole


def _pays(numbers: int, before: int) -> bool:
    return numbers < _GAIN * before and before - numbers > _LEAST_GAIN


def relay(owners: Owners) -> dict[str, Ownership]:
    """Return the same owners, with results that each site passes on a part of."""
    return {name: replace(owner, relayed=True) for name, owner in owners.items()}


def _assign(ordered: Iterable[OwnedLayer], sites: int, divided: Set[str]) -> dict[str, Ownership]:
    loads = [(0, rank) for rank in range(sites)]
    owners: dict[str, Ownership] = {}
    for layer in ordered:
        load, rank = loads[0]
        own = layer.name in divided
        owners[layer.name] = Ownership(rank, own, layer.kept)
        size = gram_numbers(layer.rank, sites, layer.kept) if own else layer.size
        heapq.heapreplace(loads, (load + size, rank))
    return owners


def busiest_numbers(layers: Iterable[OwnedLayer], owners: Owners, sites: int) -> list[int]:
    """Predict how many numbers the busiest site sends or receives in each exchange of a step.

    Args:
        layers: the layers.
        owners: their owners.
        sites: number of sites.

    Returns:
        The numbers of two exchanges, of three if results are relayed, or of four if layers are divided.
    """
    whole, parts, gram, merging = 0, 0, 0, 0
    owned, gram_of, merging_of = [0] * sites, [0] * sites, [0] * sites
    for layer in layers:
        owner = owners[layer.name]
        if not owner.divided:
            whole += layer.size
            owned[owner.rank] += layer.size
            continue
        sides = layer.rank * (part_size(layer.out, sites) + part_size(layer.width, sites))
        parts += (sites - 1) * (sides + part_size(layer.bias, sites))
        numbers = layer.rank, sites, layer.kept
        gram += gram_numbers(*numbers)
        gram_of[owner.rank] += gram_numbers(*numbers)
        merging += coefficients(*numbers)
        merging_of[owner.rank] += coefficients(*numbers)
    each = max(max((sites - 1) * own, whole - own) for own in owned) + parts
    if any(owner.relayed for owner in owners.values()):
        return [each, max(max((sites - 1) * own, whole - own) for own in owned) // sites, whole * (sites - 1) // sites]
    if not gram:
        return [each, each]
    between = [
        max(max((sites - 1) * own, total - own) for own in by_rank)
        for total, by_rank in ((gram, gram_of), (merging, merging_of))
    ]
    return [each, *between, each]


def numbers_sent(layers: Iterable[OwnedLayer], owners: Owners, sites: int) -> list[int]:
    """Predict how many numbers each site sends in a step, by rank.

    Args:
        layers: the layers.
        owners: their owners.
        sites: number of sites.
    """
    sent, more = 0, [0] * sites  # by any site that is not the owner, and what the owners send beyond that
    for layer in layers:
        owner, widths = owners[layer.name], (layer.out, layer.width)
        other = (owner.rank + 1) % sites
        numbers = [
            owner.numbers_of_rows(layer.rank, widths, site, sites) + owner.numbers_of_bias(layer.bias, site, sites)
            for site in (other, owner.rank)
        ]
        sent += numbers[0]
        more[owner.rank] += numbers[1] - numbers[0]
    return [sent + each for each in more]
