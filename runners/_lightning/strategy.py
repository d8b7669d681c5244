"""Base of the Lightning strategies: processes and their connection, the way of a step, collectives, checkpoints."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import MismatchError
from ...exchange import Transport
from ...exchange.handshake import choose_interface, gloo_interface
from ...exchange.restrictions import METRICS, OBJECTS, STATES, declared
from ...exchange.status import describe
from ...hub import LOOPBACK, STARTED_PROCESSES, current_connection
from ...step.model_sync import sameness
from ...step.model_sync.private import keeping_private, private_path, private_state, shared_part
from ...step.model_sync.samples import batch_size, takes_part
from ...support.files import check_archive, replacing
from ...support.processes import free_port
from ...support.refusals import first_reason, refuse
from ...support.signature import split_keywords
from .. import present
from ..exchanges import Exchange, plain_states
from ..loaders import UnevenLoader, compare_lengths
from .elastic import SYNC, ElasticFit, check_local
from .ending import CommonEnd, SiteFlags

if TYPE_CHECKING:
    from pytorch_lightning.strategies import DDPStrategy as _DDPStrategy
else:
    _DDPStrategy = object  # that of a package comes behind it, in the classes for a package

_HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_MODULE_HOOKS = (*_HOOKS, "configure_gradient_clipping", "optimizer_step")

_AS_IN_DDP = {"help": "as in ``DDPStrategy``"}
_ENVIRONMENT = {"help": "as in ``DDPStrategy``; by default the existing connection of the sites, if there is one"}
_START = {"help": 'start of the processes: ``"popen"``, ``"spawn"``, ``"fork"`` (notebooks) or ``"forkserver"``'}


def to_torchscript(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile a copy of a Lightning module in training, since the copy has no part of what the sites exchange."""
    copied = copy.deepcopy(module)
    for name in ("to_torchscript", "_compiled_call_impl"):
        vars(copied).pop(name, None)
    return copied.to_torchscript(*args, **kwargs)


class SiteEnvironment:
    """Lightning cluster environment of sites that are connected already, by `dadplug.connect` or a process group.

    Lightning starts no processes, but for further ones of a site that is connected by a kit: see `start_processes`.
    """

    def __init__(self) -> None:
        self.started = 0  # processes of this site, if Lightning starts all but one of them
        self._port = 0

    def start_processes(self, count: int) -> None:
        """Have Lightning start the other processes of this site when a trainer begins.

        Args:
            count: number of processes of this site.
        """
        self.started = count
        self._port = free_port()

    @property
    def creates_processes_externally(self) -> bool:
        """Whether Lightning has no processes to start, or has started them."""
        connection = current_connection()
        return not self.started or (connection is not None and connection.processes > 1)

    @property
    def main_address(self) -> str:
        """Address of site 0; loopback if it is not known, or if Lightning starts processes of this site."""
        return LOOPBACK if self.started else os.environ.get("MASTER_ADDR", LOOPBACK)

    @property
    def main_port(self) -> int:
        """Port of site 0, or of this one if Lightning starts processes; 0 if it is not known."""
        return self._port or int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        """Return whether the sites are connected."""
        return dist.is_available() and dist.is_initialized()

    def world_size(self) -> int:
        """Number of sites, or of all their processes."""
        return dist.get_world_size()

    def global_rank(self) -> int:
        """Number of this site, or of this process among those of all sites."""
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the sites are connected."""

    set_world_size = set_global_rank

    def local_rank(self) -> int:
        """Return the number of this process on its node, as torchrun or its connection by a kit sets it."""
        if (connection := current_connection()) is not None:
            return int(connection.local_rank)
        return int(os.environ.get("LOCAL_RANK", "0")) if "TORCHELASTIC_RUN_ID" in os.environ else 0

    def node_rank(self) -> int:
        """Return the number of this site: each site counts as a node."""
        return self.global_rank()

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any settings: they do not change the number of sites. Pass on that of processes to be started."""
        if self.started:
            os.environ[STARTED_PROCESSES] = str(self.started)

    def teardown(self) -> None:
        """Do nothing: the process group belongs to the program that created it."""


