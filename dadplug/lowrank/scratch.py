"""Buffers for the intermediate results of a thread, shared by its calls and never returned to callers."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

_VIEWS = 4096  # shapes that are cached


class Scratch(threading.local):
    """Buffers by name, separate for each thread; they grow to the largest requested size, and are kept."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._views: dict[tuple[object, ...], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a buffer with undefined contents; the tensor of the last call with this name is overwritten.

        Args:
            name: name of the buffer.
            shape: wanted shape.
            like: gives the device, and the type where `dtype` is None.
            dtype: wanted type.
        """
        kind, device = dtype or like.dtype, like.device
        view = self._views.get((name, kind, device, shape))
        if view is None:
            view = self._views[name, kind, device, shape] = self._view(name, shape, kind, device)
        return view

    def _view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype, device))
        if buffer is None or buffer.numel() < size:
            self._views = {key: view for key, view in self._views.items() if key[:3] != (name, dtype, device)}
            buffer = self._buffers[name, dtype, device] = torch.empty(size, dtype=dtype, device=device)
        if len(self._views) >= _VIEWS:
            self._views.clear()
        return buffer[:size].view(shape)

    def clear(self) -> None:
        """Free this thread's buffers."""
        self._buffers.clear()
        self._views.clear()


scratch = Scratch()
