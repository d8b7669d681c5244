"""Data sets of the experiments by name: ``load_dataset("digits")``."""

from ..errors import DataError
from . import clicks, criteo, digits, dogsvscats  # noqa: F401  (each registers itself)
from .base import DATASETS, DataPair, Images, Samples, load_dataset, register_dataset
from .clicks import Clicks, generated, renumbered
from .criteo import read_criteo
from .mnist import MNIST
from .photos import Photos
from .splits import fold_indices, site_indices

__all__ = [
    "DATASETS",
    "MNIST",
    "Clicks",
    "DataError",
    "DataPair",
    "Images",
    "Photos",
    "Samples",
    "fold_indices",
    "generated",
    "load_dataset",
    "read_criteo",
    "register_dataset",
    "renumbered",
    "site_indices",
]
