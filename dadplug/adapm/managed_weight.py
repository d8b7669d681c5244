"""Managed weights: embeddings whose rows live in a table of the parameter manager, and the steps of these rows.

The gradient of a managed weight is a sparse tensor in ``.grad``, accumulated and cleared by autograd. Row optimizers
turn values ``[weights | state]`` and gradients into the deltas to push.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from ..hooks.capture import ForwardOverride
from ..lowrank import sparse
from ..reduction import GradientReduction
from ..step.model_sync.structure import mark_managed
from .manager import ParameterManager
from .store import Columns, Constant, Initialiser

_CHUNK = 65536  # rows that are copied at a time
_INITIAL_ROWS = 1024  # capacity of a table whose rows are created at first use
_NORMS = {torch.norm, Tensor.norm, torch.linalg.vector_norm, torch.linalg.norm, torch._foreach_norm}
_CLAMPS = {torch.clamp, torch.clamp_, Tensor.clamp, Tensor.clamp_}
_CLAMPS |= {torch._foreach_clamp_min_, torch._foreach_clamp_max_}


class RowGradient(Tensor):
    """Sparse gradient of the rows that this site has looked up.

    Arithmetic, `zero_` and GradScaler treat it as any sparse gradient. Norms and clamps depend on the gradients of
    other sites for the same rows, and raise if there are other sites.

    Attributes:
        alone: whether there is no other site.
    """

    alone = False

    @staticmethod
    def of(gradient: Tensor, alone: bool) -> Tensor:
        """Return a gradient as a `RowGradient`; one with a graph (for its own derivatives) is returned unchanged."""
        if isinstance(gradient, RowGradient) or gradient.requires_grad:
            return gradient
        made: RowGradient = Tensor._make_subclass(RowGradient, gradient)
        made.alone = alone
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CLAMPS or func in _NORMS:
            args = tree_map_only(RowGradient, _values, args)
            kwargs = tree_map_only(RowGradient, _values, kwargs or {})
            if func in _CLAMPS:
                raise RuntimeError(_refusal("bounded"))
        with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors
            return func(*args, **(kwargs or {}))


def _values(gradient: RowGradient) -> Tensor:
    """Return the rows of a gradient, each once.

    Raises:
        RuntimeError: if there are other sites.
    """
    if not gradient.alone:
        raise RuntimeError(_refusal("measured"))
    return gradient.detach().coalesce().values()


def _refusal(what: str) -> str:
    return (
        f"the gradient of a managed embedding cannot be {what} here: its rows are spread over the sites, and each site "
        "would get another result. Clip with AdaModel.clip_grad_norm_, or leave the managed weights out: "
        "AdaModel.other_parameters()"
    )


# Row optimizers


class RowOptimizer(ABC):
    """Step of an optimizer on rows, as deltas, so that the steps of several sites add up.

    Each site computes them by its own part of a row's gradient. Unless they are linear in it, as those of SGD, the sum
    for a row that several sites use in a step is not the delta of the whole gradient.

    Attributes:
        state_names: torch's names of the parts of the state, of equal widths; checkpoints use them.
        counts_steps: whether a checkpoint's state also has a number of steps.
        initial: initial value of the state.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    counts_steps: ClassVar[bool] = False
    initial = 0.0

    def state_width(self, width: int) -> int:
        """Return the number of columns of the state for weights of a width."""
        return len(self.state_names) * width

    @abstractmethod
    def deltas(self, values: Tensor, gradients: Tensor, step: int, options: dict[str, Any]) -> Tensor:
        """Compute the deltas of one step.

        Args:
            values: pulled values, of shape (n, width and state).
            gradients: of shape (n, width).
            step: number of this step, from 1.
            options: options of the parameter group of the optimizer.

        Returns:
            The deltas, of the shape of `values`.
        """


class SGDRows(RowOptimizer):
    """Rows stepped as by torch.optim.SGD: ``w -= lr g``."""

    def deltas(self, values: Tensor, gradients: Tensor, step: int, options: dict[str, Any]) -> Tensor:
        return gradients * -float(options["lr"])


