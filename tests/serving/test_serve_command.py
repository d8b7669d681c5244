"""Arguments of `python -m dadplug serve`, and the example."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import support

from dadplug.cli.commands import named, seconds, shape

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "serve_digits.py"


def test_durations():
    assert [seconds(text) for text in ("50ms", "0.05", ".05s", "2s")] == pytest.approx([0.05, 0.05, 0.05, 2.0])
    for wrong in ("", "ms", "-1", "1h", "nan"):
        with pytest.raises(argparse.ArgumentTypeError):
            seconds(wrong)


def test_shapes():
    assert [shape(text) for text in ("1,28,28", "?, 4", "")] == [(1, 28, 28), (None, 4), ()]
    for wrong in ("a", "1,-2", "1.5"):
        with pytest.raises(argparse.ArgumentTypeError):
            shape(wrong)


def test_names_of_models():
    assert named("a=b/best.ckpt") == ("a", "b/best.ckpt")
    assert named("b/best.ckpt") == ("best", "b/best.ckpt")
    assert named("b=1/best.ckpt") == ("b", "1/best.ckpt")
    assert named("runs/b=1/best.ckpt") == ("best", "runs/b=1/best.ckpt")


def test_the_example_finds_the_right_model_of_each_site(tmp_path):
    pytest.importorskip("sklearn")
    command = [str(EXAMPLE), "--in-process", "--requests", "300", "--steps", "80"]
    (program,) = support.run_programs([command], timeout=300, folder=tmp_path)
    assert program.status == 0, program.errors
    last = dict(re.findall(r"after  300 requests, site (\w): (.*)", program.output))
    assert set(last) == {"a", "b"}
    for site, other in ("ab", "ba"):
        weights = dict(re.findall(r"([\w-]+) ([\d.]+)", last[site]))
        assert float(weights[f"site-{other}"]) < 0.05  # which has never seen these digits
    shares = [float(each) for each in re.findall(r"([\d.]+) % of the answers", program.output)]
    assert min(shares) > 90
