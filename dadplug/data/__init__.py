"""Data sets of the experiments, by name: ``load_dataset("digits")``."""

from . import digits, mnist  # noqa: F401  (each registers itself)
from .base import DATASETS, DataError, DataPair, Images, load_dataset
from .splits import fold_indices, site_indices

__all__ = [
    "DATASETS",
    "DataError",
    "DataPair",
    "Images",
    "fold_indices",
    "load_dataset",
    "site_indices",
]
