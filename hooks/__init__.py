"""Hooks on layers: they know tensors and layers, and no trainer and no network."""

from . import linear  # noqa: F401  (registers its family)
from .capture import CapturedLayer, LayerCapture
from .factor import Factor
from .override import ForwardOverride, overridden
from .registry import LayerFamily, Recorder, capturable_layers, family_of, register_family

__all__ = [
    "CapturedLayer",
    "Factor",
    "ForwardOverride",
    "LayerCapture",
    "LayerFamily",
    "Recorder",
    "capturable_layers",
    "family_of",
    "overridden",
    "register_family",
]
