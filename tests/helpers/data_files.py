"""Small files of the data sets, as their publishers write them."""

import gzip
import io
import struct
from pathlib import Path

import numpy as np
import torch


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def write_mnist(folder: Path, samples: int = 6, compressed: bool = True) -> None:
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for part in ("train", "t10k"):
        images = rng.integers(0, 256, (samples, 28, 28), dtype=np.uint8)
        labels = (np.arange(samples) % 10).astype(np.uint8)
        for name, values in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            if compressed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(idx(values)))
            else:
                (folder / name).write_bytes(idx(values))


def photo(label: str, number: int, width: int = 40, height: int = 30) -> bytes:
    from PIL import Image

    generator = torch.Generator().manual_seed(number)
    pixels = torch.randint(0, 120, (height, width, 3), generator=generator, dtype=torch.uint8)
    pixels[..., 0 if label == "cat" else 2] += 120
    stream = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(stream, "JPEG")
    return stream.getvalue()


def photo_files(each: int = 10) -> dict[str, bytes]:
    return {f"{label}.{number}.jpg": photo(label, number) for label in ("cat", "dog") for number in range(each)}


def clicks_sample(n: int = 10) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "dense": rng.random((n, 13), np.float32),
        "labels": (np.arange(n) % 2).astype(np.int8),
        "sparse": rng.integers(0, 33_762_564, (n, 26), dtype=np.int32),
    }
