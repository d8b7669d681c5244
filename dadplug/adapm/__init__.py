"""Parameter management for sparse layers: tables whose rows are spread over the sites (AdaPM).

The engine, its messages, the store and shards may be changed here without reading another room.
"""

from ..errors import IntentError
from .managed_weight import RowwiseAdagrad
from .manager import ParameterManager, Pending, Sample, Sampler, Table
from .model import AdaDataLoader, AdaModel
from .shards import join_shards, load_shards, save_shards
from .store import Columns, Constant, Normal, Uniform
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
