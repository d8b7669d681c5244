"""Data sets of the experiments, by name: ``load_dataset("digits")``."""

from . import digits  # noqa: F401  (registers itself)
from .base import DATASETS, DataError, DataPair, Images, load_dataset
from .mnist import MNIST
from .splits import fold_indices, site_indices

__all__ = [
    "DATASETS",
    "MNIST",
    "DataError",
    "DataPair",
    "Images",
    "fold_indices",
    "load_dataset",
    "site_indices",
]
