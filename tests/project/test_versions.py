"""The versions that setup.cfg promises are those that the core tests are run with."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Tools, and what `make test-oldest` does without: models of others.
UNTESTED = {"ruff", "mypy", "transformers", "peft"}


def normal(name: str) -> str:
    return name.lower().replace("_", "-")


def lower_bounds() -> dict[str, str]:
    """Return the lower bound of each requirement, apart from those of the documentation."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = [text for name, text in config["options.extras_require"].items() if name != "docs"]
    lines = "\n".join([config["options"]["install_requires"], *extras]).split()
    found = [re.fullmatch(r"([\w-]+)(?:\[\w+\])?(?:>=|==)([\d.]+)(?:;\S+)?", line) for line in lines]
    assert all(found), lines
    return {normal(match[1]): match[2] for match in found if match}


def test_the_oldest_versions_are_the_lower_bounds():
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    expected = {name: bound for name, bound in lower_bounds().items() if name not in UNTESTED}
    assert {normal(name) for name in pinned} == set(expected)
    for name, version in pinned.items():
        bound = expected[normal(name)]
        assert re.fullmatch(re.escape(bound) + r"(\.0)*", version), f"{name}: {version} is not {bound}"


def test_continuous_integration_covers_the_pythons_that_are_promised():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    classifiers = re.findall(r"Python :: (3\.\d+)", config["metadata"]["classifiers"])
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    tested = {version for each in re.findall(r"python: \[(.*)\]", workflow) for version in re.findall(r"3\.\d+", each)}
    assert set(classifiers) == tested
    assert config["options"]["python_requires"] == f">={min(classifiers, key=lambda each: int(each[2:]))}"
