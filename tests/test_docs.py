"""The README and docs: links lead somewhere, options are all there, and the snippets run as they are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import support

from dadplug.methods import method_names
from dadplug.options import Options

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

PREPARED = """
import warnings
from torch.utils.data import DataLoader, TensorDataset
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer, criterion = torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss()
data = TensorDataset(torch.randn(70, 1, 28, 28), torch.randint(0, 10, (70,)))
loader = DataLoader(data, batch_size=16)
loaders = {"train": loader, "valid": loader}
"""


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S)


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


@pytest.mark.parametrize("number", range(len(snippets(ROOT / "README.md"))))
def test_the_readmes_snippets_run_on_two_sites(number, tmp_path):
    code = snippets(ROOT / "README.md")[number]
    if "catalyst" in code:
        pytest.importorskip("catalyst")
    finished = support.run_programs(support.site_scripts(PREPARED + code, tmp_path), timeout=120)
    for each in finished:
        assert each.status == 0, each.errors
