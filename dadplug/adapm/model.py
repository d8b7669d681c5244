"""`AdaModel`: the embeddings of any model in managed tables, without changes to its code; and `AdaDataLoader`."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import GenericAlias
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..errors import IntentError
from ..exchange.fields import check_all, checked
from ..lowrank import sparse
from ..reduction import GradientReduction
from ..step.model_sync.structure import before_update, mark_managed, without_managed
from ..support.refusals import refuse
from ..support.signature import check_choice
from .managed_weight import ManagedEmbedding, ManagedEmbeddingBag, ManagedWeight, RowSteps, group_of, row_optimizer_for
from .manager import ParameterManager
from .recorder import Recorder
from .store import Initialiser, Normal

_POLL = 0.1  # seconds between checks whether the reading thread of a loader has to stop

Ids = Mapping[str, Tensor]
Layers = list[tuple[str, Any]]  # paths and layers that share a weight


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
            the batch then do not change) or `RowwiseAdagrad`. Sites step a row by their own parts of the gradient, and
            the steps add up: with several sites at a row in one step, only SGD has the result of one process.
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
        check_choice("reduce", reduce, ("mean", "sum"))
        layers = find_layers(model, optimizer)
        initialisers = dict(initialisers or {})
        if unknown := [name for name in initialisers if name not in layers]:
            raise ValueError(f"initialisers for {unknown}, but what can be managed is {list(layers)}")
        self.module = model
        self.manager = manager if manager is not None else ParameterManager(backend=backend)
        self.managed: dict[str, ManagedWeight] = {}
        self.clock_by_loader = False
        self._overrides: list[ManagedEmbedding | ManagedEmbeddingBag] = []
        self._recorder: Recorder | Exception
        try:
            self._recorder = Recorder(model, {name: [path for path, _ in found] for name, found in layers.items()})
        except Exception as error:  # the model cannot be copied; it can still be trained with manual intent
            self._recorder = error
        weights = [modules[0][1].weight for modules in layers.values()]
        self.reduction = _make_reduction(model, weights, mode, always_reduce, options)
        for name, modules in layers.items():
            self._manage(name, modules, optimizer, initialisers.get(name))
        for weight in self.managed.values():
            weight.give_up()
        self._steps = RowSteps(self.managed, self.manager.world_size, self.reduction, reduce)
        self._hooks = _register_hooks(self, optimizer)

    def _manage(self, name: str, modules: Layers, optimizer: Optimizer, first: Initialiser | None) -> None:
        parameter: nn.Parameter = modules[0][1].weight
        paddings = {module.padding_idx for _, module in modules}
        given = {int(key) for key in paddings if key is not None}
        if first is None and parameter.is_meta:
            first = _with_zeros(Normal(), list(given))
        if first is None:
            self.manager.transport.broadcast(parameter.data)
        row_optimizer = row_optimizer_for(optimizer, group_of(optimizer, parameter))
        ignored = given if len(paddings) == 1 else set()  # a key that only some layers pad has a gradient
        weight = ManagedWeight(name, parameter, row_optimizer, self.manager, first, ignored)
        self.managed[name] = weight
        for _, module in modules:
            managed = ManagedEmbedding if isinstance(module, nn.Embedding) else ManagedEmbeddingBag
            self._overrides.append(managed(module, weight))

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

    @torch.no_grad()
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
        parts = [torch.linalg.vector_norm(gradient, norm_type).cpu() for gradient in others]
        parts += [torch.linalg.vector_norm(rows, norm_type) for rows in _rows_of_all_sites(self.manager, weights)]
        if not parts:
            return torch.tensor(0.0)
        total: Tensor = torch.linalg.vector_norm(torch.stack([part.double() for part in parts]), norm_type)
        factor = float(torch.clamp(max_norm / (total + 1e-6), max=1.0))
        for gradient in (*others, *(weight.parameter.grad for weight in weights)):
            if gradient is not None:
                gradient.mul_(factor)
        return total

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
        whole = {id(weight.parameter): weight.gather_weights() for weight in self.managed.values()}
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
            for keys in weight.home_keys():
                fresh = torch.zeros(keys.numel(), weight.table.width)
                fresh[:, : weight.width] = state_dict[name][keys]
                weight.table.set(keys, fresh)
        self.manager.wait_sync(everywhere=True)
        return result

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
        for weight in self.managed.values():
            if rows := weight.gather_optimizer_state():
                states[numbers[id(weight.parameter)]] = rows
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
            self.managed[name].load_optimizer_state(rows)
        self.manager.wait_sync(everywhere=True)

    def unwrap(self, optimizer: Optimizer) -> None:
        """Restore the whole weights and states in model and optimizer, and close; all sites must call it.

        Args:
            optimizer: the optimizer that the model was created with.
        """
        self.manager.wait_sync(everywhere=True)
        for weight in self.managed.values():
            weight.parameter.data = weight.gather_weights().to(weight.parameter.device)
            if state := weight.gather_optimizer_state():
                optimizer.state[weight.parameter] = state
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


def parameter_numbers(optimizer: Optimizer) -> dict[int, int]:
    """Return the numbers of an optimizer's parameters in its state, by the id of the parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {id(parameter): number for number, parameter in enumerate(parameters)}


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
    """Register hooks before the optimizer's update and after its step; they hold a weak reference to the model.

    So an optimizer that outlives the model does not keep the tables.
    """
    reference = weakref.ref(model)

    def hide() -> None:
        model = reference()
        if model is not None:
            model._steps.hide()

    def step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        model = reference()
        if model is not None:
            model.step_managed(optimizer)

    return [before_update(optimizer, hide), optimizer.register_step_post_hook(step)]


