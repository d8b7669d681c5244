"""Audits: what other sites and a hub can recover of a site's data, measured by attacks on what it sends."""

from .attacks import ATTACKS, Attack, Budget, Result, register_attack
from .audit import audit
from .capture import Batch, LayerView, Observation, capture
from .report import LayerReport, Report

__all__ = [
    "ATTACKS",
    "Attack",
    "Batch",
    "Budget",
    "LayerReport",
    "LayerView",
    "Observation",
    "Report",
    "Result",
    "audit",
    "capture",
    "register_attack",
]
