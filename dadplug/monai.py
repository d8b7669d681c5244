"""MONAI's and ignite's engines between sites: `SiteHandler`, and metrics over the sites that are present.

trainer = SupervisedTrainer(..., train_handlers=[SiteHandler(mode="rankdad"), ValidationHandler(...)])
trainer.run()

Import it before the first engine or metric is made: over a hub, ignite then gets the numbers of the sites without an
exchange, in which absent sites would be missed.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from numbers import Number
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .errors import MismatchError
from .exchange import Traffic, Transport, gather_objects, open_transport
from .exchange.fields import NUMBER, checked, fits
from .hub import current_connection
from .hub.connect import connect
from .options import Options
from .reduction import GradientReduction
from .runners import present
from .runners.patches import SharedPatch, metrics_of_present_sites
from .step.model_sync.replicated_model import Stateful
from .support.refusals import refuse
from .support.signature import takes_keywords_of

try:
    import ignite.distributed as idist
    import ignite.distributed.utils
    import ignite.metrics
    from ignite.distributed.comp_models.native import _NativeDistModel
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint
except ImportError as error:
    raise ImportError("dadplug.monai needs pytorch-ignite: pip install 'dadplug[monai]'") from error

__all__ = ["SiteHandler", "mean_over_sites", "save_at_each_site"]

_Saver = TypeVar("_Saver")


class SiteModel(_NativeDistModel):
    """Numbers and collectives of the sites of a hub, for ignite.

    In a run with a `SiteHandler` and ``min_sites``, collectives are those of the sites that are present.
    """

    name = "dadplug"

    @staticmethod
    def create_from_context() -> SiteModel | None:
        """Return the model of this process; None where it is not connected to a hub."""
        return SiteModel() if current_connection() is not None and dist.is_initialized() else None

    def _init_from_context(self) -> None:
        self._backend = dist.get_backend()
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._nproc_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._nnodes = max(1, dist.get_world_size() // self._nproc_per_node)
        self._node = dist.get_rank() // self._nproc_per_node

    def _do_all_reduce(self, tensor: Tensor, op: str = "SUM", group: Any = None) -> Any:
        transport = present.metrics_transport.get()
        if transport is None or group is not None:
            return super()._do_all_reduce(tensor, op, group)
        return present.reduce(transport, tensor, op).to(tensor.dtype)

    def _do_all_gather(self, tensor: Tensor, group: Any = None) -> Any:
        transport = present.metrics_transport.get()
        if transport is None or group is not None:
            return super()._do_all_gather(tensor, group)
        return torch.cat(present.gather(transport, torch.atleast_1d(tensor.detach()), 0)).to(tensor.device)

    def _do_all_gather_object(self, tensor: Any, group: Any = None) -> Any:
        transport = present.metrics_transport.get()
        if transport is None or group is not None:
            return gather_objects(tensor, group)  # torch's unpickles what arrives
        return present.gather(transport, tensor)

    def _do_broadcast(self, tensor: Tensor, src: int) -> Any:
        transport = present.metrics_transport.get()
        if transport is None:
            return super()._do_broadcast(tensor, src)
        return present.broadcast(transport, tensor.detach(), src).to(tensor.device)

    def all_gather(self, tensor: Any, group: Any = None) -> Any:
        """Gather texts as objects, since ignite makes room for as many characters as a site states."""
        if isinstance(tensor, str):
            return self._do_all_gather_object(tensor, group)
        return super().all_gather(tensor, group)

    def broadcast(self, tensor: Any, src: int = 0, safe_mode: bool = False) -> Any:
        """Send as an object what ignite describes by an expression of Python, which it evaluates, or by a length."""
        if isinstance(tensor, (Tensor, Number)) and not safe_mode:
            return super().broadcast(tensor, src)
        transport = present.metrics_transport.get()
        if transport is not None:
            found = present.broadcast(transport, tensor, src)
        else:
            found = gather_objects(tensor if self.get_rank() == src else None)[src]
        if not isinstance(found, (Tensor, Number, str)):
            raise MismatchError(f"process {src} has sent an object of type {type(found).__name__} in idist.broadcast()")
        return found

    def barrier(self) -> None:
        transport = present.metrics_transport.get()
        if transport is None:
            super().barrier()
        else:
            present.gather(transport, 0)


# ignite uses `SiteModel` over a hub, also where it has looked for the sites before.
ignite.distributed.utils.registered_computation_models = (
    SiteModel,
    *ignite.distributed.utils.registered_computation_models,
)
if current_connection() is not None:
    idist.sync()


def _restoring(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a metric's method so that a failure leaves its attributes as they were."""

    def compute(metric: Any, *args: Any, **kwargs: Any) -> Any:
        before = dict(vars(metric))
        try:
            return original(metric, *args, **kwargs)
        except BaseException:
            vars(metric).update(before)
            raise

    return compute


def _pooling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace MONAI's gather of tensors of different lengths, which makes room for as many rows as a site states."""

    @functools.wraps(original)
    def gather(data: Any, concat: bool = True) -> Any:
        transport = present.metrics_transport.get()
        if transport is None or not isinstance(data, Tensor):
            return original(data, concat)
        parts = [each.to(data.device) for each in present.gather(transport, data.detach(), min(1, data.dim()))]
        return torch.cat(parts) if concat else parts

    return gather


