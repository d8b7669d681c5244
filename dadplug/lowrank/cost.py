"""Cost model of the algorithms; ``benchmarks/lowrank.py --calibrate`` measures the rates."""

from __future__ import annotations

from .algorithms import columns_for

# Multiplications and additions a microsecond, on one core: of products of large blocks, and of blocks of few rows.
FAT, SKINNY = 45_000.0, 30_000.0
EIGEN = 600.0  # rows^3 a microsecond, of the N x N algebra in double precision
START = {"gram": 20.0, "iteration": 40.0, "formed": 40.0}  # microseconds
OPTIMAL = 1.2  # the optimum may cost this much more than an approximation


def predict(rows: int, out: int, width: int, k: int, iterations: int) -> dict[str, float]:
    """Predict the time of each algorithm in microseconds, without the projection that follows.

    Args:
        rows: rows N of the factors.
        out: width of the deltas.
        width: width of the activations.
        k: number of columns.
        iterations: passes of a block iteration; a warm start halves the first.
    """
    columns, sides = columns_for(k), out + width
    further = columns - k  # which the projection, too, has more of than after the Gram matrices
    products = max(1, 2 * iterations - 1) * columns + further
    return {
        "gram": START["gram"] + rows * rows * sides / FAT + rows**3 / EIGEN,
        "iteration": START["iteration"] + products * rows * sides / SKINNY,
        "formed": START["formed"] + rows * out * width / FAT + products * out * width / SKINNY,
    }


def choose(rows: int, out: int, width: int, k: int, iterations: int) -> str:
    """Choose an algorithm; G itself is formed only if there are more rows than its smaller side has."""
    costs = predict(rows, out, width, k, iterations)
    if costs["gram"] <= OPTIMAL * min(costs["iteration"], costs["formed"]):
        return "gram"
    if rows > min(out, width) and costs["formed"] < costs["iteration"]:
        return "formed"
    return "iteration"
