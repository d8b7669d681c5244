"""Registry of data sets, and their common interface: samples for training and for testing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from ..errors import DataError
from ..registry import Registry


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Data set of images and labels in memory.

    Args:
        images: of shape (n, channels, height, width).
        labels: of shape (n,), class numbers.

    Raises:
        DataError: if the numbers of images and labels differ.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        if len(images) != len(labels):
            raise DataError(f"{len(images)} images, but {len(labels)} labels")
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.images[indices], self.labels[indices], strict=True))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def subset(self, indices: Tensor) -> Images:
        """Return a subset of the samples.

        Args:
            indices: indices or a mask of the samples.
        """
        return Images(self.images[indices], self.labels[indices])

    def plain(self) -> Images:
        """Return the samples without augmentation, which are these samples."""
        return self

    def resized(self, size: int) -> Images:
        """Return the samples as square images of a height and width in pixels."""
        if self.shape[1:] == (size, size):
            return self
        resized = interpolate(self.images, size=(size, size), mode="bilinear", align_corners=False)
        return Images(resized, self.labels)


class Samples(Protocol):
    """Interface of all data sets: `Images` in memory, `Photos` in files, `Clicks` with three tensors per sample."""

    labels: Tensor

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Tensor, ...]: ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""

    def subset(self, indices: Tensor) -> Samples:
        """Return a subset of the samples.

        Args:
            indices: indices or a mask of the samples.
        """

    def plain(self) -> Samples:
        """Return the samples without augmentation, for evaluation."""

    def resized(self, size: int) -> Samples:
        """Return the samples as square images of a height and width in pixels."""


@dataclass(frozen=True)
class DataPair:
    """Training and test samples of a data set.

    Attributes:
        train: samples for training.
        test: held-out samples.
        classes: number of classes.

    Raises:
        DataError: if a label is out of range.
    """

    train: Samples
    test: Samples
    classes: int

    def __post_init__(self) -> None:
        for name, part in (("training", self.train), ("test", self.test)):
            outside = (part.labels < 0) | (part.labels >= self.classes)
            if outside.any():
                place = int(torch.nonzero(outside)[0])
                raise DataError(
                    f"label {int(part.labels[place])} of {name} sample {place} is out of range: there are "
                    f"{self.classes} classes, 0 to {self.classes - 1}"
                )

    def resized(self, size: int) -> DataPair:
        """Return the data set with square images of a height and width in pixels."""
        return DataPair(self.train.resized(size), self.test.resized(size), self.classes)


@dataclass(frozen=True)
class DataSource:
    """Registered data set.

    Attributes:
        load: function that loads it, of a path where it has files, else of nothing.
        has_files: whether it is read from a folder or file.
    """

    load: Callable[..., DataPair]
    has_files: bool


DATASETS: Registry[str, DataSource] = Registry("dataset")

Load = TypeVar("Load", bound=Callable[..., DataPair])


def register_dataset(name: str, *, has_files: bool) -> Callable[[Load], Load]:
    """Register the function that loads a data set; a decorator.

    Args:
        name: name of the data set.
        has_files: whether the function takes the path of a folder or file; otherwise it takes nothing.

    Example:
        >>> from dadplug.data import DataPair, generated, register_dataset
        >>> @register_dataset("more clicks", has_files=False)
        ... def more_clicks(samples=50_000):
        ...     clicks = generated(samples=samples)
        ...     return DataPair(clicks.subset(slice(0, 40_000)), clicks.subset(slice(40_000, None)), classes=2)
    """

    def decorate(load: Load) -> Load:
        DATASETS.register(name)(DataSource(load, has_files))
        return load

    return decorate


def load_dataset(name: str, data_dir: str | Path | None = None) -> DataPair:
    """Load a data set by name.

    Args:
        name: name of the data set, in upper or lower case.
        data_dir: folder or file of the data set; None for the folder ``data``, and for data sets without files.

    Raises:
        ValueError: if there is no such data set; the message lists the valid names. If a data set without files is
            given a folder.
        DataError: if it cannot be loaded.

    Example:
        >>> from dadplug.data import load_dataset
        >>> len(load_dataset("clicks").train)
        8000
    """
    source = DATASETS[name]
    if source.has_files:
        return source.load(Path("data" if data_dir is None else data_dir))
    if data_dir is not None:
        raise ValueError(
            f"the data set {name!r} has no files: choose the data set of the files in {data_dir}, or leave data_dir out"
        )
    return source.load()
