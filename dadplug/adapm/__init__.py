"""Parameter management for sparse layers: rows of values that live spread over the sites (AdaPM)."""

from .initialisers import Columns, Constant, Normal, Uniform
from .manager import ParameterManager
from .model import AdaModel
from .pending import Pending
from .rules import RowwiseAdagrad
from .table import Table

__all__ = [
    "AdaModel",
    "Columns",
    "Constant",
    "Normal",
    "ParameterManager",
    "Pending",
    "RowwiseAdagrad",
    "Table",
    "Uniform",
]
