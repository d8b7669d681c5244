"""`make test` runs tests that failed once more, and nothing else that goes wrong passes."""

from __future__ import annotations

import json
import os
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
