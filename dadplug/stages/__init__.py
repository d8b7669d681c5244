"""The stages of an exchange, one kind a file; each kind registers the paths that it serves."""

from . import dense, factors, machine, powersgd, topk  # noqa: F401  (each registers itself)
from .base import Stage, register_stage, stage_kind, write_gradient
from .dense import DenseStage

__all__ = ["DenseStage", "Stage", "register_stage", "stage_kind", "write_gradient"]
