"""The table of data sets, and what each of them is: images and labels for training and for testing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from ..registry import Registry


class DataError(RuntimeError):
    """A data set cannot be had: a file is missing, damaged or of another kind; the message says what to do."""


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images and labels in memory.

    Args:
        images: of shape (n, channels, height, width).
        labels: of shape (n,), class numbers.
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
        """Returns some of the samples."""
        return Images(self.images[indices], self.labels[indices])

    def plain(self) -> Images:
        """Returns the same samples without augmentation, which these have none of."""
        return self

    def resized(self, size: int) -> Images:
        """Returns the same samples in another size, in pixels; the images are square then."""
        if self.shape[1:] == (size, size):
            return self
        resized = interpolate(self.images, size=(size, size), mode="bilinear", align_corners=False)
        return Images(resized, self.labels)


class Samples(Protocol):
    """What every data set can do: `Images` in memory, `Photos` in files, or `Clicks` of three parts a sample."""

    labels: Tensor

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Tensor, ...]: ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""

    def subset(self, indices: Tensor) -> Samples:
        """Returns some of the samples."""

    def plain(self) -> Samples:
        """Returns the same samples without augmentation, to evaluate on."""

    def resized(self, size: int) -> Samples:
        """Returns the same samples in another size, in pixels."""


@dataclass(frozen=True)
class DataPair:
    """A data set.

    Attributes:
        train: samples to train on.
        test: samples held out.
        classes: number of classes.
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
        """Returns the same data set with images of another size, in pixels."""
        return DataPair(self.train.resized(size), self.test.resized(size), self.classes)


DATASETS: Registry[Callable[[Path], DataPair]] = Registry("dataset")


def load_dataset(name: str, data_dir: str | Path = "data") -> DataPair:
    """Loads a data set by name.

    Args:
        name: name of the data set, in any case.
        data_dir: folder for data sets that are files; not used by embedded ones.

    Raises:
        ValueError: if there is no such data set; the message lists the valid ones.
        DataError: if it cannot be had.
    """
    return DATASETS[name](Path(data_dir))
