"""Errors of dadplug, besides ValueError and TypeError for wrong arguments.

Each one derives from `DadplugError`, and from the built-in class that it had before there was one base.
"""

from __future__ import annotations


def escaped(text: str, keep: str = "") -> str:
    """Return a text in which line ends, escape codes and all else that cannot be printed are written as escapes.

    Args:
        text: the text.
        keep: characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode() for each in text
    )


class DadplugError(Exception):
    """Base of every error that dadplug raises, except ValueError and TypeError for wrong arguments.

    The message may contain what another site has sent. Of what cannot be printed it has line ends and tabs only.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(escaped(each, "\n\t") if isinstance(each, str) else each for each in arguments))


# Sites and their training.


class SiteError(DadplugError, RuntimeError):
    """Another site is missing, silent or gone; the message names it."""


class DroppedError(SiteError):
    """The hub has dropped this site, which takes part again from its next step on; the message has the reason."""


class MismatchError(DadplugError, RuntimeError):
    """The sites do not run the same program: models, options, steps or message sizes differ."""


class InvalidDeltaError(MismatchError):
    """The sparse delta of a site is not one; it is not applied.

    Attributes:
        rank: the site that has sent it.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class NonFiniteError(DadplugError, RuntimeError):
    """A gradient holds NaN or Inf; the message names step, site and layer, and no parameter has been touched."""


class ProcessFailedError(DadplugError, RuntimeError):
    """A process that trains on this machine has raised an error, was killed or is gone; the message names it."""


class RunFailedError(DadplugError, RuntimeError):
    """A run of a comparison has failed in one of its processes."""


class IntentError(DadplugError, RuntimeError):
    """The lookups of a batch cannot be known before its forward pass; the message names the line."""


class DataError(DadplugError, RuntimeError):
    """A data set cannot be loaded: a file is missing, damaged or of another format; the message has the remedy."""


class PrivacyError(DadplugError, RuntimeError):
    """A step cannot be made private, since gradients of single samples are not known, or were changed."""


# The hub and its kits.


class KitError(DadplugError, ValueError):
    """A project file or a kit is incomplete, damaged or contradictory; the message names the file."""


class PolicyError(KitError):
    """An option is not allowed by the site's kit: by its local policy, or since a third party runs the hub."""


class RefusedError(SiteError):
    """A connection between hub and site was refused; the message is the reason, and connecting again does not help.

    Attributes:
        lasting: False where something else than the hub answers at its address, which may be repaired.
    """

    def __init__(self, message: str, lasting: bool = True) -> None:
        super().__init__(message)
        self.lasting = lasting


class SealingError(SiteError):
    """A sealed message is not what its site has sent, or sites cannot agree on keys; the message names the site."""


class TryAgainError(DadplugError, ConnectionError):
    """The hub refuses this site at present, and may accept it later."""


class ProxyError(DadplugError, ConnectionError):
    """The HTTP proxy between a site and the hub cannot be reached or refuses; the message names it and its status.

    Attributes:
        status: HTTP status of its answer; 0 without one.
        lasting: whether to connect again is of no use, as long as nobody changes a setting.
    """

    def __init__(self, message: str, status: int = 0, lasting: bool = False) -> None:
        super().__init__(message)
        self.status, self.lasting = status, lasting


class StoreError(DadplugError):
    """A request to the hub's store cannot be fulfilled; the message is sent to the site."""


# Data from the network that does not follow the protocol.


class FrameError(DadplugError, ValueError):
    """Bytes between hub and site are no frames, or not those that are expected."""


class StreamError(DadplugError, ConnectionError):
    """Bytes on a stream of a parameter server are no frame, or one that is too large."""


class MessageError(DadplugError, ConnectionError):
    """A message of a parameter server over the hub is invalid, or the other end refuses this one."""


class SequenceError(DadplugError, ValueError):
    """A site's message contradicts its earlier ones."""


class ProtocolError(DadplugError):
    """Data of the parameter manager from another site does not follow the protocol."""


class DamagedError(DadplugError, ValueError):
    """A message was not made by `exchange.codec.encode`, or a file is not what was written; the message names it."""


# Serving. Each has the HTTP status that it becomes.


class ServingError(DadplugError, RuntimeError):
    """Base of the errors of a prediction or of its feedback.

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


class FeedbackError(ServingError, ValueError):
    """Feedback that belongs to no open prediction, or has no valid label; it changes nothing."""

    status = 404


class LoadError(ServingError, ValueError):
    """A model that cannot be loaded; the message names the file and the reason."""


class RequestError(ServingError):
    """A request that is not answered for its HTTP properties: method, path, size, pace."""


class BackendFailedError(DadplugError, RuntimeError):
    """The process of a model has ended, or does not answer; it has to be started again."""
