"""The verdicts of the benchmark of peak memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import support

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("method", "beyond", "beyond_alone", "expected"),
    [
        ("alone", 9.0, 0.0, ""),
        ("ddp-powersgd", 9.0, 9.0, ""),
        ("dad", 2.0, 5.0, "yes"),
        ("topk", 4.0, 5.0, "with its state"),
        ("topk", 5.5, 5.0, "NO"),
        ("dad", float("nan"), 5.0, ""),
        ("dad:fused=true", 1.0, float("nan"), "yes"),
        ("dad:fused=true", 1.0, 0.0, "NO"),
        ("dad:fused=true", 5.5, -1.0, "NO"),
        ("dad:fused=true", float("nan"), -1.0, "yes"),
    ],
)
def test_peaks_of_memory_are_compared_with_what_is_promised(method, beyond, beyond_alone, expected):
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # for its neighbours
    verdict = support.load(str(FOLDER / "memory.py")).verdict
    assert verdict(method, 2.0, 3.0, beyond, beyond_alone) == expected
