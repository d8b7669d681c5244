"""Parameter management for sparse layers: tables whose rows are spread over the sites (AdaPM)."""

from ..errors import IntentError
from .initialisers import Columns, Constant, Normal, Uniform
from .manager import ParameterManager, Pending, Sample, Sampler, Table
from .model import AdaDataLoader, AdaModel
from .row_optimizers import RowwiseAdagrad
from .shards import join_shards, load_shards, save_shards
from .timeline import Timeline

__all__ = [
    "AdaDataLoader",
    "AdaModel",
    "Columns",
    "Constant",
    "IntentError",
    "Normal",
    "ParameterManager",
    "Pending",
    "RowwiseAdagrad",
    "Sample",
    "Sampler",
    "Table",
    "Timeline",
    "Uniform",
    "join_shards",
    "load_shards",
    "save_shards",
]
