"""Errors of a prediction or of its feedback, each with the HTTP status that it becomes."""

from __future__ import annotations


class ServingError(RuntimeError):
    """Base of these errors.

    Attributes:
        status: HTTP status.
    """

    status = 500

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        if status is not None:
            self.status = status


class InputError(ServingError, ValueError):
    """An input that does not fit the schema, or that the model refuses; the message has the reason."""

    status = 422


class UnavailableError(ServingError):
    """No answer before the deadline: the queue is too long, or the model's process has failed or hangs."""

    status = 503


class ModelError(ServingError):
    """The model raised an error for a valid input, or its output has no row for each sample."""

    status = 500


class FeedbackError(ServingError, ValueError):
    """Feedback that belongs to no open prediction, or has no valid label; it changes nothing."""

    status = 404


class LoadError(ServingError, ValueError):
    """A model that cannot be loaded; the message names the file and the reason."""
