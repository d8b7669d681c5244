"""The notebooks of the tutorials: run from top to bottom, with outputs that are those of a run."""

import json
import os
import re
import sys
from pathlib import Path

import forkserver
import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("nbclient")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "tutorials"
NAMES = ("two-sites-notebook", "fine-tune-text-notebook", "audit-and-privacy-notebook", "segmentation-notebook")


def cells(notebook: dict, kind: str) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def text_of(notebook: dict) -> str:
    """All text that a notebook's cells have printed."""
    outputs = [output for cell in cells(notebook, "code") for output in cell["outputs"]]
    return "\n".join("".join(each.get("text", each.get("data", {}).get("text/plain", ""))) for each in outputs)


def kinds(notebook: dict) -> list[set[str]]:
    """Return the kinds of each cell's outputs: streams by name, and formats of what is displayed."""
    return [
        {kind for output in cell["outputs"] for kind in output.get("data", {output.get("name", "")})}
        for cell in cells(notebook, "code")
    ]


@pytest.fixture(scope="module")
def execute(tmp_path_factory):
    """Function that executes a notebook by name, in an empty folder; torchrun and its sites start by fork."""
    launcher = tmp_path_factory.mktemp("programs") / "torchrun"
    launcher.write_text(
        f'#!/bin/sh\nexec {forkserver.interpreter(forkserver.TRAINERS)} -m torch.distributed.run "$@"\n'
    )
    launcher.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
            patch.setenv(name, "")
        programs = (str(launcher.parent), str(Path(sys.executable).parent), os.environ["PATH"])
        patch.setenv("PATH", os.pathsep.join(programs))
        import notebooks

        yield lambda name: notebooks.execute(FOLDER / f"{name}.ipynb", tmp_path_factory.mktemp(name))
    sys.modules.pop("notebooks", None)


def figures(pattern: str, text: str) -> dict[str, float]:
    """Return the numbers of lines by their names, both groups of a pattern."""
    return {name: float(number) for name, number in re.findall(pattern, text)}


def test_two_sites_train_one_model_and_rankdad_sends_least(execute):
    notebook = execute("two-sites-notebook")
    text = text_of(notebook)
    assert text.count("first difference: None") == 3
    accuracies = figures(r"(\w+): accuracy (0\.\d+)", text)
    sent = figures(r"(\w+): accuracy .*?, ([\d.]+) MB sent", text)
    assert min(accuracies.values()) > 0.9
    assert sent["dsgd"] > 4 * sent["dad"] > 0
    assert sent["dad"] > sent["rankdad"] > 0
    assert_committed("two-sites-notebook", notebook)


def test_a_text_model_learns_by_the_drop_in_with_a_fifth_of_the_bytes(execute):
    notebook = execute("fine-tune-text-notebook")
    text = text_of(notebook)
    accuracies = figures(r"(\w+): accuracy (0\.\d+)", text)
    sent = figures(r"(\w+): accuracy .*?, ([\d.]+) MB sent", text)
    assert accuracies["rankdad"] > accuracies["ddp"] - 0.1 > 0.3
    assert sent["ddp"] > 5 * sent["rankdad"] > 0
    assert_committed("fine-tune-text-notebook", notebook)


def test_an_audit_recovers_data_until_noise_is_added(execute):
    notebook = execute("audit-and-privacy-notebook")
    text = text_of(notebook)
    assert "Another site can recover 100%" in text
    assert text.rstrip().rpartition("No attack that was tried has recovered a sample")[1]
    spent = figures(r"epsilon (\d): accuracy [\d.]+, epsilon spent ([\d.]+)", text)
    assert all(0.9 * float(name) < epsilon <= float(name) for name, epsilon in spent.items())
    assert len(spent) == 2
    assert_committed("audit-and-privacy-notebook", notebook)


def test_hospitals_segment_volumes_with_a_fraction_of_the_bytes(execute):
    pytest.importorskip("ignite")
    pytest.importorskip("monai")
    notebook = execute("segmentation-notebook")
    text = text_of(notebook)
    assert text.count("first difference: None") == 2
    dice = figures(r"(\w+): Dice (0\.\d+)", text)
    sent = figures(r"(\w+): Dice .*?, ([\d.]+) MB sent", text)
    assert dice["rankdad"] > dice["dsgd"] - 0.1 > 0.4
    assert sent["dsgd"] > 4 * sent["rankdad"] > 0
    assert_committed("segmentation-notebook", notebook)


def assert_committed(name: str, executed: dict) -> None:
    """The notebook in the repository has been executed as it is, and its outputs name nothing of the machine."""
    committed = json.loads((FOLDER / f"{name}.ipynb").read_text())
    assert kinds(committed) == kinds(executed), "make notebooks"
    assert not any("stderr" in each for each in kinds(executed))
    assert re.findall(r"/(?:work|home|root|tmp|usr|opt)/|\.venv|[\d-]+ [\d:]+,\d+", text_of(committed)) == []


@pytest.mark.parametrize("name", NAMES)
def test_links_of_notebooks_lead_somewhere(name):
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text())
    text = "\n".join("".join(cell["source"]) for cell in cells(notebook, "markdown"))
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", text) if not target.startswith("https://")]
    assert targets
    for target in targets:
        path, _, anchor = target.partition("#")
        page = (FOLDER / path).resolve()
        assert page.exists(), target
        headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
        assert not anchor or anchor in [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings]


def test_every_notebook_is_tested():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(NAMES)
