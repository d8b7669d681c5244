"""Transforms of single images with the names of torchvision's, for environments without torchvision."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_BILINEAR, _LEFT_RIGHT = 2, 0  # PIL's Resampling.BILINEAR and Transpose.FLIP_LEFT_RIGHT


class Compose:
    """Composition of transforms.

    Args:
        transforms: the transforms in the order of their application.
    """

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = list(transforms)

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class ToTensor:
    """Conversion of an image to a float tensor of shape (channels, height, width).

    An image is a PIL image or an array of shape (height, width) or (height, width, channels). Values of bytes are
    scaled to 0 to 1.
    """

    def __call__(self, image: Any) -> Tensor:
        array = np.asarray(image)
        if array.ndim not in (2, 3):
            raise ValueError(f"an image has 2 or 3 dimensions, got {array.ndim}")
        tensor = torch.from_numpy(np.atleast_3d(array).transpose(2, 0, 1).copy())
        return tensor.float() / 255 if tensor.dtype == torch.uint8 else tensor.float()


class Resize:
    """Resizing of a PIL image.

    Args:
        size: length of the shorter side, or height and width, in pixels.
    """

    def __init__(self, size: int | tuple[int, int]) -> None:
        self.size = size

    def __call__(self, image: Any) -> Any:
        if isinstance(self.size, tuple):
            return image.resize(self.size[::-1], _BILINEAR)
        scale = self.size / min(image.size)
        return image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))), _BILINEAR)


class CenterCrop:
    """Square crop of the centre of a PIL image.

    Args:
        size: side of the square in pixels.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Any) -> Any:
        left, top = (image.width - self.size) // 2, (image.height - self.size) // 2
        return image.crop((left, top, left + self.size, top + self.size))


class RandomResizedCrop:
    """Crop of a PIL image with random position, area and shape, resized to a square.

    Args:
        size: side of the square in pixels.
        scale: minimum and maximum share of the area.
        ratio: minimum and maximum ratio of width to height.
    """

    def __init__(
        self, size: int, scale: tuple[float, float] = (0.08, 1.0), ratio: tuple[float, float] = (3 / 4, 4 / 3)
    ) -> None:
        self.size = size
        self.scale = scale
        self.ratio = ratio

    def __call__(self, image: Any) -> Any:
        whole = image.width * image.height
        for _ in range(10):
            area, shape, across, down = torch.rand(4).tolist()
            area = whole * (self.scale[0] + area * (self.scale[1] - self.scale[0]))
            ratio = self.ratio[0] * (self.ratio[1] / self.ratio[0]) ** shape
            width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < width <= image.width and 0 < height <= image.height:
                left, top = int(across * (image.width - width + 1)), int(down * (image.height - height + 1))
                break
        else:
            width = height = min(image.size)
            left, top = (image.width - width) // 2, (image.height - height) // 2
        return image.resize((self.size, self.size), _BILINEAR, box=(left, top, left + width, top + height))


class RandomHorizontalFlip:
    """Horizontal flip of a PIL image at random.

    Args:
        p: probability of a flip.
    """

    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def __call__(self, image: Any) -> Any:
        return image.transpose(_LEFT_RIGHT) if float(torch.rand(())) < self.p else image


class Normalize:
    """Normalisation of each channel: ``(image - mean) / std``.

    Args:
        mean: mean of each channel.
        std: standard deviation of each channel.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean = torch.tensor(mean)[:, None, None]
        self.std = torch.tensor(std)[:, None, None]

    def __call__(self, image: Tensor) -> Tensor:
        return (image - self.mean) / self.std
