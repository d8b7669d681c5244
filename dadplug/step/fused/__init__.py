"""Optimizer steps on gradients that are products of factors, and are never formed as a whole."""

from .steps import (
    Deferral,
    FusedSteps,
    GradientProduct,
    HeldGradients,
    clip_norm,
    compare_digests,
    engine_for,
    fused_remarks,
    reasons_against,
    register_update,
    take_step,
)

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
