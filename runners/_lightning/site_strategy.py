"""Common part of the strategies for training between sites: processes, connection, loaders, checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...exchange import Traffic, Transport, open_transport
from ...exchange.failure_reports import describe
from ...exchange.handshake import choose_interface, gloo_interface
from ...exchange.transport import Requirements
from ...hub.site.runtime import current_connection
from ...model_sync.samples import batch_size, takes_part
from .collectives import SiteCollectives
from .environment import SiteEnvironment
from .uneven_loader import UnevenLoader, compare_lengths

_SIGTERM = "_broadcast_sigterm_tensor"  # of Lightning's loop over batches, since 2.6


_AS_IN_DDP = {"help": "as in ``DDPStrategy``"}
_ENVIRONMENT = {"help": "as in ``DDPStrategy``; by default the existing connection of the sites, if there is one"}
_START = {"help": 'start of the processes: ``"popen"``, ``"spawn"``, ``"fork"`` (notebooks) or ``"forkserver"``'}


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


class Exchange(Protocol):
    """Object that exchanges something between the sites during a fit, such as `dadplug.GradientReduction`."""

    @property
    def syncing(self) -> bool:
        """Whether `synchronize` is due after a backward pass; False inside `no_sync`."""

    def synchronize(self) -> Any:
        """Agree on gradients after a backward pass, if the exchange does that."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Hold gradients back, for accumulation."""

    def samples(self, count: int) -> AbstractContextManager[Any]:
        """State the number of samples of the forward passes inside."""

    def state_dict(self) -> dict[str, Any]:
        """Return this site's state."""

    def gather_objects(self, item: Any) -> list[Any]:
        """Gather an object from every site."""

    def abort(self, reason: str) -> None:
        """Report to the other sites why this one exits."""

    def detach(self, *, discard: bool) -> None:
        """Remove all hooks from the model."""