def _with_zeros(first: Initialiser, zeros: list[int]) -> Initialiser:
    """Return an initialiser that sets some rows to zeros, as nn.Embedding does for its padding."""

    def initialise(keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        first(keys, out)
        out[np.isin(keys, zeros)] = 0.0

    return initialise


def find_layers(model: nn.Module, optimizer: Optimizer) -> dict[str, Layers]:
    """Find the layers whose weights can be managed.

    Args:
        model: the model.
        optimizer: the optimizer; weights that it does not have are left out.

    Returns:
        By the name of the weight, the paths and layers that share it.

    Raises:
        ValueError: if such a layer has `max_norm`.
    """
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    owners: dict[int, Layers] = {}
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
            continue  # a subclass may use its weight in other ways
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


def _rows_of_all_sites(manager: ParameterManager, weights: list[ManagedWeight]) -> list[Tensor]:
    """Sum the gradients of managed rows over the sites; return one matrix per weight, of shape (rows, width)."""
    own = [sparse.sum_duplicates(*weight.rows_of_gradient()) for weight in weights]
    lengths = tuple(keys.numel() for keys, _ in own)
    every, kind = manager.transport.gather_present(lengths), GenericAlias(tuple, (int,) * len(own))
    by_site = checked(every, kind, "list of counts", manager.transport)
    for rank, lengths in by_site.items():
        for weight, length in zip(weights, lengths, strict=True):  # distinct rows of the table
            check_all("list of counts", manager.transport.sites[rank], [length], 0, weight.rows)
    counts = [*by_site.values()]
    found = []
    for number, (keys, rows) in enumerate(own):
        of_sites = [count[number] for count in counts]
        begin = sum(of_sites[: manager.rank])
        mine = slice(begin, begin + keys.numel())
        all_keys = keys.new_zeros(sum(of_sites))
        all_rows = rows.new_zeros(sum(of_sites), rows.shape[1])
        all_keys[mine], all_rows[mine] = keys, rows
        if all_keys.numel():
            manager.transport.all_reduce(all_keys).wait()
            manager.transport.all_reduce(all_rows).wait()
        found.append(sparse.sum_duplicates(all_keys, all_rows)[1])
    return found


class AdaDataLoader:
    """Loader that reads another loader ahead in a thread, and signals intent for the rows of each batch.

    Batches are yielded unchanged and in order. Each yielded batch advances the clock, in place of each step of the
    optimizer, so that gradient accumulation works. Other attributes (``sampler``, ``batch_sampler``, ``dataset``) are
    those of the wrapped loader.

    Args:
        loader: iterable of batches that can be iterated repeatedly.
        model: the model.
        intent: function from a batch to ids by the names in ``model.managed``; ``"auto"`` to find them by a forward
            pass on shapes.
        forward: for ``"auto"``, a function that calls a model with a batch as the training step does; None to pass the
            batch, or its first element if it is a tuple or list.
        lookahead: number of batches to read ahead.

    Raises:
        ValueError: if an option is out of range.
        IntentError: while iterating, if ids cannot be known before the forward pass.

    Example:
        >>> import torch
        >>> from dadplug.adapm import AdaDataLoader, AdaModel
        >>> model = torch.nn.Sequential(torch.nn.Embedding(100, 8), torch.nn.Flatten(), torch.nn.Linear(24, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model = AdaModel(model, optimizer)
        >>> for ids in AdaDataLoader(torch.randint(100, (5, 4, 3)), model, lookahead=2):
        ...     optimizer.zero_grad()
        ...     model(ids).square().mean().backward()
        ...     model.synchronize()
        ...     optimizer.step()
        >>> model.manager.current_clock
        5
        >>> model.manager.close()
    """

    def __init__(
        self,
        loader: Any,
        model: AdaModel,
        *,
        intent: str | Callable[[Any], Ids] = "auto",
        forward: Callable[[Any, Any], Any] | None = None,
        lookahead: int = 16,
    ) -> None:
        refuse(
            (lookahead < 1, f"lookahead must be at least 1, got {lookahead}"),
            (
                intent != "auto" and not callable(intent),
                f"intent must be 'auto' or a function from a batch to its ids, got {intent!r}",
            ),
        )
        self.loader = loader
        self.model = model
        self.lookahead = lookahead
        self._forward = forward if forward is not None else _call
        self._intent = intent
        model.clock_by_loader = True

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def ids(self, batch: Any) -> Ids:
        """Return the ids that a batch will look up, by the name of the weight.

        Args:
            batch: a batch of the loader.

        Raises:
            IntentError: if they cannot be known before the forward pass.
        """
        if callable(self._intent):
            return self._intent(batch)
        return self.model.record(self._forward, batch)

    def announce(self, batch: Any, clock: int, number: int) -> None:
        """Signal intent for the rows of a batch; called in the reading thread.

        Args:
            batch: the batch.
            clock: clock at which it will be used.
            number: number of the batch since the start of the iteration, from 0.
        """
        self.model.intent(self.ids(batch), clock)

    def __iter__(self) -> Iterator[Any]:
        manager = self.model.manager
        begin = manager.current_clock + 1  # the clock of the first batch
        ready: queue.Queue[tuple[str, Any]] = queue.Queue(self.lookahead)
        stop = threading.Event()

        def put(item: tuple[str, Any]) -> bool:
            while not stop.is_set():
                try:
                    ready.put(item, timeout=_POLL)
                    return True
                except queue.Full:
                    continue
            return False

        def read() -> None:
            try:
                for number, batch in enumerate(self.loader):
                    self.announce(batch, begin + number, number)
                    if not put(("batch", batch)):
                        return
                put(("end", None))
            except BaseException as error:
                put(("error", error))

        thread = threading.Thread(target=read, name="dadplug-ahead", daemon=True)
        thread.start()
        try:
            while True:
                kind, item = ready.get()
                if kind == "end":
                    return
                if kind == "error":
                    raise item
                manager.advance_clock()
                yield item
        finally:
            stop.set()
            thread.join()


def _call(model: Any, batch: Any) -> Any:
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)
