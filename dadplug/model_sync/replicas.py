"""Functions that compare the replicas of a model, and make their parameters and buffers equal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MismatchError
from ..exchange import Transport

_ROUNDS = 8  # of renormalisation; two are enough, but with NaN there is always a change


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def check_alike(model: nn.Module, settings: dict[str, Any], transport: Transport) -> None:
    """Compare the sites' models and settings.

    Args:
        model: the model.
        settings: the settings by name.
        transport: the transport.

    Raises:
        MismatchError: on every site, naming the first difference.
    """
    own = {f"option {name}": repr(value) for name, value in settings.items()}
    for name, tensor in _tensors(model).items():
        trained = ", trained" if tensor.requires_grad else ""
        own[f"tensor {name}"] = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{trained}"
    every = transport.gather_objects(own)
    for rank, other in enumerate(every):
        for what in [*every[0], *other]:
            here, there = every[0].get(what, "absent"), other.get(what, "absent")
            if here != there:
                raise MismatchError(
                    f"the sites do not train the same thing: {what} is {here} at {transport.sites[0]} and {there} at "
                    f"{transport.sites[rank]}"
                )


def check_values(model: nn.Module, names: Collection[str], transport: Transport) -> None:
    """Compare the values of parameters that have been added to the model.

    Args:
        model: the model.
        names: names of the parameters, the same on all sites.
        transport: the transport.

    Raises:
        MismatchError: on every site, if names or values differ; nothing has been changed then.
    """
    own = {name: _fingerprint(each) for name, each in model.named_parameters() if name in names}
    every = transport.gather_objects(own)
    for rank, other in enumerate(every):
        for name in [*every[0], *other]:
            if every[0].get(name) != other.get(name):
                raise MismatchError(
                    f"parameter {name!r} has been added to the model and is not the same at {transport.sites[0]} and "
                    f"{transport.sites[rank]}: give it the same values on all sites before training goes on, by the "
                    "same seed or by reduction.broadcast_model()"
                )


@torch.no_grad()
def broadcast_model(model: nn.Module, transport: Transport) -> None:
    """Replace every site's parameters and buffers by those of rank 0."""
    for flat, tensors in _flattened(list(_tensors(model).values())):
        transport.broadcast(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


def tables_with_max_norm(model: nn.Module) -> list[nn.Embedding | nn.EmbeddingBag]:
    """Return the embeddings with ``max_norm``, whose lookups change their rows."""
    tables = (module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    return [table for table in tables if table.max_norm is not None]


@torch.no_grad()
def renormalise(table: nn.Embedding | nn.EmbeddingBag) -> None:
    """Renormalise every row of a table, as a lookup does with its rows, since sites have looked up different rows.

    This is repeated until nothing changes, so that a row that has been looked up twice has the bits of one that has
    not.

    Args:
        table: an embedding with ``max_norm``.
    """
    assert table.max_norm is not None
    weight, everything = table.weight, torch.arange(table.num_embeddings, device=table.weight.device)
    for _ in range(_ROUNDS):
        before = weight.clone()
        torch.embedding_renorm_(weight, everything, table.max_norm, table.norm_type)
        if torch.equal(before, weight):
            break


@torch.no_grad()
def average_buffers(model: nn.Module, transport: Transport, weight: float) -> None:
    """Replace every site's float buffers by their weighted mean over sites, and counters by their maximum.

    Args:
        model: the model.
        transport: the transport.
        weight: this site's weight; weights need not sum to one.
    """
    buffers = [buffer for _, buffer in model.named_buffers() if buffer.numel()]
    if transport.world_size == 1 or not buffers:
        return
    weights = transport.gather_objects(weight)
    total = sum(weights) or 1.0
    shares = [each / total for each in weights] if sum(weights) else [1 / len(weights)] * len(weights)
    for flat, tensors in _flattened(buffers):
        gather = transport.gather([flat.numel()] * transport.world_size, flat.dtype)
        gather.payload.copy_(flat)
        gather.launch()
        every = gather.wait()
        if flat.is_floating_point():
            agreed = torch.zeros_like(every[0])
            for other, share in zip(every, shares, strict=True):
                agreed.add_(other, alpha=share)
        else:
            agreed = torch.stack(every).amax(0) if flat.dtype != torch.bool else every[0]
        for tensor, part in zip(tensors, agreed.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


def first_difference(model: nn.Module, transport: Transport) -> str | None:
    """Compare the sites' parameters bit by bit.

    Returns:
        The name of the first parameter that differs between sites; None if the replicas are equal.
    """
    own = {name: _fingerprint(parameter) for name, parameter in model.named_parameters()}
    every = transport.gather_objects(own)
    for name in own:
        if any(other[name] != every[0][name] for other in every):
            return name
    return None


def _fingerprint(tensor: Tensor) -> str:
    import hashlib

    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).hexdigest() if plain.numel() else ""


def _flattened(tensors: Sequence[Tensor]) -> Iterable[tuple[Tensor, list[Tensor]]]:
    """Group tensors by type and device; yield each group, flattened into one tensor and as the tensors."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for group in groups.values():
        yield torch.cat([tensor.reshape(-1) for tensor in group]), group
