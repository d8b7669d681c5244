"""Serving of trained models: batches, cache, selection by feedback, models in processes of their own. No network.

The HTTP server on LitServe is `dadplug.serve`. Policies, cache and queues may be changed here without reading
another room.
"""

from ..errors import FeedbackError, InputError, LoadError, ModelError, ServingError, UnavailableError
from .options import Model, ServingOptions
from .policies import Exp3, Exp4, Fixed, Policy
from .predictor import Prediction, Predictor

__all__ = [
    "Exp3",
    "Exp4",
    "FeedbackError",
    "Fixed",
    "InputError",
    "LoadError",
    "Model",
    "ModelError",
    "Policy",
    "Prediction",
    "Predictor",
    "ServingError",
    "ServingOptions",
    "UnavailableError",
]
