"""`AdaModel`: the embeddings of any model in managed tables, without changes to its code."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..errors import IntentError
from ..model_sync.structure import mark_managed, without_managed
from ..reduction import GradientReduction
from .clip import clip_grad_norm
from .initialisers import Initialiser, Normal
from .layers import ManagedEmbedding, ManagedEmbeddingBag, find_layers
from .managed_weight import ManagedWeight
from .manager import ParameterManager
from .model_state import gather_optimizer_states, gather_rows, load_model_state, load_optimizer_state, parameter_numbers
from .recorder import Recorder
from .row_optimizers import row_optimizer_for
from .row_steps import RowSteps, group_of

Layers = list[tuple[str, nn.Module]]  # paths and layers that share a weight


class AdaModel(nn.Module):
    """Model whose nn.Embedding and nn.EmbeddingBag rows live in tables spread over the sites.

    The forward methods of these layers are replaced on the instance; the model's code does not change. Each step pulls
    the distinct rows of the batch, and ``optimizer.step()`` pushes their deltas. The gradients of all other parameters
    are reduced by `dadplug.GradientReduction`, so `synchronize` has to be called between backward and step.

    A table that is too large for one site is created on torch's meta device, ``nn.Embedding(rows, width,
    device="meta")``. Its rows are created at first use, and only these take memory.

    A weight remains an ordinary parameter if it is not float32, is used by another kind of layer as well (a tied output
    projection), or is not in the optimizer. The parameter of a managed weight holds NaN and takes no memory. Its
    ``.grad`` is a sparse gradient of the rows that this site has looked up; after `synchronize`, the sum of the sites'
    gradients is the gradient of one process with all rows. Clip with `clip_grad_norm_`, which includes the rows of all
    sites.

    Args:
        model: the model; structures must be equal on all sites. Parameters are replaced by those of site 0.
        optimizer: optimizer of the model's parameters: SGD, Adagrad, SparseAdam, Adam (moments of rows that are not in
            the batch then do not change) or `RowwiseAdagrad`.
        manager: parameter manager of the tables; None for a new one.
        backend: backend of a new manager, see `ParameterManager`.
        reduce: ``"mean"`` weights the gradients of rows by the site's share of the samples, as one process with all
            rows and a mean loss would (equally if there are no other parameters); ``"sum"`` adds them up.
        initialisers: by the name of a weight, initialisers of its rows, in place of the values of the model. On the
            meta device the default is ``Normal()``, as for nn.Embedding.
        mode: method for the other parameters, see `dadplug.GradientReduction`.
        always_reduce: whether to create a reduction even if there are no other parameters, which keeps the sites in
            step and provides the shares of samples.
        options: further options of `dadplug.GradientReduction`.

    Attributes:
        module: the model.
        manager: the parameter manager.
        reduction: the gradient reduction of the other parameters; None if there are none.
        managed: the managed weights by parameter name.
        clock_by_loader: whether an `AdaDataLoader` advances the clock, instead of ``optimizer.step()``.

    Raises:
        ValueError: if a layer or the optimizer has an option that is not supported for rows.
        MismatchError: if the sites' models differ.
        SiteError: if a site exits or does not answer.

    Example:
        >>> import torch
        >>> from dadplug.adapm import AdaModel
        >>> model = torch.nn.Sequential(torch.nn.Embedding(100, 8), torch.nn.Flatten(), torch.nn.Linear(24, 1))
        >>> optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        >>> model = AdaModel(model, optimizer)
        >>> for ids in torch.randint(100, (5, 4, 3)):
        ...     optimizer.zero_grad()
        ...     model(ids).square().mean().backward()
        ...     model.synchronize()
        ...     optimizer.step()
        >>> model.state_dict()["0.weight"].shape
        torch.Size([100, 8])
        >>> model.manager.close()
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
        self.clock_by_loader = False
        self._padding: dict[str, set[int]] = {}
        self._overrides: list[ManagedEmbedding | ManagedEmbeddingBag] = []
        self._recorder = _make_recorder(model, layers)
        weights: list[Any] = [modules[0][1].weight for modules in layers.values()]
        self.reduction = _make_reduction(model, weights, mode, always_reduce, options)
        for name, modules in layers.items():
            self._manage(name, modules, optimizer, initialisers.get(name))
        for weight in self.managed.values():
            weight.give_up()
        self._steps = RowSteps(self.managed, self._padding, self.manager, self.reduction, reduce)
        self._hooks = _register_hooks(self, optimizer)

    def _manage(self, name: str, modules: Layers, optimizer: Optimizer, first: Initialiser | None) -> None:
        parameter = modules[0][1].weight
        assert isinstance(parameter, nn.Parameter)
        paddings: list[Any] = [module.padding_idx for _, module in modules]
        if first is None and parameter.is_meta:
            first = _with_zeros(Normal(), [int(key) for key in paddings if key is not None])
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
            self._padding[name].add(int(paddings[0]))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*args, **kwargs)

    def synchronize(self) -> None:
        """Wait until the gradients are reduced; call it between backward and the optimizer's step.

        Afterwards ``.grad`` of a managed weight is this site's part of the gradient of all sites.

        Raises:
            NonFiniteError: on all sites, if the gradients of one hold NaN or Inf and ``check_finite=True``.
            SiteError: if a site exits or does not answer.
        """
        if self.reduction is not None:
            self.reduction.synchronize()
        else:
            self._steps.apply_share(None)

    def step_managed(self, optimizer: Optimizer) -> None:
        """Push the deltas of managed rows and advance the clock; ``optimizer.step()`` calls it."""
        self._steps.step(optimizer)
        if not self.clock_by_loader:
            self.manager.advance_clock()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, parameters: Iterable[nn.Parameter] | None = None
    ) -> Tensor:
        """Clip the gradients as `torch.nn.utils.clip_grad_norm_` does in one process; all sites must call it.

        Args:
            max_norm: upper bound of the norm of all gradients together.
            norm_type: order of the norm.
            parameters: some of the model's parameters; None for all.

        Returns:
            The norm before clipping, a tensor of no dimensions on the CPU.

        Raises:
            RuntimeError: if `synchronize` has not been called since the last backward pass.

        Example:
            >>> import torch
            >>> model = torch.nn.Embedding(10, 2)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> model = AdaModel(model, optimizer)
            >>> model(torch.tensor([1, 2])).sum().backward()
            >>> model.synchronize()
            >>> model.clip_grad_norm_(1.0)
            tensor(2., dtype=torch.float64)
            >>> model.manager.close()
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
        """Find the rows that a batch will look up, by a forward pass on shapes.

        Args:
            forward: function of the model and the batch, such as ``lambda model, batch: model(batch[0])``.
            batch: tensors in any nesting; only the shapes of floating-point tensors are used.

        Returns:
            The distinct ids by the name of a managed weight.

        Raises:
            IntentError: if they cannot be known before the forward pass.
        """
        if not isinstance(self._recorder, Recorder):
            raise IntentError(
                f"automatic intent needs a model that can be copied: {self._recorder}"
            ) from self._recorder
        return self._recorder.record(forward, batch, self.module.training)

    def intent(self, ids: Mapping[str, Tensor], start: int, end: int = 0) -> None:
        """Signal that this site will look up rows; returns at once.

        Args:
            ids: by the name of a managed weight, as in `managed`, whole numbers of any shape.
            start: clock of the first step that uses them; `ParameterManager.current_clock` counts steps.
            end: clock after the last step that uses them; 0 for ``start + 1``.

        Raises:
            ValueError: if there is no managed weight of a name.
        """
        for name, some in ids.items():
            if name not in self.managed:
                raise ValueError(
                    f"no managed weight is called {name!r}; there are {', '.join(map(repr, self.managed))}"
                )
            self.managed[name].table.intent(some.detach().long().cpu(), start, end)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state of the model with whole tables, under the names of the plain model.

        All sites must call it, since it gathers the tables. A site needs memory for all of them.
        """
        self.manager.wait_sync(everywhere=True)
        state = dict(self.module.state_dict(*args, **kwargs))
        whole = {id(weight.parameter): gather_rows(weight) for weight in self.managed.values()}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if id(parameter) in whole and name in state:
                state[name] = whole[id(parameter)]
        self.manager.barrier()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the state of a plain model; the state of the row optimizers is reset. All sites must call it.

        Args:
            state_dict: the state, equal on all sites.
            strict: whether missing and unexpected names are errors.
            assign: not used.

        Returns:
            The result of `torch.nn.Module.load_state_dict`.

        Raises:
            ValueError: if a name or shape does not fit.
        """
        return load_model_state(self.manager, self.module, self.managed, state_dict, strict)

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of the optimizer with that of all rows, as the plain optimizer has it.

        All sites must call it, since it gathers the tables.

        Args:
            optimizer: the optimizer that the model was created with.
        """
        self.manager.wait_sync(everywhere=True)
        state = optimizer.state_dict()
        states = dict(state["state"])
        numbers = parameter_numbers(optimizer)
        for name, rows in gather_optimizer_states(self.managed).items():
            states[numbers[id(self.managed[name].parameter)]] = rows
        self.manager.barrier()
        return state | {"state": states}

    def load_optimizer_state_dict(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Load the state of an optimizer, including that of all rows; all sites must call it.

        Args:
            optimizer: the optimizer that the model was created with.
            state_dict: a state as returned by `optimizer_state_dict`, equal on all sites.

        Raises:
            ValueError: if the state of a managed weight does not fit.
        """
        states = dict(state_dict["state"])
        numbers = parameter_numbers(optimizer)
        own = {name: states.pop(numbers[id(weight.parameter)], None) for name, weight in self.managed.items()}
        optimizer.load_state_dict({**state_dict, "state": states})
        self.manager.wait_sync(everywhere=True)
        for name, rows in own.items():
            load_optimizer_state(self.manager, name, self.managed[name], rows)
        self.manager.wait_sync(everywhere=True)

    def unwrap(self, optimizer: Optimizer) -> None:
        """Restore the whole weights and states in model and optimizer, and close; all sites must call it.

        Args:
            optimizer: the optimizer that the model was created with.
        """
        self.manager.wait_sync(everywhere=True)
        states = gather_optimizer_states(self.managed)
        for name, weight in self.managed.items():
            weight.parameter.data = gather_rows(weight).to(weight.parameter.device)
            if name in states:
                optimizer.state[weight.parameter] = states[name]
        self.manager.barrier()
        self.close()

    def close(self) -> None:
        """Remove hooks, gradients of rows and replaced forward methods; the manager keeps the tables."""
        for hook in self._hooks:
            hook.remove()
        for weight in self.managed.values():
            weight.release()
        for override in self._overrides:
            override.restore()
        if self.reduction is not None:
            self.reduction.detach()


def _make_recorder(model: nn.Module, layers: Mapping[str, Layers]) -> Recorder | Exception:
    """Return a recorder, or the error if the model cannot be copied; it can still be trained with manual intent."""
    try:
        return Recorder(model, {name: [path for path, _ in modules] for name, modules in layers.items()})
    except Exception as error:
        return error


def _make_reduction(
    model: nn.Module, weights: list[nn.Parameter], mode: str, always_reduce: bool, options: dict[str, Any]
) -> GradientReduction | None:
    """Mark weights as managed, and create the reduction of the other parameters; None if there are none."""
    for weight in weights:
        mark_managed(weight, True)
    try:
        with without_managed(model):  # the reduction neither sends nor compares them
            if always_reduce or any(True for _ in model.parameters()):
                return GradientReduction(model, mode, **options)
            return None
    except BaseException:
        for weight in weights:
            mark_managed(weight, False)
        raise


def _register_hooks(model: AdaModel, optimizer: Optimizer) -> list[Any]:
    """Register hooks before and after the optimizer's step; they hold a weak reference to the model.

    So an optimizer that outlives the model does not keep the tables.
    """
    reference = weakref.ref(model)

    def begin(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        model = reference()
        return None if model is None else model._steps.begin(args, kwargs)

    def step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        model = reference()
        if model is not None:
            model.step_managed(optimizer)

    return [optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(step)]


def _with_zeros(first: Initialiser, zeros: list[int]) -> Initialiser:
    """Return an initialiser that sets some rows to zeros, as nn.Embedding does for its padding."""

    def initialise(keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        first(keys, out)
        out[np.isin(keys, zeros)] = 0.0

    return initialise
