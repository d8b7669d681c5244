"""`AdaModel`: any model's embeddings in managed tables, without changing its code."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..model_sync.structure import mark_managed, without_managed
from ..reduction import GradientReduction
from .clip import clip_grad_norm
from .initialisers import Initialiser, Normal
from .layers import ManagedEmbedding, ManagedEmbeddingBag, find_layers
from .managed_weight import ManagedWeight
from .manager import ParameterManager
from .recorder import Recorder
from .row_optimizers import row_optimizer_for
from .row_steps import RowSteps, group_of
from .shapes import IntentError

_CHUNK = 65536  # rows that are gathered or set at a time


class AdaModel(nn.Module):
    """A model whose nn.Embedding and nn.EmbeddingBag rows live spread over the sites.

    Their forward is replaced on the instance; the model's own code stays as it is. In each step the distinct rows of
    the batch are pulled, and ``optimizer.step()`` pushes what the user's optimizer would have added to them. All other
    parameters are agreed on by `GradientReduction`, so that ``synchronize()`` belongs between backward and step.

    A table that is too large for one site stands on torch's meta device, ``nn.Embedding(rows, width, device="meta")``:
    its rows come to be when they are first used, and only those take memory.

    A weight stays an ordinary parameter where it is not float32, is used by another kind of layer as well (a tied
    output projection), or is not in the optimizer; `managed` lists those that are managed. A managed parameter holds
    NaN instead of its values and takes no memory. Its ``.grad`` is a sparse gradient of the rows that this site has
    looked up; after `synchronize` the sites' gradients add up to that of one process. Clearing it discards it, as for
    any parameter. Clip by `clip_grad_norm_`, which looks at all sites' rows.

    Args:
        model: the model, the same on all sites but for the values of its parameters, which site 0's replace.
        optimizer: the user's optimizer of the model's parameters: SGD, Adagrad, SparseAdam, Adam (which then leaves
            the moments of rows alone that are not in the batch), or `RowwiseAdagrad`.
        manager: where the tables are; a new one where None.
        backend: what a new manager runs on, see `ParameterManager`.
        reduce: ``"mean"`` weights gradients of rows by the site's share of the samples, as one process with all sites'
            rows and a mean loss would have them (equally where no other parameters are there); ``"sum"`` does not.
        initialisers: by a weight's name, what makes the first values of its rows, as they come to be, in place of the
            model's own; on the meta device ``Normal()`` where there is none, as nn.Embedding begins with.
        mode: how the other parameters are agreed on, see `dadplug.GradientReduction`.
        always_reduce: whether to make a reduction also where no other parameters are there: it keeps the sites in step,
            and tells the shares of samples.
        options: further options of `dadplug.GradientReduction`.

    Attributes:
        module: the model.
        manager: the parameter manager.
        reduction: the gradient reduction of the other parameters; None if there are none.
        managed: the managed weights by parameter name.
        clock_by_loader: whether an `AdaDataLoader` moves the clock, instead of ``optimizer.step()``.

    Raises:
        ValueError: if a layer or the optimizer has an option that rows of a batch cannot have.
        MismatchError: if the sites' models differ.
        SiteError: if a site ends or does not answer.

    Example:
        >>> optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        >>> model = AdaModel(model, optimizer)
        >>> for inputs, targets in loader:
        ...     optimizer.zero_grad()
        ...     criterion(model(inputs), targets).backward()
        ...     model.synchronize()
        ...     optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        manager: ParameterManager | None = None,
        *,
        backend: str = "builtin",
        reduce: str = "mean",
        initialisers: Mapping[str, Initialiser] | None = None,
        mode: str = "dsgd",
        always_reduce: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if reduce not in ("mean", "sum"):
            raise ValueError(f"unknown reduce {reduce!r}; valid ones are 'mean' and 'sum'")
        layers = find_layers(model, optimizer)
        initialisers = dict(initialisers or {})
        if unknown := [name for name in initialisers if name not in layers]:
            raise ValueError(f"initialisers for {unknown}, but what can be managed is {list(layers)}")
        self.module = model
        self.manager = manager if manager is not None else ParameterManager(backend=backend)
        self.managed: dict[str, ManagedWeight] = {}
        self.reduction: GradientReduction | None = None
        self._padding: dict[str, set[int]] = {}
        self._overrides: list[ManagedEmbedding | ManagedEmbeddingBag] = []
        paths = {name: [path for path, _ in modules] for name, modules in layers.items()}
        self.clock_by_loader = False
        self._recorder: Recorder | BaseException
        try:
            self._recorder = Recorder(model, paths)
        except Exception as error:  # a model that cannot be copied trains, with manual intent
            self._recorder = error
        parameters: list[Any] = [modules[0][1].weight for modules in layers.values()]
        for parameter in parameters:
            mark_managed(parameter, True)
        try:
            with without_managed(model):  # the reduction neither sends nor compares them
                if always_reduce or any(True for _ in model.parameters()):
                    self.reduction = GradientReduction(model, mode, **options)
        except BaseException:
            for parameter in parameters:
                mark_managed(parameter, False)
            raise
        for name, modules in layers.items():
            self._manage(name, modules, optimizer, initialisers.get(name))
        for weight in self.managed.values():
            weight.give_up()
        self._steps = RowSteps(self.managed, self._padding, self.manager, self.reduction, reduce)
        # By a weak reference: the optimizer, which the user may keep, does not keep the tables.
        reference = weakref.ref(self)

        def begin(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
            model = reference()
            return None if model is None else model._steps.begin(args, kwargs)

        def step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            model = reference()
            if model is not None:
                model.step_managed(optimizer)

        self._hooks = [optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(step)]

    def _manage(
        self, name: str, modules: list[tuple[str, nn.Module]], optimizer: Optimizer, first: Initialiser | None
    ) -> None:
        parameter = modules[0][1].weight
        assert isinstance(parameter, nn.Parameter)
        paddings = [module.padding_idx for _, module in modules]
        if first is None and parameter.is_meta:
            first = _with_zeros(Normal(), [int(key) for key in paddings if key is not None])  # type: ignore[arg-type]
        if first is None:
            self.manager.broadcast(parameter.data)
        self.managed[name] = weight = ManagedWeight(
            name,
            parameter,
            row_optimizer_for(optimizer, group_of(optimizer, parameter)),
            lambda width, first, capacity: self.manager.table(
                name, width, rows=parameter.shape[0], initialiser=first, capacity=capacity
            ),
            first,
        )
        self._padding[name] = set()
        for _, module in modules:
            if isinstance(module, nn.Embedding):
                self._overrides.append(ManagedEmbedding(module, weight))
            else:
                assert isinstance(module, nn.EmbeddingBag)
                self._overrides.append(ManagedEmbeddingBag(module, weight))
        if paddings.count(paddings[0]) == len(paddings) and paddings[0] is not None:
            self._padding[name].add(int(paddings[0]))  # type: ignore[arg-type]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        return self.module(*args, **kwargs)

    def synchronize(self) -> None:
        """Wait until the gradients are agreed on; call it between backward and the optimizer's step.

        After it, ``.grad`` of a managed weight is this site's part of the sites' gradient.

        Raises:
            NonFiniteError: on all sites, if the gradients of one hold NaN or Inf, with ``check_finite=True``.
            SiteError: if a site exits or does not answer.
        """
        if self.reduction is not None:
            self.reduction.synchronize()
        else:
            self._steps.apply_share(None)

    def step_managed(self, optimizer: Optimizer) -> None:
        """Push what an optimizer adds to managed rows, and move the clock on; ``optimizer.step()`` calls it."""
        self._steps.step(optimizer)
        if not self.clock_by_loader:
            self.manager.advance_clock()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, parameters: Iterable[nn.Parameter] | None = None
    ) -> Tensor:
        """Clip the gradients as `torch.nn.utils.clip_grad_norm_` does in one process; all sites must call it.

        Args:
            max_norm: the largest norm of all gradients together.
            norm_type: the order of the norm.
            parameters: some of the model's parameters; all where None.

        Returns:
            The norm before clipping.

        Raises:
            RuntimeError: if `synchronize` has not been called since the last backward pass.
        """
        self._steps.finish("clip_grad_norm_()")
        given = {id(parameter): parameter for parameter in (self.parameters() if parameters is None else parameters)}
        weights = [weight for weight in self.managed.values() if given.pop(id(weight.parameter), None) is not None]
        others = [parameter.grad for parameter in given.values() if parameter.grad is not None]
        return clip_grad_norm(self.manager, weights, others, max_norm, norm_type)

    def other_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are not managed."""
        managed = {id(weight.parameter) for weight in self.managed.values()}
        return [parameter for parameter in self.parameters() if id(parameter) not in managed]

    def record(self, forward: Callable[[Any, Any], Any], batch: Any) -> dict[str, Tensor]:
        """Finds the rows that a batch will look up, by a forward pass on shapes; see `Recorder.record`.

        Raises:
            IntentError: if they cannot be known before the forward pass.
        """
        if not isinstance(self._recorder, Recorder):
            raise IntentError(
                f"automatic intent needs a model that can be copied: {self._recorder}"
            ) from self._recorder
        return self._recorder.record(forward, batch, self.module.training)

    def intent(self, ids: Mapping[str, Tensor], start: int, end: int = 0) -> None:
        """Says which rows a batch will look up.

        Args:
            ids: by the name of a managed weight, as in `managed`, ids of any shape.
            start: the clock of the first step with the batch; `ParameterManager.current_clock` counts steps.
            end: the clock after its last step; 0 for ``start + 1``.

        Raises:
            ValueError: if no managed weight has such a name.
        """
        for name, some in ids.items():
            if name not in self.managed:
                raise ValueError(
                    f"no managed weight is called {name!r}; there are {', '.join(map(repr, self.managed))}"
                )
            self.managed[name].table.intent(some.detach().long().cpu(), start, end)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the model's state, with the whole tables, as the model without dadplug has it.

        All sites must call it, since they gather the tables.
        """
        self.manager.wait_sync(everywhere=True)
        state = dict(self.module.state_dict(*args, **kwargs))
        whole = {id(weight.parameter): self._gather(weight) for weight in self.managed.values()}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if id(parameter) in whole and name in state:
                state[name] = whole[id(parameter)]
        self.manager.barrier()
        return state

    def _gather(self, weight: ManagedWeight, columns: slice | None = None) -> Tensor:
        columns = slice(weight.width) if columns is None else columns
        whole = torch.empty(weight.rows, len(range(weight.table.width)[columns]))
        for start in range(0, weight.rows, _CHUNK):
            keys = torch.arange(start, min(start + _CHUNK, weight.rows))
            whole[keys] = weight.table.pull(keys)[:, columns]
        return whole

    def _optimizer_states(self) -> dict[str, dict[str, Tensor]]:
        """Gathers the state of the rows' optimizer by weight, as torch's own has it."""
        found = {}
        for name, weight in self.managed.items():
            if parts := weight.row_optimizer.state_names:
                state = self._gather(weight, slice(weight.width, None)).chunk(len(parts), 1)
                own = {part: value.contiguous() for part, value in zip(parts, state, strict=True)}
                step = {"step": torch.tensor(float(weight.steps))} if weight.row_optimizer.counts_steps else {}
                found[name] = step | own
        return found

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the optimizer's state, with that of all rows, as the optimizer without dadplug has it.

        All sites must call it, since they gather the tables.
        """
        self.manager.wait_sync(everywhere=True)
        state = optimizer.state_dict()
        states = dict(state["state"])
        numbers = places(optimizer)
        for name, rows in self._optimizer_states().items():
            states[numbers[id(self.managed[name].parameter)]] = rows
        self.manager.barrier()
        return state | {"state": states}

    def load_optimizer_state_dict(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Loads an optimizer's state, of all rows too; all sites must call it with the same.

        Raises:
            ValueError: if the state of a managed weight does not fit.
        """
        states = dict(state_dict["state"])
        numbers = places(optimizer)
        own = {name: states.pop(numbers[id(weight.parameter)], None) for name, weight in self.managed.items()}
        optimizer.load_state_dict({**state_dict, "state": states})
        self.manager.wait_sync(everywhere=True)
        for name, rows in own.items():
            weight = self.managed[name]
            if not rows or not weight.row_optimizer.state_names:
                continue
            if missing := [part for part in weight.row_optimizer.state_names if part not in rows]:
                raise ValueError(f"the optimizer's state of {name} lacks {missing}: it is another optimizer's")
            state = torch.cat([rows[part].float().cpu() for part in weight.row_optimizer.state_names], 1)
            if state.shape != (weight.rows, weight.table.width - weight.width):
                raise ValueError(f"the optimizer's state of {name} has shape {tuple(state.shape)}, which does not fit")
            weight.steps = int(rows.get("step", 0))
            for keys in weight.home_keys(self.manager.rank, self.manager.world_size):
                values = weight.table.pull(keys)
                values[:, weight.width :] = state[keys]
                weight.table.set(keys, values)
        self.manager.wait_sync(everywhere=True)

    def unwrap(self, optimizer: Optimizer) -> None:
        """Gives model and optimizer their whole weights and states back, and closes; all sites must call it."""
        self.manager.wait_sync(everywhere=True)
        states = self._optimizer_states()
        for name, weight in self.managed.items():
            whole = self._gather(weight)
            weight.parameter.data = whole.to(weight.parameter.device)
            if name in states:
                optimizer.state[weight.parameter] = states[name]
        self.manager.barrier()
        self.close()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state of the model without dadplug; all sites must call it with the same.

        The state of the rows' optimizer begins anew.
        """
        names = {
            name: weight
            for name, parameter in self.module.named_parameters(remove_duplicate=False)
            for weight in self.managed.values()
            if weight.parameter is parameter and name in state_dict
        }
        for name, weight in names.items():
            if state_dict[name].shape != (weight.rows, weight.width):
                raise ValueError(
                    f"{name} has shape {tuple(state_dict[name].shape)} in the state, {(weight.rows, weight.width)} here"
                )
        rest = {name: value for name, value in state_dict.items() if name not in names}
        result = self.module.load_state_dict(rest, strict=False)
        missing = [name for name in result.missing_keys if name not in names]
        if strict and (missing or result.unexpected_keys):
            raise ValueError(f"the state lacks {missing} and has {result.unexpected_keys} besides")
        self.manager.wait_sync(everywhere=True)
        for weight, name in {weight: name for name, weight in names.items()}.items():
            for keys in weight.home_keys(self.manager.rank, self.manager.world_size):
                fresh = torch.zeros(keys.numel(), weight.table.width)
                fresh[:, : weight.width] = state_dict[name][keys]
                weight.table.set(keys, fresh)
        self.manager.wait_sync(everywhere=True)
        return result

    def close(self) -> None:
        """Take hooks, gradients of rows and replaced forwards off; the tables stay with the manager."""
        for hook in self._hooks:
            hook.remove()
        for weight in self.managed.values():
            weight.release()
        for override in self._overrides:
            override.restore()
        if self.reduction is not None:
            self.reduction.detach()


def _with_zeros(first: Initialiser, zeros: list[int]) -> Initialiser:
    """Makes some rows begin with zeros, as nn.Embedding has it for its padding."""

    def initialise(keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        first(keys, out)
        out[np.isin(keys, zeros)] = 0.0

    return initialise


def places(optimizer: Optimizer) -> dict[int, int]:
    """Numbers parameters, by their id, as the optimizer's state does."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {id(parameter): place for place, parameter in enumerate(parameters)}
