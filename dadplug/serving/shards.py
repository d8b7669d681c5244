"""Models whose tables are in the files of a sharded checkpoint: rows are mapped, not loaded."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..adapm.shards import INDEX, check_index, check_sizes, map_shard, parse_rest, read_head
from ..errors import InputError, LoadError
from .backends import Array, runner_of
from .building import Loaded, build, load_state
from .schema import Schema

_RESIDENT = 8 << 20  # bytes of a table's files that may become resident before their pages are given back
_AROUND = 2 << 20  # bytes that the kernel maps for one row at most: a huge page


class MappedTable:
    """Rows of a table in mapped files.

    Args:
        shards: by shard, ``keys`` of shape (n,) and ``values`` of shape (n, columns), both mapped.
        rows: number of rows.
        width: number of weights in a row, the first columns.

    Raises:
        LoadError: if a row is missing or occurs twice.
    """

    def __init__(self, shards: list[dict[str, Tensor]], rows: int, width: int) -> None:
        self.rows, self.width = rows, width
        self._values = [shard["values"].numpy() for shard in shards]
        self._starts = np.cumsum([0, *(len(values) for values in self._values)])
        total = int(self._starts[-1])
        self._place = np.full(rows, -1, np.int32 if total < 2**31 else np.int64)
        for shard, start in zip(shards, self._starts, strict=False):
            keys = shard["keys"].numpy()
            self._place[keys] = np.arange(start, start + len(keys), dtype=self._place.dtype)
            _give_back(keys)
        if total != rows or (rows and self._place.min() < 0):
            raise LoadError(f"rows are missing or occur twice: the shards hold {total} of {rows} rows")
        self._touched = 0

    def gather(self, keys: Array) -> Array:
        """Return the rows of keys: shape (n, width) for n keys.

        Raises:
            InputError: if a key is out of range.
        """
        if keys.size and not 0 <= int(keys.min()) <= int(keys.max()) < self.rows:
            raise InputError(f"a key is out of range: {keys.min()} to {keys.max()}, the table has {self.rows} rows")
        places = self._place[keys]
        found = np.empty((len(keys), self.width), np.float32)
        shard = np.searchsorted(self._starts, places, side="right") - 1
        for number, values in enumerate(self._values):
            mine = shard == number
            if mine.any():
                found[mine] = values[places[mine] - self._starts[number], : self.width]
        self._touched += len(keys)
        if self._touched * _AROUND > _RESIDENT:
            self._touched = 0
            for values in self._values:
                _give_back(values)
        return found


def _give_back(array: Array) -> None:
    """Let the kernel take back the pages of a mapped array; they are read from the file when they are needed again."""
    page = mmap.PAGESIZE
    start = -(-array.ctypes.data // page) * page
    length = (array.ctypes.data + array.nbytes - start) // page * page
    if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


class MappedEmbedding(nn.Module):
    """Embedding layer whose rows are in a `MappedTable`.

    Args:
        layer: the `nn.Embedding` or `nn.EmbeddingBag` that it stands for; its weight is not used.
        table: the rows.
    """

    def __init__(self, layer: nn.Module, table: MappedTable) -> None:
        super().__init__()
        self._layer, self._table = (layer,), table  # in a tuple: its weight is no parameter of the model

    def forward(self, keys: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Return the rows of keys, or their bags, as the layer does."""
        layer = self._layer[0]
        unique, places = torch.unique(keys, return_inverse=True)
        rows = torch.from_numpy(self._table.gather(unique.numpy()))
        if isinstance(layer, nn.EmbeddingBag):
            return nn.functional.embedding_bag(
                places,
                rows,
                offsets,
                mode=layer.mode,
                per_sample_weights=per_sample_weights,
                include_last_offset=layer.include_last_offset,
                padding_idx=_padding(layer, unique),
            )
        return nn.functional.embedding(places, rows)


def _padding(layer: nn.EmbeddingBag, unique: Tensor) -> int | None:
    if layer.padding_idx is None:
        return None
    found = (unique == layer.padding_idx).nonzero()
    return int(found) if found.numel() else None


def load_folder(
    folder: Path, description: Mapping[str, Any], stamp: str | None = None, arguments: Mapping[str, Any] | None = None
) -> Loaded:
    """Load a folder that `dadplug.adapm.save_shards` has written; the digests of all files are compared.

    Args:
        folder: the folder.
        description: result of `Model.description`.
        stamp: stamp of the save; None for the checkpoint of the folder.
        arguments: hyperparameters for the builder.

    Returns:
        The builder's model with mapped tables; without a builder the look-up in the only table.

    Raises:
        LoadError: if the folder is incomplete or damaged, or does not fit the model.
    """
    try:
        content, rest = read_head(folder, stamp)
        index, state = check_index(content, folder / INDEX), parse_rest(rest, folder)
        check_sizes(index, folder)
        shards = [map_shard(folder, name, index) for name in index["files"]]
    except (OSError, ValueError) as error:
        raise LoadError(f"{error}") from error
    tables = {
        name: MappedTable([shard[name] for shard in shards], table["rows"], table["width"])
        for name, table in index["tables"].items()
    }
    if description["builder"] is None:
        if len(tables) != 1 or state["model"]:
            raise LoadError(f"{folder} holds {len(tables)} tables and other weights: name the model's builder")
        (table,) = tables.values()
        return Loaded(lambda keys: _rows(table, keys), Schema(None, "int64"))
    model = _build_without_tables(description, arguments or {}, index, tables, state["model"], folder)
    return Loaded(runner_of(model), Schema(None, None))


def _rows(table: MappedTable, keys: Array) -> Array:
    return table.gather(keys.reshape(-1)).reshape(*keys.shape, table.width)


def _build_without_tables(
    description: Mapping[str, Any],
    arguments: Mapping[str, Any],
    index: Mapping[str, Any],
    tables: Mapping[str, MappedTable],
    state: Mapping[str, Tensor],
    folder: Path,
) -> nn.Module:
    """Build a model; on the meta device if it can be, so that whole tables are never in memory."""
    try:
        with torch.device("meta"):
            model = build(description, arguments, {})
        _map_tables(model, index, tables)
        load_state(model, state, folder, assign=True)
        if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            return model
    except (RuntimeError, NotImplementedError):
        pass  # the builder reads values of tensors
    model = build(description, arguments, {})
    _map_tables(model, index, tables)
    load_state(model, state, folder)
    return model


def _map_tables(model: nn.Module, index: Mapping[str, Any], tables: Mapping[str, MappedTable]) -> None:
    for name, table in index["tables"].items():
        for alias in table["names"]:
            path, _, attribute = alias.rpartition(".")
            try:
                layer = model.get_submodule(path)
            except AttributeError:
                raise LoadError(
                    f"the builder's model has no layer {path!r}, of which the checkpoint has a table"
                ) from None
            if attribute != "weight" or not isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
                raise LoadError(f"{alias} is no weight of an Embedding or EmbeddingBag, whose rows can be mapped")
            if layer.max_norm is not None:
                raise LoadError(f"{path} has max_norm, which changes rows when they are looked up")
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, MappedEmbedding(layer, tables[name]))
