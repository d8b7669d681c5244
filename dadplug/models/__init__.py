"""Models of the experiments, by name: ``build_model("MNISTNet", classes=10)``."""

from . import mnist_net  # noqa: F401  (registers itself)
from .mnist_net import MNISTNet
from .registry import MODELS, build_model

__all__ = ["MODELS", "MNISTNet", "build_model"]
