"""Lookups in managed tables, in place of the forward of nn.Embedding and nn.EmbeddingBag."""

from __future__ import annotations

import weakref
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
from ..model_sync.structure import mark_managed
from .initialisers import Columns, Initialiser
from .row_gradient import Lookup, PulledRows, RowGradient
from .row_optimizers import Rule
from .table import Table

_CHUNK = 65536  # rows that are copied at a time
_FEW = 1024  # rows to make room for at first, where they come to be when they are used


class ManagedWeight:
    """An embedding's weight whose rows live in a table.

    Its parameter stands for the rows in autograd: backward accumulates a sparse gradient in ``.grad``, which programs
    clear, keep and scale like any other. `settle` turns this site's gradient into its part of the sites' gradient, and
    `step` pushes what the optimizer makes of it.

    Args:
        name: the parameter's name.
        parameter: the weight; `give_up` takes its memory, and what reads it then meets NaN. On torch's meta device it
            has none.
        rule: the optimizer's rule.
        make_table: makes the table from a width, an initialiser and a capacity.
        first: makes the first values of rows when they are first used; the weight's own where None.

    Attributes:
        steps: number of steps of the row optimizer.
        recorded: the distinct keys of each lookup are appended here, where it is a list.
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
        self.recorded: list[Tensor] | None = None
        self._settled = True
        self._base: Tensor | None = None  # what was settled of a gradient that has been added to since
        self._lookups: list[Lookup] = []  # of the gradient, to spare pulling the rows again
        self._backward_pass = -1
        self._handle: Any = None
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
        no_memory = torch.full((1, 1), torch.nan, device="cpu" if self.parameter.is_meta else self.parameter.device)
        if self.parameter.is_meta:  # which has no gradients
            stand_in = nn.Parameter(no_memory.expand(self.rows, self.width), self.parameter.requires_grad)
            torch.utils.swap_tensors(self.parameter, stand_in)
            mark_managed(self.parameter, True)
        else:
            self.parameter.data = no_memory.expand(self.rows, self.width)
        reference = weakref.ref(self)  # the user may keep the parameter, and does not keep the table by it

        def arrive(parameter: Tensor) -> None:
            weight = reference()
            if weight is not None and parameter.grad is not None:
                weight._settled = False
                parameter.grad = RowGradient.of(parameter.grad, weight.table.world_size == 1)

        trained = self.parameter.requires_grad
        self.parameter.requires_grad_(True)  # a frozen one takes no hook, and may be freed later
        self._handle = self.parameter.register_post_accumulate_grad_hook(arrive)
        self.parameter.requires_grad_(trained)

    def release(self) -> None:
        """Take the hook and the gradient off the parameter."""
        self._handle.remove()
        mark_managed(self.parameter, False)
        self.parameter.grad = None

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
            the weights, of shape (k, width), whose gradient goes to the parameter.
        """
        flat = ids.detach().reshape(-1).long().cpu()
        keys, inverse = sparse.unique(flat)
        values = self.table.pull(keys)
        weights = values[:, : self.width].to(ids.device, copy=True).contiguous()
        if torch.is_grad_enabled() and self.parameter.requires_grad:
            if self.recorded is not None:
                self.recorded.append(keys)
            weights = PulledRows.apply(self.parameter, weights, self, Lookup(keys, values, self.steps))
        return keys, inverse.to(ids.device).view(ids.shape), weights

    def gradient_of(self, lookup: Lookup, gradient: Tensor) -> Tensor:
        """Return the parameter's gradient by the gradient of pulled rows; called in backward.

        Args:
            lookup: the lookup that pulled the rows.
            gradient: of shape (k, width), in the order of the lookup's keys.
        """
        present = self.parameter.grad
        if present is None or (present.is_sparse and not present._nnz()):  # there was none, or it has been cleared
            now = torch._C._current_graph_task_id()
            if now != self._backward_pass:
                self._lookups.clear()
            self._base, self._backward_pass = None, now
        elif self._settled:  # what comes now is weighted by itself
            self._base = present.detach().clone()
        self._lookups.append(lookup)
        indices = lookup.keys.to(self.parameter.device).unsqueeze(0)
        values = gradient.to(self.parameter.device, self.parameter.dtype)
        return torch.sparse_coo_tensor(indices, values, (self.rows, self.width), check_invariants=False)

    @property
    def fresh(self) -> bool:
        """Whether backward has brought a gradient since `settle`."""
        return not self._settled

    @property
    def unsettled(self) -> bool:
        """Whether it is there, so that nobody has cleared it."""
        gradient = self.parameter.grad
        return not self._settled and gradient is not None and not (gradient.is_sparse and not gradient._nnz())

    @property
    def is_finite(self) -> bool:
        """Whether what backward has brought holds neither NaN nor Inf."""
        gradient = self.parameter.grad
        return gradient is None or bool((gradient._values() if gradient.is_sparse else gradient).isfinite().all())

    @torch.no_grad()
    def settle(self, share: float) -> None:
        """Weight what backward has added since the last call.

        Args:
            share: this site's weight; 0 where it has no samples, so that it takes part in the step with no rows.
        """
        gradient, base, fresh = self.parameter.grad, self._base, not self._settled
        self._settled, self._base = True, None
        if share == 0.0 and self.parameter.requires_grad:
            kept = base if fresh else gradient
            self._put(self._of_keys([], 0.0) if kept is None else kept)
        elif fresh and gradient is not None and share != 1.0:
            if base is None:
                gradient.mul_(share)
            else:
                self._put(gradient * share + base * (1 - share))

    def spoil(self) -> None:
        """Make the gradient Inf, as that of another site is."""
        if self.parameter.requires_grad:
            self._put(self._of_keys([0], torch.inf))

    def _put(self, gradient: Tensor) -> None:
        self.parameter.grad = RowGradient.of(gradient, self.table.world_size == 1)

    def _of_keys(self, keys: list[int], value: float) -> Tensor:
        values = self.parameter.new_full((len(keys), self.width), value)
        indices = torch.tensor([keys], dtype=torch.int64, device=values.device)
        return torch.sparse_coo_tensor(indices, values, (self.rows, self.width))

    def step(self, options: dict[str, Any], scale: float, padding: set[int]) -> None:
        """Push the step that the gradient asks for; the gradient stays.

        Args:
            options: those of the parameter's group in the optimizer.
            scale: factor on the gradient.
            padding: keys without a gradient.
        """
        lookups, self._lookups = self._lookups, []
        if self.parameter.grad is None:
            return
        self.steps += 1
        keys, rows = self.rows_of_gradient()
        known = [lookup for lookup in lookups if lookup.steps == self.steps - 1]
        if len(known) == 1 and torch.equal(known[0].keys, keys):
            values = known[0].values
        else:
            keys, rows = sparse.sum_duplicates(keys, rows)
            values = self._values_of(keys, known)
        for key in padding:
            kept = keys != key
            keys, values, rows = keys[kept], values[kept], rows[kept]
        if not keys.numel():
            return
        if scale != 1:
            rows = rows * scale
        self.table.push_async(keys, self.rule.deltas(values, rows, self.steps, options))

    def rows_of_gradient(self) -> tuple[Tensor, Tensor]:
        """Return the gradient's keys, not always distinct, and their rows, on the CPU."""
        if self.parameter.grad is None:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, self.width)
        gradient = self.parameter.grad.detach()
        if not gradient.is_sparse:
            gradient = gradient.to_sparse(1)
        return gradient._indices()[0].cpu(), gradient._values().float().cpu()

    def _values_of(self, keys: Tensor, lookups: list[Lookup]) -> Tensor:
        """Return the values of distinct keys: those that have been pulled for the gradient, or pulled anew."""
        if not self.rule.names:
            return torch.empty(keys.numel(), 0)  # the rule looks at none
        if lookups:
            pulled = torch.cat([lookup.keys for lookup in lookups])
            distinct, places = sparse.unique(torch.cat([pulled, keys]))
            first = torch.empty_like(distinct).scatter_reduce_(
                0, places, torch.arange(places.numel()), "amin", include_self=False
            )[places[pulled.numel() :]]
            if keys.numel() and int(first.max()) < pulled.numel():
                return torch.cat([lookup.values for lookup in lookups])[first]
        return self.table.pull(keys)


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
