"""Imitated processors, on which the numerical tests run again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import support

processors = support.load("tests/processors.py")
LOOK = """
import json, numba, torch
from numba.core import config
print(json.dumps([config.CPU_NAME, torch.backends.cpu.get_cpu_capability()]))
"""


@pytest.mark.parametrize(("name", "capability"), [("avx2", "AVX2"), ("generic", "DEFAULT")])
def test_libraries_follow_the_imitated_processor(name, capability):
    if reason := processors.obstacle(name):
        pytest.skip(reason)
    variables = processors.environment(name)
    found = subprocess.run(
        [sys.executable, "-c", LOOK], env=os.environ | variables, capture_output=True, text=True, check=True
    )
    assert json.loads(found.stdout) == [variables["NUMBA_CPU_NAME"], capability]


@pytest.mark.parametrize("test", processors.TESTS)
def test_the_tests_that_are_named_exist(test):
    path, _, name = test.partition("::")
    assert f"def {name}" in Path(path).read_text()


def test_the_main_command_and_the_pipeline_run_all_processors():
    shown = subprocess.run(["make", "--dry-run", "test"], capture_output=True, text=True, check=True).stdout
    assert "tests/run.py" in shown
    for name in processors.LIMITS:
        assert f"tests/processors.py {name}" in shown
    assert "- run: make test\n" in Path(".github/workflows/ci.yml").read_text()


def test_what_cannot_be_imitated_is_skipped_with_the_reason(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(processors.platform, "machine", lambda: "arm64")
    assert processors.main(["avx2"]) == 0
    assert "skipped, this processor is arm64" in capsys.readouterr().out
    monkeypatch.setattr(processors.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(processors, "CPU_INFO", tmp_path / "none")
    assert processors.main(["avx2"]) == 0
    assert "skipped, this processor is not known to have AVX2" in capsys.readouterr().out
