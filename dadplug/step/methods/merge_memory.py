"""Memory of what the merges of divided layers have dropped, by parts of the sites that merge."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...exchange.factor_buckets import FactorPayload
from ...lowrank.dispatch import divide_columns


class PartPlace(NamedTuple):
    """Part of a divided layer that a site merges.

    Attributes:
        site: rank of the site.
        sites: number of sites.
        out: height of the layer's gradient as a matrix.
        width: its width.
    """

    site: int
    sites: int
    out: int
    width: int


class MergeMemory:
    """Rows by layer whose product is to be added to the next step's sum, without the loss scale.

    A step stages the next rows beside the present ones: `commit` makes them the present ones, `rollback` drops them.
    After a checkpoint of another number of sites was loaded, the parts of all its sites are here until the layer is
    asked for; where one is missing, the memory of the layer is dropped.
    """

    def __init__(self) -> None:
        self._parts: dict[str, dict[PartPlace, FactorPayload]] = {}
        self._staged: dict[str, tuple[PartPlace, FactorPayload]] = {}

    def find(self, name: str, place: PartPlace) -> FactorPayload | None:
        """Return the rows of a site's part of a layer, the strongest first; None where nothing is kept."""
        parts = self._parts.get(name, {})
        if parts and (len(parts) > 1 or place not in parts):
            own = parts[place] if place in parts else _divided(parts, place)
            self._parts[name] = parts = {} if own is None else {place: own}
        return parts.get(place)

    def prepare(self, name: str, place: PartPlace, rows: FactorPayload) -> None:
        """Keep rows of a site's part of a layer for the next step, if this one counts."""
        self._staged[name] = place, rows

    def commit(self, name: str) -> None:
        """Make the staged rows of a layer the present ones."""
        if name in self._staged:
            place, rows = self._staged.pop(name)
            self._parts[name] = {place: rows}

    def rollback(self, name: str) -> None:
        """Drop the staged rows of a layer."""
        self._staged.pop(name, None)

    def forget(self, name: str) -> None:
        """Drop the memory of a layer."""
        self.rollback(name)
        self._parts.pop(name, None)

    def retain(self, names: Container[str]) -> None:
        """Drop the memory of all other layers."""
        for name in [name for name in self._parts if name not in names]:
            self.forget(name)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the memory: by layer, places with rows of left and of right."""
        return {
            name: [(tuple(place), rows.left.clone(), rows.right.clone()) for place, rows in parts.items()]
            for name, parts in self._parts.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._parts = {}
        self.add(state)

    def add(self, state: dict[str, Any]) -> None:
        """Add parts that are not here from what another site's `state_dict` returned."""
        for name, saved in state.items():
            parts = self._parts.setdefault(name, {})
            for place, left, right in saved:
                parts.setdefault(PartPlace(*place), FactorPayload(left.clone(), right.clone()))


def _divided(parts: dict[PartPlace, FactorPayload], place: PartPlace) -> FactorPayload | None:
    """Return a site's part of the rows whose parts other sites had; None unless all of them are there."""
    for sites in {each.sites for each in parts}:
        found = [parts.get(place._replace(site=site, sites=sites)) for site in range(sites)]
        whole = [each for each in found if each is not None]
        if len(whole) == sites and len({each.rows for each in whole}) == 1:
            left = torch.cat([each.left for each in whole], 1)[:, : place.out]
            right = torch.cat([each.right for each in whole], 1)[:, : place.width]
            return FactorPayload(_part(left, place), _part(right, place))
    return None


def _part(matrix: Tensor, place: PartPlace) -> Tensor:
    return divide_columns(matrix, place.sites)[place.site]