@dataclass(frozen=True)
class StrategyArguments:
    """Arguments of Lightning's ``DDPStrategy``, which every strategy has beside its own options."""

    accelerator: Any = field(default=None, metadata=_AS_IN_DDP)
    parallel_devices: Any = field(default=None, metadata=_AS_IN_DDP)
    cluster_environment: Any = field(default=None, metadata=_ENVIRONMENT)
    checkpoint_io: Any = field(default=None, metadata=_AS_IN_DDP)
    precision_plugin: Any = field(default=None, metadata=_AS_IN_DDP)
    process_group_backend: str | None = field(default=None, metadata=_AS_IN_DDP)
    start_method: str = field(default="popen", metadata=_START)


class SiteStrategy(Exchange, _DDPStrategy):
    """Lightning strategy that trains one model between sites; the base of those for each way to train.

    It starts and connects the sites' processes, wraps loaders of unequal length, takes fused steps, posts exit reasons,
    and puts the state of every site into checkpoints. A way is a subclass, which derives from one of
    `dadplug.runners.exchanges` first. What the sites exchange is built where DDP would wrap the model or, with
    `_needs_optimizers`, when the optimizers are there.

    Args:
        kind: class of the exchange's options, see `Exchange`. They have ``sync_batchnorm`` if the exchange can
            normalise over sites.
        keywords: those options, and arguments of ``DDPStrategy``, see `StrategyArguments`.

    Attributes:
        options: the options of the exchange.
    """

    _layer_sync: Any
    _elastic: ElasticFit | None = None
    _attribute = "_exchange"  # name by which the user finds the exchange
    _needs_optimizers = True
    _saves_alone = False  # whether a site's state is of use without those of the others
    _in_step_with_others = True  # if not, sites are at different steps within an epoch
    _fuses = False  # whether optimizer steps of this fit are fused
    _last_batches: SiteFlags | None = None  # whether a batch is the last one; None where lengths are known
    _common_end: CommonEnd | None = None  # of a fit of several sites
    _stepping: Any = None  # the optimizer whose fused step is being taken
    _private_path = ""  # of the file with this site's private layers beside the checkpoint that was loaded last

    def __init__(self, kind: type[Any], keywords: Mapping[str, Any]) -> None:
        given, own = split_keywords(StrategyArguments, keywords)
        self.options = kind.create(**own)
        settings = vars(StrategyArguments(**given))
        if settings["cluster_environment"] is None and SiteEnvironment.detect():
            settings = settings | {"cluster_environment": SiteEnvironment()}
        super().__init__(**settings, timeout=timedelta(seconds=self.options.timeout))
        self._states: list[Any] | None = None  # of all sites, from a checkpoint
        self._steps: tuple[int, int] | None = None
        self._weightless = self._skipped = False
        self._transport: Transport | None = None
        self._run = ExitStack()

    @property
    def _deals(self) -> bool:
        """Whether the batches of the training loader are dealt, which then holds the data of all sites."""
        return False

    @property
    def _trainer(self) -> Any:
        return getattr(self.lightning_module, "_trainer", None)

    @property
    def _interrupted(self) -> bool:
        return self._trainer is not None and self._trainer.interrupted

    @property
    def _in_fit(self) -> bool:
        """Whether all sites are inside a fit, so that they can communicate."""
        trainer = self._trainer
        return trainer is not None and trainer.state.fn == "fit" and not self._interrupted

    # Start and end

    def _configure_launcher(self) -> None:
        """Check the devices, which the trainer has chosen by now, and make a launcher where processes are to start."""
        count, connection = len(self.parallel_devices or ()), current_connection()
        if count > 1 and connection is not None and connection.processes == 1:
            here = f"the trainer is to use {count} devices at a site that is connected by a kit"
            by_site = self._start_method == "popen" and isinstance(self.cluster_environment, SiteEnvironment)
            refuse(
                (
                    self._requirements is not None,
                    f"{here}, and min_sites goes with one process at each site: pass devices=1",
                ),
                (
                    not by_site,
                    f"{here}: leave start_method and cluster_environment out, which go with devices=1 there, or start "
                    f"the program by torchrun --standalone --nproc_per_node={count}",
                ),
            )
            self.cluster_environment.start_processes(count)
        super()._configure_launcher()

    @property
    def root_device(self) -> torch.device:
        return torch.device(self.parallel_devices[self.local_rank % len(self.parallel_devices)])

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of Lightning's samplers: all of the data where they are dealt in training, a share otherwise."""
        trainer = self._trainer
        if self._deals and trainer is not None and trainer.training:
            return {"num_replicas": 1, "rank": 0}
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_environment(self) -> None:
        environment = self.cluster_environment
        if environment is not None and not dist.is_initialized():
            choose_interface(environment.main_address, environment.main_port)
        connection = current_connection()
        if connection is not None and self._requirements is None:  # processes started by Lightning meet
            count = max(connection.processes, getattr(environment, "started", 0))
            connection.meet_processes(count, environment.main_port, self.options.timeout)
        self._run.enter_context(gloo_interface())  # Lightning builds process groups of its own during a run
        super().setup_environment()
        if self.world_size > 1:
            before = self._transport
            self._transport = self._open_transport(self.root_device)
            self._run.enter_context(SYNC)
            if before is not None:
                before.close()

    def setup(self, trainer: Any) -> None:
        fits = trainer.state.fn == "fit"
        self._elastic, self._fuses = None, False
        transport = self._elastic_transport
        if transport is not None and (fits or self._requirements is not None):
            self._elastic = ElasticFit(self, trainer, transport, self._sends_optimizer, self._returns_by)
            self._elastic.begin(self._run, fits)
            if not fits:
                self._set_up_evaluation(trainer, transport)
                return
        self._set_up_loop(trainer)
        super().setup(trainer)
        if not fits:
            return
        if self._needs_optimizers:
            self._set_up_exchange()
        module = self.lightning_module
        module.to_torchscript = MethodType(to_torchscript, module)
        self._run.callback(module.__dict__.pop, "to_torchscript", None)
        if self._private:
            self._replace_clipping()
        if self._wants_fused:
            self._set_up_fusing()
        if self._elastic is not None:
            self._elastic.restore(self._run)

    def _set_up_loop(self, trainer: Any) -> None:
        """Have Lightning leave to this strategy the synchronization of batch normalisation, and of the run's end."""
        if self._layer_sync is not None:  # Trainer(sync_batchnorm=True); torch's own works on GPUs only
            if not hasattr(self.options, "sync_batchnorm"):
                raise ValueError(f"{type(self).__name__} cannot normalise over sites: leave sync_batchnorm=True out")
            self.options = replace(self.options, sync_batchnorm=True)
            self._layer_sync = None
        self._common_end = None
        if self._transport is not None and trainer.state.fn == "fit":
            self._common_end = CommonEnd(self, trainer)
            self._common_end.begin(self._run, self._in_step_with_others and self._elastic_transport is None)

    def _set_up_evaluation(self, trainer: Any, transport: Transport) -> None:
        """Prepare an evaluation as ``DDPStrategy`` does, which waits for site 0."""
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        sameness.broadcast_model(shared_part(self.model, self._private), transport)
        self.setup_precision_plugin()

    def configure_ddp(self) -> None:
        """Build the exchange, or wait for all sites, since one that has failed by now builds none."""
        if not self._needs_optimizers:
            self._set_up_exchange()
        elif self._transport is not None:
            self._transport.gather_objects(None)

    def _set_up_exchange(self) -> None:
        scaled = getattr(self.precision_plugin, "scaler", None) is not None
        self._exchange = self._build_exchange(self.lightning_module, scaled)
        setattr(self, self._attribute, self._exchange)

    def _one_optimizer(self) -> torch.optim.Optimizer:
        if not self.lightning_module.automatic_optimization or len(self.optimizers) != 1:
            raise ValueError(
                f"{type(self).__name__} needs automatic optimization and one optimizer; DADStrategy takes any module"
            )
        optimizer: torch.optim.Optimizer = self.optimizers[0]
        return optimizer

    def on_train_start(self) -> None:
        if self._elastic is not None:
            self._elastic.prepare_validation()
        super().on_train_start()

    def teardown(self) -> None:
        try:
            if self._exchange is not None:
                self._exchange.detach(discard=True)  # after an error or a stop some gradients are left
            self._steps = None
            super().teardown()
        finally:
            self._run.close()

    def on_exception(self, exception: BaseException) -> None:
        """Post the exit reason to the other sites and close the connections, so that no site waits for this one."""
        reason = describe(exception)
        if self._last_batches is not None:
            self._last_batches.abandon()
        if self._common_end is not None:
            self._common_end.flags.abandon()
        if self._transport is not None:
            self._transport.sites.announce(reason)
            self._transport.close()
        if self._exchange is not None:
            self._exchange.abort(reason)
        super().on_exception(exception)

    # Training

    def process_dataloader(self, dataloader: Any) -> Any:
        dataloader = super().process_dataloader(dataloader)
        trainer = self._trainer
        if trainer is None or not trainer.training or self._transport is None:
            return dataloader
        return self._wrap_train_loader(dataloader, self._transport)

    def _wrap_train_loader(self, dataloader: Any, transport: Transport) -> Any:
        """Compare the lengths of all sites' training loaders, and wrap one that is shorter than others."""
        if self._elastic is None:
            own, steps = compare_lengths(dataloader, transport)
            self._last_batches = SiteFlags(self) if own < 0 and self._in_step_with_others else None
            loader = dataloader if own == steps else UnevenLoader(dataloader, own, steps)
        else:
            own, steps = self._elastic.compare_lengths(dataloader)
            loader = UnevenLoader(dataloader, own, steps, self._elastic.first_batch)
        self._steps = None if own == steps else (own, steps)
        return loader

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Compare with the other sites whether a batch is the last one of an epoch, where no length is known.

        The exchange goes on beside the batch, and only a site that ends waits for it: so no step becomes longer.

        Raises:
            MismatchError: if it is the last one at some sites only, at these before the batch, or with the next one.
        """
        super().on_train_batch_start(batch, batch_idx)
        if self._last_batches is not None and self._transport is not None:
            progress = self._trainer.fit_loop.epoch_loop.batch_progress
            is_last = progress.is_last_batch or progress.current.ready >= self._trainer.num_training_batches
            for (ended,) in self._last_batches.exchange(is_last, waits=is_last):
                if 0 < ended.sum() < self.world_size:
                    raise MismatchError(
                        "the sites have different numbers of training batches: the epoch ends at "
                        + ", ".join(self._transport.sites[rank] for rank in ended.nonzero().flatten().tolist())
                        + ", not at the others. Loaders without a length need limit_train_batches=n, which all sites "
                        "reach, or a length"
                    )

    @property
    def _has_batch(self) -> bool:
        """Whether this site takes part in the current step with a batch of its own."""
        if self._steps is None or self._trainer is None:
            return True
        return takes_part(self._trainer.fit_loop.epoch_loop.batch_idx, *self._steps)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step; if it returns None, this site participates in the step without data."""
        with self._samples_of(next(iter((*args, *kwargs.values())), None)):
            output = super().training_step(*args, **kwargs)
        automatic = self.lightning_module.automatic_optimization
        self._skipped = output is None and automatic and self._transport is not None
        if not self._skipped:
            return output
        if self._in_step_with_others and getattr(self.options, "sync_batchnorm", False):
            raise RuntimeError(
                "training_step returned None: with sync_batchnorm each site needs a loss in every step, since the "
                "other sites wait for its statistics in backward"
            )
        return self._no_loss()

    def _no_loss(self) -> Tensor:
        """Return a loss for a step without data, since Lightning refuses None between processes."""
        return torch.zeros((), device=self.root_device, requires_grad=True)

    def _samples_of(self, batch: Any) -> AbstractContextManager[Any]:
        self._weightless = not self._has_batch
        samples = 0 if self._weightless else batch_size(batch)
        return nullcontext() if self._exchange is None or samples is None else self._exchange.samples(samples)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward, and synchronize the gradients before any hook reads them."""
        module = self.lightning_module
        if self._weightless:  # a batch that this site has had before, so that it takes part in the others' steps
            closure_loss = closure_loss * 0.0
        self.pre_backward(closure_loss)
        if not self._skipped:
            closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
            self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        if self._exchange is not None and self._exchange.syncing:
            if self._stepping is None:
                self._exchange.synchronize()
                if not getattr(self._exchange, "contributors", True):
                    module.zero_grad()  # no site has a loss: optimizers leave the weights, as in one process
            else:  # gradients that need not be formed, in a fused step
                self._exchange.hold(self._stepping)
            if self._steps_in_backward:
                self._end_step()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def _end_step(self) -> None:
        """Count a step of the exchange, where sites may leave and return."""
        if self._elastic is not None:
            self._elastic.end_step()

    def block_backward_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which gradients accumulate and are not sent."""
        return nullcontext() if self._exchange is None else self._exchange.no_sync()

    def on_validation_start(self) -> None:
        self._agree()
        super().on_validation_start()

    def on_validation_end(self) -> None:
        """Agree on an end that callbacks have asked for in a validation."""
        super().on_validation_end()
        if self._common_end is not None and self._in_fit and not self._trainer.sanity_checking:
            self._common_end.agree_on_end()

    def _agree(self) -> None:
        """Make what may differ between the sites' models equal, where all sites are inside a fit."""
        if self._in_fit and self._exchange is not None:
            self._make_equal()

    # Fused steps

    def _reason_against_fusing(self) -> str:
        """Return why a fit's gradients have to be formed before the optimizer's step; empty if they need not be."""
        trainer, module = self._trainer, self.lightning_module
        owners = [(module, _MODULE_HOOKS), *((callback, _HOOKS) for callback in trainer.callbacks)]
        reading = [(type(owner).__name__, name) for owner, names in owners for name in names if _overrides(owner, name)]
        by_value = trainer.gradient_clip_val and "VALUE" in str(trainer.gradient_clip_algorithm).upper()
        return first_reason(
            (not module.automatic_optimization, "manual optimization"),
            (self._elastic is not None, "sites may leave, by min_sites"),
            (getattr(self.precision_plugin, "scaler", None) is not None, "a GradScaler scales the loss"),
            (by_value, "gradients are clipped by value"),
            *((True, f"{owner}.{name} may read the gradients") for owner, name in reading),
        )

    def _set_up_fusing(self) -> None:
        """Take fused steps in this fit, with a clipping by norm of held gradients, or let the exchange show why not."""
        if reason := self._reason_against_fusing():
            self._exchange.stop_fusing(reason)
            return
        self._exchange.remark_on(self.optimizers)
        self._fuses = True
        self._replace_clipping()

    def _replace_clipping(self) -> None:
        """Let `_clip_by_norm` clip the gradients in this run."""
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm
        self._run.callback(self.precision_plugin.__dict__.pop, "clip_grad_by_norm", None)

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        precision = self.precision_plugin
        if self._exchange.holds or self._private:
            self._exchange.clip_held(precision.main_params(optimizer), clip_val)
        else:
            type(precision).clip_grad_by_norm(precision, optimizer, clip_val)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step an optimizer; a fused step is ordinary for what is not held."""
        if not self._fuses:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        self._stepping = optimizer
        try:
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self._stepping = None
        self._exchange.apply_held(optimizer)
        return result

    # Collectives, over all sites, or over those that are present where sites leave and return

    @property
    def _elastic_transport(self) -> Transport | None:
        """The transport where sites may leave and return."""
        return self._transport if self._transport is not None and self._transport.rounds.elastic else None

    @property
    def _alone(self) -> bool:
        """Whether the other sites are at different steps, so that this one cannot wait for them."""
        return False

    def _begin_collective(self, name: str) -> None:
        """Raise RuntimeError where the other sites are at different steps, and would never answer."""
        if self._alone:
            raise RuntimeError(
                f"{name} was called in training, where the sites are at different steps: call it between epochs, as in "
                "on_train_epoch_end or in validation, or use DADStrategy"
            )

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all sites; after an error return at once, since the other sites may have exited."""
        self._begin_collective("barrier")
        if self._interrupted:
            return
        if self._transport is not None:
            self._transport.gather_objects(None)
        else:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return one site's object on all sites; that of the first one where site 0 may have left."""
        self._begin_collective("broadcast")
        if self._transport is None or self._interrupted:
            return super().broadcast(obj, src) if self._transport is None else obj
        with declared(OBJECTS):
            if self._elastic_transport is not None:
                found = present.broadcast(self._elastic_transport, obj, src)
            else:
                found = self._transport.gather_objects(obj if src == self.global_rank else None)[src]
        if isinstance(found, str) and isinstance(obj, str):  # the folder of checkpoints, or a file that all load
            check_local(found, obj, self._transport.sites[src])
        return found

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the sites that are present; where they are at different steps, return this site's."""
        if self._alone:
            return tensor
        self._begin_collective("reduce")
        if self._elastic_transport is not None and isinstance(tensor, Tensor):
            return present.reduce(self._elastic_transport, tensor, reduce_op)
        with self._naming_sites():
            return super().reduce(tensor, self._own_group(group), reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all sites decide so, or any of them."""
        self._begin_collective("reduce_boolean_decision")
        if self._elastic_transport is None:
            return bool(super().reduce_boolean_decision(decision, all))
        votes = present.gather(self._elastic_transport, bool(decision))
        return False not in votes if all else True in votes

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor from all sites, or from those that are present where some may have left."""
        self._begin_collective("all_gather")
        if self._elastic_transport is not None:
            return present.all_gather(self._elastic_transport, tensor, sync_grads)
        with self._naming_sites():
            gathered: Tensor = super().all_gather(tensor, self._own_group(group), sync_grads)
            return gathered

    def _own_group(self, group: Any) -> Any:
        """Replace the group of all processes by one that this site can leave after an error."""
        everyone = group is None or group is dist.group.WORLD
        return group if self._transport is None or not everyone else self._transport.group

    @contextmanager
    def _naming_sites(self) -> Iterator[None]:
        """Declare the metrics of a context, and convert its connection errors into errors that name the site."""
        try:
            with declared(METRICS):
                yield
        except RuntimeError as error:
            if self._transport is None or not any(word in str(error) for word in ("onnection", "imed out")):
                raise
            raise self._transport.lost(error) from error

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._agree()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, with the state of every site."""
        self._add_states(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        self._save_private(filepath)

    def _save_private(self, filepath: Any) -> None:
        """Write the private layers of this site beside a checkpoint, which has those of the site that writes it."""
        if self._private:
            own = private_state(shared_part(self.lightning_module, self._private), self.optimizers)
            self.checkpoint_io.save_checkpoint(own, private_path(filepath, self.global_rank))

    def _keeping_private(self, optimizers: Sequence[Any] = ()) -> AbstractContextManager[None]:
        """Return a context in which a checkpoint is loaded without the private layers of the site that wrote it."""

        def read() -> dict[str, Any] | None:
            with suppress(FileNotFoundError):
                found: dict[str, Any] = self.checkpoint_io.load_checkpoint(self._private_path)
                return found
            return None

        if not self._private:
            return nullcontext()
        return keeping_private(shared_part(self.lightning_module, self._private), optimizers, read)

    def load_model_state_dict(self, checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        with self._keeping_private():
            super().load_model_state_dict(checkpoint, *args, **kwargs)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        self._remove_private(filepath)

    def _remove_private(self, filepath: Any) -> None:
        if self._private:
            with suppress(FileNotFoundError):
                self.checkpoint_io.remove_checkpoint(private_path(filepath, self.global_rank))

    def _add_states(self, checkpoint: dict[str, Any]) -> None:
        """Add the state of every site; after an error that of this one, where it is complete without the others."""
        if self._exchange is not None and (self._in_fit or self._saves_alone):
            own = self.own_state()
            checkpoint["dadplug"] = plain_states(self._gather_states(own) if self._in_fit else [own])

    @declared(STATES)
    def _gather_states(self, own: Any) -> list[Any]:
        """Return the states of all sites."""
        states: list[Any] = self._exchange.gather_objects(own)
        return states

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        check_archive(Path(checkpoint_path), f"checkpoint {checkpoint_path}")
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._states, self._private_path = checkpoint.get("dadplug"), private_path(checkpoint_path, self.global_rank)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the states of the optimizers, and this site's part of what a checkpoint holds of every site."""
        with self._keeping_private(self.optimizers):
            super().load_optimizer_state_dict(checkpoint)
        self._load_states()

    def _load_states(self) -> None:
        states, self._states = self._states, None
        if states is not None:
            self.load_states(states, self.global_rank)


def _overrides(owner: Any, name: str) -> bool:
    """Return whether a hook is not that of Lightning's base class."""
    if name in vars(owner):
        return True
    found = next((each for each in type(owner).__mro__ if name in vars(each)), None)
    return found is not None and not (
        found.__module__.split(".")[0] in ("lightning", "pytorch_lightning")
        and found.__name__ in ("Callback", "LightningModule", "ModelHooks")
    )


class HubStrategy(SiteStrategy):
    """Lightning strategy whose sites may leave and return over a hub, where the option ``min_sites`` says so.

    Args:
        kind: as in `SiteStrategy`; the options have ``min_sites`` and ``requirements``.
        keywords: as in `SiteStrategy`.

    Raises:
        ValueError: if there is no hub with ``min_sites``.
    """

    def __init__(self, kind: type[Any], keywords: Mapping[str, Any]) -> None:
        super().__init__(kind, keywords)
        if self.options.min_sites is not None and self.cluster_environment is None:
            raise ValueError(
                "min_sites needs a hub, which tracks the sites that are present: dadplug.connect(kit=...) before the "
                "strategy is built"
            )

    @property
    def is_global_zero(self) -> bool:
        """Whether this site prints and logs: site 0, or the first one that is present where sites may leave."""
        transport = self._elastic_transport
        return bool(self.global_rank == (0 if transport is None else transport.rounds.lowest))

    # Checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, with the compressor state of every site."""
        if self._elastic is None:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        else:  # each site writes its own files, since any of them may leave
            self._add_states(checkpoint)
            # Sites of one machine may share the file, and write it at the same time: it is replaced as a whole.
            local = type(self.checkpoint_io).__name__ == "TorchCheckpointIO" and "://" not in str(filepath)
            target = f"{filepath}.{self.global_rank}.part" if local else filepath
            with replacing(Path(filepath), Path(target), durable=False) if local else nullcontext():
                self.checkpoint_io.save_checkpoint(checkpoint, target, storage_options=storage_options)
            self._save_private(filepath)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self._elastic is None:
            super().remove_checkpoint(filepath)
        else:
            with suppress(FileNotFoundError):  # sites of one machine may share the file
                self.checkpoint_io.remove_checkpoint(filepath)
            self._remove_private(filepath)
