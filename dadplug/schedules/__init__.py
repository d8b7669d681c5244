"""Constants by which kernels run, such as sizes of blocks: the defaults, or those that were tuned on this machine.

Code reads `current()` when it is set up; `dadplug.tune` measures, and writes the file that `current` reads.
"""

from .constants import Decoding, Encoding, Serving
from .machine import Machine
from .records import Record, current, forget, load, path_of, replaced, save

__all__ = [
    "Decoding",
    "Encoding",
    "Machine",
    "Record",
    "Serving",
    "current",
    "forget",
    "load",
    "path_of",
    "replaced",
    "save",
]
