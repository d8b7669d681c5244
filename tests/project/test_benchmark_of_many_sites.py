"""The benchmark of many sites counts steps that all sites take together."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path

import support

FOLDER = Path(__file__).parents[2] / "benchmarks"


def count(target):
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    many = support.load(str(FOLDER / "many_sites.py"))
    case = {"sites": 2, "seeds": 1, "first_seed": 0, "rank": 2, "methods": many.DIGITS_METHODS}
    arguments = argparse.Namespace(**case, target=target, most_steps=4)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        many.count_steps(arguments)
    return [json.loads(line) for line in printed.getvalue().splitlines()]


def test_sites_count_steps_until_an_accuracy_or_the_limit(sites):
    rows, nothing = sites(2).run(count, 1.0)
    assert [row["method"] for row in rows] == ["rankdad", "rankdad:merge=owner"]
    assert all(row["steps"] == 0 and 0 < row["best"] < 1 for row in rows)
    assert not nothing


def test_sites_stop_together_at_the_target(sites):
    rows, _ = sites(2).run(count, 0.01)
    assert [row["steps"] for row in rows] == [2, 2]
