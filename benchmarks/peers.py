"""Tests of torch and Accelerate, from the installed packages, with dadplug's DistributedDataParallel for torch's class.

    make test-peers
    python benchmarks/peers.py --only join         those with a word in their names

runs the tests of `tests_of_torch.py`, and the scripts of `accelerate.test_utils.scripts`, in two processes of a
machine. `peers.toml` lists by reason the tests that fail. It is an error if another test fails, and if one of the list
passes: so the list can only shrink.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tomllib
from command import parser_of
from tests_of_others import REPLACEMENT, ROOT

FOLDER = Path(__file__).parent
SCRIPTS = ("test_cli", "test_ops", "test_script", "test_sync")
"""Scripts of Accelerate that end on two processors without a download, with torch's class."""
SECONDS = 600  # for a script


def of_torch(mode: str, only: str) -> Iterator[tuple[str, str]]:
    """Run torch's tests; yield names and errors, which are empty where a test passes. Skipped tests are left out."""
    command = [sys.executable, str(FOLDER / "tests_of_torch.py"), "--mode", mode, "--only", only]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        for line in process.stdout or ():
            found, _, rest = line.partition(" ")
            if found in ("passed", "failed"):
                name, _, error = rest.strip().partition(" ")
                yield f"torch {name}", "" if found == "passed" else error or found
    if process.returncode:
        sys.exit(f"{' '.join(command)} has failed")


def of_accelerate(mode: str, only: str) -> Iterator[tuple[str, str]]:
    """Run Accelerate's scripts, as `of_torch` does its tests."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(REPLACEMENT)
        paths = os.pathsep.join(filter(None, [folder, str(ROOT), os.environ.get("PYTHONPATH", "")]))
        own = {"PYTHONPATH": paths, "DADPLUG_MODE": mode, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        for script in (each for each in SCRIPTS if only in each):
            command = [*torchrun, f"accelerate.test_utils.scripts.{script}"]
            done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=SECONDS)
            errors = [line for line in done.stderr.splitlines() if "Error" in line and "Child" not in line]
            yield f"accelerate {script}", "" if not done.returncode else (errors or ["failed"])[0]


def main() -> None:
    parser = parser_of(__doc__, mode=("dsgd", "mode of the class"), only=("", "part of the names of tests"))
    arguments = parser.parse_args()
    listed = tomllib.loads((FOLDER / "peers.toml").read_text())
    groups = [(peer, *group) for peer, found in listed.items() for group in found.items()]
    reasons = {f"{peer} {name}": why for peer, why, names in groups for name in names}
    ran = dict((*of_torch(arguments.mode, arguments.only), *of_accelerate(arguments.mode, arguments.only)))
    wrong = [f"{name} is listed and did not run" for name in reasons if name not in ran and arguments.only in name]
    for name, error in ran.items():
        if error and name not in reasons:
            wrong.append(f"{name} fails: {error}")
        elif not error and name in reasons:
            wrong.append(f"{name} passes: remove it from peers.toml, where the reason is: {reasons[name]}")
    print(f"{[*ran.values()].count('')} of {len(ran)} tests pass")
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
