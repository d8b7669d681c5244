"""Predicts what each algorithm costs; ``benchmarks/lowrank.py --calibrate`` measures the rates."""

from __future__ import annotations

from .algorithms import OVERSAMPLING

# Multiplications and additions a microsecond, on one core: of products of large blocks, and of blocks of few rows.
FAT, SKINNY, ORTHONORMALISE = 40_000.0, 18_000.0, 1_500.0
EIGEN = 160.0  # rows^3 a microsecond, of the N x N algebra in double precision
START = {"gram": 60.0, "iteration": 20.0, "formed": 25.0}  # microseconds
OPTIMAL = 1.3  # the optimum may cost this much more than an approximation


def predict(rows: int, out: int, width: int, k: int, passes: int) -> dict[str, float]:
    """Predicts the microseconds of each algorithm.

    Args:
        rows: rows N of the factors.
        out: width of the deltas.
        width: width of the activations.
        k: number of columns.
        passes: passes of the block iteration.
    """
    columns, sides = k + OVERSAMPLING, out + width
    numbers = (2 * passes + 1) * columns  # that a pass over a row or column makes, all in all
    orthonormalising = (passes + 1) * 2 * columns * columns * out / ORTHONORMALISE
    last = k * rows * (sides + out) / SKINNY
    return {
        "gram": START["gram"] + rows * rows * sides / FAT + min(rows, 48) ** 3 / EIGEN + last,
        "iteration": START["iteration"] + numbers * rows * sides / SKINNY + orthonormalising,
        "formed": START["formed"] + rows * out * width / FAT + numbers * out * width / SKINNY + orthonormalising,
    }


def choose(rows: int, out: int, width: int, k: int, passes: int) -> str:
    """Chooses an algorithm; G itself is formed only where there are more rows than its smaller side has."""
    costs = predict(rows, out, width, k, passes)
    if costs["gram"] <= OPTIMAL * min(costs["iteration"], costs["formed"]):
        return "gram"
    if rows > min(out, width) and costs["formed"] < costs["iteration"]:
        return "formed"
    return "iteration"
