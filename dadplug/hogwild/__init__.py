"""Training without locks by processes of one machine on one model in shared memory (Hogwild!, arXiv:1106.5730)."""

from .experiment import chart_losses, log_elapsed_time, train_model
from .memory import Progress
from .training import DealtLoader, Hogwild

__all__ = ["DealtLoader", "Hogwild", "Progress", "chart_losses", "log_elapsed_time", "train_model"]
