"""Optimizer steps on gradients that are products of factors, and are never formed as a whole."""

from .deferral import Deferral, compare_digests, fused_remarks
from .product import GradientProduct
from .steps import FusedSteps
from .updates import register_update

__all__ = ["Deferral", "FusedSteps", "GradientProduct", "compare_digests", "fused_remarks", "register_update"]
