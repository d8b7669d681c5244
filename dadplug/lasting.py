"""Memory of tensors that last for many steps, apart from what a step allocates and frees."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_LEAST = 2048  # bytes; the memory of a smaller tensor would be less than half of a page


def lasting(shape: int | Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return zeros that are to last for many steps.

    On the CPU they have pages of their own. In the heap, small ones that last would lie between the activations that
    are freed, so that the gaps were too small for gradients, and the heap would grow.

    Args:
        shape: shape of the tensor.
        dtype: type of its elements.
        device: its device.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _LEAST or torch.device(device).type != "cpu" or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def copied(tensor: Tensor) -> Tensor:
    """Return a contiguous copy that is to last, for example from backward to the end of a step."""
    return lasting(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)
