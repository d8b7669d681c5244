"""Data sets of the experiments, by name: ``load_dataset("digits")``."""

from . import digits, dogsvscats  # noqa: F401  (each registers itself)
from .base import DATASETS, DataError, DataPair, Images, Samples, load_dataset
from .mnist import MNIST
from .photos import Photos
from .splits import fold_indices, site_indices

__all__ = [
    "DATASETS",
    "MNIST",
    "DataError",
    "DataPair",
    "Images",
    "Photos",
    "Samples",
    "fold_indices",
    "load_dataset",
    "site_indices",
]
