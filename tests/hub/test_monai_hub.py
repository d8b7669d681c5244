"""MONAI's trainer over a hub: a site is killed and comes back, replicas are equal, and metrics are of those present."""

from pathlib import Path

import pytest
from elastic_runs import ENDED, Run, same_bits
from running_hub import running_hub, until

pytest.importorskip("ignite", reason="needs pytorch-ignite: pip install 'dadplug[monai]'")
pytest.importorskip("monai", reason="needs monai: pip install 'dadplug[monai]'")

PROGRAM = Path(__file__).resolve().parents[1] / "helpers" / "elastic_monai.py"
LEAVES, MORE, LENGTH = 6, 14, 4


def test_a_site_is_killed_and_comes_back(tmp_path: Path) -> None:
    with running_hub(tmp_path / "kits", ("a", "b")) as hub:
        run = Run(tmp_path, hub, str(PROGRAM), ["monai"], leave=-1)
        run.start("a")
        run.start("b", leave=LEAVES)
        run.end("b", -9)
        before = len(run.lines("b"))
        run.await_step("a", LEAVES + LENGTH)  # which validates alone meanwhile
        run.start("b")
        until(lambda: len(run.lines("b")) >= before + MORE or run.processes["b"].poll() is not None, run.state, ENDED)
        run.stop(8)
        run.end("ab")
    first, second = run.lines("a"), run.lines("b")
    same_bits(first, second)
    assert max(first) == max(second)
    assert first[LEAVES + 2]["present"] == [0]
    assert first[max(first)]["present"] == [0, 1]
    for step, line in second.items():
        assert {name: line[name] for name in ("epoch", "lr", "reduced")} == {
            name: first[step][name] for name in ("epoch", "lr", "reduced")
        }, step
        assert line["reduced"] == step
    scores = {
        name: {line["validation"]: line["dice"] for line in run.written(name) if "validation" in line} for name in "ab"
    }
    both = scores["a"].keys() & scores["b"].keys()
    assert len(both) >= 3
    assert all(scores["a"][epoch] == scores["b"][epoch] for epoch in both)
    assert scores["a"][max(both)] > 0.3
