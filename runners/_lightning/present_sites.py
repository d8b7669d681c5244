"""Collectives and metrics of Lightning over the sites that are present, where sites leave and come."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import SiteError
from ...exchange import Transport
from ..shared_patch import SharedPatch

_transport: ContextVar[Transport | None] = ContextVar("transport", default=None)
_seen: ContextVar[dict[str, list[int]] | None] = ContextVar("seen", default=None)  # sites of a metric's first gather


class _Lost(Exception):
    """Loss or return of a site between the gathers of one metric; raised at all sites that are present."""


def gather(transport: Transport, item: Any) -> list[Any]:
    """Gather an object from each site that is present; within one metric always from the same sites."""
    every = transport.gather_present(item)
    seen = _seen.get()
    if seen is not None and seen.setdefault("present", [*every]) != [*every]:
        raise _Lost
    return [*every.values()]


def reduce(transport: Transport, tensor: Tensor, operation: Any) -> Tensor:
    """Reduce a tensor over the sites that are present, as a new tensor.

    Args:
        transport: the transport.
        tensor: this site's tensor.
        operation: a name as in Lightning, or a ``ReduceOp``; the mean of whole numbers is a floating-point number.

    Raises:
        ValueError: if the operation is unknown.
    """
    ops = dist.ReduceOp
    functions: dict[Any, Callable[[Tensor], Tensor]] = {
        ("mean", "avg", ops.AVG): lambda parts: parts.double().mean(0) if _is_whole(parts) else parts.mean(0),
        ("sum", ops.SUM): lambda parts: parts.sum(0),
        ("min", ops.MIN): lambda parts: parts.amin(0),
        ("max", ops.MAX): lambda parts: parts.amax(0),
        ("prod", "product", ops.PRODUCT): lambda parts: parts.prod(0),
    }
    wanted = operation.lower() if isinstance(operation, str) else ops.SUM if operation is None else operation
    for names, function in functions.items():
        if any(wanted == name for name in names):
            return function(torch.stack(gather(transport, tensor.detach())).to(tensor.device))
    raise ValueError(f"unknown reduction {operation!r}: there are mean, sum, min, max and prod where sites may leave")


def all_gather(transport: Transport, tensor: Tensor, sync_grads: bool) -> Tensor:
    """Gather tensors of one shape from the sites that are present.

    Returns:
        The tensors, stacked in the order of sites.

    Raises:
        ValueError: if gradients are to flow through it.
    """
    if sync_grads:
        raise ValueError("all_gather(sync_grads=True) needs all sites: leave min_sites out")
    return torch.stack(gather(transport, tensor.detach())).to(tensor.device)


def broadcast(transport: Transport, item: Any, source: int) -> Any:
    """Return one site's object: that of the first site that is present, where it is to be that of site 0.

    Raises:
        SiteError: at all sites, if it is to be that of another site, which is absent.
    """
    every = transport.gather_present(item)
    if source and source not in every and not transport.joins:
        raise SiteError(f"{transport.sites[source]} is gone, and broadcast(src={source}) needs its object")
    return every.get(source, next(iter(every.values())))


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _repeating(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that gathers several times, so that all its gathers hold the same sites."""

    @functools.wraps(original)
    def compute(*args: Any, **kwargs: Any) -> Any:
        if _transport.get() is None or _seen.get() is not None:
            return original(*args, **kwargs)
        while True:
            token = _seen.set({})
            try:
                return original(*args, **kwargs)
            except _Lost:
                continue
            finally:
                _seen.reset(token)

    return compute


def _gathering(original: Callable[..., None]) -> Callable[..., None]:
    """Replace the function by which a metric of torchmetrics gathers its state, unless it is a user's."""

    @functools.wraps(original)
    def sync(metric: Any, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        transport = _transport.get()
        if transport is None or (metric.dist_sync_fn is not None and dist_sync_fn is metric.dist_sync_fn):
            arguments = {"dist_sync_fn": dist_sync_fn} if dist_sync_fn is not None else {}
            original(metric, **arguments, process_group=process_group)
            return

        def of_present(tensor: Tensor, group: Any = None) -> Sequence[Tensor]:
            return [each.to(tensor.device) for each in gather(transport, tensor.detach())]

        original(metric, dist_sync_fn=of_present, process_group=process_group)

    return _repeating(sync)


def _metric() -> Any:
    return importlib.import_module("torchmetrics").Metric


_SYNC = SharedPatch(_metric, "_sync_dist", _gathering)
_results: dict[str, SharedPatch] = {}  # by package


def _logged(package: str) -> SharedPatch:
    """Return the patch of the values that a package's modules log."""

    def find() -> Any:
        return importlib.import_module(f"{package}.trainer.connectors.logger_connector.result")._ResultMetric

    return _results.setdefault(package, SharedPatch(find, "compute", _repeating))


@contextmanager
def metrics_of_present_sites(transport: Transport, package: str) -> Iterator[None]:
    """Compute torchmetrics and logged values over the sites that are present, in a context.

    Args:
        transport: the transport.
        package: Lightning's package, ``"lightning.pytorch"`` or ``"pytorch_lightning"``.
    """
    before = _transport.get()
    _transport.set(transport)
    try:
        with ExitStack() as patches:
            patches.enter_context(_SYNC)
            patches.enter_context(_logged(package))
            yield
    finally:
        _transport.set(before)