class SiteStrategy(SiteCollectives):
    """Lightning strategy that trains one model between sites; the base of those for a family of exchange.

    It starts and connects the sites' processes, wraps loaders of unequal length, posts exit reasons, and puts the state
    of every site into checkpoints. A subclass builds the exchange, and returns it as `_exchange`.

    Args:
        options: options of the exchange, a dataclass with a ``timeout`` in seconds; with ``sync_batchnorm`` if the
            exchange can normalise by the statistics of all sites' rows.
        arguments: arguments of ``DDPStrategy``, see `StrategyArguments`.

    Attributes:
        options: the options of the exchange.
    """

    def __init__(self, options: Any, arguments: Mapping[str, Any]) -> None:
        settings = vars(StrategyArguments(**arguments))
        if settings["cluster_environment"] is None and SiteEnvironment.detect():
            settings = settings | {"cluster_environment": SiteEnvironment()}
        super().__init__(**settings, timeout=timedelta(seconds=options.timeout))
        self.options = options
        self._states: list[Any] | None = None  # of all sites, from a checkpoint
        self._steps: tuple[int, int] | None = None
        self._weightless = self._skipped = False
        self._transport: Transport | None = None
        self._run = ExitStack()

    @property
    def _exchange(self) -> Exchange | None:
        """The exchange of the last fit; None before it."""
        raise NotImplementedError

    @property
    def _requirements(self) -> Requirements | None:
        """Requirements of training to go on without a site that leaves; None where all must stay."""
        return None

    # Start and end

    def _configure_launcher(self) -> None:
        """Check the devices, which the trainer has chosen by now, and make a launcher where processes are to start."""
        count, connection = len(self.parallel_devices or ()), current_connection()
        if count > 1 and connection is not None and connection.processes == 1:
            self._check_launch(count)
            self.cluster_environment.start_processes(count)
        super()._configure_launcher()

    def _check_launch(self, count: int) -> None:
        """Raise ValueError if no processes can be started at a site that is connected by a kit."""
        here = f"the trainer is to use {count} devices at a site that is connected by a kit"
        if self._requirements is not None:
            raise ValueError(f"{here}, and min_sites goes with one process at each site: pass devices=1")
        if self._start_method != "popen" or not isinstance(self.cluster_environment, SiteEnvironment):
            raise ValueError(
                f"{here}: leave start_method and cluster_environment out, which go with devices=1 there, or start the "
                f"program by torchrun --standalone --nproc_per_node={count}"
            )

    def _agree_on_processes(self) -> None:
        """Meet the processes that Lightning has started at this site or others, where sites are connected by kits."""
        connection, environment = current_connection(), self.cluster_environment
        if connection is not None and self._requirements is None:
            count = max(connection.processes, getattr(environment, "started", 0))
            connection.meet_processes(count, environment.main_port, self.options.timeout)

    @property
    def root_device(self) -> torch.device:
        device: torch.device = self.parallel_devices[self.local_rank % len(self.parallel_devices)]
        return device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_environment(self) -> None:
        environment = self.cluster_environment
        if environment is not None and not dist.is_initialized():
            choose_interface(environment.main_address, environment.main_port)
        self._agree_on_processes()
        self._run.enter_context(gloo_interface())  # Lightning builds process groups of its own during a run
        super().setup_environment()
        if self.world_size > 1:
            before = self._transport
            self._transport = self._open_transport()
            if before is not None:
                before.close()

    def _open_transport(self) -> Transport:
        """Open the transport for everything but gradients."""
        return open_transport(
            None,
            Traffic(),
            self.root_device,
            self.options.timeout,
            requirements=self._requirements,
            for_trainer=True,
        )

    def setup(self, trainer: Any) -> None:
        if self._layer_sync is not None:  # Trainer(sync_batchnorm=True); torch's own works on GPUs only
            if not hasattr(self.options, "sync_batchnorm"):
                raise ValueError(f"{type(self).__name__} cannot normalise over sites: leave sync_batchnorm=True out")
            self.options = dataclasses.replace(self.options, sync_batchnorm=True)
            self._layer_sync = None
        loop = trainer.fit_loop.epoch_loop
        if self._transport is not None and hasattr(loop, _SIGTERM):
            setattr(loop, _SIGTERM, self._share_sigterm)
            self._run.callback(delattr, loop, _SIGTERM)
        super().setup(trainer)

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
        return self._match_lengths(dataloader, self._transport)

    def _match_lengths(self, dataloader: Any, transport: Transport) -> Any:
        """Compare the lengths of all sites' training loaders, and wrap one that is shorter than others."""
        self._steps = compare_lengths(dataloader, transport)
        own, steps = self._steps or (0, 0)
        return UnevenLoader(dataloader, own, steps) if own < steps else dataloader

    @property
    def _has_batch(self) -> bool:
        """Whether this site takes part in the current step with a batch of its own."""
        if self._steps is None or self._trainer is None:
            return True
        return takes_part(self._trainer.fit_loop.epoch_loop.batch_idx, *self._steps)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step; if it returns None, this site participates in the step without data."""
        with self._samples_of((args, kwargs)):
            output = super().training_step(*args, **kwargs)
        automatic = self.lightning_module.automatic_optimization
        self._skipped = output is None and automatic and self._transport is not None
        if not self._skipped:
            return output
        if self._waits_in_backward:
            raise RuntimeError(
                "training_step returned None: with sync_batchnorm each site needs a loss in every step, since the "
                "other sites wait for its statistics in backward"
            )
        return torch.zeros((), device=self.root_device, requires_grad=True)  # Lightning refuses None between processes

    @property
    def _waits_in_backward(self) -> bool:
        """Whether each site waits for the statistics of all others in backward."""
        return getattr(self.options, "sync_batchnorm", False)

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
        self._synchronize()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def _synchronize(self) -> None:
        """Agree on the gradients, unless they accumulate."""
        if self._exchange is not None and self._exchange.syncing:
            self._exchange.synchronize()

    def block_backward_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which gradients accumulate and are not sent."""
        return nullcontext() if self._exchange is None else self._exchange.no_sync()

    def on_validation_start(self) -> None:
        self._average_buffers()
        super().on_validation_start()

    def _average_buffers(self) -> None:
        """Make what may differ between the sites' models equal, before an evaluation or a checkpoint."""

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._average_buffers()
        return super().lightning_module_state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, with the state of every site."""
        self._add_states(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def _add_states(self, checkpoint: dict[str, Any]) -> None:
        if self._exchange is not None:
            own = self._own_state(self._exchange)
            checkpoint["dadplug"] = self._exchange.gather_objects(own) if self._in_fit else [own]

    def _own_state(self, exchange: Exchange) -> Any:
        """Return what a checkpoint holds of this site."""
        return exchange.state_dict()

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._states = checkpoint.get("dadplug")
        return checkpoint
