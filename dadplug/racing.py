"""Former name of `dadplug.comparison`."""

import warnings

from .comparison import Comparison, Row, compare

__all__ = ["Comparison", "Row", "compare"]

warnings.warn("dadplug.racing is now dadplug.comparison", DeprecationWarning, stacklevel=2)
