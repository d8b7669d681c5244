"""Models of the experiments by name: ``build_model("MNISTNet", classes=10)``."""

from . import gcn, mnist_net, vit, wide_deep  # noqa: F401  (each registers itself)
from .gcn import GCN
from .mnist_net import MNISTNet
from .registry import MODELS, build_for, build_model
from .vit import ViT
from .wide_deep import WideDeep

__all__ = ["GCN", "MODELS", "MNISTNet", "ViT", "WideDeep", "build_for", "build_model"]
