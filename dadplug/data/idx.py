"""Reader of IDX files, the format of MNIST: a magic number, sizes, values."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError

_UNSIGNED_BYTE = 0x08


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
