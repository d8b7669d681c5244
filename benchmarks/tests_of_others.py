r"""Tests of other projects with dadplug's DistributedDataParallel in the place of torch's.

    python benchmarks/tests_of_others.py FOLDER [--mode dsgd] [--only EXPRESSION] TEST ...

runs tests by pytest in a checkout of another project, such as Lightning's: first as they are, then with the drop-in in
each Python process that they start, also those of torchrun and spawn. It prints how many tests pass both times, and the
names of those that pass only without it. Tests that do not pass as they are say nothing about the drop-in. Nothing in
the checkout is changed. The figures of docs/guides/drop-in.md, in an environment with dadplug, pytest and the project:

    python benchmarks/tests_of_others.py accelerate \
        ./tests/test_cpu.py ./tests/test_grad_sync.py ./tests/test_scheduler.py

    export PYTEST_ADDOPTS="-o addopts=" PYTHONPATH=$PWD/pytorch-lightning/tests
    python benchmarks/tests_of_others.py pytorch-lightning/tests --only "ddp or DDP or cpu" \
        tests_fabric/strategies/test_ddp.py tests_fabric/strategies/test_ddp_integration.py
    python benchmarks/tests_of_others.py pytorch-lightning/tests --only "ddp or DDP or cpu" \
        tests_pytorch/strategies/test_ddp_integration.py tests_pytorch/callbacks/test_stochastic_weight_avg.py \
        tests_pytorch/callbacks/test_weight_averaging.py tests_pytorch/callbacks/test_pruning.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from command import parser_of

ROOT = Path(__file__).resolve().parents[1]

# It runs when an interpreter starts, and acts when torch has been imported: most processes never import it.
REPLACEMENT = """
import importlib.abc, importlib.machinery, os, sys


class AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name)
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        import torch.distributed, torch.nn.parallel.distributed as place
        if not torch.distributed.is_available():
            return
        from dadplug.ddp import DistributedDataParallel as Own

        class DistributedDataParallel(Own):
            def __init__(self, module, *arguments, **keywords):
                keywords.setdefault("mode", os.environ["DADPLUG_MODE"])
                keywords.setdefault("weighting", "uniform")  # as torch's class weights
                super().__init__(module, *arguments, **keywords)

        DistributedDataParallel.__module__ = place.__name__
        DistributedDataParallel.__qualname__ = "DistributedDataParallel"
        place.DistributedDataParallel = torch.nn.parallel.DistributedDataParallel = DistributedDataParallel


if "DADPLUG_MODE" in os.environ:
    sys.meta_path.insert(0, AfterTorch())
"""


def outcomes(report: Path) -> dict[str, str]:
    """Read a report of pytest: by name of a test "passed", "skipped", or the first line of its failure."""
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = next((each for each in case if each.tag in ("failure", "error")), None)
        if bad is not None:
            found[name] = " ".join((bad.get("message") or bad.tag).split())[:200]
        else:
            found[name] = "skipped" if any(each.tag == "skipped" for each in case) else "passed"
    return found


def run(folder: Path, tests: list[str], only: str, mode: str | None, seconds: int) -> dict[str, str]:
    """Run tests in a checkout, with the drop-in if a mode is given; return their outcomes by name."""
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "sitecustomize.py").write_text(REPLACEMENT)
        paths = [temporary, str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment |= {} if mode is None else {"DADPLUG_MODE": mode}
        report = Path(temporary) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        command += ["-k", only] if only else []
        subprocess.run(command, cwd=folder, env=environment, timeout=seconds, check=False, stdout=sys.stderr)
        return outcomes(report) if report.exists() else {}


def compare(plain: dict[str, str], replaced: dict[str, str]) -> str:
    """Return a text about two results of `run`, without and with the drop-in."""
    passed = [name for name, outcome in plain.items() if outcome == "passed"]
    lost = {name: replaced.get(name, "did not run") for name in passed if replaced.get(name) != "passed"}
    lines = [f"{len(passed) - len(lost)} of {len(passed)} tests that pass with torch's class pass with the drop-in"]
    lines += [f"  {name}: {outcome}" for name, outcome in lost.items()]
    others = {name: outcome for name, outcome in plain.items() if outcome not in ("passed", "skipped")}
    lines += [f"{len(others)} tests fail with torch's class here"] if others else []
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(
        __doc__,
        mode=("dsgd", "mode of the drop-in"),
        only=("", "expression by which tests are chosen, as pytest's -k"),
        seconds=(3600, "limit of each of the two runs"),
    )
    parser.add_argument("folder", type=Path, help="folder in which the other project runs its tests")
    parser.add_argument("tests", nargs="+", help="files or names of tests, for pytest")
    given = parser.parse_args()
    plain = run(given.folder, given.tests, given.only, None, given.seconds)
    replaced = run(given.folder, given.tests, given.only, given.mode, given.seconds)
    print(compare(plain, replaced))


if __name__ == "__main__":
    main()
