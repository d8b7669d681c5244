"""Optimizer steps on gradients that are products of factors, and are never formed as a whole."""

from .deferral import Deferral, clip_norm, compare_digests, fused_remarks, reasons_against
from .product import GradientProduct
from .steps import FusedSteps, HeldGradients
from .updates import register_update

__all__ = [
    "Deferral",
    "FusedSteps",
    "GradientProduct",
    "HeldGradients",
    "clip_norm",
    "compare_digests",
    "fused_remarks",
    "reasons_against",
    "register_update",
]
