"""Kernels compile once on a machine, and not silently."""

import json
from collections import Counter
from pathlib import Path

import pytest
import support
import torch

from dadplug.options import Options
from dadplug.step.methods import METHODS
from dadplug.step.methods.base import warm_up

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
    found = {name.split()[0] for name in counts}
    assert {"components", "eigh", "inverse_triangle", "unit_rows"} <= found
    assert set(counts.values()) == {1}
    assert len({name.split()[0] for name in counts}) == len(counts)  # in one precision, that of the model
    assert sum(each.errors.count(ANNOUNCED) for each in first) == 1  # although several may compile
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
    kernel = "from dadplug.support.jit import njit\n"
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


ALONE = (
    COUNTED
    + """
import sys; sys.dont_write_bytecode = True; sys.path.insert(0, sys.argv[1])
import user
print(user.alone(3))
print(json.dumps(compiled.names))
"""
)
ALONE_SOURCE = "from dadplug.support.jit import njit\n@njit()\ndef alone(x):\n    return x + 1\n"


def run_alone(source: Path, cache: Path, **variables: str) -> support.Finished:
    env = {"XDG_CACHE_HOME": str(cache), "NUMBA_CACHE_DIR": "", **variables}
    (finished,) = support.run_programs([["-c", ALONE, str(source)]], env=env, timeout=200, bare=True)
    assert finished.output.splitlines()[0] == "4", finished.errors
    return finished


@pytest.fixture
def source(tmp_path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "user.py").write_text(ALONE_SOURCE)
    return folder


def test_kernels_are_kept_in_the_users_cache_folder_and_not_beside_the_source(tmp_path, source):
    cache = tmp_path / "cache"
    first = run_alone(source, cache)
    assert len(names(first)) == first.errors.count(ANNOUNCED) == 1
    assert not list(source.rglob("*.nb?"))
    (folder,) = (cache / "dadplug").iterdir()
    assert list(folder.rglob("*.nbc"))
    assert [path.stat().st_mode & 0o777 for path in (cache / "dadplug", folder)] == [0o700, 0o700]
    again = run_alone(source, cache)
    assert names(again) == []
    other = tmp_path / "other"
    other.mkdir()
    (other / "user.py").write_text(ALONE_SOURCE)
    assert len(names(run_alone(other, cache))) == 1  # another checkout has a folder of its own
    imitated = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    assert len(names(run_alone(source, cache, **imitated))) == 1  # so has another target
    assert names(run_alone(source, cache, **imitated)) == names(run_alone(source, cache)) == []
    assert len(list((cache / "dadplug").iterdir())) == 3
    named = tmp_path / "named"
    assert len(names(run_alone(source, cache, NUMBA_CACHE_DIR=str(named)))) == 1
    assert list(named.rglob("*.nbc"))
    assert len(names(run_alone(source, cache, NUMBA_CACHE_DIR=str(named), **imitated))) == 1


def test_kernels_whose_arguments_have_types_that_are_gone_are_compiled_again(tmp_path):
    for name in ("Pair", "Couple"):
        (tmp_path / "user.py").write_text(
            "from typing import NamedTuple\nfrom dadplug.support.jit import njit\n"
            f"class {name}(NamedTuple):\n    first: float\n    second: float\n"
            "@njit()\ndef total(pair):\n    return pair.first + pair.second\n"
        )
        code = f"import sys; sys.dont_write_bytecode = True; sys.path.insert(0, {str(tmp_path)!r})\n{COUNTED}"
        code += f"import user\nassert user.total(user.{name}(1.0, 2.0)) == 3.0\nprint(json.dumps(compiled.names))"
        env = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        (finished,) = support.run_programs([["-c", code]], env=env, timeout=200, bare=True)
        assert len(names(finished)) == 1


def test_damaged_and_unwritable_files_of_kernels_are_compiled_again(tmp_path, source):
    cache = tmp_path / "cache"
    assert len(names(run_alone(source, cache))) == 1
    for number, pattern in enumerate(["*.nbi", "*.nbc", "*.nbi", "*.nbc"]):
        (path,) = cache.rglob(pattern)
        content = path.read_bytes()
        half = len(content) // 2
        path.write_bytes(
            content[:half] if number < 2 else content[:half] + bytes([content[half] ^ 4]) + content[half + 1 :]
        )
        assert len(names(run_alone(source, cache))) == 1, path
        assert names(run_alone(source, cache)) == []
    full = "from numba.core.caching import IndexDataCacheFile as File\n"  # without room on the disk
    full += "File._open_for_write = lambda *_: open('/dev/full', 'wb', buffering=0)\n"
    (source / "user.py").write_text(full + ALONE_SOURCE)
    finished = run_alone(source, tmp_path / "full")
    assert len(names(finished)) == 1
    assert "compiled kernels cannot be kept" in finished.errors


def test_a_cache_folder_that_others_can_write_is_not_used(tmp_path, source):
    folder = tmp_path / "cache" / "dadplug"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    for _ in range(2):
        finished = run_alone(source, folder.parent)
        assert len(names(finished)) == 1
        assert "compiled kernels cannot be kept" in finished.errors
        assert f"others can write to {folder}" in finished.errors
    assert list(folder.iterdir()) == []


def test_a_cache_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    from dadplug.support import jit

    folder = tmp_path / "dadplug" / "kernels"
    jit.make_private(folder)
    jit.make_private(folder)
    monkeypatch.setattr(jit.os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(RuntimeError, match="belongs to another user"):
        jit.make_private(folder)
    monkeypatch.undo()
    linked = tmp_path / "linked" / "dadplug"
    linked.parent.mkdir()
    linked.symlink_to(folder.parent)
    with pytest.raises(RuntimeError, match="is no folder"):
        jit.make_private(linked / "kernels")


def test_where_no_folder_can_be_written_kernels_still_run():
    from dadplug.support import jit

    jit._warn_once.cache_clear()
    space: dict = {"njit": jit.njit}
    with pytest.warns(UserWarning, match="compiled kernels cannot be kept: each start compiles them again"):
        exec("@njit()\ndef plus(x):\n    return x + 1", space)  # numba keeps nothing that is in no file
    assert space["plus"](2) == 3


# Warm-up of kernels


@pytest.mark.parametrize("mode", sorted(METHODS))
def test_every_method_can_be_warmed_up(mode, monkeypatch):
    calls = []
    encode = METHODS[mode].encode
    monkeypatch.setattr(METHODS[mode], "encode", lambda *args: (calls.append(args[1]), encode(*args))[1])
    state = torch.random.get_rng_state()
    warm_up(Options.create(mode=mode), torch.float32)
    assert calls == ["warm-up 0"] * 2 + ["warm-up 1"] * 2 if METHODS[mode].traits.takes_factors else not calls
    assert torch.equal(torch.random.get_rng_state(), state)
    warm_up(Options.create(mode=mode), torch.int64)
    assert len(calls) <= 4
