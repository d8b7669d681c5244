"""MONAI's trainer over a hub: a site is killed and comes back, replicas are equal, and metrics are of those present."""

from pathlib import Path

import pytest
from fleet import Fleet

pytest.importorskip("ignite", reason="needs pytorch-ignite: pip install 'dadplug[monai]'")
pytest.importorskip("monai", reason="needs monai: pip install 'dadplug[monai]'")

PROGRAM = Path(__file__).resolve().parents[1] / "helpers" / "elastic_monai.py"
LEAVES, MORE, LENGTH = 6, 14, 4


def test_a_site_is_killed_and_comes_back(tmp_path: Path) -> None:
    with Fleet(tmp_path, "ab", str(PROGRAM), ["monai"], leave=-1) as fleet:
        fleet.start("a")
        fleet.start("b", leave=LEAVES)
        fleet.end("b", -9)
        fleet.await_step("a", LEAVES + LENGTH)  # which validates alone meanwhile
        fleet.restart("b", MORE)
        first, present = fleet.finish("ab", 8)
    second = fleet.lines("b")
    assert max(first) == max(second)
    assert present[LEAVES + 2] == [0]
    for step, line in second.items():
        assert {name: line[name] for name in ("epoch", "lr", "reduced")} == {
            name: first[step][name] for name in ("epoch", "lr", "reduced")
        }, step
        assert line["reduced"] == step
    scores = {name: {line["validation"]: line["dice"] for line in fleet.written(name, "validation")} for name in "ab"}
    both = scores["a"].keys() & scores["b"].keys()
    assert len(both) >= 3
    assert all(scores["a"][epoch] == scores["b"][epoch] for epoch in both)
    assert scores["a"][max(both)] > 0.3
