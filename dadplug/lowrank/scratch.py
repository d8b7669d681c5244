"""Memory that calls share: one thread's intermediate results, which are never handed out as results."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

_VIEWS = 4096  # as many shapes are remembered


class Scratch(threading.local):
    """Buffers by name, each thread its own; they grow to the largest that was asked for, and stay."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._views: dict[tuple[object, ...], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Lend a buffer; its contents are undefined, and its last borrower has lost it.

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
        """Give this thread's buffers back."""
        self._buffers.clear()
        self._views.clear()


scratch = Scratch()
