"""States of managed models as plain models and optimizers have them: whole tables, gathered and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from .managed_weight import ManagedWeight
from .manager import ParameterManager

_CHUNK = 65536  # rows that are gathered at a time


def parameter_numbers(optimizer: Optimizer) -> dict[int, int]:
    """Return the numbers of an optimizer's parameters in its state, by the id of the parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {id(parameter): number for number, parameter in enumerate(parameters)}


def gather_rows(weight: ManagedWeight, columns: slice | None = None) -> Tensor:
    """Pull all rows of a weight.

    Args:
        weight: the weight.
        columns: columns of the table; None for those of the weight.

    Returns:
        A float32 tensor of shape (rows, number of columns).
    """
    columns = slice(weight.width) if columns is None else columns
    whole = torch.empty(weight.rows, len(range(weight.table.width)[columns]))
    for start in range(0, weight.rows, _CHUNK):
        keys = torch.arange(start, min(start + _CHUNK, weight.rows))
        whole[keys] = weight.table.pull(keys)[:, columns]
    return whole


def gather_optimizer_states(managed: Mapping[str, ManagedWeight]) -> dict[str, dict[str, Tensor]]:
    """Pull the state of the row optimizers, by the name of the weight and torch's name of the state."""
    found = {}
    for name, weight in managed.items():
        if parts := weight.row_optimizer.state_names:
            state = gather_rows(weight, slice(weight.width, None)).chunk(len(parts), 1)
            own = {part: value.contiguous() for part, value in zip(parts, state, strict=True)}
            step = {"step": torch.tensor(float(weight.steps))} if weight.row_optimizer.counts_steps else {}
            found[name] = step | own
    return found


def load_optimizer_state(
    manager: ParameterManager, name: str, weight: ManagedWeight, state: Mapping[str, Any] | None
) -> None:
    """Set the optimizer state of all rows of a weight; each site sets the rows whose home it is.

    Args:
        manager: the parameter manager.
        name: name of the weight, for messages.
        weight: the weight.
        state: the state of the parameter in a plain optimizer; None for none, which changes nothing.

    Raises:
        ValueError: if the state does not fit the weight.
    """
    parts = weight.row_optimizer.state_names
    if not state or not parts:
        return
    if missing := [part for part in parts if part not in state]:
        raise ValueError(f"the optimizer's state of {name} lacks {missing}: it is another optimizer's")
    columns = torch.cat([state[part].float().cpu() for part in parts], 1)
    if columns.shape != (weight.rows, weight.table.width - weight.width):
        raise ValueError(f"the optimizer's state of {name} has shape {tuple(columns.shape)}, which does not fit")
    weight.steps = int(state.get("step", 0))
    for keys in weight.home_keys(manager.rank, manager.world_size):
        values = weight.table.pull(keys)
        values[:, weight.width :] = columns[keys]
        weight.table.set(keys, values)


def load_model_state(
    manager: ParameterManager,
    module: nn.Module,
    managed: Mapping[str, ManagedWeight],
    state_dict: Mapping[str, Any],
    strict: bool,
) -> Any:
    """Load the state of a plain model into a module with managed weights; the state of row optimizers is reset.

    Args:
        manager: the parameter manager.
        module: the module.
        managed: its managed weights by name.
        state_dict: the state, equal on all sites.
        strict: whether missing and unexpected names are errors.

    Returns:
        The result of `torch.nn.Module.load_state_dict`.

    Raises:
        ValueError: if a name or shape does not fit.
    """
    names = {
        name: weight
        for name, parameter in module.named_parameters(remove_duplicate=False)
        for weight in managed.values()
        if weight.parameter is parameter and name in state_dict
    }
    for name, weight in names.items():
        if state_dict[name].shape != (weight.rows, weight.width):
            raise ValueError(
                f"{name} has shape {tuple(state_dict[name].shape)} in the state, {(weight.rows, weight.width)} here"
            )
    rest = {name: value for name, value in state_dict.items() if name not in names}
    result = module.load_state_dict(rest, strict=False)
    missing = [name for name in result.missing_keys if name not in names]
    if strict and (missing or result.unexpected_keys):
        raise ValueError(f"the state lacks {missing} and has {result.unexpected_keys} besides")
    manager.wait_sync(everywhere=True)
    for weight, name in {weight: name for name, weight in names.items()}.items():
        for keys in weight.home_keys(manager.rank, manager.world_size):
            fresh = torch.zeros(keys.numel(), weight.table.width)
            fresh[:, : weight.width] = state_dict[name][keys]
            weight.table.set(keys, fresh)
    manager.wait_sync(everywhere=True)
    return result
