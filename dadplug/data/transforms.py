"""Transforms of single images, by the names that torchvision has for them, where torchvision is not to be had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Compose:
    """Applies transforms one after the other.

    Args:
        transforms: the transforms.
    """

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = list(transforms)

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class ToTensor:
    """Turns an image of bytes, a PIL image or an array (height x width [x channels]), into floats from 0 to 1."""

    def __call__(self, image: Any) -> Tensor:
        array = np.asarray(image)
        if array.ndim not in (2, 3):
            raise ValueError(f"an image has 2 or 3 dimensions, got {array.ndim}")
        tensor = torch.from_numpy(np.atleast_3d(array).transpose(2, 0, 1).copy())
        return tensor.float() / 255 if tensor.dtype == torch.uint8 else tensor.float()


class Normalize:
    """Subtracts a mean and divides by a deviation, channel by channel.

    Args:
        mean: mean of each channel.
        std: deviation of each channel.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean = torch.tensor(mean)[:, None, None]
        self.std = torch.tensor(std)[:, None, None]

    def __call__(self, image: Tensor) -> Tensor:
        return (image - self.mean) / self.std
