"""Run pytest, and run the tests that failed once more, alone, when they are few.

    python tests/run.py -n 3 --dist loadfile

Tests of networks meet the scheduler of a busy machine. A test that fails in the first run and passes alone is flaky:
the run passes, and its last lines name the test. Report and fix it, see CONTRIBUTING.md.

Compiled files of the tests and of the package are kept, also where PYTHONDONTWRITEBYTECODE is set: hundreds of
processes import them.

A test that fails both times fails the run. So do more than three failures, an interruption, an error in pytest or in
the collection, and a crash of one of its processes: they are not run again.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

MOST_RETRIED = 3
FAILURES = Path(".pytest_cache/v/cache/lastfailed")
_TESTS_FAILED = 1  # the status of pytest for failed tests alone


def run_pytest(arguments: Sequence[str]) -> int:
    """Run pytest in a process of its own and return its status, as a shell gives that of a signal."""
    command = [sys.executable, "-m", "pytest", "-o", "cache_dir=.pytest_cache", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    status = subprocess.run(command, check=False, env=environment).returncode
    return status if status >= 0 else 128 - status


def failed_tests() -> list[str]:
    """Return the ids of the tests and files that failed in the last run, as pytest has noted them."""
    try:
        return list(json.loads(FAILURES.read_text()))
    except FileNotFoundError:
        return []


def main(arguments: Sequence[str]) -> int:
    """Run the tests, and those that failed once more; return the status of the process.

    Args:
        arguments: what pytest is given in the first run.
    """
    FAILURES.unlink(missing_ok=True)  # the failures of an earlier run
    status = run_pytest(arguments)
    failed = failed_tests()
    if status != _TESTS_FAILED or not 0 < len(failed) <= MOST_RETRIED or not all("::" in name for name in failed):
        return status
    names = "\n".join(f"  {name}" for name in failed)
    print(f"\nFailed, and run once more, alone:\n{names}", flush=True)
    status = run_pytest(["-n", "0", *failed])
    if status == 0:
        print(f"\nFLAKY: failed at first, and passed alone. Please report with the output above:\n{names}", flush=True)
    else:
        print("\nFailed again.", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
