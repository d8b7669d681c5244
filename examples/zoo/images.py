"""Images in memory: the interface of data sets, handwritten digits, and MNIST.

MNIST's files are downloaded if they are missing. The environment variable DADPLUG_MNIST_URL sets another address to
download from.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import struct
import sys
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from dadplug.errors import DataError

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
_MEAN, _STD = 0.1307, 0.3081  # of MNIST's training pixels
_HELD_OUT = 5  # every fifth digit
_UNSIGNED_BYTE = 0x08
_CHUNK = 1 << 16
_TIMEOUT = 30  # seconds without a response


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


def digits() -> DataPair:
    """Load the digits, which are part of scikit-learn; nothing is downloaded.

    Raises:
        DataError: if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("the digits come with scikit-learn: pip install 'dadplug[examples]'") from error
    raw = load_digits()
    images = torch.from_numpy(raw.images).float()[:, None] / 16.0
    images = torch.nn.functional.interpolate(images, size=(28, 28), mode="bilinear", align_corners=False)
    images = (images - images.mean()) / images.std()
    labels = torch.from_numpy(raw.target).long()
    held_out = torch.arange(len(labels)) % _HELD_OUT == 0
    every = Images(images, labels)
    return DataPair(every.subset(~held_out), every.subset(held_out), classes=10)


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read an IDX file of unsigned bytes, plain or compressed by gzip.

    Args:
        path: the file.
        dimensions: expected number of dimensions: 3 for images, 1 for labels.

    Returns:
        A uint8 tensor of the shape in the file's head.

    Raises:
        DataError: if the file is missing, damaged, too short or too long, or of another format.
    """
    try:
        raw = path.read_bytes()
        content = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged ({error}): delete it and fetch it again") from error
    head = 4 + 4 * dimensions
    if len(content) < 4 or content[:2] != b"\0\0":
        raise DataError(f"{path} is no IDX file: it does not begin with IDX's magic number")
    kind, count = content[2], content[3]
    if kind != _UNSIGNED_BYTE or count != dimensions:
        raise DataError(
            f"{path} is another kind of IDX file: it holds {count} dimensions of type 0x{kind:02x}, while "
            f"{dimensions} of unsigned bytes (0x08) are wanted"
        )
    if len(content) < head:
        raise DataError(f"{path} is truncated: it ends within its head")
    shape = struct.unpack(f">{dimensions}I", content[4:head])
    if len(content) - head != math.prod(shape):
        what = "truncated" if len(content) - head < math.prod(shape) else "longer than it says"
        raise DataError(
            f"{path} is {what}: its head announces {math.prod(shape):,} values, there are {len(content) - head:,}"
        )
    values = np.frombuffer(content, dtype=np.uint8, offset=head).reshape(shape)
    return torch.from_numpy(values.copy())


def download(urls: Sequence[str], path: Path, md5: str) -> None:
    """Download a file from the first of several addresses that provides it with the right checksum.

    A progress bar is shown if standard error is a terminal. The file gets its name only when it is complete.

    Args:
        urls: addresses of the file.
        path: path of the downloaded file.
        md5: MD5 checksum of the file.

    Raises:
        DataError: if no address provides it.
    """
    problems = []
    path.parent.mkdir(parents=True, exist_ok=True)
    for url in urls:
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                found = _fetch(url, file, path.name)
            if found == md5:
                os.replace(partial, path)
                return
            problems.append(f"{url}: the checksum is {found}, it should be {md5}")
        except (urllib.error.URLError, OSError) as error:
            problems.append(f"{url}: {getattr(error, 'reason', error)}")
        finally:
            Path(partial).unlink(missing_ok=True)
    raise DataError(
        f"{path.name} could not be downloaded:\n  "
        + "\n  ".join(problems)
        + f"\nWithout a connection, put the file into "
        f"{path.parent} by hand, or use a data set that is embedded (digits)."
    )


def _fetch(url: str, file: IO[bytes], name: str) -> str:
    from tqdm import tqdm

    digest = hashlib.md5(usedforsecurity=False)
    with urllib.request.urlopen(url, timeout=_TIMEOUT) as response:
        size = int(response.headers.get("Content-Length", 0)) or None
        with tqdm(total=size, unit="B", unit_scale=True, desc=name, disable=not sys.stderr.isatty()) as bar:
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                digest.update(chunk)
                bar.update(len(chunk))
    return digest.hexdigest()


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
