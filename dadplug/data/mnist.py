"""MNIST from its IDX files, which are downloaded where they are not there."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from .base import DATASETS, DataError, DataPair, Images
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
_MEAN, _STD = 0.1307, 0.3081  # of the training pixels, as usual


@DATASETS.register("mnist")
def mnist(data_dir: Path) -> DataPair:
    """Loads MNIST from a folder with its four IDX files, compressed or not; files that are missing are downloaded.

    Args:
        data_dir: the folder.

    Raises:
        DataError: if a file is damaged or cannot be downloaded, or if labels and images do not fit.
    """
    train_images, train_labels, test_images, test_labels = (_find(data_dir, name) for name in FILES)
    return DataPair(_images(train_images, train_labels), _images(test_images, test_labels), classes=10)


def _find(data_dir: Path, name: str) -> Path:
    for candidate in (data_dir / name, data_dir / name.removesuffix(".gz")):
        if candidate.exists():
            return candidate
    download([mirror + name for mirror in MIRRORS], data_dir / name, FILES[name])
    return data_dir / name


def _images(image_file: Path, label_file: Path) -> Images:
    pixels, labels = read_idx(image_file, 3), read_idx(label_file, 1)
    if len(pixels) != len(labels):
        raise DataError(f"{image_file} holds {len(pixels):,} images, {label_file} {len(labels):,} labels")
    return Images(_normalised(pixels), labels.long())


def _normalised(pixels: Tensor) -> Tensor:
    return ((pixels.float() / 255 - _MEAN) / _STD)[:, None]
