"""MONAI's trainer over a hub: a site is killed and comes back, replicas are equal, and metrics are of those present."""

from pathlib import Path

import hub_kits
import pytest
import support
import torch
import torch.distributed as dist
from fleet import Fleet
from running_hub import running_hub
from torch import nn

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


def lies(what: str) -> str:
    """Return the error of site 0 where site 1 states a length or a weight that no site has."""
    import ignite.distributed as idist
    from dadplug.runners.patches import metrics_of_present_sites
    from monai.metrics import DiceMetric

    import dadplug
    from dadplug import monai
    from dadplug.exchange import Traffic, open_transport

    reduction = dadplug.GradientReduction(nn.Linear(2, 1), "dsgd")
    transport = open_transport(None, Traffic(), torch.device("cpu"), 60.0, for_trainer=True)
    metric = DiceMetric()
    metric(torch.ones(2, 1, 3, 3), torch.ones(2, 1, 3, 3))
    with metrics_of_present_sites(transport, monai._PATCHES):
        try:
            if what == "rows" and dist.get_rank():
                idist.all_gather(1 << 40)
            elif what == "rows":
                metric.aggregate()
            elif dist.get_rank():
                reduction.gather_objects((1.0, float(what)))
            else:
                monai.mean_over_sites(reduction, 0.5)
        except Exception as error:
            return str(error)
    return ""


@pytest.mark.parametrize("what", ["rows", "nan"])
def test_a_site_that_states_impossible_rows_or_weights_is_named(tmp_path: Path, what: str) -> None:
    """MONAI's own gather makes room for as many rows as a site states."""
    kits = hub_kits.make(tmp_path / "kits", hub=f"127.0.0.1:{support.free_port()}", hub_names=[])
    with running_hub(kits), support.Sites(2, kits=[kits / name for name in "ab"]) as sites:
        found = sites.run(lies, what)[0]
    assert "site 1 (b)" in found, found
    assert what == "rows" or f"has sent an invalid value with its weight: it holds {float(what)}" in found
