"""MNIST from its IDX files, which are downloaded if they are missing.

The environment variable DADPLUG_MNIST_URL sets another address to download from.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from ..errors import DataError
from .base import DataPair, Images, register_dataset
from .download import download
from .idx import read_idx

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
FILES = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
_MEAN, _STD = 0.1307, 0.3081  # of the training pixels


class MNIST(Dataset[tuple[Any, int]]):
    """MNIST with the arguments of torchvision's class, for scripts that were written for it.

    Args:
        root: folder of the IDX files.
        train: whether to use the training images; otherwise the test images.
        transform: function of an image, a uint8 array of shape (28, 28); see `dadplug.data.transforms`.
        download: whether to download missing files.

    Raises:
        DataError: if a file is missing or damaged.
    """

    def __init__(
        self,
        root: str | Path,
        train: bool = True,
        transform: Callable[[Any], Any] | None = None,
        download: bool = False,
    ) -> None:
        part = "train" if train else "t10k"
        image_file, label_file = (_find(Path(root), name, download) for name in FILES if name.startswith(part))
        self.data, self.targets = _read(image_file, label_file)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image: Any = self.data[index].numpy()
        return image if self.transform is None else self.transform(image), int(self.targets[index])


@register_dataset("mnist", has_files=True)
def mnist(data_dir: Path) -> DataPair:
    """Load MNIST from a folder with its four IDX files, plain or compressed; missing files are downloaded.

    Args:
        data_dir: the folder.

    Raises:
        DataError: if a file is damaged or cannot be downloaded, or if labels and images do not fit.
    """
    train_images, train_labels, test_images, test_labels = (_find(data_dir, name) for name in FILES)
    return DataPair(_images(train_images, train_labels), _images(test_images, test_labels), classes=10)


def _find(folder: Path, name: str, fetch: bool = True) -> Path:
    for candidate in (folder / name, folder / name.removesuffix(".gz")):
        if candidate.exists():
            return candidate
    if not fetch:
        raise DataError(f"{folder / name} is missing; pass download=True to fetch it")
    mirrors = (os.environ["DADPLUG_MNIST_URL"],) if "DADPLUG_MNIST_URL" in os.environ else MIRRORS
    download([f"{mirror.rstrip('/')}/{name}" for mirror in mirrors], folder / name, FILES[name])
    return folder / name


def _read(image_file: Path, label_file: Path) -> tuple[Tensor, Tensor]:
    pixels, labels = read_idx(image_file, 3), read_idx(label_file, 1)
    if len(pixels) != len(labels):
        raise DataError(f"{image_file} holds {len(pixels):,} images, {label_file} {len(labels):,} labels")
    return pixels, labels.long()


def _images(image_file: Path, label_file: Path) -> Images:
    pixels, labels = _read(image_file, label_file)
    return Images(((pixels.float() / 255 - _MEAN) / _STD)[:, None], labels)
