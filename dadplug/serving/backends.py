"""Backends: what computes a batch. A backend in this process is here, one in a process of its own in `process.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ..errors import InputError, ModelError
from .schema import Schema

Array = np.ndarray[Any, Any]


class Backend(Protocol):
    """Interface of what computes the batches of one model.

    Attributes:
        schema: schema of its inputs; None before `start`.
        pid: its process; None without one.
        last_good: whether it computes with a copy of the file that was loaded before, since the file is damaged.
    """

    schema: Schema | None
    pid: int | None
    last_good: bool

    def start(self) -> None:
        """Load the model, or load it again after a failure.

        Raises:
            LoadError: if it cannot be loaded.
        """

    def run(self, batch: Array) -> Array:
        """Return the outputs of a batch, of shape (samples, ...).

        Raises:
            ModelError: if the model raises an error or returns something else; the backend can be used on.
            InputError: if the model finds an input not valid; likewise.
            BackendFailedError: if the process has ended or hangs.
        """

    def stop(self) -> None:
        """End the backend."""


class ObjectBackend:
    """Model given as an object: it runs in this process, in the thread of its queue.

    Args:
        model: a `torch.nn.Module`, which is switched to evaluation mode, or a function of an array of shape
            (samples, ...) that returns one of shape (samples, ...).
    """

    pid: int | None = None
    last_good = False

    def __init__(self, model: Callable[..., Any]) -> None:
        self.schema: Schema | None = None
        self._function: Callable[[Array], Any] = model
        if hasattr(model, "state_dict"):
            self.schema, self._function = Schema(None, dtype_of(model)), runner_of(model)

    def start(self) -> None:
        """Do nothing: the model is loaded."""

    def run(self, batch: Array) -> Array:
        """Return the outputs of a batch; see `Backend.run`."""
        return checked_outputs(self._function, batch)

    def stop(self) -> None:
        """Do nothing: the object belongs to the caller."""


def runner_of(module: Any) -> Callable[[Array], Any]:
    """Return a function of arrays that calls a `torch.nn.Module` in evaluation mode, without gradients."""
    import torch

    module.eval()

    def run(batch: Array) -> Any:
        with torch.inference_mode():
            return module(torch.from_numpy(batch))

    return run


def dtype_of(module: Any) -> str | None:
    """Return the dtype of a module's parameters; None if it has tables, whose inputs are integers."""
    import torch

    if any(isinstance(each, (torch.nn.Embedding, torch.nn.EmbeddingBag)) for each in module.modules()):
        return None
    found = next((each.dtype for each in module.parameters() if each.is_floating_point()), None)
    return None if found is None or found is torch.bfloat16 else str(found).removeprefix("torch.")


def checked_outputs(function: Callable[[Array], Any], batch: Array) -> Array:
    """Call a model and check its outputs.

    Raises:
        InputError: if the model raises it, since an input is not valid.
        ModelError: if it raises another error, or does not return an array with a row of numbers for each sample.
    """
    try:
        found = function(batch)
        if hasattr(found, "detach"):
            found = found.detach().cpu()
            found = found.float().numpy() if str(found.dtype) == "torch.bfloat16" else found.numpy()
    except InputError:
        raise
    except Exception as error:
        raise ModelError(f"the model raised {type(error).__name__}: {error}") from error
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "fiub":
        raise ModelError(f"the model returned {type(found).__name__}, not one tensor or array of numbers")
    if found.ndim == 0 or len(found) != len(batch):
        raise ModelError(f"the model returned shape {found.shape} for {len(batch)} samples")
    return found
