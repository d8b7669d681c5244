"""Hooks on layers, which capture activations and deltas; they know no trainer and no network."""

from . import (  # noqa: F401  (each registers its family)
    conv,
    conv_transpose,
    embedding,
    embedding_bag,
    libraries,
    linear,
    transposed,
)
from .capture import CapturedLayer, LayerCapture
from .eager import eager
from .elementwise import Elementwise, register_elementwise
from .factor import Factor, stack_by_form
from .form import LINEAR, Form
from .override import ForwardOverride, overridden
from .own_hook import OwnHook
from .registry import LayerFamily, Recorder, capturable_layers, family_of, refusal_of, register_family
from .trace import Trace

__all__ = [
    "CapturedLayer",
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
    "capturable_layers",
    "eager",
    "family_of",
    "overridden",
    "refusal_of",
    "register_elementwise",
    "register_family",
    "stack_by_form",
]