class AdagradRows(RowOptimizer):
    """Rows stepped as by torch.optim.Adagrad: ``s += g^2; w -= lr g / (sqrt(s) + eps)``.

    Args:
        initial: initial value of ``s``.
    """

    state_names = ("sum",)
    counts_steps = True

    def __init__(self, initial: float) -> None:
        self.initial = initial

    def deltas(self, values: Tensor, gradients: Tensor, step: int, options: dict[str, Any]) -> Tensor:
        rate = float(options["lr"]) / (1 + (step - 1) * options["lr_decay"])
        squares = gradients.square()
        sums = values[:, gradients.shape[1] :] + squares
        return torch.cat([-rate * (gradients / (sums.sqrt() + options["eps"])), squares], 1)


class RowwiseAdagradRows(RowOptimizer):
    """Rows stepped as by `RowwiseAdagrad`: ``s += mean(g^2); w -= lr g / (sqrt(s) + eps)``, with one s per row."""

    state_names = ("sum",)

    def state_width(self, width: int) -> int:
        return 1

    def deltas(self, values: Tensor, gradients: Tensor, step: int, options: dict[str, Any]) -> Tensor:
        squares = gradients.square().mean(1, keepdim=True)
        sums = values[:, gradients.shape[1] :] + squares
        return torch.cat([gradients * (-float(options["lr"]) / (sums.sqrt() + options["eps"])), squares], 1)


