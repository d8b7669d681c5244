"""Click data: rows of counts and categories of advertisements, generated or read from Criteo's files.

Criteo's text file, ``train.txt``, has one row per line, separated by tabs: the label, 13 integers and 26 categories of
eight hexadecimal digits; all but the label may be empty. A sample, ``*.npz``, has the arrays ``dense`` (n, 13),
``labels`` (n,) and ``sparse`` (n, 26), with ids in one key space.
"""

from __future__ import annotations

import gzip
import itertools
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from dadplug.errors import DataError

from .images import DataPair

DENSE, FIELDS = 13, 26  # counts and categories in a row, as Criteo's logs have them
ROWS = 1 << 20  # size of the key space that categories of the text file are hashed into
_ADVICE = "give train.txt of Criteo's Kaggle challenge, or a sample of it as .npz"
_LINES = 1 << 15  # lines parsed at a time
_STEP, _MIX_1, _MIX_2 = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_HELD_OUT = 5  # the last fifth of the rows


class Clicks(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Data set of rows with counts, categories and a label, in memory and in the order of their time.

    Args:
        dense: of shape (n, counts), float32.
        ids: of shape (n, fields), integers of at least 0: the category of each field, in one key space for all fields.
        labels: of shape (n,), 1 for a click, 0 otherwise.
        rows: upper bound of ids, exclusive; None for the largest id plus 1.

    Raises:
        DataError: if shapes do not fit or an id is out of range.
    """

    def __init__(self, dense: Tensor, ids: Tensor, labels: Tensor, rows: int | None = None) -> None:
        if dense.dim() != 2 or ids.dim() != 2 or not len(dense) == len(ids) == len(labels):
            raise DataError(
                f"clicks have a row of counts, a row of ids and a label each; there are {tuple(dense.shape)} counts, "
                f"{tuple(ids.shape)} ids and {tuple(labels.shape)} labels"
            )
        self.dense, self.ids, self.labels = dense, ids, labels
        low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
        self.rows = high + 1 if rows is None else rows
        if low < 0 or high >= self.rows:
            raise DataError(f"ids must lie in 0 to {self.rows - 1}, there are some from {low} to {high}")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.dense[index], self.ids[index].long(), self.labels[index]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
        parts = (self.dense[indices], self.ids[indices].long(), self.labels[indices])
        return list(zip(*parts, strict=True))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Not supported, since samples are not images.

        Raises:
            DataError: always.
        """
        raise DataError(
            "clicks are rows of counts and categories, not images: they are for the model wide_deep, as in "
            "examples/ctr.py"
        )

    def subset(self, indices: Tensor) -> Clicks:
        """Return a subset of the rows.

        Args:
            indices: indices or a mask of the rows.
        """
        return Clicks(self.dense[indices], self.ids[indices], self.labels[indices], self.rows)

    def plain(self) -> Clicks:
        """Return the rows unchanged, since they have no augmentation."""
        return self

    def resized(self, size: int) -> Clicks:
        """Return the rows unchanged, since they have no size."""
        return self

    def batch(self, start: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return counts, int64 ids and labels of the rows from `start` to `end`, exclusive."""
        return self.dense[start:end], self.ids[start:end].long(), self.labels[start:end]


def split_by_time(every: Clicks) -> DataPair:
    """Hold out the last fifth of the rows for testing, since the task is to predict later clicks."""
    held_out = max(1, len(every) // _HELD_OUT)
    place = torch.arange(len(every))
    return DataPair(every.subset(place[:-held_out]), every.subset(place[-held_out:]), classes=2)


def renumbered(data: DataPair) -> tuple[DataPair, Tensor]:
    """Renumber the ids that occur from 0 without gaps, so that a table of them fits into memory.

    Args:
        data: training and test clicks.

    Returns:
        The clicks with new ids, and the old id of each new id, in ascending order.
    """
    parts: list[Any] = [data.train, data.test]
    assert all(isinstance(part, Clicks) for part in parts)
    old, new = torch.unique(torch.cat([part.ids.reshape(-1) for part in parts]), return_inverse=True)
    pair: list[Clicks] = []
    begin = 0
    for part in parts:
        assert isinstance(part, Clicks)
        own = new[begin : begin + part.ids.numel()].view(part.ids.shape)
        begin += part.ids.numel()
        pair.append(Clicks(part.dense, own, part.labels, len(old)))
    return DataPair(pair[0], pair[1], classes=2), old.long()


def generated(samples: int = 10_000, seed: int = 0, exponent: float = 1.1) -> Clicks:
    """Generate clicks that a model can learn to predict.

    A field has between 4 and 4,000 categories; the frequency of the k-th is proportional to ``1 / k^exponent``. Each
    category has a weight and each count a slope; the probability of a click is the logistic function of their sum.

    Args:
        samples: number of rows.
        seed: seed of the generator.
        exponent: skew of the categories; 0 for uniform categories.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(0.6, 3.6, FIELDS).long()[torch.randperm(FIELDS, generator=generator)]
    starts = sizes.cumsum(0) - sizes
    dense = torch.randn(samples, DENSE, generator=generator).exp().log1p()
    ids = torch.empty(samples, FIELDS, dtype=torch.long)
    for field, (size, start) in enumerate(zip(sizes.tolist(), starts.tolist(), strict=True)):
        bounds = (torch.arange(1, size + 1, dtype=torch.float64) ** -exponent).cumsum(0)
        drawn = torch.rand(samples, generator=generator, dtype=torch.float64) * bounds[-1]
        ids[:, field] = start + torch.searchsorted(bounds, drawn).clamp_(max=size - 1)
    weights = 0.35 * torch.randn(int(sizes.sum()), generator=generator)
    slopes = 0.4 * torch.randn(DENSE, generator=generator)
    logits = weights[ids].sum(1) + dense @ slopes
    logits += -1.2 - logits.mean()
    labels = (torch.rand(samples, generator=generator) < torch.sigmoid(logits)).long()
    return Clicks(dense, ids, labels, int(sizes.sum()))


def clicks() -> DataPair:
    """Generate 10,000 clicks in memory."""
    return split_by_time(generated())


def criteo(data_dir: Path) -> DataPair:
    """Load Criteo's clicks; the last fifth of the rows is held out.

    Args:
        data_dir: the file (text, plain or compressed by gzip, or ``.npz``), or a folder with one such file.

    Raises:
        DataError: if the file is missing, damaged or of another format.
    """
    return split_by_time(read_criteo(data_dir))


def read_criteo(path: str | Path, *, limit: int | None = None, rows: int = ROWS) -> Clicks:
    """Read clicks from a file.

    Counts of the text file become ``log(1 + count)``, empty ones 0; negative counts are not changed. Categories are
    hashed together with their field, so that all fields share the key space; an empty one is a category of its own.

    Args:
        path: the file, or a folder with one.
        limit: number of rows to read, from the beginning; None for all.
        rows: size of the key space that categories of the text file are hashed into.

    Raises:
        DataError: if the file is missing, damaged or of another format; the message names the line.
        ValueError: if `limit` or `rows` is less than 1.
    """
    if rows < 1 or (limit is not None and limit < 1):
        raise ValueError(f"limit and rows must be at least 1, got {limit} and {rows}")
    file = _find(Path(path))
    clicks = _read_sample(file, limit) if file.suffix == ".npz" else _read_text(file, limit, rows)
    if not len(clicks):
        raise DataError(f"{file} holds no rows: {_ADVICE}")
    return clicks


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.exists():
        raise DataError(f"there is no {path}: {_ADVICE}")
    for folder in (path, path / "criteo"):
        for name in ("train.txt", "train.txt.gz", "*.npz"):
            found = sorted(folder.glob(name))
            if len(found) > 1:
                raise DataError(f"there are several files in {folder}: say which, {found[0].name} or {found[1].name}")
            if found:
                return found[0]
    raise DataError(f"there is neither train.txt nor a .npz in {path}: {_ADVICE}")


def _read_sample(file: Path, limit: int | None) -> Clicks:
    shapes = {"dense": (DENSE,), "labels": (), "sparse": (FIELDS,)}
    try:
        loaded = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise ValueError("it is one array, not an archive of them")
        with loaded as archive:
            missing = [name for name in shapes if name not in archive]
            if missing:
                raise DataError(f"{file} lacks the arrays {', '.join(missing)}; it has {', '.join(archive) or 'none'}")
            dense, labels, ids = (archive[name] for name in shapes)
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DataError(f"{file} is damaged, or no file of NumPy's: {error}") from error
    count = labels.shape[0] if labels.ndim else 0
    for array, (name, rest) in zip((dense, labels, ids), shapes.items(), strict=True):
        if array.shape != (count, *rest):
            raise DataError(f"{name} in {file} has shape {array.shape}, it should be {(count, *rest)} for its labels")
    if not all(np.issubdtype(array.dtype, np.integer) for array in (labels, ids)):
        raise DataError(f"labels and sparse in {file} must be whole numbers, they are {labels.dtype} and {ids.dtype}")
    if not np.issubdtype(dense.dtype, np.number) or not np.isfinite(dense).all():
        raise DataError(f"dense in {file} must hold finite numbers")
    if ((labels != 0) & (labels != 1)).any():
        place = int(np.flatnonzero((labels != 0) & (labels != 1))[0])
        raise DataError(f"label {labels[place]} of row {place} in {file} is neither 0 nor 1")
    if ids.size and ids.min() < 0:
        place = int(np.flatnonzero((ids < 0).any(1))[0])
        raise DataError(f"row {place} of sparse in {file} has an id below 0")
    some = slice(limit)
    return Clicks(
        torch.from_numpy(dense[some].astype(np.float32)),
        torch.from_numpy(ids[some].astype(np.int64)),
        torch.from_numpy(labels[some].astype(np.int64)),
        int(ids.max()) + 1 if ids.size else 1,
    )


@contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    try:
        with file.open("rb") as raw:
            compressed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(file) if compressed else file.open("rb") as stream:
            yield stream  # type: ignore[misc]
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _read_text(file: Path, limit: int | None, rows: int) -> Clicks:
    parts: list[tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]] = []
    with _opened(file) as stream:
        lines = itertools.islice(stream, limit)
        first = 1
        while chunk := list(itertools.islice(lines, _LINES)):
            parts.append(_parse(file, first, chunk, rows))
            first += len(chunk)
    if not parts:
        raise DataError(f"{file} holds no rows: {_ADVICE}")
    dense, ids, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Clicks(torch.from_numpy(dense), torch.from_numpy(ids), torch.from_numpy(labels), rows)


def _parse(
    file: Path, first: int, lines: list[bytes], rows: int
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    counts = np.zeros((len(lines), DENSE), np.float64)
    categories = np.full((len(lines), FIELDS), -1, np.int64)
    labels = np.empty(len(lines), np.int64)
    for place, line in enumerate(lines):
        columns = line.rstrip(b"\r\n").split(b"\t")
        try:
            if len(columns) != 1 + DENSE + FIELDS:
                without = ": that is how test.txt looks, which has no labels" if len(columns) == DENSE + FIELDS else ""
                raise ValueError(f"has {len(columns)} columns{without}; {1 + DENSE + FIELDS} are expected")
            if columns[0] not in (b"0", b"1"):
                raise ValueError(f"begins with {columns[0][:20].decode(errors='replace')!r}, not with a label, 0 or 1")
            labels[place] = columns[0] == b"1"
            _fill(counts[place], columns[1 : 1 + DENSE], 10)
            _fill(categories[place], columns[1 + DENSE :], 16)
        except (ValueError, OverflowError) as error:
            raise DataError(f"line {first + place} of {file} {error}: {_ADVICE}") from error
    dense = np.where(counts > 0, np.log1p(np.maximum(counts, 0)), counts).astype(np.float32)
    return dense, _hashed(categories, rows), labels


def _fill(out: NDArray[np.float64] | NDArray[np.int64], columns: Iterable[bytes], base: int) -> None:
    for place, column in enumerate(columns):
        if column:
            try:
                out[place] = int(column, base)
            except ValueError:
                kind = "a whole number" if base == 10 else "a category in hexadecimal digits"
                raise ValueError(f"has {column[:20].decode(errors='replace')!r}, which is not {kind}") from None


def _hashed(categories: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """Hash (field, category) into the key space by the finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    x = categories.astype(np.uint64) + (np.arange(categories.shape[1], dtype=np.uint64) + np.uint64(1)) * _STEP
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    hashed: NDArray[np.int64] = ((x ^ (x >> np.uint64(31))) % np.uint64(rows)).astype(np.int64)
    return hashed
