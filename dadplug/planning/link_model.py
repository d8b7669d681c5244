"""What the link between sites costs, as measured at the start, and what a gradient would by each exact path."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..exchange import Transport
from ..exchange.codec import register

_SIZES = (4_096, 65_536, 1_048_576)  # numbers; the next larger one is tried while the last was fast
_FAST = 0.02  # seconds
_ROUNDS = 3


@register
@dataclass(frozen=True)
class LinkCosts:
    """What things cost at a site, the exchange with all others included.

    Attributes:
        latency: seconds of an exchange of next to nothing.
        gather: seconds a byte that a site sends to every other one.
        reduce: seconds a byte of a tensor that is summed over sites.
        multiply: seconds a multiplication and addition of a matrix product.
    """

    latency: float
    gather: float
    reduce: float
    multiply: float

    @staticmethod
    def worst(links: Sequence[LinkCosts]) -> LinkCosts:
        """The slowest of what the sites have measured: all wait for that one."""
        return LinkCosts(*(max(getattr(link, name) for link in links) for name in LinkCosts.__dataclass_fields__))

    def dense(self, nbytes: int, multiplications: int) -> float:
        """Predicts the seconds of a gradient that is formed and all-reduced.

        Args:
            nbytes: bytes of the gradient.
            multiplications: multiplications that form a site's own.
        """
        return self.reduce * nbytes + self.multiply * multiplications

    def factors(self, nbytes: int, multiplications: int, sites: int) -> float:
        """Predicts the seconds of a gradient whose factors are gathered, and which every site forms for all.

        Args:
            nbytes: bytes of a site's factors.
            multiplications: multiplications that form a site's own.
            sites: number of sites.
        """
        return self.gather * nbytes + self.multiply * multiplications * sites


def measure_link(transport: Transport) -> LinkCosts:
    """Measures the link by exchanges of growing size, for about a tenth of a second; all sites must call it."""
    left, right = torch.ones(32, 512), torch.ones(32, 512)
    multiply = _fastest(lambda: left.T @ right) / (32 * 512 * 512)
    latency = _gather_seconds(transport, 16)
    gather = reduce = 0.0
    for size in _SIZES:
        seconds = _gather_seconds(transport, size)
        summed = torch.zeros(size, device=transport.device)
        reducing = _fastest(lambda: transport.all_reduce(summed).wait())  # noqa: B023
        gather, reduce = (max(0.0, each - latency) / (4 * size) for each in (seconds, reducing))
        if max(transport.gather_objects(seconds)) > _FAST:
            break
    return LinkCosts(latency, gather, reduce, multiply)


def _gather_seconds(transport: Transport, size: int) -> float:
    gather = transport.gather([size] * transport.world_size, torch.float32)

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
