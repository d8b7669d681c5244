"""Photos of the dogs-vs-cats challenge in its layout: ``train/cat.0.jpg``, ``train/dog.0.jpg`` and so on."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

from ..errors import DataError
from .base import DataPair, register_dataset
from .photos import Archive, Photos, find_damaged

_NAME = re.compile(r"(?:^|/)(cat|dog)\.\d+\.jpe?g$", re.IGNORECASE)
_HELD_OUT = 5  # every fifth photo of a class
_SHOWN = 5


@register_dataset("dogsvscats", has_files=True)
def dogsvscats(data_dir: Path) -> DataPair:
    """Load the labelled photos of the challenge; by the names of the files, cats are class 0 and dogs class 1.

    Damaged photos are left out; their number is printed to standard error.

    Args:
        data_dir: ``train.zip`` of the challenge, a folder with it, or a folder with the unpacked photos.

    Raises:
        DataError: if there are no such photos.
    """
    archive = Archive(_find(data_dir))
    names = [name for name in archive.names if _NAME.search(name)]
    if not names:
        raise DataError(
            f"there are no photos named cat.N.jpg or dog.N.jpg in {archive.path}: give the challenge's train.zip, or "
            "the folder that it is unpacked in"
        )
    damaged = find_damaged(archive, names)
    if damaged:
        shown = "; ".join(f"{name}: {problem}" for name, problem in list(damaged.items())[:_SHOWN])
        more = f"; and {len(damaged) - _SHOWN} more" if len(damaged) > _SHOWN else ""
        print(f"{len(damaged)} of {len(names)} photos are damaged and left out ({shown}{more})", file=sys.stderr)
        names = [name for name in names if name not in damaged]
    labels = torch.tensor([_label(name) for name in names], dtype=torch.long)
    if len(labels.unique()) < 2:
        raise DataError(f"there are photos of cats and dogs in the challenge, in {archive.path} only of one kind")
    held_out = torch.zeros(len(names), dtype=torch.bool)
    for label in range(2):
        held_out[torch.nonzero(labels == label).flatten()[::_HELD_OUT]] = True
    every = Photos(archive, names, labels)
    train = every.subset(torch.nonzero(~held_out).flatten())
    train = Photos(archive, train.names, train.labels, train.size, augmented=True)
    return DataPair(train, every.subset(torch.nonzero(held_out).flatten()), classes=2)


def _find(data_dir: Path) -> Path:
    """Find the zip file or the folder with the photos."""
    if data_dir.is_file():
        return data_dir
    for place in (data_dir, data_dir / "dogsvscats", data_dir / "dogs-vs-cats"):
        if (place / "train.zip").is_file() and not (place / "train").is_dir():
            return place / "train.zip"
        if (place / "train").is_dir():
            return place / "train"
    if not data_dir.is_dir():
        raise DataError(
            f"there is no {data_dir}: download train.zip of the dogs-vs-cats challenge from Kaggle, and pass its place"
        )
    return data_dir


def _label(name: str) -> int:
    match = _NAME.search(name)
    assert match is not None
    return int(match.group(1).lower() == "dog")