class AdamRows(RowOptimizer):
    """Rows stepped as by torch.optim.SparseAdam or torch.optim.Adam; moments of rows without a gradient do not change.

    Args:
        sparse: whether eps is added to the uncorrected root, as in SparseAdam.
    """

    state_names = ("exp_avg", "exp_avg_sq")
    counts_steps = True

    def __init__(self, sparse: bool) -> None:
        self.sparse = sparse

    def deltas(self, values: Tensor, gradients: Tensor, step: int, options: dict[str, Any]) -> Tensor:
        width = gradients.shape[1]
        first, second = options["betas"]
        averages, squares = values[:, width : 2 * width], values[:, 2 * width :]
        more, more_squares = (1 - first) * (gradients - averages), (1 - second) * (gradients.square() - squares)
        correction = math.sqrt(1 - second**step)
        rate = float(options["lr"]) * correction / (1 - first**step)
        eps = options["eps"] * (1 if self.sparse else correction)
        moves = -rate * ((averages + more) / ((squares + more_squares).sqrt() + eps))
        return torch.cat([moves, more, more_squares], 1)


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator per row of a matrix, as used for recommenders: ``s += mean(g^2)`` over the row.

    Args:
        params: parameters or parameter groups. A parameter that is not a matrix counts as one row.
        lr: learning rate.
        eps: term added to the denominator.

    Raises:
        ValueError: if `lr` or `eps` is negative.

    Example:
        >>> import torch
        >>> from dadplug.adapm import RowwiseAdagrad
        >>> table = torch.nn.Embedding(10, 4)
        >>> optimizer = RowwiseAdagrad(table.parameters(), lr=0.1)
        >>> table(torch.tensor([1, 2])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[table.weight]["sum"].shape
        torch.Size([10, 1])
    """

    def __init__(self, params: Any, lr: float = 1e-2, eps: float = 1e-10) -> None:
        if lr < 0 or eps < 0:
            raise ValueError(f"lr and eps must be at least 0, got {lr} and {eps}")
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step. Rows whose gradient is zero do not change.

        Args:
            closure: function that computes the loss again and returns it.

        Returns:
            The loss of the closure, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                matrix = gradient if gradient.dim() == 2 else gradient.reshape(1, -1)
                sums = self.state[parameter].setdefault("sum", matrix.new_zeros(matrix.shape[0], 1))
                sums += matrix.square().mean(1, keepdim=True)
                parameter -= (group["lr"] * matrix / (sums.sqrt() + group["eps"])).view_as(parameter)
        return loss


def row_optimizer_for(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> RowOptimizer:
    """Return the row optimizer that corresponds to a parameter group of a torch optimizer.

    Args:
        optimizer: the optimizer.
        group: its parameter group with the managed weight.

    Raises:
        ValueError: if the optimizer or one of its options cannot step only the rows of a batch.
    """
    for option in ("momentum", "weight_decay", "amsgrad", "maximize"):
        if group.get(option):
            raise ValueError(
                f"managed embeddings step only the rows of a batch, which {option}={group[option]} does not allow: "
                "give them a parameter group, or an optimizer, without it"
            )
    if isinstance(optimizer, torch.optim.SGD):
        return SGDRows()
    if isinstance(optimizer, torch.optim.Adagrad):
        return AdagradRows(group["initial_accumulator_value"])
    if isinstance(optimizer, RowwiseAdagrad):
        return RowwiseAdagradRows()
    if isinstance(optimizer, torch.optim.SparseAdam) or type(optimizer) is torch.optim.Adam:
        return AdamRows(isinstance(optimizer, torch.optim.SparseAdam))
    raise ValueError(
        f"managed embeddings cannot be stepped by {type(optimizer).__name__}: use SGD, Adagrad, SparseAdam, Adam or "
        "dadplug.adapm.RowwiseAdagrad for them"
    )


# Managed weights


class Lookup:
    """One lookup of a weight.

    Args:
        keys: the distinct keys, of shape (k,).
        values: the pulled values, of shape (k, width and optimizer state).
        steps: number of optimizer steps of the weight before the lookup.
    """

    def __init__(self, keys: Tensor, values: Tensor, steps: int) -> None:
        self.keys, self.values, self.steps = keys, values, steps


class PulledRows(torch.autograd.Function):
    """Pulled rows as a function of the parameter that they replace; backward gives the parameter a sparse gradient."""

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, rows: Tensor, gradient_of: Callable[[Lookup, Tensor], Tensor], lookup: Lookup
    ) -> Tensor:
        ctx.gradient_of, ctx.lookup = gradient_of, lookup
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.gradient_of(ctx.lookup, gradients[0]), None, None, None


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
        manager: manager that the table is added to.
        first: initialiser of rows that are created at first use; None for the values of the weight.
        padding: keys whose gradient is ignored.

    Attributes:
        steps: number of steps of the row optimizer.
        weighted: whether `apply_share` has weighted all that backward has added, cleared or not.
        recorded: if it is a list, each lookup appends its distinct keys.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        row_optimizer: RowOptimizer,
        manager: ParameterManager,
        first: Initialiser | None,
        padding: set[int],
    ) -> None:
        self.name, self.parameter, self.row_optimizer, self.padding = name, parameter, row_optimizer, padding
        self.rows, self.width = parameter.shape
        self.steps = 0
        self.recorded: list[Tensor] | None = None
        self.weighted = True
        self._base: Tensor | None = None  # weighted part of a gradient that backward has added to since
        self._lookups: list[Lookup] = []  # of the gradient, so that its rows need not be pulled again
        self._backward_pass = -1
        self._handle: RemovableHandle | None = None
        self._first: NDArray[np.float32] | None = None

        def from_weights(keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
            assert self._first is not None
            out[:] = self._first[keys]

        state = row_optimizer.state_width(self.width)
        if first is None:
            self._first = parameter.detach().cpu().contiguous().numpy()
        columns = Columns([(self.width, first or from_weights), (state, Constant(row_optimizer.initial))])
        capacity = None if first is None else _INITIAL_ROWS
        self.table = manager.table(name, self.width + state, rows=self.rows, initialiser=columns, capacity=capacity)

    def give_up(self) -> None:
        """Fill the table and free the parameter's memory; all tables must have been created."""
        if self._first is not None:
            self.create_rows()
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
                weight.weighted = False
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

    def home_keys(self) -> list[Tensor]:
        """Return the keys whose home is this site, in chunks."""
        keys = torch.arange(self.table.rank, self.rows, self.table.world_size)
        return list(keys.split(_CHUNK)) if keys.numel() else []

    def create_rows(self) -> None:
        """Create the rows whose home is this site, if they have not been used."""
        for keys in self.home_keys():
            self.table.pull(keys)

    def gather(self, columns: slice) -> Tensor:
        """Pull columns of all rows; return a float32 tensor of shape (rows, number of columns)."""
        whole = torch.empty(self.rows, len(range(self.table.width)[columns]))
        for keys in torch.arange(self.rows).split(_CHUNK):
            whole[keys] = self.table.pull(keys)[:, columns]
        return whole

    def gather_weights(self) -> Tensor:
        """Pull the weights of all rows, of shape (rows, width)."""
        return self.gather(slice(self.width))

    def gather_optimizer_state(self) -> dict[str, Tensor]:
        """Pull the state of the row optimizer for all rows, by torch's names; empty if it has none."""
        parts, steps = self.row_optimizer.state_names, self.steps if self.row_optimizer.counts_steps else None
        return split_state(self.gather(slice(self.width, None)), parts, steps) if parts else {}

    def load_optimizer_state(self, state: Mapping[str, Any] | None) -> None:
        """Set the optimizer state of all rows; each site sets the rows whose home it is.

        Args:
            state: the state of the parameter in a plain optimizer; None for none, which changes nothing.

        Raises:
            ValueError: if the state does not fit the weight.
        """
        parts = self.row_optimizer.state_names
        if not state or not parts:
            return
        if missing := [part for part in parts if part not in state]:
            raise ValueError(f"the optimizer's state of {self.name} lacks {missing}: it is another optimizer's")
        columns = torch.cat([state[part].float().cpu() for part in parts], 1)
        if columns.shape != (self.rows, self.table.width - self.width):
            raise ValueError(
                f"the optimizer's state of {self.name} has shape {tuple(columns.shape)}, which does not fit"
            )
        self.steps = int(state.get("step", 0))
        for keys in self.home_keys():
            values = self.table.pull(keys)
            values[:, self.width :] = columns[keys]
            self.table.set(keys, values)

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
        elif self.weighted:  # only what is added from now on has to be weighted
            self._base = present.detach().clone()
        self._lookups.append(lookup)
        indices = lookup.keys.to(self.parameter.device).unsqueeze(0)
        values = gradient.to(self.parameter.device, self.parameter.dtype)
        return torch.sparse_coo_tensor(indices, values, (self.rows, self.width), check_invariants=False)

    @property
    def needs_share(self) -> bool:
        """Whether `apply_share` has to weight a gradient: backward has added one, and it has not been cleared."""
        gradient = self.parameter.grad
        return not self.weighted and gradient is not None and not (gradient.is_sparse and not gradient._nnz())

    @property
    def is_finite(self) -> bool:
        """Whether the gradient holds neither NaN nor Inf."""
        gradient = self.parameter.grad
        return gradient is None or bool((gradient._values() if gradient.is_sparse else gradient).isfinite().all())

    @torch.no_grad()
    def apply_share(self, share: float) -> None:
        """Weight the gradient that backward has added since the last call.

        Args:
            share: weight of this site; 0 if it has no samples and takes part in the step without rows: gradients of
                earlier steps that have not been cleared do not count, either.
        """
        gradient, base, fresh = self.parameter.grad, self._base, not self.weighted
        self.weighted, self._base = True, None
        if share == 0.0 and self.parameter.requires_grad:
            self._put(self._of_keys([], 0.0))
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

    def step(self, options: dict[str, Any], scale: float) -> None:
        """Push the deltas of one optimizer step; the gradient is kept.

        Args:
            options: options of the parameter's group in the optimizer.
            scale: factor on the gradient.
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
        for key in self.padding:
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


def split_state(columns: Tensor, parts: Sequence[str], steps: int | None) -> dict[str, Tensor]:
    """Return the state of a row optimizer as torch's optimizer has it.

    Args:
        columns: of shape (rows, width of the state).
        parts: torch's names of its parts, of equal widths.
        steps: number of steps; None if the state has none.
    """
    own = {part: value.contiguous() for part, value in zip(parts, columns.chunk(len(parts), 1), strict=True)}
    return own if steps is None else {"step": torch.tensor(float(steps))} | own


class _ManagedLayer(ForwardOverride):
    """Forward of a layer with a managed weight.

    Args:
        module: the layer.
        weight: its weight.
    """

    def __init__(self, module: Any, weight: ManagedWeight) -> None:
        super().__init__(module)
        self.layer, self.weight = module, weight

    def _place_of_padding(self, keys: Tensor) -> int | None:
        """Return the position of the layer's padding among distinct keys, of shape (k,); None if it is not there."""
        if self.layer.padding_idx is None:
            return None
        places = (keys == self.layer.padding_idx).nonzero()
        return int(places[0]) if places.numel() else None


class ManagedEmbedding(_ManagedLayer):
    """Forward of an nn.Embedding with a managed weight."""

    def __call__(self, input: Tensor) -> Tensor:
        keys, positions, rows = self.weight.rows_of(input)
        padding = self._place_of_padding(keys)
        return F.embedding(positions, rows, padding, scale_grad_by_freq=self.layer.scale_grad_by_freq)


class ManagedEmbeddingBag(_ManagedLayer):
    """Forward of an nn.EmbeddingBag with a managed weight."""

    def __call__(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        keys, positions, rows = self.weight.rows_of(input)
        return F.embedding_bag(
            positions,
            rows,
            offsets,
            scale_grad_by_freq=self.layer.scale_grad_by_freq,
            mode=self.layer.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.layer.include_last_offset,
            padding_idx=self._place_of_padding(keys),
        )


class RowSteps:
    """Gradients of managed weights from backward to the end of the optimizer's step.

    It is the `dadplug.step.reducer.reducer.AttachedGradients` of the reduction.

    Args:
        managed: the managed weights by name.
        sites: number of sites.
        reduction: the reduction of the other parameters; None if there are none.
        reduce: ``"mean"`` or ``"sum"``, see `AdaModel`.
    """

    def __init__(
        self,
        managed: Mapping[str, ManagedWeight],
        sites: int,
        reduction: GradientReduction | None,
        reduce: str,
    ) -> None:
        self._managed, self._sites, self._reduction, self._reduce = managed, sites, reduction, reduce
        self._hidden: dict[str, Tensor] = {}  # gradients, while the optimizer steps all other parameters
        if reduction is not None:
            reduction.attach(self)

    # Interface of the reduction

    @property
    def arrived(self) -> bool:
        """Whether backward has added gradients since the last synchronization, cleared or not."""
        return any(not weight.weighted for weight in self._managed.values())

    @property
    def cleared(self) -> bool:
        """Whether the program has cleared all of them."""
        return not self._unweighted()

    @property
    def names(self) -> list[str]:
        """The names of the managed weights."""
        return list(self._managed)

    def first_not_finite(self) -> int | None:
        """Return the number of the first weight whose gradient holds NaN or Inf; None if there is none."""
        weights = enumerate(self._managed.values())
        return next((number for number, weight in weights if weight.needs_share and not weight.is_finite), None)

    def apply_share(self, share: float | None) -> None:
        """Weight the gradients that have arrived.

        Args:
            share: this site's share of the samples; None if it is not known.
        """
        if self._reduce == "sum":
            share = 0.0 if share == 0.0 else 1.0
        elif share is None:
            share = 1.0 / self._sites
        for weight in self._managed.values():
            weight.apply_share(share)

    def fill_with_inf(self) -> None:
        """Replace the gradients by ones with Inf, since the gradients of some site are not finite."""
        for weight in self._managed.values():
            weight.fill_with_inf()

    # The optimizer's step

    def finish(self, what: str) -> None:
        """Weight gradients that no `synchronize` has weighted, if that needs no other site.

        Args:
            what: the operation that needs the gradients, for the message of the error.

        Raises:
            RuntimeError: if `synchronize` has to be called first.
        """
        unweighted = self._unweighted()
        if unweighted and self._reduction is not None and self._sites > 1:
            raise RuntimeError(
                f"{what} before the gradient of {unweighted[0]!r} is synchronized: call synchronize() after backward()"
            )
        if unweighted:
            self.apply_share(None)

    def _unweighted(self) -> list[str]:
        return [name for name, weight in self._managed.items() if weight.needs_share]

    def hide(self) -> None:
        """Hide the gradients of managed weights from the update of the optimizer."""
        self.finish("optimizer.step()")
        self._hidden = {}
        for name, weight in self._managed.items():
            if weight.parameter.grad is not None:
                self._hidden[name], weight.parameter.grad = weight.parameter.grad, None

    def _show(self) -> None:
        hidden, self._hidden = self._hidden, {}
        for name, gradient in hidden.items():
            self._managed[name].parameter.grad = gradient

    def step(self, optimizer: Optimizer) -> None:
        """Push the deltas of one step of an optimizer."""
        self._show()
        # A GradScaler sets these on fused optimizers, which unscale the gradients themselves.
        found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
        if found_inf is not None and found_inf.item():
            return
        factor = 1.0 if scale is None else 1.0 / scale.item()
        for weight in self._managed.values():
            weight.step(group_of(optimizer, weight.parameter), factor)


def group_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """Return the parameter group of a managed parameter.

    Raises:
        ValueError: if the optimizer no longer has the parameter.
    """
    for group in optimizer.param_groups:
        if any(parameter is other for other in group["params"]):
            return group
    raise ValueError("a managed weight has left the optimizer that AdaModel was made with")
