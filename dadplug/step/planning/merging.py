"""Choice between sending factors to all sites and sending them to an owner of each layer, which merges them.

Its cost model of the link between sites, measured at the start, predicts the times of the exact paths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ...exchange import Transport
from ...exchange.codec import register
from ...exchange.fields import checked
from ...exchange.transport import Streams
from ...exchange.wire import wire_format
from ...options import Options
from ...support.schedules import current
from ..methods import Method
from ..methods.base import GradientPath
from ..reducer.owners import OwnedLayer, Owners, assign_owners, busiest_numbers, relay, stacked_rows
from ..units.base import Unit
from ..units.factor import FactorUnit

_SIZES = (4_096, 65_536, 1_048_576)  # elements; the next larger one is tried while the last was fast
_FAST = 0.02  # seconds
_ROUNDS = 3


@register
@dataclass(frozen=True)
class LinkCosts:
    """Measured costs at one site, with the exchange of all sites.

    Attributes:
        latency: seconds of an exchange of a few bytes.
        gather: seconds for each byte that a site sends to every other one.
        reduce: seconds for each byte of a tensor that is summed over sites.
        multiply: seconds for each multiplication and addition of a matrix product.
    """

    latency: float
    gather: float
    reduce: float
    multiply: float

    @staticmethod
    def worst_of(links: Iterable[LinkCosts | None]) -> LinkCosts | None:
        """Return the largest of each of the costs that have been measured; None without any."""
        known = [link for link in links if link is not None]
        if not known:
            return None
        return LinkCosts(
            max(link.latency for link in known),
            max(link.gather for link in known),
            max(link.reduce for link in known),
            max(link.multiply for link in known),
        )

    def dense(self, nbytes: int, multiplications: int) -> float:
        """Predict the seconds of a gradient that is formed and all-reduced.

        Args:
            nbytes: bytes of the gradient.
            multiplications: multiplications that form a site's own gradient.
        """
        return self.reduce * nbytes + self.multiply * multiplications

    def factors(self, nbytes: int, multiplications: int, sites: int) -> float:
        """Predict the seconds of a gradient whose factors are gathered, and which every site forms for all sites.

        Args:
            nbytes: bytes of a site's factors.
            multiplications: multiplications that form a site's own gradient.
            sites: number of sites.
        """
        return self.gather * nbytes + self.multiply * multiplications * sites


def measure_link(transport: Transport) -> LinkCosts:
    """Measure the link by exchanges of growing size, for about a tenth of a second; all sites must call it."""
    constants, left, right = current(), torch.ones(32, 512), torch.ones(32, 512)
    if constants.tuned and transport.device.type == "cpu":  # measured on products of many sizes
        multiply = 1e-6 / constants.encoding.fat
    else:
        multiply = _fastest(lambda: left.T @ right) / (32 * 512 * 512)
    latency = gather_seconds(transport, 16)
    gather = reduce = 0.0
    for size in _SIZES:
        seconds = gather_seconds(transport, size)
        summed = torch.zeros(size, device=transport.device)
        reducing = _fastest(lambda: transport.all_reduce(summed).wait())  # noqa: B023
        gather, reduce = (max(0.0, each - latency) / (4 * size) for each in (seconds, reducing))
        if max(checked(transport.gather_present(seconds), float, "time", transport).values()) > _FAST:
            break
    return LinkCosts(latency, gather, reduce, multiply)


def gather_seconds(transport: Transport, size: int, rounds: int = _ROUNDS) -> float:
    """Measure an exchange of a message of each site; all sites must call it.

    Args:
        transport: the transport.
        size: elements of four bytes of a site's message.
        rounds: number of measurements, of which the fastest counts.
    """
    gather = transport.gather([size] * transport.world_size, torch.float32, once=True)

    def exchange() -> None:
        gather.launch()
        gather.wait()

    return _fastest(exchange, rounds)


def _fastest(call: Callable[[], object], rounds: int = _ROUNDS) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


_PASSES = 8  # products with a block of rows in a compression, about
_DECOMPOSITIONS = 50  # products of square matrices that take as long as two symmetric and one singular decomposition


_MARGIN = 0.005  # seconds of a step from which all sites merge in place of owners, who send less


def check_merge(options: Options, transport: Transport) -> None:
    """Check that a transport can do what the options ask for; close it if it cannot.

    Raises:
        ValueError: if it cannot.
    """
    if transport.inside is not None and (options.privacy is not None or options.private):
        transport.close()
        raise ValueError(
            f"{'privacy' if options.privacy is not None else 'private'}= with min_sites goes with one process at each "
            "site: start one, or leave it out"
        )
    if options.clip_sites is not None and transport.nodes is not None:
        transport.close()
        raise ValueError("clip_sites= does not go with several processes at a site, which send as one: leave it out")
    if options.merge == "owner" and transport.world_size > 1 and not transport.has_all_to_all:
        if transport.nodes is not None:
            reason = "hierarchical groups, which merge the gradients of a node before they send them"
        elif isinstance(transport, Streams):
            reason = "a hub with several processes at a site, or more than 254 sites"
        else:
            reason = "NCCL"
        transport.close()
        raise ValueError(f"merge='owner' does not work over {reason}: choose merge='all' or merge='auto'")


def settle_merge(options: Options, transport: Transport) -> Options:
    """Return options with ``merge="all"`` in place of ``"auto"`` where owners cannot merge, or would not save bytes.

    Args:
        options: the options.
        transport: the transport.
    """
    needs_all = options.hierarchy is not None or options.budget is not None
    enough = transport.world_size > 2 or transport.rounds.elastic  # a run of two sites may grow
    able = options.mode == "rankdad" and enough and transport.has_all_to_all and not needs_all
    return options if able or options.merge != "auto" else replace(options, merge="all")


class Merging:
    """Choice of the layers' owners, the same at all sites.

    Args:
        method: the method.
        options: the options.
        transport: the transport.

    Attributes:
        link: costs of the link as all sites know them; None before they have been measured.
        sites: number of sites of the plan, which a site that joins may exceed until the run has grown.
    """

    def __init__(self, method: Method, options: Options, transport: Transport) -> None:
        self._method = method
        self._options = options
        self._transport = transport
        self.link: LinkCosts | None = None
        self.sites = transport.world_size

    @property
    def needs_link(self) -> bool:
        """Whether the choice depends on the link."""
        return self._options.merge == "auto" and self._transport.has_all_to_all

    def owners(self, units: Sequence[Unit]) -> Owners:
        """Return the sites that merge each layer, by name of the weight; empty where factors are sent to all sites."""
        sites = self.sites
        if self._options.merge == "all" or sites == 1 or not self._transport.has_all_to_all:
            return {}
        layers = self._layers(units)
        wire = wire_format(self._options.wire_of(GradientPath.LOWRANK))
        # The memory of rounding to int8 is of whole rows. Over a hub, the results of parts would take two rounds more,
        # and the hub sends what it gets from one site to all.
        apart = not isinstance(self._transport, Streams)
        owners = assign_owners(layers, sites, apart and not wire.quantised, apart)
        if self._options.merge == "owner":
            return owners
        if self.link is None or sites == 2:
            return {}
        whole = assign_owners(layers, sites, divide=False)
        ways = [whole, owners, relay(whole)] if apart else [whole, owners]
        predicted = [predict_seconds(layers, tried, sites, self.link, wire.itemsize) for tried in ways]
        to_all, seconds = predicted[0][0], [to_owner for _, to_owner in predicted]
        return {} if to_all + _MARGIN <= min(seconds) else ways[seconds.index(min(seconds))]

    def busiest_share(self, units: Sequence[Unit]) -> float:
        """Return the numbers on the link of the busiest site in a step, as a share of those where all sites merge."""
        owners, layers = self.owners(units), self._layers(units)
        if not owners:
            return 1.0
        return sum(busiest_numbers(layers, owners, self.sites)) / (self.sites - 1) / sum(each.size for each in layers)

    def _layers(self, units: Sequence[Unit]) -> list[OwnedLayer]:
        """Return the layers that can have an owner: those whose gradients are compressed."""
        found = []
        for unit in units:
            if isinstance(unit, FactorUnit) and unit.path == GradientPath.LOWRANK:
                sends_bias = unit.bias is not None and self._method.traits.sends_bias
                bias = unit.parameters[unit.bias].numel() if sends_bias and unit.bias is not None else 0
                rank = self._method.rank_of(self._method.largest_rank, *unit.widths)
                found.append(OwnedLayer(unit.name, *unit.widths, bias, rank, rank if self._method.keeps_rows else 0))
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
