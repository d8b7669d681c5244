"""Parameter management for sparse layers: rows of values that live spread over the sites (AdaPM)."""

from .initialisers import Columns, Constant, Normal, Uniform
from .manager import ParameterManager
from .pending import Pending
from .table import Table

__all__ = ["Columns", "Constant", "Normal", "ParameterManager", "Pending", "Table", "Uniform"]
