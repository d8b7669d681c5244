"""Managed weights: embeddings whose rows live in a table of the parameter manager."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..lowrank import sparse
from ..model_sync.structure import mark_managed
from .initialisers import Columns, Initialiser
from .row_gradient import Lookup, PulledRows, RowGradient
from .row_optimizers import RowOptimizer
from .table import Table

_CHUNK = 65536  # rows that are copied at a time
_INITIAL_ROWS = 1024  # capacity of a table whose rows are created at first use


class ManagedWeight:
    """Weight of embedding layers whose rows live in a table.

    Its parameter represents the rows in autograd: backward accumulates a sparse gradient in ``.grad``, which programs
    clear, keep and scale like any other. `apply_share` weights this site's gradient as its part of the gradient of all
    sites, and `step` pushes the deltas of the row optimizer.

    Args:
        name: name of the parameter.
        parameter: the weight, of shape (rows, width). `give_up` frees its memory; code that reads it then gets NaN. On
            torch's meta device it has no memory.
        row_optimizer: the optimizer of the rows.
        make_table: function that creates the table from a width, an initialiser and a capacity.
        first: initialiser of rows that are created at first use; None for the values of the weight.

    Attributes:
        steps: number of steps of the row optimizer.
        recorded: if it is a list, each lookup appends its distinct keys.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        row_optimizer: RowOptimizer,
        make_table: Callable[[int, Any, int | None], Table],
        first: Initialiser | None = None,
    ) -> None:
        self.name, self.parameter, self.row_optimizer = name, parameter, row_optimizer
        self.rows, self.width = parameter.shape
        self.steps = 0
        self.recorded: list[Tensor] | None = None
        self._weighted = True  # whether `apply_share` has seen all that backward has added
        self._base: Tensor | None = None  # weighted part of a gradient that backward has added to since
        self._lookups: list[Lookup] = []  # of the gradient, so that its rows need not be pulled again
        self._backward_pass = -1
        self._handle: RemovableHandle | None = None
        self._first: NDArray[np.float32] | None = None

        def from_weights(keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
            assert self._first is not None
            out[:] = self._first[keys]

        state = row_optimizer.state_columns(self.width)
        width = self.width + sum(width for width, _ in state)
        if first is not None:
            self.table = make_table(width, Columns([(self.width, first), *state]), _INITIAL_ROWS)
        else:
            self._first = parameter.detach().cpu().contiguous().numpy()
            self.table = make_table(width, Columns([(self.width, from_weights), *state]), None)

    def give_up(self) -> None:
        """Fill the table and free the parameter's memory; all tables must have been created."""
        if self._first is not None:
            for keys in self.home_keys(self.table.rank, self.table.world_size):
                self.table.pull(keys)  # creates the rows whose home is this site
        self._first = None
        no_memory = torch.full((1, 1), torch.nan, device="cpu" if self.parameter.is_meta else self.parameter.device)
        if self.parameter.is_meta:  # its parameters get no gradients
            stand_in = nn.Parameter(no_memory.expand(self.rows, self.width), self.parameter.requires_grad)
            torch.utils.swap_tensors(self.parameter, stand_in)
            mark_managed(self.parameter, True)
        else:
            self.parameter.data = no_memory.expand(self.rows, self.width)
        reference = weakref.ref(self)  # so that the parameter, if kept, does not keep the table

        def arrive(parameter: Tensor) -> None:
            weight = reference()
            if weight is not None and parameter.grad is not None:
                weight._weighted = False
                parameter.grad = RowGradient.of(parameter.grad, weight.table.world_size == 1)

        trained = self.parameter.requires_grad
        self.parameter.requires_grad_(True)  # a frozen parameter takes no hook, and may be unfrozen later
        self._handle = self.parameter.register_post_accumulate_grad_hook(arrive)
        self.parameter.requires_grad_(trained)

    def release(self) -> None:
        """Remove the hook and the gradient from the parameter."""
        if self._handle is not None:
            self._handle.remove()
        mark_managed(self.parameter, False)
        self.parameter.grad = None

    def home_keys(self, rank: int, sites: int) -> list[Tensor]:
        """Return the keys whose home is a site, in chunks."""
        keys = torch.arange(rank, self.rows, sites)
        return list(keys.split(_CHUNK)) if keys.numel() else []

    def rows_of(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pull the rows of ids, each distinct id once.

        Args:
            ids: whole numbers of any shape, on any device.

        Returns:
            The distinct ids, of shape (k,), on the CPU; the positions of `ids` among them, of the shape of `ids`; and
            their weights, of shape (k, width), whose gradient is accumulated in the parameter.
        """
        flat = ids.detach().reshape(-1).long().cpu()
        keys, inverse = sparse.unique(flat)
        values = self.table.pull(keys)
        weights = values[:, : self.width].to(ids.device, copy=True).contiguous()
        if torch.is_grad_enabled() and self.parameter.requires_grad:
            if self.recorded is not None:
                self.recorded.append(keys)
            lookup = Lookup(keys, values, self.steps)
            weights = PulledRows.apply(self.parameter, weights, self.gradient_of, lookup)  # type: ignore[no-untyped-call]
        return keys, inverse.to(ids.device).view(ids.shape), weights

    def gradient_of(self, lookup: Lookup, gradient: Tensor) -> Tensor:
        """Return the parameter's sparse gradient from the gradient of pulled rows; called in backward.

        Args:
            lookup: the lookup that pulled the rows.
            gradient: of shape (k, width), in the order of the lookup's keys.
        """
        present = self.parameter.grad
        if present is None or (present.is_sparse and not present._nnz()):  # none yet, or cleared
            now = torch._C._current_graph_task_id()
            if now != self._backward_pass:
                self._lookups.clear()
            self._base, self._backward_pass = None, now
        elif self._weighted:  # only what is added from now on has to be weighted
            self._base = present.detach().clone()
        self._lookups.append(lookup)
        indices = lookup.keys.to(self.parameter.device).unsqueeze(0)
        values = gradient.to(self.parameter.device, self.parameter.dtype)
        return torch.sparse_coo_tensor(indices, values, (self.rows, self.width), check_invariants=False)

    @property
    def has_arrived(self) -> bool:
        """Whether backward has added a gradient since `apply_share`, cleared or not."""
        return not self._weighted

    @property
    def needs_share(self) -> bool:
        """Whether `apply_share` has to weight a gradient: backward has added one, and it has not been cleared."""
        gradient = self.parameter.grad
        return not self._weighted and gradient is not None and not (gradient.is_sparse and not gradient._nnz())

    @property
    def is_finite(self) -> bool:
        """Whether the gradient holds neither NaN nor Inf."""
        gradient = self.parameter.grad
        return gradient is None or bool((gradient._values() if gradient.is_sparse else gradient).isfinite().all())

    @torch.no_grad()
    def apply_share(self, share: float) -> None:
        """Weight the gradient that backward has added since the last call.

        Args:
            share: weight of this site; 0 if it has no samples and takes part in the step without rows.
        """
        gradient, base, fresh = self.parameter.grad, self._base, not self._weighted
        self._weighted, self._base = True, None
        if share == 0.0 and self.parameter.requires_grad:
            kept = base if fresh else gradient
            self._put(self._of_keys([], 0.0) if kept is None else kept)
        elif fresh and gradient is not None and share != 1.0:
            if base is None:
                gradient.mul_(share)
            else:
                self._put(gradient * share + base * (1 - share))

    def fill_with_inf(self) -> None:
        """Replace the gradient by one with Inf, since the gradients of some site are not finite."""
        if self.parameter.requires_grad:
            self._put(self._of_keys([0], torch.inf))

    def _put(self, gradient: Tensor) -> None:
        self.parameter.grad = RowGradient.of(gradient, self.table.world_size == 1)

    def _of_keys(self, keys: list[int], value: float) -> Tensor:
        values = self.parameter.new_full((len(keys), self.width), value)
        indices = torch.tensor([keys], dtype=torch.int64, device=values.device)
        return torch.sparse_coo_tensor(indices, values, (self.rows, self.width))

    def step(self, options: dict[str, Any], scale: float, padding: set[int]) -> None:
        """Push the deltas of one optimizer step; the gradient is kept.

        Args:
            options: options of the parameter's group in the optimizer.
            scale: factor on the gradient.
            padding: keys whose gradient is ignored.
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
        self.table.push_async(keys, self.row_optimizer.deltas(values, rows, self.steps, options))

    def rows_of_gradient(self) -> tuple[Tensor, Tensor]:
        """Return the gradient's keys, of shape (k,), possibly with duplicates, and rows (k, width), on the CPU."""
        if self.parameter.grad is None:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, self.width)
        gradient = self.parameter.grad.detach()
        if not gradient.is_sparse:
            gradient = gradient.to_sparse(1)
        return gradient._indices()[0].cpu(), gradient._values().float().cpu()

    def _values_of(self, keys: Tensor, lookups: list[Lookup]) -> Tensor:
        """Return the values of distinct keys, from the lookups if these have all of them, otherwise by a pull."""
        if not self.row_optimizer.state_names:
            return torch.empty(keys.numel(), 0)  # the optimizer reads no values
        if lookups:
            pulled = torch.cat([lookup.keys for lookup in lookups])
            distinct, places = sparse.unique(torch.cat([pulled, keys]))
            first = torch.empty_like(distinct).scatter_reduce_(
                0, places, torch.arange(places.numel()), "amin", include_self=False
            )[places[pulled.numel() :]]
            if keys.numel() and int(first.max()) < pulled.numel():
                return torch.cat([lookup.values for lookup in lookups])[first]
        return self.table.pull(keys)
