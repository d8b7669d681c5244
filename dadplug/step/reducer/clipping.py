"""Norms of the sites' gradients: which are out of all proportion, and how these are clipped by the median.

With the norm n_s of what site s sends in a step, and ``clip_sites=c``, the site's weight in the mean is multiplied by
``min(1, c m / n_s)``, where m is the median of the norms of the sites that have data, the lower one of two. All sites
compute it from the same numbers, and so get the same bits.

Each site states its norm in its step header, without ``clip_sites`` in every eighth step. Where what it sends arrives
at every site, these compute the norm of it, too, and use that where it is larger. An owner does so for the layers that
it merges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median_low

import torch
from torch import Tensor

from ...exchange import Transport
from ...exchange.factor_buckets import FactorPayload
from ...exchange.rounds import Outsized
from ...hooks.factor import Form
from ...support.logs import get_logger
from ..methods import decode, is_product

_log = get_logger(__name__)
OUTSIZED = 1000.0
"""Multiple of the median from which on a gradient is named, where none is clipped."""
MEASURED_EVERY = 8  # steps, where norms are only compared: they cost time, and on a GPU a wait
TRUSTED = 1.05
"""A statement holds where what arrives is up to this many times as large: it is rounded on the wire."""
FEW_STEPS = 10
_NOISE = 2.0**-20  # of the product of the factors' norms: what rounding may leave of rows that cancel each other


def square_of(payload: FactorPayload, form: Form, with_bias: bool, exact: bool) -> Tensor:
    """Return the squared norm of the gradients of a weight and its bias that a payload stands for.

    If it is exact, it is infinity where it is out of range, and never below what rounding may leave of the rows.

    Args:
        payload: the rows.
        form: how rows make a gradient.
        with_bias: whether the layer has a bias that is trained.
        exact: whether it has to be exact; otherwise the squared norms of left and right are multiplied, which is an
            upper bound where the gradient is their product, and costs less.
    """
    left, right, bias = payload[:3]
    further = [] if bias is None else [bias]
    if not payload.rows or not (exact or right.is_floating_point()):
        return sum_of_squares([left, *further], exact)
    if not exact:
        first, second, *rest = torch._foreach_norm([left, right, *further])
        return (first * second) ** 2 + (rest[0] ** 2 if rest else 0.0)
    summed, wide = with_bias and bias is None, left.double()
    width = right.double() if right.is_floating_point() else torch.ones_like(right, dtype=torch.float64)
    if summed:  # the gradient of the bias is that of an input of ones
        width = torch.nn.functional.pad(width, (0, 1), value=1.0)
    least = _NOISE**2 * float(wide.square().sum() * width.square().sum())
    if not math.isfinite(least):
        found = math.inf
    elif is_product(form):
        from ...lowrank.compression import squared_norm  # runs that clip nothing do not need it

        found = squared_norm(wide, width) + float(sum_of_squares(further))
    else:
        formed = decode([payload], [1.0], summed, site_by_site=True, form=form)
        found = float(sum_of_squares([*formed, *further]))
    return torch.tensor(max(found, least) if math.isfinite(found) else math.inf, dtype=torch.float64)


def sum_of_squares(gradients: Iterable[Tensor | None], exact: bool = True) -> Tensor:
    """Return the sum of the squared norms of gradients, of which some may be None or sparse.

    Args:
        gradients: the gradients.
        exact: whether it is computed in double precision.
    """
    plain = [each.coalesce()._values() if each.is_sparse else each for each in gradients if each is not None]
    real = [torch.view_as_real(each.detach()) if each.is_complex() else each.detach() for each in plain]
    wide = exact or torch.float64 in [each.dtype for each in real]
    if not real:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm(real, 2, torch.float64 if wide else torch.float32)
    return torch.stack([each.to(norms[0].device) for each in norms]).square().sum()


def total_of(squares: Sequence[Tensor]) -> float:
    """Return the sum of numbers, which is read from their device at once."""
    return float(torch.stack([each.to(squares[0].device, torch.float64) for each in squares]).sum()) if squares else 0.0


def limit_of(norms: Sequence[float], multiple: float) -> float:
    """Return the norm to which those of the sites are clipped; infinity where no site states one.

    Args:
        norms: the norms; 0.0 for sites without data.
        multiple: the option ``clip_sites``.
    """
    counted = [norm for norm in norms if norm > 0]
    return multiple * median_low(counted) if counted else math.inf


class OutsizedGradients:
    """Log of the sites whose gradients are out of all proportion, once for each occurrence.

    Args:
        transport: the transport.
        multiple: the option ``clip_sites``.
        what: what has the norms, for messages.
        over: steps without it that end an occurrence.
    """

    def __init__(
        self, transport: Transport, multiple: float | None, what: str = "gradient", over: int = FEW_STEPS
    ) -> None:
        self._transport = transport
        self._multiple = multiple
        self._what, self._over = what, over
        self._last: dict[int, tuple[int, float]] = {}  # by rank, the last step above the limit, and how far

    def follow(self, norms: Sequence[float], step: int) -> None:
        """Name the sites whose norms are above the limit, and were not in the steps before.

        One of the other sites reports it to a hub, for its status.

        Args:
            norms: the norms of all sites, by rank; 0.0 for sites without data.
            step: number of the step.
        """
        limit = limit_of(norms, self._multiple or OUTSIZED)
        for rank, norm in enumerate(norms):
            if norm <= limit:
                continue
            times, transport = norm / limit * (self._multiple or OUTSIZED), self._transport
            last, self._last[rank] = self._last.get(rank), (step, times)
            if last is not None and step - last[0] <= self._over:
                continue
            done = "" if self._multiple is None else f", and clipped to {self._multiple:g} times the median"
            _log.warning(
                "step %d: the norm of the %s of %s is %.3g times the median of all sites%s. Look at the scale of its "
                "data and of its loss",
                step,
                self._what,
                transport.sites[rank],
                times,
                done,
            )
            if transport.rank == min(other for other, each in enumerate(norms) if each and other != rank):
                transport.rounds.show(Outsized(rank, step, times))

    def explain(self, step: int) -> str:
        """Return what explains NaN or Inf in a step: sites that were above the limit in it, or shortly before."""
        recent = [(rank, *last) for rank, last in self._last.items() if step - last[0] <= self._over]
        return "".join(
            f"in step {last} the norm of the {self._what} of {self._transport.sites[rank]} was {times:.3g} times the "
            "median of all sites, which explains this: "
            for rank, last, times in recent
        )
