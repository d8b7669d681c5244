"""Kernels compile once on a machine, and not silently."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import support

# Counts what a process compiles: the kernels' names, without the parts of numba that are compiled into them.
COUNTED = """
import json, sys
from numba.core import event

class Compiled(event.Listener):
    def __init__(self):
        self.names = []
    def on_start(self, event):
        function = event.data["dispatcher"].py_func
        if not function.__module__.startswith("numba"):
            self.names.append(f"{function.__name__} {event.data['args']}")
    def on_end(self, event):
        pass

compiled = Compiled()
event.register("numba:compile", compiled)
"""
STEPS = """
torch.manual_seed(rank)
for mode in ("dad", "rankdad"):
    model = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 8))
    reduction = dadplug.GradientReduction(model, mode=mode, rank=2)
    for _ in range(2):
        model.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(16, 32)), torch.randint(8, (16,))).backward()
        reduction.synchronize()
    reduction.detach()
print(json.dumps(compiled.names))
"""
ANNOUNCED = "compiling kernels for this machine, once"


def names(finished: support.Finished) -> list[str]:
    assert finished.status == 0, finished.errors
    return json.loads(finished.output.splitlines()[-1])


def test_sites_of_one_machine_compile_each_kernel_once_and_say_so(tmp_path):
    def steps() -> list[support.Finished]:
        commands = support.site_scripts(COUNTED + STEPS, tmp_path)
        return support.run_programs(commands, env={"NUMBA_CACHE_DIR": str(tmp_path / "cache")}, bare=True)

    first = steps()
    counts = Counter(name for each in first for name in names(each))
    assert {"gram_vectors", "eigh", "inverse_triangle", "unit_rows"} <= {name.split()[0] for name in counts}
    assert set(counts.values()) == {1}
    assert len({name.split()[0] for name in counts}) == len(counts)  # in one precision, that of the model
    for each in first:
        assert each.errors.count(ANNOUNCED) == bool(names(each))
    for each in steps():
        assert names(each) == []
        assert ANNOUNCED not in each.errors


USER = """
import helper, user
print(user.twice(3), user.alone(3))
try:
    user.wrong(3)
except Exception as error:
    assert "Typing" in type(error).__name__, error
print(json.dumps(compiled.names))
"""


def test_a_change_in_another_file_compiles_its_users_again_and_nothing_else(tmp_path):
    kernel = "from dadplug.jit import njit\n"
    (tmp_path / "user.py").write_text(
        f"{kernel}from helper import FACTOR, times\n"
        "@njit()\ndef twice(x):\n    return times(x) * 2\n"
        "@njit()\ndef alone(x):\n    return x + 1\n"
        "@njit()\ndef wrong(x):\n    return x.nothing\n"
    )

    def run(helper: str) -> list[support.Finished]:
        (tmp_path / "helper.py").write_text(f"{kernel}FACTOR = 5\n@njit()\ndef times(x):\n    {helper}\n")
        code = f"import sys; sys.dont_write_bytecode = True; sys.path.insert(0, {str(tmp_path)!r})\n{COUNTED}{USER}"
        env = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        # The kernel that cannot be compiled must not keep the others waiting for it.
        return support.run_programs([["-c", code]] * 2, env=env, timeout=200, bare=True)

    def compiled(finished: list[support.Finished]) -> list[str]:
        found = sorted(name.split()[0] for each in finished for name in names(each))
        assert found.count("wrong") == 2
        return [name for name in found if name != "wrong"]

    for helper, result, expected in (
        ("return x * FACTOR", "30 4", ["alone", "times", "twice"]),
        ("return x * FACTOR", "30 4", []),
        ("return x + FACTOR", "16 4", ["times", "twice"]),
    ):
        finished = run(helper)
        assert compiled(finished) == expected
        assert [each.output.splitlines()[0] for each in finished] == [result] * 2


def test_where_no_folder_can_be_written_kernels_still_run():
    from dadplug import jit

    jit._warn_once.cache_clear()
    space: dict = {"njit": jit.njit}
    with pytest.warns(UserWarning, match="compiled kernels cannot be kept: each start compiles them again"):
        exec("@njit()\ndef plus(x):\n    return x + 1", space)  # numba keeps nothing that is in no file
    assert space["plus"](2) == 3
