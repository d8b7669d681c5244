"""Files of tuned constants."""

import dataclasses
import json
import os
import stat
import warnings

import pytest
import torch

from dadplug import schedules
from dadplug.lowrank import sum_of_products, sum_one_by_one, top_k
from dadplug.lowrank.algorithms import choose, predict
from dadplug.schedules import Decoding, Encoding, Machine, Record, Serving

TUNED = Record(
    Decoding(few=24, strip=512, block=1 << 15, align=8, tile=1 << 14),
    Encoding(fat=90_000.0, coarse=12),
    {"a": Serving("compiled", fused=True)},
    tuned=True,
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DADPLUG_TUNING", str(tmp_path / "tuning"))
    schedules.forget()
    yield tmp_path / "tuning"
    schedules.forget()


@pytest.fixture
def path(folder):
    return schedules.save(TUNED, Machine.this(), [{"task": "some"}])


def test_what_is_saved_is_what_later_processes_use(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert schedules.current() == TUNED
    assert os.listdir(path.parent) == [path.name]
    assert stat.S_ISREG(path.stat().st_mode)
    later = dataclasses.replace(TUNED, decoding=Decoding(few=4))
    schedules.save(later, Machine.this())
    assert schedules.current() == TUNED
    schedules.forget()
    assert schedules.current() == later


def test_without_a_file_or_switched_off_the_defaults_hold(folder, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert schedules.load() == Record()
        schedules.save(TUNED, Machine.this())
        monkeypatch.setenv("DADPLUG_TUNING", "0")
        assert schedules.load() == Record()
    with pytest.raises(ValueError, match="switches tuned constants off"):
        schedules.save(TUNED, Machine.this())


def changed(**entries):
    return lambda content: json.dumps(json.loads(content) | entries).encode()


def of_machine(**entries):
    def change(content):
        found = json.loads(content)
        return json.dumps(found | {"machine": found["machine"] | entries}).encode()

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content[: len(content) // 2], "damaged"),
        (lambda content: b"", "damaged"),
        (lambda content: b"\xff\x00" * 100, "damaged"),
        (lambda content: b"[" * 100_000, ""),
        (lambda content: b" " * (1 << 21), "larger"),
        (lambda content: b"[]", "damaged"),
        (changed(format=2), "format"),
        (changed(machine=None), "damaged"),
        (changed(served=[]), "damaged"),
        (changed(served={"a": {"backend": "os.system"}}), "backend"),
        (changed(decoding={"few": "12"}), "few must be of type int"),
        (changed(decoding={"few": True}), "few must be of type int"),
        (changed(decoding={"few": -4}), "few must lie in"),
        (changed(decoding={"tile": 0}), "tile must lie in"),
        (changed(decoding={"other": 1}), "unknown option 'other'"),
        (changed(encoding={"fat": float("nan")}), "fat must lie in"),
        (of_machine(cpu="another"), "cpu 'another' instead of"),
        (of_machine(torch="1.0"), "torch '1.0' instead of"),
        (of_machine(sources="0"), "sources '0' instead of"),
        (of_machine(threads=64), "threads 64 instead of"),
    ],
)
def test_a_file_that_is_damaged_foreign_or_outdated_is_ignored_with_a_warning(path, change, reason):
    path.write_bytes(change(path.read_bytes()))
    with pytest.warns(UserWarning, match="the tuned constants in .* are not used") as caught:
        assert schedules.load() == Record()
    assert reason in str(caught[0].message)


def test_a_file_that_cannot_be_read_is_ignored_with_a_warning(path):
    path.unlink()
    path.mkdir()
    with pytest.warns(UserWarning, match="are not used"):
        assert schedules.load() == Record()


def test_an_interrupted_write_leaves_the_file_before(path, monkeypatch):
    def fail(*args):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        schedules.save(Record(), Machine.this())
    assert schedules.load() == TUNED
    assert os.listdir(path.parent) == [path.name]


def test_threads_have_files_of_their_own():
    assert Machine.this(1).key != Machine.this(2).key
    assert Machine.this(1).key == Machine.this(1).key


def test_constants_change_how_kernels_compute_and_not_what():
    generator = torch.Generator().manual_seed(0)
    lefts = [torch.randn(5, 37, generator=generator, dtype=torch.float64) for _ in range(2)]
    rights = [torch.randn(5, 53, generator=generator, dtype=torch.float64) for _ in range(2)]
    exact = sum(0.5 * left.T @ right for left, right in zip(lefts, rights, strict=True))
    for few in (0, 64):
        for strip in (16, 20, 1 << 20):
            found = sum_of_products(lefts, rights, [0.5, 0.5], Decoding(few=few, strip=strip))
            torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
    for block in (16, 200, 1 << 20):
        for align in (1, 4, 64):
            found = sum_one_by_one(lefts, rights, Decoding(block=block, align=align))
            torch.testing.assert_close(found, 2 * exact, rtol=1e-12, atol=1e-12)
    values = torch.randn(3000, generator=generator)
    expected = top_k(values, 100)
    for coarse in (8, 22):
        with schedules.replaced(Record(encoding=Encoding(coarse=coarse))):
            assert all(map(torch.equal, top_k(values, 100), expected))


def test_the_cost_model_of_compression_has_the_constants_of_the_process():
    case = (256, 768, 768, 8, 1)
    before = predict(*case)
    with schedules.replaced(Record(encoding=Encoding(skinny=30.0, start_gram=0.0, fat=1e8, eigen=1e6))):
        assert predict(*case)["iteration"] > 100 * before["iteration"]
        assert choose(*case) == "gram"
    assert predict(*case) == before
    assert choose(*case) == "iteration"
