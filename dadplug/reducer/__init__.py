"""The stages of an exchange, one kind a file; each kind registers the paths that it serves."""

from . import dense, factors, hierarchical, powersgd, topk  # noqa: F401  (each registers itself)
from .dense import DenseStage
from .handler import Stage, register_stage, stage_kind, write_gradient

__all__ = ["DenseStage", "Stage", "register_stage", "stage_kind", "write_gradient"]
