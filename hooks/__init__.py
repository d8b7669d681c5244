"""Hooks on layers, which capture activations and deltas; they know no trainer and no network.

A family of layers may be changed or added here without reading another room.
"""

from . import convolution, embedding, linear  # noqa: F401  (each registers its families)
from .capture import (
    CallOverride,
    CapturedLayer,
    EagerForward,
    ForwardOverride,
    LayerCapture,
    OwnHook,
    being_exported,
    eager,
    overridden,
)
from .factor import LINEAR, Elementwise, Factor, Form, Trace, register_elementwise, stack_by_form
from .registry import LayerFamily, Recorder, capturable_layers, family_of, refusal_of, register_family

__all__ = [
    "CallOverride",
    "CapturedLayer",
    "EagerForward",
    "Elementwise",
    "LINEAR",
    "Factor",
    "Form",
    "ForwardOverride",
    "LayerCapture",
    "LayerFamily",
    "OwnHook",
    "Recorder",
    "Trace",
    "being_exported",
    "capturable_layers",
    "eager",
    "family_of",
    "overridden",
    "refusal_of",
    "register_elementwise",
    "register_family",
    "stack_by_form",
]
