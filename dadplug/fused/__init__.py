"""Optimizer steps on gradients that are products of factors, and are never formed as a whole."""

from .steps import (
    Deferral,
    FusedSteps,
    HeldGradients,
    clip_norm,
    compare_digests,
    fused_remarks,
    reasons_against,
    take_step,
)
from .updates import GradientProduct, engine_for, register_update

__all__ = [
    "Deferral",
    "FusedSteps",
    "GradientProduct",
    "HeldGradients",
    "clip_norm",
    "compare_digests",
    "engine_for",
    "fused_remarks",
    "reasons_against",
    "register_update",
    "take_step",
]
