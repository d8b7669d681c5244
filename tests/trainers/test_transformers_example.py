"""The example that fine-tunes a text encoder with transformers' Trainer, as a user runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import support

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fine_tune_text.py"


def test_it_compares_ddp_with_dadplug(tmp_path):
    for name, word in (("fruit", "apple"), ("tools", "hammer")):
        for number in range(6):
            folder = tmp_path / "text" / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.txt").write_text(f"the {word} number {number} lies here " * 80)
    flags = [
        "--text",
        str(tmp_path / "text"),
        "--steps",
        "20",
        "--batch-size",
        "8",
        "--log-dir",
        str(tmp_path / "logs"),
    ]
    (only,) = support.run_programs([[str(EXAMPLE), *flags]], timeout=400, preload=["transformers.trainer"])
    assert only.status == 0, only.errors
    rows = {
        row[0]: row for row in (line.split() for line in only.output.splitlines()) if row[:1] in (["ddp"], ["rankdad"])
    }
    assert {*rows} == {"ddp", "rankdad"}
    for row in rows.values():
        assert float(row[2]) == 1.0  # accuracy
    assert float(rows["ddp"][3]) > 4 * float(rows["rankdad"][3])  # MB a step
    assert re.search(r"passages of 2 folders, two sites", only.output)
    assert (tmp_path / "logs" / "loss.png").read_bytes().startswith(b"\x89PNG")
