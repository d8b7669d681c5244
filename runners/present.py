"""Collectives over the sites that are present, which trainers use in place of those over all sites."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import MismatchError, SiteError
from ..exchange import Transport
from ..exchange.fields import checked, invalid, minority
from ..exchange.restrictions import METRICS, declared

metrics_transport: ContextVar[Transport | None] = ContextVar("metrics_transport", default=None)
"""Transport over which metrics are computed; None outside of a run."""
_seen: ContextVar[dict[str, list[int]] | None] = ContextVar("seen", default=None)  # sites of a metric's first gather


class _Lost(Exception):
    """Loss or return of a site between the gathers of one metric; raised at all sites that are present."""


def gather(transport: Transport, item: Any, alike: int | None = None) -> list[Any]:
    """Gather an object from each site that is present; within one metric always from the same sites.

    Args:
        transport: the transport.
        item: this site's object; where it is a tensor or a text, those of the other sites have to be that, too.
        alike: first dimension from which on all tensors need the same shape; None where they may differ.

    Raises:
        MismatchError: if the tensors do not have it.
    """
    kind = next((each for each in (Tensor, bool, str) if isinstance(item, each)), Any)
    with declared(METRICS):
        every = checked(transport.gather_present(item), kind, "value", transport)
    shapes = {rank: None if alike is None else _kind(each, alike) for rank, each in every.items()}
    for rank in minority(shapes) if transport.rounds.elastic else ():
        why = f"it is of {shapes.pop(rank)}, and those of most sites are not"
        transport.rounds.leave_out(rank, invalid("value", transport.sites[rank], why))
        del every[rank]
    if len({*shapes.values()}) > 1:
        where = ", ".join(f"{shape} at {transport.sites[rank]}" for rank, shape in shapes.items())
        raise MismatchError(f"the sites gather tensors of different shapes: {where}")
    seen = _seen.get()
    if seen is not None and seen.setdefault("present", [*every]) != [*every]:
        raise _Lost
    return [*every.values()]


def _kind(tensor: Tensor, alike: int) -> str:
    """Return what tensors of all sites need to have in common, which are stacked."""
    exotic = tensor.is_complex() or (tensor.is_floating_point() and tensor.element_size() == 1)
    return f"{f'type {tensor.dtype} and ' if exotic else ''}shape {[*tensor.shape[alike:]]}"


def reduce(transport: Transport, tensor: Tensor, operation: Any) -> Tensor:
    """Reduce a tensor over the sites that are present, as a new tensor.

    Args:
        transport: the transport.
        tensor: this site's tensor.
        operation: a name as in Lightning, or a ``ReduceOp``; the mean of whole numbers is a floating-point number.

    Raises:
        ValueError: if the operation is unknown.
    """
    ops, is_floating = dist.ReduceOp, tensor.is_floating_point() or tensor.is_complex()
    functions: dict[Any, Callable[[Tensor], Tensor]] = {
        ("mean", "avg", ops.AVG): lambda parts: (parts if is_floating else parts.double()).mean(0),
        ("sum", ops.SUM): lambda parts: parts.sum(0),
        ("min", ops.MIN): lambda parts: parts.amin(0),
        ("max", ops.MAX): lambda parts: parts.amax(0),
        ("prod", "product", ops.PRODUCT): lambda parts: parts.prod(0),
    }
    wanted = operation.lower() if isinstance(operation, str) else ops.SUM if operation is None else operation
    for names, function in functions.items():
        if any(wanted == name for name in names):
            return function(torch.stack(gather(transport, tensor.detach(), 0)).to(tensor.device))
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
    return torch.stack(gather(transport, tensor.detach(), 0)).to(tensor.device)


def broadcast(transport: Transport, item: Any, source: int) -> Any:
    """Return one site's object: that of the first site that is present, where it is to be that of site 0.

    Raises:
        SiteError: at all sites, if it is to be that of another site, which is absent.
    """
    with declared(METRICS):
        every = transport.gather_present(item)
    if source and source not in every and not transport.rounds.joins:
        raise SiteError(f"{transport.sites[source]} is gone, and broadcast(src={source}) needs its object")
    return every.get(source, next(iter(every.values())))


def repeating(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a metric's method that gathers several times, so that all its gathers hold the same sites."""

    @functools.wraps(original)
    def compute(metric: Any, *args: Any, **kwargs: Any) -> Any:
        if metrics_transport.get() is None or _seen.get() is not None:
            return original(metric, *args, **kwargs)
        own = copy.deepcopy(getattr(metric, "statistics", None))  # which Catalyst's replace by sums over sites
        while True:
            token = _seen.set({})
            try:
                return original(metric, *args, **kwargs)
            except _Lost:
                if own is not None:
                    metric.statistics = copy.deepcopy(own)
            finally:
                _seen.reset(token)

    return compute
