"""The bundle of MONAI in the examples, run by MONAI's command at two sites."""

import re
from pathlib import Path

import pytest
import support
from running_hub import running_hub

pytest.importorskip("fire", reason="monai.bundle's command needs fire")
pytest.importorskip("ignite", reason="needs pytorch-ignite: pip install 'dadplug[monai]'")
pytest.importorskip("monai", reason="needs monai: pip install 'dadplug[monai]'")

pytestmark = pytest.mark.slow
BUNDLE = Path(__file__).resolve().parents[2] / "examples" / "segmentation_bundle"
RUN = ["-m", "monai.bundle", "run", "--config_file", str(BUNDLE / "configs" / "train.json"), "--epochs", "2"]


def scores(text: str) -> list[str]:
    return re.findall(r"dice: (0\.\d+)", text)


def test_hospitals_run_the_bundle_over_a_hub(tmp_path):
    own = [["--size", "16", "--seed", str(number), "--output", str(tmp_path / f"{number}")] for number in range(2)]
    with running_hub(tmp_path / "kits", ("a", "b")) as hub:
        commands = [[*RUN, *each, "--kit", str(hub.kits / name)] for each, name in zip(own, "ab", strict=True)]
        done = support.run_programs(commands, timeout=400, folder=tmp_path)
    assert [each.status for each in done] == [0, 0], done
    first, second = (scores(each.output + each.errors) for each in done)
    assert len(first) == 2
    assert first == second  # of the volumes of both
    assert list((tmp_path / "0").glob("*.pt"))


def test_the_bundle_runs_by_torchrun(tmp_path):
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(support.free_port())]
    (only,) = support.run_programs([[*launch, *RUN, "--size", "16"]], timeout=400, folder=tmp_path)
    assert only.status == 0, only.errors
    found = scores(only.output + only.errors)
    assert len(found) == 4
    assert len(set(found)) == 2
    assert list((tmp_path / "models").glob("*.pt"))
