"""Photos in a folder or a zip file, which are read on access, and those of the dogs-vs-cats challenge."""

from __future__ import annotations

import io
import os
import re
import sys
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from dadplug.errors import DataError

from .images import DataPair
from .transforms import CenterCrop, Compose, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize, ToTensor

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
_NAME = re.compile(r"(?:^|/)(cat|dog)\.\d+\.jpe?g$", re.IGNORECASE)
_HELD_OUT = 5  # every fifth photo of a class
_SHOWN = 5


class Archive:
    """Files of a folder or a zip file by name; several threads and processes may read them.

    Args:
        path: the folder or the zip file.

    Raises:
        DataError: if the path is neither.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[int, zipfile.ZipFile] = {}  # by process
        if path.is_dir():
            self.names = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
        elif not path.exists():
            raise DataError(f"there is no {path}")
        else:
            try:
                self.names = sorted(name for name in self._zip().namelist() if not name.endswith("/"))
            except (zipfile.BadZipFile, OSError) as error:
                raise DataError(f"{path} is no zip file, or a damaged one: {error}") from error

    def _zip(self) -> zipfile.ZipFile:
        process = os.getpid()
        if process not in self._open:
            self._open[process] = zipfile.ZipFile(self.path)
        return self._open[process]

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        return (self.path / name).read_bytes() if self.path.is_dir() else self._zip().read(name)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_open": {}}


def decode(content: bytes, thumbnail: bool = False) -> Any:
    """Decode a photo into a PIL image with three channels.

    Args:
        content: content of the file.
        thumbnail: whether to decode a small version, which is faster.

    Raises:
        DataError: if Pillow is not installed.
        OSError: if the photo is damaged or of an unknown format.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("photos need Pillow: pip install 'dadplug[examples]'") from error
    try:
        image = Image.open(io.BytesIO(content))
        if thumbnail:
            image.draft("RGB", (64, 64))
        return image.convert("RGB")
    except (SyntaxError, ValueError, Image.DecompressionBombError) as error:  # errors of Pillow for damaged files
        raise OSError(str(error)) from error


def find_damaged(archive: Archive, names: Iterable[str]) -> dict[str, str]:
    """Decode photos, and return the error messages of damaged ones by name."""

    def problem(name: str) -> tuple[str, str | None]:
        try:
            decode(archive.read(name), thumbnail=True)
        except (OSError, zipfile.BadZipFile) as error:
            return name, str(error) or type(error).__name__
        return name, None

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return {name: wrong for name, wrong in pool.map(problem, names) if wrong is not None}


class Photos(Dataset[tuple[Tensor, Tensor]]):
    """Data set of photos in files, and labels.

    Args:
        archive: archive of the files.
        names: names of the files.
        labels: of shape (n,), class numbers.
        size: height and width of the images in pixels.
        augmented: whether to crop and mirror images at random, for training.
    """

    def __init__(
        self, archive: Archive, names: Sequence[str], labels: Tensor, size: int = 224, augmented: bool = False
    ) -> None:
        self.archive = archive
        self.names = list(names)
        self.labels = labels
        self.size = size
        self.augmented = augmented
        cut: list[Any] = [Resize(size), CenterCrop(size)]
        if augmented:
            cut = [
                Resize(size),
                RandomResizedCrop(size, scale=(0.5, 1.0)),
                RandomHorizontalFlip(),
            ]
        self._transform = Compose([*cut, ToTensor(), Normalize(_MEAN, _STD)])

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return 3, self.size, self.size

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image, of shape (3, size, size), and its label.

        Raises:
            DataError: if it has become unreadable since the data set was loaded.
        """
        try:
            image = decode(self.archive.read(self.names[index]))
        except (OSError, zipfile.BadZipFile) as error:
            raise DataError(f"cannot read {self.names[index]} in {self.archive.path}: {error}") from error
        return self._transform(image), self.labels[index]

    def subset(self, indices: Tensor) -> Photos:
        """Return a subset of the samples.

        Args:
            indices: indices or a mask of the samples.
        """
        names = [self.names[index] for index in torch.arange(len(self))[indices].tolist()]
        return Photos(self.archive, names, self.labels[indices], self.size, self.augmented)

    def plain(self) -> Photos:
        """Return the samples without augmentation, for evaluation."""
        return Photos(self.archive, self.names, self.labels, self.size)

    def resized(self, size: int) -> Photos:
        """Return the samples as square images of a height and width in pixels."""
        return Photos(self.archive, self.names, self.labels, size, self.augmented)


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
