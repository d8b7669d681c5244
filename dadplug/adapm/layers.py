"""Lookups in managed tables, in place of the forward of nn.Embedding and nn.EmbeddingBag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import Optimizer

from ..hooks.override import ForwardOverride
from ..lowrank import sparse
from .initialisers import Columns, Initialiser
from .rules import Rule
from .table import Table

_CHUNK = 65536  # rows that are copied at a time
_FEW = 1024  # rows to make room for at first, where they come to be when they are used


class ManagedWeight:
    """An embedding's weight whose rows live in a table, and the gradients of a step.

    Args:
        name: the parameter's name.
        parameter: the weight; `give_up` takes its memory, and what reads it then meets NaN. On torch's meta device it
            has none.
        rule: the optimizer's rule.
        make_table: makes the table from a width, an initialiser and a capacity.
        first: makes the first values of rows when they are first used; the weight's own where None.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        rule: Rule,
        make_table: Callable[[int, Any, int | None], Table],
        first: Initialiser | None = None,
    ) -> None:
        self.name, self.parameter, self.rule = name, parameter, rule
        self.rows, self.width = parameter.shape
        self.steps = 0
        self._lookups: list[tuple[Tensor, Tensor, Tensor]] = []
        self._first: NDArray[np.float32] | None = None

        def from_weights(keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
            assert self._first is not None
            out[:] = self._first[keys]

        state = rule.state(self.width)
        width = self.width + sum(width for width, _ in state)
        if first is not None:
            self.table = make_table(width, Columns([(self.width, first), *state]), _FEW)
        else:
            self._first = parameter.detach().cpu().contiguous().numpy()
            self.table = make_table(width, Columns([(self.width, from_weights), *state]), None)

    def give_up(self) -> None:
        """Fills the table, and gives the parameter's memory up; once all tables are there."""
        if self._first is not None:
            for keys in self.home_keys(self.table.rank, self.table.world_size):
                self.table.pull(keys)  # makes the rows that are at home here, so that the weight can go
        self._first = None
        if not self.parameter.is_meta:
            self.parameter.data = self.parameter.new_full((1, 1), torch.nan).expand(self.rows, self.width)

    def home_keys(self, rank: int, sites: int) -> list[Tensor]:
        """Returns the keys that are at home at a site, in portions."""
        keys = torch.arange(rank, self.rows, sites)
        return list(keys.split(_CHUNK)) if keys.numel() else []

    def rows_of(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pulls the rows of ids, each once.

        Args:
            ids: of any shape, on any device.

        Returns:
            The distinct ids, of shape (k,), on the CPU; the ids as positions among them, of the shape of `ids`; and
            the weights, of shape (k, width), whose gradient counts in the next step.
        """
        flat = ids.detach().reshape(-1).long().cpu()
        keys, inverse = sparse.unique(flat)
        values = self.table.pull(keys)
        weights = values[:, : self.width].to(ids.device, copy=True).contiguous()
        if torch.is_grad_enabled() and self.parameter.requires_grad:
            weights.requires_grad_()
            self._lookups.append((keys, values, weights))
        return keys, inverse.to(ids.device).view(ids.shape), weights

    def step(self, options: dict[str, Any], scale: float, padding: set[int]) -> None:
        """Pushes the step that the gradients since the last one ask for.

        Args:
            options: those of the parameter's group in the optimizer.
            scale: factor on the gradients.
            padding: keys without a gradient.
        """
        lookups = [entry for entry in self._lookups if entry[2].grad is not None]
        self._lookups = []
        if not lookups:
            return
        self.steps += 1
        keys = torch.cat([keys for keys, _, _ in lookups])
        gradients = torch.cat([weights.grad.float().cpu() for _, _, weights in lookups if weights.grad is not None])
        values = torch.cat([values for _, values, _ in lookups])
        if len(lookups) > 1:
            distinct, inverse = sparse.unique(keys)
            first = torch.empty_like(distinct).scatter_reduce_(
                0, inverse, torch.arange(keys.numel()), "amin", include_self=False
            )
            _, gradients = sparse.sum_duplicates(keys, gradients)
            keys, values = distinct, values[first]
        for key in padding:
            kept = keys != key
            keys, values, gradients = keys[kept], values[kept], gradients[kept]
        if scale != 1:
            gradients = gradients * scale
        self.table.push_async(keys, self.rule.deltas(values, gradients, self.steps, options))

    @property
    def lookups(self) -> list[Tensor]:
        """The distinct keys of each lookup since the last step, in their order."""
        return [keys for keys, _, _ in self._lookups]

    def forget(self) -> None:
        """Drops the gradients since the last step."""
        self._lookups = []


def position_of(key: int | None, keys: Tensor) -> int | None:
    """Finds the place of a key among distinct ones; None if it is not there."""
    if key is None:
        return None
    places = (keys == key).nonzero()
    return int(places[0]) if places.numel() else None


class ManagedEmbedding(ForwardOverride):
    """nn.Embedding on a managed weight."""

    def __init__(self, module: nn.Embedding, weight: ManagedWeight) -> None:
        super().__init__(module)
        self.embedding, self.weight = module, weight

    def __call__(self, input: Tensor) -> Tensor:
        keys, positions, rows = self.weight.rows_of(input)
        padding = position_of(self.embedding.padding_idx, keys)
        return F.embedding(positions, rows, padding, scale_grad_by_freq=self.embedding.scale_grad_by_freq)


class ManagedEmbeddingBag(ForwardOverride):
    """nn.EmbeddingBag on a managed weight."""

    def __init__(self, module: nn.EmbeddingBag, weight: ManagedWeight) -> None:
        super().__init__(module)
        self.bag, self.weight = module, weight

    def __call__(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        keys, positions, rows = self.weight.rows_of(input)
        return F.embedding_bag(
            positions,
            rows,
            offsets,
            scale_grad_by_freq=self.bag.scale_grad_by_freq,
            mode=self.bag.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.bag.include_last_offset,
            padding_idx=position_of(self.bag.padding_idx, keys),
        )


def find_layers(model: nn.Module, optimizer: Optimizer) -> dict[str, list[tuple[str, nn.Module]]]:
    """Finds the layers whose weights can be managed, by the weight's name; layers may share one."""
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    names: dict[int, str] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((path, module))
            names.setdefault(id(parameter), f"{path}.{name}" if path else name)
    found = {}
    for key, modules in owners.items():
        if key not in optimized or not all(
            isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for _, module in modules
        ):
            continue
        if any(type(module) not in (nn.Embedding, nn.EmbeddingBag) for _, module in modules):
            continue  # a class of its own may do anything with its weight
        if modules[0][1].weight.dtype != torch.float32:
            continue
        for path, module in modules:
            if module.max_norm is not None:
                raise ValueError(
                    f"layer {path!r} has max_norm={module.max_norm}, which rescales rows in forward: a managed row "
                    "changes by what optimizers add only. Leave it out of the optimizer's parameters, or drop max_norm"
                )
        found[names[key]] = modules
    return found
