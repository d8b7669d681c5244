"""Checkpoints of sites in one machine that write one path at the same time, since Lightning broadcasts it."""

from __future__ import annotations

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("pytorch_lightning")

from dadplug.runners import DADStrategy

SECONDS = 60.0


class Halves:
    """Writer of checkpoints that waits when half of a file is written.

    Attributes:
        waits: set while it waits.
        goes_on: set to let it go on.
    """

    def __init__(self) -> None:
        self.waits, self.goes_on = threading.Event(), threading.Event()

    def save_checkpoint(self, checkpoint, path, storage_options=None) -> None:
        content = io.BytesIO()
        torch.save(checkpoint, content)
        half = content.tell() // 2
        with open(path, "wb", buffering=0) as file:
            file.write(content.getbuffer()[:half])
            self.waits.set()
            assert self.goes_on.wait(SECONDS)
            file.write(content.getbuffer()[half:])


def site(rank: int, monkeypatch) -> tuple[DADStrategy, Halves]:
    """Return the strategy of a site where sites may leave, and its writer."""
    strategy, writer = DADStrategy(mode="dsgd"), Halves()
    strategy._elastic = SimpleNamespace()
    monkeypatch.setattr(strategy, "cluster_environment", SimpleNamespace(global_rank=lambda: rank))
    monkeypatch.setattr(strategy.checkpoint_io, "save_checkpoint", writer.save_checkpoint)
    return strategy, writer


def test_a_file_that_two_sites_write_at_the_same_time_is_always_whole(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"

    def found() -> set[float]:
        return set(torch.load(path)["values"].tolist())

    torch.save({"values": torch.zeros(10)}, path)
    pairs = [site(rank, monkeypatch) for rank in range(2)]
    writing = []
    with ThreadPoolExecutor(2) as pool:
        try:
            for number, (strategy, writer) in enumerate(pairs, 1):  # files of different lengths
                checkpoint = {"values": torch.full((1000 * number,), float(number))}
                writing.append(pool.submit(strategy.save_checkpoint, checkpoint, path))
                assert writer.waits.wait(SECONDS)
                assert found() == {0.0}
            for number, (_, writer) in enumerate(pairs, 1):
                writer.goes_on.set()
                writing[number - 1].result()
                assert found() == {float(number)}
        finally:
            for _, writer in pairs:
                writer.goes_on.set()
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]
