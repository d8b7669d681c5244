"""The README and docs: links lead somewhere, options are all there, and the snippets run as they are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import support

from dadplug.methods import method_names
from dadplug.options import Options

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

# What a reader's script has before the snippet begins.
PREPARED = """
from torch.utils.data import DataLoader, TensorDataset
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer, criterion = torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss()
data = TensorDataset(torch.randn(70, 1, 28, 28), torch.randint(0, 10, (70,)))
loader = DataLoader(data, batch_size=16)
loaders = {"train": loader, "valid": loader}
"""
MODULE = """
import os
import pytorch_lightning as pl
os.environ.setdefault("MASTER_PORT", "PORT")
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model
    def training_step(self, batch, batch_idx):
        return criterion(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
module = Module()
"""
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))


def snippets(page: Path) -> list[str]:
    """The snippets of a page; of a diff, the script that it leads to."""
    found = []
    for kind, code in re.findall(r"```(python|diff)\n(.*?)```", page.read_text(), re.S):
        if kind == "diff":
            code = "".join(line[1:] for line in code.splitlines(keepends=True) if not line.startswith("-"))
        found.append(code)
    return found


def prepared(code: str) -> str:
    """A snippet with what comes before it, for a program of which each site runs a copy."""
    if "pytorch_lightning" not in code:
        return PREPARED + code
    return PREPARED + MODULE.replace("PORT", str(support.free_port())) + code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            linked = (page.parent / path).resolve() if path else page
            assert linked.exists(), target
            if anchor:
                heads = [line.lstrip("# ").lower().replace(" ", "-") for line in linked.read_text().splitlines()]
                assert anchor in heads, target


def test_every_option_and_every_mode_has_its_place():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "methods").iterdir())
    assert [name for name in Options.names() if f"| `{name}` |" not in pages and name != "mode"] == []
    assert [mode for mode in method_names() if not (ROOT / "docs" / "methods" / f"{mode}.md").exists()] == []
    readme = (ROOT / "README.md").read_text()
    assert [mode for mode in method_names() if f"`{mode}`" not in readme] == []


RUN = (ROOT / "README.md", ROOT / "docs" / "methods" / "adapm.md", *GUIDES)
SNIPPETS = [(page, number) for page in RUN for number in range(len(snippets(page)))]


@pytest.mark.parametrize(("page", "number"), SNIPPETS, ids=lambda item: getattr(item, "stem", item))
def test_snippets_run_as_they_are_written(page, number, tmp_path):
    code = snippets(page)[number]
    for package in ("catalyst", "pytorch_lightning"):
        if package in code:
            pytest.importorskip(package)
    if "devices=2" in code:  # Lightning starts the sites
        program = tmp_path / "train.py"
        program.write_text("import torch\nfrom torch import nn\n" + prepared(code))
        commands = [[str(program)]]
    else:
        commands = support.site_scripts(prepared(code), tmp_path)
    preload = ["pytorch_lightning"] if "pytorch_lightning" in code else []
    for each in support.run_programs(commands, timeout=120, folder=tmp_path, preload=preload):
        assert each.status == 0, each.errors


def test_a_script_changes_in_few_lines():
    for page in GUIDES:
        (diff,) = re.findall(r"```diff\n(.*?)```", page.read_text(), re.S)
        assert sum(line.startswith("+") and "import" not in line for line in diff.splitlines()) <= 3
