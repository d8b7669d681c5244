"""torch's own tests of DistributedDataParallel with dadplug's class in its place.

    python benchmarks/tests_of_torch.py            # torch's class
    python benchmarks/tests_of_torch.py --mode dsgd

runs the tests of `torch.testing._internal.distributed.distributed_test` that use DDP or `Join`, in two processes of a
machine. Most of them are for GPUs: their devices are replaced by the CPU. Each line has the outcome, the name, and the
last line of an error; the numbers at the end are the figures of docs/guides/drop-in.md. Only tests that torch's class
passes say something about dadplug's. It needs `expecttest`, which torch's test classes import.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import sys
import tempfile
import unittest
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.parallel.distributed as ddp_module
from command import parser_of
from torch import nn
from torch.overrides import TorchFunctionMode

SECONDS = 120  # for a test; most take two on an idle machine
_NEEDS = (  # decorators of tests that skip them without GPUs
    *("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend", "skip_if_small_worldsize"),
    *("skip_if_no_gpu", "skip_if_rocm_multiprocess"),
)
_PLAIN = ("skip_if_no_gpu", "skip_if_small_worldsize", "skip_if_rocm_multiprocess")  # used without arguments


def on_cpu(value: Any) -> Any:
    """Return the CPU for a device of CUDA, by number, name or object, and other values as they are."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.startswith("cuda") else value


def device(value: Any) -> Any:
    """Return what stands for a value in the place of a device, which may be a number."""
    return "cpu" if isinstance(value, int) and not isinstance(value, bool) else on_cpu(value)


class CPU(TorchFunctionMode):
    """Mode in which tensors are made on, and moved to, the CPU in place of a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: device(value) if name == "device" else value for name, value in (kwargs or {}).items()}
        moves = function is torch.Tensor.to
        return function(
            *(device(each) if moves and place == 1 else on_cpu(each) for place, each in enumerate(args)), **kwargs
        )


def without_gpus() -> None:
    """Replace what the tests call of CUDA."""
    import torch.testing._internal.common_distributed as common
    import torch.testing._internal.common_utils as utils

    for name in _NEEDS:
        plain = name in _PLAIN
        setattr(common, name, (lambda test: test) if plain else (lambda *_, **__: lambda test: test))
    utils.skip_but_pass_in_sandcastle_if = lambda *_, **__: lambda test: test
    common.TIMEOUT_DEFAULT = SECONDS
    common.TIMEOUT_OVERRIDE = dict.fromkeys(common.TIMEOUT_OVERRIDE, SECONDS)
    torch.cuda.set_device = torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = torch.cuda.device_count = lambda: 0
    torch.Tensor.cuda = nn.Module.cuda = lambda self, *_, **__: self
    move = nn.Module.to
    nn.Module.to = lambda self, *args, **kwargs: move(
        self, *map(device, args), **{name: device(value) for name, value in kwargs.items()}
    )


def replace_class(mode: str | None) -> None:
    """Put a class without devices in the place of torch's: its own, or dadplug's in a mode."""
    base: Any = nn.parallel.DistributedDataParallel
    if mode is not None:
        from dadplug.ddp import DistributedDataParallel as base

    class DistributedDataParallel(base):
        def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            own = {} if mode is None else {"mode": mode}
            kept = {name: value for name, value in kwargs.items() if name not in ("device_ids", "output_device")}
            super().__init__(module, *args, **(own | kept))

    DistributedDataParallel.__module__ = ddp_module.__name__  # with the name, for pickle
    DistributedDataParallel.__qualname__ = base.__name__
    ddp_module.DistributedDataParallel = nn.parallel.DistributedDataParallel = DistributedDataParallel


def tests() -> tuple[type[unittest.TestCase], list[str]]:
    """Return a class with all tests, and the names of the tests that use DDP."""
    import torch.testing._internal.distributed.distributed_test as source

    run: Callable[..., Any] = source.TestDistBackend.run_test

    def run_on_cpu(self: Any, *args: Any) -> Any:
        with CPU():
            return run(self, *args)

    source.TestDistBackend.run_test = run_on_cpu

    class Tests(source.TestDistBackend, source.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    texts = {
        name: inspect.getsource(inspect.unwrap(getattr(Tests, name))) for name in dir(Tests) if name[:5] == "test_"
    }
    used = ("DistributedDataParallel", "Join")
    return Tests, [name for name, text in texts.items() if "ddp" in name.lower() or any(each in text for each in used)]


def outcome(test: unittest.TestCase) -> tuple[str, str]:
    """Run a test; return its outcome, and the last line of its error that names one."""
    result = unittest.TestResult()
    test.run(result)
    errors = result.failures + result.errors
    if not errors:
        return ("skipped" if result.skipped else "passed"), ""
    lines = [line for line in errors[0][1].splitlines() if line.strip()]
    return "failed", next((line for line in reversed(lines) if "Error" in line and "Process" not in line), lines[-1])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--mode", help="mode of dadplug's class; torch's class without it")
    parser.add_argument("--only", default="", help="part of the names of tests")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": "2", "TEMP_DIR": folder, "MASTER_ADDR": "127.0.0.1"}
        torch.set_num_threads(1)
        without_gpus()
        replace_class(arguments.mode)
        made, names = tests()
        counts: Counter[str] = Counter()
        for name in (name for name in names if arguments.only in name):
            found, text = outcome(made(name))
            counts[found] += 1
            print(f"{found:7s} {name} {text[:200]}", flush=True)
        print(", ".join(f"{count} {found}" for found, count in sorted(counts.items())), flush=True)
    sys.stdout.flush()
    os._exit(0)  # processes of tests that have failed may still run


if __name__ == "__main__":
    main()
