"""Functions that compare the replicas of a model, and make their parameters equal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MismatchError
from ..exchange import Transport

_STATES, _FURTHER_BYTES = 16, 1 << 28  # bound of a state: times the model's tensors, and besides
_ROUNDS = 8  # of renormalisation; two are enough, but with NaN there is always a change


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def describe(model: nn.Module, settings: dict[str, Any]) -> dict[str, str]:
    """Return what has to be the same at all sites: settings, and types and shapes of the model's tensors."""
    own = {f"option {name}": repr(value) for name, value in settings.items()}
    for name, tensor in _tensors(model).items():
        trained = ", trained" if tensor.requires_grad else ""
        own[f"tensor {name}"] = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{trained}"
    return own


@torch.no_grad()
def load_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Replace the values of a model's parameters and buffers, whose shapes have been compared."""
    for name, tensor in _tensors(model).items():
        tensor.copy_(tensors[name])


def largest_state(model: nn.Module) -> int:
    """Return a bound in bytes of the state of a training: the model, and several times that of optimizer and method."""
    tensors = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(model).values())
    return _STATES * tensors + _FURTHER_BYTES


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers by name, detached."""
    return {name: tensor.detach() for name, tensor in _tensors(model).items()}


def check_alike(description: dict[str, str], transport: Transport) -> None:
    """Compare the sites' models and settings.

    Args:
        description: what `describe` returns at this site.
        transport: the transport.

    Raises:
        MismatchError: on every site, naming the first difference.
    """
    every = transport.gather_present(description)
    lowest, first = next(iter(every.items()))
    for rank, other in every.items():
        compare(first, other, transport.sites[lowest], transport.sites[rank])


def compare(first: dict[str, str], second: dict[str, str], first_site: str, second_site: str, remedy: str = "") -> None:
    """Compare two results of `describe`.

    Args:
        first: that of one site.
        second: that of another.
        first_site: name of the one.
        second_site: name of the other.
        remedy: end of the message.

    Raises:
        MismatchError: naming the first difference.
    """
    for here, there in zip(first, second):
        if here != there and first.keys() == second.keys():
            raise MismatchError(
                f"configuration differs between sites: where {first_site} has {here}, {second_site} has {there}. "
                "Define layers and parameters in the same order at all sites"
            )
    for what in [*first, *second]:
        here, there = first.get(what, "absent"), second.get(what, "absent")
        if here != there:
            raise MismatchError(
                f"configuration differs between sites: {what} is {here} at {first_site} and {there} at {second_site}"
                f"{remedy}"
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
    own = {name: fingerprint(each) for name, each in model.named_parameters() if name in names}
    every = transport.gather_present(own)
    lowest, first = next(iter(every.items()))
    for rank, other in every.items():
        for name in [*first, *other]:
            if first.get(name) != other.get(name):
                raise MismatchError(
                    f"parameter {name!r} has been added to the model and is not the same at {transport.sites[lowest]} "
                    f"and {transport.sites[rank]}: give it the same values on all sites before training goes on, by "
                    "the same seed or by reduction.broadcast_model()"
                )


@torch.no_grad()
def broadcast_model(model: nn.Module, transport: Transport) -> None:
    """Replace every site's parameters and buffers by those of rank 0.

    What is equal at all sites already, as by the same seed, is not sent: on a slow link that takes long.
    """
    groups = list(flattened(list(_tensors(model).values())))
    equal = [False] * len(groups)
    if transport.device.type == "cpu" and transport.world_size > 1:  # between GPUs, sending is faster than comparing
        every = [*transport.gather_present([fingerprint(flat) for flat, _ in groups]).values()]
        equal = [len(set(digests)) == 1 for digests in zip(*every, strict=True)]
    for (flat, tensors), skip in zip(groups, equal, strict=True):
        if skip:
            continue
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


def first_difference(model: nn.Module, transport: Transport) -> str | None:
    """Compare the sites' parameters bit by bit.

    Returns:
        The name of the first parameter that differs between sites; None if the replicas are equal.
    """
    own = {name: fingerprint(parameter) for name, parameter in model.named_parameters()}
    every = [*transport.gather_present(own).values()]
    for name in own:
        if any(other[name] != every[0][name] for other in every):
            return name
    return None


def fingerprint(tensor: Tensor) -> str:
    """Return a digest of a tensor's values, to the bit."""
    import hashlib

    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).hexdigest() if plain.numel() else ""


def flattened(tensors: Sequence[Tensor]) -> Iterable[tuple[Tensor, list[Tensor]]]:
    """Group tensors by type and device; yield each group, flattened into one tensor and as the tensors."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for group in groups.values():
        yield torch.cat([tensor.reshape(-1) for tensor in group]), group
