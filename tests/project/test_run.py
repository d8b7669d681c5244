"""`make test`: what it runs again, and the versions it promises."""

import configparser
import json
import os
import re
from pathlib import Path

import forkserver
import support

TESTS = Path(__file__).resolve().parents[1]
HELPERS = TESTS / "helpers"
FAILS_ONCE = """
import os, pathlib, pytest

@pytest.mark.parametrize("name", ["a b::c[d]", "é"])
def test_fails_once(name):
    mark = pathlib.Path(str(len(name)))
    if not mark.exists():
        mark.touch()
        {end}
"""
FLAKY = FAILS_ONCE.format(end="assert False")
IDS = ["test_a.py::test_fails_once[a b::c[d]]", "test_a.py::test_fails_once[\\xe9]"]
CASES = {  # a test file, options, and the status
    "flaky": (FLAKY, "-n0", 0),
    "failing": ("def test_fails(): assert False\n" + FLAKY, "-n0", 1),
    "many failing": (
        "import pytest\n@pytest.mark.parametrize('n', range(4))\ndef test_fails(n): assert False\n",
        "-n0",
        1,
    ),
    "unreadable": ("1 / 0", "-n0", 2),
    "stopped": (FAILS_ONCE.format(end="raise KeyboardInterrupt"), "-n0", 2),
    "crashed": (FAILS_ONCE.format(end="os._exit(0)"), "-n1 --max-worker-restart 0", 3),
    "empty": ("", "-n0", 5),
}


def start(folder: Path, content: str, options: str) -> forkserver.Program:
    """Start `tests/run.py` in a folder with one test file, in which another run has failed before."""
    cache = folder / ".pytest_cache" / "v" / "cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text(json.dumps({f"test_a.py::test_{name}": True for name in "abcd"}))
    (folder / "test_a.py").write_text(content)
    (folder / "conftest.py").write_text("from crashes import pytest_sessionfinish, pytest_testnodedown")
    env = os.environ | support.ONE_THREAD
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist.plugin", "PYTHONPATH": str(HELPERS)}
    return forkserver.start([str(TESTS / "run.py"), *options.split()], env, folder)


def test_tests_that_failed_run_once_more_alone(tmp_path):
    programs = {name: start(tmp_path / name, *case[:2]) for name, case in CASES.items()}
    status = {name: program.wait(120) for name, program in programs.items()}
    output = {name: "".join(program.read()) for name, program in programs.items()}
    assert status == {name: case[2] for name, case in CASES.items()}, output
    assert {name for name, text in output.items() if "once more" in text} == {"flaky", "failing"}
    assert output["flaky"].endswith("\n".join(["with the output above:", *(f"  {each}" for each in IDS), ""]))
    assert "FLAKY: failed at first, and passed alone." in output["flaky"]
    assert "1 failed, 2 passed" in output["failing"]
    assert output["failing"].endswith("Failed again.\n")


# The versions that setup.cfg promises are those that the core tests are run with


ROOT = Path(__file__).resolve().parents[2]
# Tools, and what `make test-oldest` does without: models of others.
UNTESTED = {
    "ruff",
    "mypy",
    "transformers",
    "peft",
    "opacus",
    "ipykernel",
    "nbclient",
    "nbformat",
    "codespell",
    "monai",
    "pytorch-ignite",
}
UNTESTED_EXTRAS = {"docs", "accelerate", "transformers", "ray", "nnunet", "monai"}


def normal(name: str) -> str:
    return name.lower().replace("_", "-")


def lower_bounds() -> dict[str, str]:
    """Return the lower bound of each requirement, apart from those of extras that `make test-oldest` does without."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = [text for name, text in config["options.extras_require"].items() if name not in UNTESTED_EXTRAS]
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
