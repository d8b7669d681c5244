"""Cost model of the algorithms; its rates are in `dadplug.schedules.Encoding`, and ``dadplug.tune`` measures them."""

from __future__ import annotations

import functools

from ..schedules import Encoding, current
from .algorithms import columns_for

OPTIMAL = 1.2  # the optimum may cost this much more than an approximation


def terms(rows: int, out: int, width: int, k: int, iterations: int) -> dict[str, dict[str, float]]:
    """Return the work of each algorithm, by the name of the rate at which it is done.

    Args:
        rows: rows N of the factors.
        out: width of the deltas.
        width: width of the activations.
        k: number of columns.
        iterations: passes of a block iteration; a warm start halves the first.

    Returns:
        Multiplications and additions by ``"fat"`` and ``"skinny"``, and rows^3 by ``"eigen"``. A constant time of a
        call, such as ``"start_gram"``, is not among them.
    """
    columns, sides = columns_for(k), out + width
    further = columns - k  # which the projection, too, has more of than after the Gram matrices
    products = max(1, 2 * iterations - 1) * columns + further
    return {
        "gram": {"fat": rows * rows * sides, "eigen": rows**3},
        "iteration": {"skinny": products * rows * sides},
        "formed": {"fat": rows * out * width, "skinny": products * out * width},
    }


def predict(
    rows: int, out: int, width: int, k: int, iterations: int, constants: Encoding | None = None
) -> dict[str, float]:
    """Predict the time of each algorithm in microseconds, without the projection that follows.

    Args:
        rows: rows N of the factors.
        out: width of the deltas.
        width: width of the activations.
        k: number of columns.
        iterations: passes of a block iteration; a warm start halves the first.
        constants: the rates; those of this process if None.
    """
    rates = current().encoding if constants is None else constants
    costs = {}
    for algorithm, work in terms(rows, out, width, k, iterations).items():
        starts = getattr(rates, f"start_{algorithm}")
        costs[algorithm] = starts + sum(amount / getattr(rates, name) for name, amount in work.items())
    return costs


def choose(rows: int, out: int, width: int, k: int, iterations: int, constants: Encoding | None = None) -> str:
    """Choose an algorithm; G itself is formed only if there are more rows than its smaller side has."""
    return _chosen(rows, out, width, k, iterations, current().encoding if constants is None else constants)


@functools.lru_cache(4096)
def _chosen(rows: int, out: int, width: int, k: int, iterations: int, constants: Encoding) -> str:
    costs = predict(rows, out, width, k, iterations, constants)
    if costs["gram"] <= OPTIMAL * min(costs["iteration"], costs["formed"]):
        return "gram"
    if rows > min(out, width) and costs["formed"] < costs["iteration"]:
        return "formed"
    return "iteration"
