"""Choice between sending factors to all sites and sending them to an owner of each layer, which merges them."""

from __future__ import annotations

from collections.abc import Sequence

from ..exchange import Transport
from ..exchange.wire import wire_format
from ..methods import Method
from ..methods.base import GradientPath
from ..methods.rankdad import keeps_rows
from ..options import Options
from ..reducer.owners import OwnedLayer, Owners, assign_owners, busiest_numbers, stacked_rows
from ..units.base import Unit
from ..units.factor import FactorUnit
from .link_model import LinkCosts

_PASSES = 8  # products with a block of rows in a compression, about
_DECOMPOSITIONS = 50  # products of square matrices that take as long as two symmetric and one singular decomposition


def check_merge(options: Options, transport: Transport) -> None:
    """Check that a transport can do what the option ``merge`` asks for.

    Raises:
        ValueError: if it cannot.
    """
    if options.merge == "owner" and transport.world_size > 1 and not transport.has_all_to_all:
        if transport.nodes is not None:
            reason = "hierarchical groups, which merge the gradients of a node before they send them"
        elif not transport.is_direct:
            reason = "a hub, which passes what a site sends to all others"
        else:
            reason = "NCCL"
        raise ValueError(f"merge='owner' does not work over {reason}: choose merge='all' or merge='auto'")


class Merging:
    """Choice of the layers' owners, the same at all sites.

    Args:
        method: the method.
        options: the options.
        transport: the transport.

    Attributes:
        link: costs of the link as all sites know them; None before they have been measured.
    """

    def __init__(self, method: Method, options: Options, transport: Transport) -> None:
        self._method = method
        self._options = options
        self._transport = transport
        self.link: LinkCosts | None = None

    @property
    def needs_link(self) -> bool:
        """Whether the choice depends on the link."""
        return self._options.merge == "auto" and self._transport.has_all_to_all

    def owners(self, units: Sequence[Unit]) -> Owners:
        """Return the sites that merge each layer, by name of the weight; empty where factors are sent to all sites."""
        sites = self._transport.world_size
        if self._options.merge == "all" or sites == 1 or not self._transport.has_all_to_all:
            return {}
        layers = self._layers(units)
        divide = not wire_format(self._options.wire).quantised  # the memory of rounding to int8 is of whole rows
        owners = assign_owners(layers, sites, divide)
        if self._options.merge == "owner":
            return owners
        if self.link is None:
            return {}
        whole = assign_owners(layers, sites, divide=False)
        to_all, to_owner = predict_seconds(layers, whole, sites, self.link)
        divided = predict_seconds(layers, owners, sites, self.link)[1]
        return min((to_all, {}), (to_owner, whole), (divided, owners), key=lambda choice: choice[0])[1]

    def _layers(self, units: Sequence[Unit]) -> list[OwnedLayer]:
        """Return the layers that can have an owner: those whose gradients are compressed."""
        found = []
        for unit in units:
            if isinstance(unit, FactorUnit) and unit.path == GradientPath.LOWRANK:
                sends_bias = unit.bias is not None and self._method.traits.sends_bias
                bias = unit.parameters[unit.bias].numel() if sends_bias and unit.bias is not None else 0
                rank = min(self._options.rank, *unit.widths)
                found.append(OwnedLayer(unit.name, *unit.widths, bias, rank, rank if keeps_rows(self._options) else 0))
        return found


def predict_seconds(
    layers: Sequence[OwnedLayer], owners: Owners, sites: int, link: LinkCosts, itemsize: int = 4
) -> tuple[float, float]:
    """Predict the seconds of an exchange of low-rank factors, with all sites and by owners.

    Args:
        layers: the layers.
        owners: the sites that merge each layer, by name.
        sites: number of sites.
        link: costs of the link.
        itemsize: bytes of a number.

    Returns:
        The seconds of each way.
    """
    whole = sum(layer.size for layer in layers)
    formed = sum(layer.rank * layer.out * layer.width for layer in layers)
    to_all = link.latency + link.gather * itemsize * whole + link.multiply * sites * formed
    exchanges = busiest_numbers(layers, owners, sites)
    merged = [0] * sites
    for layer in layers:
        owner, rows = owners[layer.name], stacked_rows(layer.rank, sites, layer.kept)
        products = rows * (layer.rank + layer.kept) * _PASSES
        merged[owner.rank] += _DECOMPOSITIONS * rows**3 if owner.divided else products * (layer.out + layer.width)
    travel = len(exchanges) * link.latency + link.gather / (sites - 1) * itemsize * sum(exchanges)
    return to_all, travel + link.multiply * (formed + max(merged))
