"""Run the numerical tests as another processor would.

    python tests/processors.py avx2

Results differ between kinds of processors in the last bits, and kernels take other branches. An imitated processor has
fewer vector instructions than this one; the libraries of products and numba are told so by environment variables.
Where this processor cannot imitate it, the run is skipped with the reason.

The tests are those whose result depends on the instructions: all tests of kernels and fused steps, and of each method
those that hold its numbers against one process, a best approximation or the bits of other sites. Tests of errors,
options, states, bytes and the order of calls give the same on every processor, and run once, with the whole suite.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FILES = (
    *("lowrank/test_lowrank", "lowrank/test_hard_inputs", "lowrank/test_packing", "lowrank/test_sparse_kernels"),
    *("fused/test_fused_steps", "methods/test_methods"),
)
METHODS = {  # by file, its tests whose result depends on the processor
    "divided": (
        "with_rank_enough_it_is_the_exact_mean",
        "coefficients_are_those_of_the_best_approximation",
        "the_residual_is_that_of_the_best_approximation",
        "squares_may_leave_the_range_of_the_type",
    ),
    "edad": (
        "gradients_are_those_of_one_process_at_four_sites_and_in_single_precision",
        "steps_that_leave_the_chain_are_exact",
        "replicas_are_equal_to_the_bit",
        "autocast_keeps_chains",
        "equal_batches_have_the_bits_of_dad",
    ),
    "conservation": ("what_is_kept_is_neither_lost_nor_multiplied",),
    "lossy_state": ("powersgd_follows_its_paper_over_several_buckets",),
    "merge_memory": ("the_residual_is_that_of_the_best_approximation_of_sum_and_memory",),
    "owner": ("with_rank_enough_it_is_the_exact_mean", "the_residual_is_that_of_the_best_approximation"),
}
TESTS = (
    *(f"tests/{file}.py" for file in FILES),
    *(f"tests/methods/test_{file}.py::test_{name}" for file, names in METHODS.items() for name in names),
)
LIMITS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "generic": {"ATEN_CPU_CAPABILITY": "default", "NUMBA_CPU_NAME": "generic"},
}
CPU_INFO = Path("/proc/cpuinfo")


def environment(name: str) -> dict[str, str]:
    """Return the variables that imitate a processor."""
    found = {"NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(Path(sys.prefix, "kernels", name))} | LIMITS[name]
    if name == "avx2":
        found["NUMBA_CPU_NAME"] = "znver3" if "AuthenticAMD" in _cpu_info() else "haswell"
    return found


def obstacle(name: str) -> str | None:
    """Return why this processor cannot imitate another one, or None."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"this processor is {platform.machine()}, and not x86-64"
    if name == "avx2" and not {"avx2", "fma"} <= set(_cpu_info().split()):
        return "this processor is not known to have AVX2 and FMA"
    return None


def _cpu_info() -> str:
    return CPU_INFO.read_text() if CPU_INFO.exists() else ""


def main(arguments: Sequence[str]) -> int:
    """Run the tests; return the status of pytest.

    Args:
        arguments: name of the processor, and what pytest is given.
    """
    name, *given = arguments
    if reason := obstacle(name):
        print(f"numerical tests on an imitated processor ({name}): skipped, {reason}", flush=True)
        return 0
    print(f"numerical tests on an imitated processor ({name})", flush=True)
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir=.pytest_cache/{name}", *given, *TESTS]
    variables = environment(name)
    Path(variables["NUMBA_CACHE_DIR"]).mkdir(parents=True, exist_ok=True)
    return subprocess.run(command, check=False, env=os.environ | variables).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
