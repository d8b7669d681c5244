"""Cost model of the link between sites: measured at the start, it predicts the times of the exact paths."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from ..exchange import Transport
from ..exchange.codec import register
from ..schedules import current

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
    def worst(links: Sequence[LinkCosts]) -> LinkCosts:
        """Return the highest of the costs that the sites have measured, since all sites wait for the slowest."""
        return LinkCosts(
            max(link.latency for link in links),
            max(link.gather for link in links),
            max(link.reduce for link in links),
            max(link.multiply for link in links),
        )

    @staticmethod
    def worst_of(links: Iterable[LinkCosts | None]) -> LinkCosts | None:
        """Return `worst` of the costs that have been measured; None without any."""
        known = [link for link in links if link is not None]
        return LinkCosts.worst(known) if known else None

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
    latency = _gather_seconds(transport, 16)
    gather = reduce = 0.0
    for size in _SIZES:
        seconds = _gather_seconds(transport, size)
        summed = torch.zeros(size, device=transport.device)
        reducing = _fastest(lambda: transport.all_reduce(summed).wait())  # noqa: B023
        gather, reduce = (max(0.0, each - latency) / (4 * size) for each in (seconds, reducing))
        if max(transport.gather_present(seconds).values()) > _FAST:
            break
    return LinkCosts(latency, gather, reduce, multiply)


def _gather_seconds(transport: Transport, size: int) -> float:
    gather = transport.gather_once([size] * transport.world_size, torch.float32)

    def exchange() -> None:
        gather.launch()
        gather.wait()

    return _fastest(exchange)


def _fastest(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