_PATCHES = [
    SharedPatch(lambda: ignite.metrics.Metric, "completed", lambda original: present.repeating(_restoring(original)))
]
if importlib.util.find_spec("monai") is not None:
    _PATCHES.append(
        SharedPatch(lambda: importlib.import_module("monai.metrics.metric").Cumulative, "_sync", present.repeating)
    )
    for _name in ("monai.metrics.metric", "monai.handlers.classification_saver", "monai.utils.dist"):
        _module = functools.partial(importlib.import_module, _name)
        _PATCHES.append(SharedPatch(_module, "evenly_divisible_all_gather", _pooling))


class _EnginePlace:
    """Number of the iteration at which a site that joins begins.

    Args:
        engine: the engine.

    Attributes:
        iteration: iterations of the engine before the current step.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.iteration = engine.state.iteration

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        iteration, own = state["iteration"], self._engine.state
        if not fits(iteration, int) or not 0 <= iteration < (own.max_epochs or NUMBER) * own.epoch_length:
            raise ValueError(f"the number of the iteration is {iteration!r}")
        self.iteration = own.iteration = iteration
        own.epoch = iteration // own.epoch_length


class SiteHandler:
    """Handler by which the sites agree on the gradients of an engine's network, in each iteration.

    List it before all other handlers of a MONAI trainer. It needs no change of the trainer's step: gradients are final
    when ``backward()`` returns. With ``accumulation_steps`` of MONAI's trainer, they are exchanged once an optimizer's
    step. Before handlers of the end of an epoch, buffers are averaged, if the option ``average_buffers`` is set.

    With ``min_sites`` over a hub, sites may leave; a site that is started again joins at the iteration of the others,
    with their optimizer. From the start of the run on, metrics of ignite and MONAI are those of the present sites.

    Args:
        mode: name of a method, as in `dadplug.GradientReduction`.
        network: the network; that of the engine (``engine.network``) where None.
        optimizer: its optimizer, which a site needs to join; that of the engine (``engine.optimizer``) where None.
        state: further objects that a site needs to join, such as a learning rate scheduler, by name.
        kit: folder of this site's kit, by which it connects to a hub. None: the present connection, or processes that a
            launcher such as torchrun has started. See `dadplug.connect`.
        options: the other options, see `dadplug.options.Options`. ``check_finite`` is False under a MONAI trainer with
            ``amp=True``, whose GradScaler looks for Inf.

    Attributes:
        reduction: the reduction; None before the first run.

    Raises:
        ValueError: if an option is unknown or not valid; further errors are those of `dadplug.connect`.

    Example:
        >>> trainer = SupervisedTrainer(..., train_handlers=[SiteHandler(mode="rankdad"), validation])
        >>> trainer.run()
    """

    @takes_keywords_of(Options)
    def __init__(
        self,
        mode: str = "rankdad",
        *,
        network: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        state: Mapping[str, Stateful] | None = None,
        kit: str | Path | None = None,
        **options: Any,
    ) -> None:
        self.options = Options.create(mode=mode, **options)
        self._keywords = {"mode": mode, **options}
        connect(kit=kit, timeout=self.options.timeout)
        self._network, self._optimizer, self._state = network, optimizer, dict(state or {})
        self._place: _EnginePlace | None = None
        self._begun = 0  # iterations until the begin of the epoch
        self._metrics, self._accumulation = ExitStack(), ExitStack()
        self.reduction: GradientReduction | None = None

    def attach(self, engine: Engine) -> None:
        """Attach the handler to an engine; MONAI calls it for ``train_handlers``.

        Args:
            engine: the engine that trains.
        """
        engine.add_event_handler(Events.STARTED, self._start)
        engine.add_event_handler(Events.EPOCH_STARTED, self._begin_epoch)
        engine.add_event_handler(Events.ITERATION_STARTED, self._begin_iteration)
        engine.add_event_handler(Events.EPOCH_COMPLETED, self._end_epoch)

    def detach(self) -> None:
        """Let the network train alone again, and metrics be those of this site. May be called twice."""
        self._accumulation.close()
        self._metrics.close()
        if self.reduction is not None:
            self.reduction.detach()
            self.reduction = None

    def _start(self, engine: Engine) -> None:
        """Build the reduction, at the start of the first run."""
        if self.reduction is not None:
            return
        network = self._network if self._network is not None else getattr(engine, "network", None)
        optimizer = self._optimizer if self._optimizer is not None else getattr(engine, "optimizer", None)
        elastic_run, length = self.options.min_sites is not None, engine.state.epoch_length
        refuse(
            (network is None, "the engine has no network: SiteHandler(network=model, optimizer=optimizer)"),
            (isinstance(network, DistributedDataParallel), "the network is wrapped in DDP: give the model itself"),
            (elastic_run and optimizer is None, "with min_sites a site that joins needs SiteHandler(optimizer=...)"),
            (elastic_run and not length, "with min_sites the engine needs an epoch_length"),
        )
        assert network is not None
        network = getattr(network, "_orig_mod", network)  # of torch.compile
        self._place = _EnginePlace(engine)
        state: dict[str, Any] = {"engine": self._place, "optimizer": optimizer, **self._state}
        if (scaler := getattr(engine, "scaler", None)) is not None:
            state["scaler"] = scaler
        finite = {"check_finite": not getattr(engine, "amp", False)} | self._keywords
        transport = self._open_transport(network) if current_connection() is not None else None
        self.reduction = GradientReduction(
            network, synchronize="backward", state=state if elastic_run else None, **finite
        )
        if elastic_run and transport is not None:
            self.reduction.after_step.append(transport.rounds.end_step)
        if transport is not None:
            self._metrics.enter_context(metrics_of_present_sites(transport, _PATCHES))
        self._compare(engine, transport)

    def _open_transport(self, network: nn.Module) -> Transport:
        """Open the transport of metrics, by which a site that joins takes part from its first step on."""
        device = next((each.device for each in network.parameters()), torch.device("cpu"))
        return open_transport(
            None, Traffic(), device, self.options.timeout, requirements=self.options.requirements, for_trainer=True
        )

    def _compare(self, engine: Engine, transport: Transport | None) -> None:
        """Raise MismatchError if the engines of the sites make different numbers of steps."""
        assert self.reduction is not None
        state = engine.state
        names = ("epoch_length", "max_epochs", "max_iters", "accumulation_steps")
        own = {name: getattr(engine, name, getattr(state, name, None)) for name in names}
        kind, what = dict[str, int | None], "description of its engine"
        if transport is None:
            every = self.reduction.gather_objects(own, kind, what)
        else:
            every = [*checked(transport.gather_present(own), kind, what, transport).values()]
        differing = [name for name in names if len({each.get(name) for each in every}) > 1]
        if differing:
            found = ", ".join(f"{name}={[each.get(name) for each in every]}" for name in differing)
            raise MismatchError(
                f"the sites' engines differ in {found}, by site: give all sites the same, such as epoch_length=, "
                "beyond which a loader begins again"
            )

    def _begin_epoch(self, engine: Engine) -> None:
        self._begun = engine.state.iteration

    def _begin_iteration(self, engine: Engine) -> None:
        """Hold gradients back in iterations after which a MONAI trainer does not step."""
        assert self.reduction is not None
        assert self._place is not None
        self._accumulation.close()
        if not self.reduction.pending:
            self._place.iteration = engine.state.iteration - 1
        every, length = getattr(engine, "accumulation_steps", 1), engine.state.epoch_length
        number = engine.state.iteration if length is None else (engine.state.iteration - 1) % length + 1
        if number % every and number != length:
            self._accumulation.enter_context(self.reduction.no_sync())

    def _end_epoch(self, engine: Engine) -> None:
        # ignite only warns of it, and ends the epoch, while the other sites wait for gradients of this one
        empty = engine.state.iteration == self._begun
        refuse((empty, "the loader of the engine has given no batch in this epoch: check the data of this site"))
        if self.options.average_buffers and self.reduction is not None:
            self.reduction.average_buffers()


def mean_over_sites(reduction: GradientReduction, value: float | Tensor, weight: float | Tensor = 1.0) -> float:
    """Return the weighted mean of a value of each site that is present; all of these must call it.

    Args:
        reduction: the reduction of the training.
        value: this site's value, such as the mean Dice of its own images; without effect where the weight is 0. What
            ``aggregate()`` of MONAI's metrics returns is that of all sites already.
        weight: weight of this site, such as its number of validation images; 0 for none.

    Returns:
        The mean, the same at all sites; NaN if all weights are 0.

    Example:
        >>> own = torch.cat([metric(predicted, label).flatten() for predicted, label in validation])
        >>> dice = mean_over_sites(handler.reduction, own.mean(), len(own))
    """
    own = (float(value) if weight else 0.0, float(weight))
    found = reduction.gather_objects(own, tuple[float, float], "value with its weight", lambda each: each[1:])
    every = [each for each in found if each is not None]
    total = sum(share for _, share in every)
    return sum(each * share for each, share in every) / total if total else float("nan")


def save_at_each_site(saver: _Saver) -> _Saver:
    """Let a MONAI ``CheckpointSaver``, or an ignite ``Checkpoint``, write at this site, whatever its number.

    Without it they write at site 0 alone. Call it after `dadplug.connect`, and before the engine runs.

    Args:
        saver: the handler; its folder is made.

    Returns:
        The handler.

    Example:
        >>> handlers = [save_at_each_site(CheckpointSaver("checkpoints", {"network": network}, save_final=True))]
    """
    parts = [saver, *vars(saver).values()]
    for checkpoint in (each for each in parts if isinstance(each, Checkpoint)):
        checkpoint.save_on_rank = idist.get_rank()
        handler: Any = checkpoint.save_handler
        if hasattr(handler, "save_on_rank"):
            handler.save_on_rank = idist.get_rank()
            Path(handler.dirname).mkdir(parents=True, exist_ok=True)
    return saver
