"""The 1,797 handwritten digits of scikit-learn, enlarged from 8 x 8 to MNIST's 28 x 28 pixels."""

from __future__ import annotations

import torch

from ..errors import DataError
from .base import DataPair, Images, register_dataset

_HELD_OUT = 5  # every fifth digit


@register_dataset("digits", has_files=False)
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
