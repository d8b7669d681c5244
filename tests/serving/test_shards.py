"""Models with tables in a folder of shards, whose rows are mapped."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import nn

from dadplug.adapm import AdaModel, save_shards
from dadplug.adapm.shards import VERSION, write_index, write_whole
from dadplug.serving import InputError, LoadError, Model
from dadplug.serving.loading import load, map_tables

BUILDER = """
import torch
from torch import nn

class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 4)
        self.bags = nn.EmbeddingBag(30, 4, mode="sum")
        self.head = nn.Linear(4, 2)
    def forward(self, keys):
        return self.head(self.table(keys).mean(1) + self.bags(keys))
"""


def description(path, **given):
    return Model(path, **given).description() | {"threads": 1}


@pytest.fixture
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_a_model_with_mapped_tables_answers_as_the_trained_one(tmp_path, alone):
    (tmp_path / "clicks.py").write_text(BUILDER)
    scope: dict = {}
    exec(BUILDER, scope)
    model = scope["Clicks"]()
    keys = torch.randint(0, 30, (6, 3))
    expected = model(keys).detach()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    managed = AdaModel(model, optimizer)
    save_shards(managed, tmp_path / "shards", optimizer)
    managed.manager.close()
    loaded = load(description(tmp_path / "shards", builder=f"{tmp_path / 'clicks.py'}:Clicks"))
    torch.testing.assert_close(loaded.run(keys.numpy()), expected)
    with pytest.raises(InputError, match="the table has 30 rows"):
        loaded.run(np.full((1, 3), 40))
    with pytest.raises(LoadError, match="2 tables and other weights"):
        load(description(tmp_path / "shards"))


def shards(folder, rows, width, sites=2):
    """Write a folder of one table, as sites that own rows at random would; row i holds i, i + 0.5, ..."""
    folder.mkdir()
    order = torch.randperm(rows)
    files = {}
    for site, keys in enumerate(order.chunk(sites)):
        values = torch.cat([keys[:, None] + torch.arange(width) / 2, torch.zeros(len(keys), width)], 1).float()
        name = f"0123abcd-site-{site}-of-{sites}.pt"
        files[name] = write_whole(folder / name, {"site": site, "tables": {"t": {"keys": keys, "values": values}}})
    table = {"rows": rows, "width": width, "columns": 2 * width, "names": ["weight"], "place": 0}
    table |= {"parts": ["sum"], "counts_steps": True, "steps": 1}
    rest = {"0123abcd-rest.pt": write_whole(folder / "0123abcd-rest.pt", {"model": {}, "optimizer": {"state": {}}})}
    write_index(folder / "index.json", {"version": VERSION, "tables": {"t": table}, "files": files, "rest": rest})
    return folder


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_rows_are_mapped_and_not_loaded(tmp_path):
    rows, width = 400_000, 16
    folder = shards(tmp_path / "table", rows, width)
    described = description(folder)
    load(description(shards(tmp_path / "small", 10, 4)))  # what is imported at the first load
    torch.randperm(rows)
    before = resident()
    loaded = load(described)
    rng = np.random.default_rng(0)
    keys = np.minimum(rng.zipf(1.3, 10_000), rows) - 1
    for part in keys.reshape(100, 100):
        found = loaded.run(part[:, None])
        assert found.shape == (100, 1, width)
        np.testing.assert_array_equal(found[:, 0], part[:, None] + np.arange(width) / 2)
    grown = resident() - before
    assert grown < 0.25 * rows * width * 4 + (4 << 20), grown


def test_damaged_folders_are_errors(tmp_path):
    folder = shards(tmp_path / "table", 100, 4)
    path = folder / "0123abcd-site-1-of-2.pt"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"x")
    with pytest.raises(LoadError, match="is damaged"):
        load(description(folder))
    path.unlink()
    with pytest.raises(LoadError, match="is missing"):
        load(description(folder))


def test_a_layer_with_max_norm_is_refused(tmp_path):
    model = nn.Sequential(nn.Embedding(5, 2, max_norm=1.0))
    with pytest.raises(LoadError, match="max_norm"):
        map_tables(model, {"tables": {"t": {"names": ["0.weight"]}}}, {})
