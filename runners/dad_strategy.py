"""Lightning's strategy for training between sites; no import of Lightning, of which there are two packages."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..exchange import Traffic, Transport, open_transport
from ..exchange.addresses import choose_interface, gloo_interface
from ..exchange.membership import describe
from ..model_sync.samples import batch_size
from ..model_sync.uneven_inputs import has_turn
from ..options import Options
from ..reduction import GradientReduction
from ._lightning.environment import SiteEnvironment
from ._lightning.registration import needs_lightning
from ._lightning.uneven_loader import TurnLoader, agree_on_steps

_SIGTERM = "_broadcast_sigterm_tensor"  # of Lightning's loop over batches, since 2.6


class DADStrategy:
    """Trains one model between sites, by gradients that dadplug agrees on; for ``Trainer(strategy=)``.

    Processes, samplers, metrics and evaluation are those of Lightning's ``DDPStrategy``, from which the classes that
    are made derive: `dadplug.runners.lightning.DADStrategy` and `dadplug.runners.pytorch_lightning.DADStrategy`. This
    one stands for that of the package that is in use.

    Where the sites have met before, by `dadplug.connect`, Lightning starts no processes: give ``devices=1`` then.
    Gradients are agreed on at the end of each backward pass, with accumulation of the last one, before any hook,
    clipping or optimizer sees them. Sites may have different numbers of batches: one that has fewer repeats a batch
    without weight in some steps.

    Args:
        mode: name of a method, such as ``"dsgd"``, ``"dad"`` or ``"rankdad"``.
        rank: and all up to `timeout`: options of the reduction, see `dadplug.options.Options`.
        accelerator: and the following: as in ``DDPStrategy``.
        parallel_devices: as in ``DDPStrategy``.
        cluster_environment: as in ``DDPStrategy``.
        checkpoint_io: as in ``DDPStrategy``.
        precision_plugin: as in ``DDPStrategy``.
        process_group_backend: as in ``DDPStrategy``.
        start_method: ``"popen"``, or ``"spawn"``, ``"fork"`` (notebooks), ``"forkserver"``.

    Attributes:
        reduction: the `GradientReduction` of the last fit, with its plan and traffic; None before it.

    Raises:
        ValueError: if a mode, an option or its value is unknown; the message lists the valid ones.
        RuntimeError: if it cannot tell for which of Lightning's packages it is to be.

    Example:
        >>> trainer = pl.Trainer(strategy=DADStrategy(mode="rankdad"), accelerator="cpu", devices=2)
    """

    reduction: GradientReduction | None = None

    # What DDPStrategy has.
    cluster_environment: Any
    lightning_module: Any
    precision_plugin: Any
    parallel_devices: Any
    world_size: int
    global_rank: int
    local_rank: int
    pre_backward: Any
    post_backward: Any
    _layer_sync: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(needs_lightning("DADStrategy", __package__).DADStrategy if cls is DADStrategy else cls)

    def __init__(
        self,
        mode: str = "rankdad",
        *,
        rank: int = 8,
        iterations: int = 1,
        tolerance: float = 1e-3,
        warm_start: bool = True,
        weighting: str = "samples",
        wire: str = "fp32",
        dense: str = "allreduce",
        density: float = 0.01,
        error_feedback: bool | None = None,
        share_inputs: bool = True,
        sync_batchnorm: bool = False,
        average_buffers: bool = True,
        check_finite: bool = True,
        bucket_mb: float | None = None,
        hierarchy: str | int | list[list[int]] | None = None,
        timeout: float = 300.0,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        start_method: str = "popen",
        **unknown: Any,
    ) -> None:
        given = locals()
        self._check_names(unknown)
        if cluster_environment is None and SiteEnvironment.detect():
            cluster_environment = SiteEnvironment()
        self.options = Options.create(**{name: given[name] for name in Options.names()}, **unknown)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            start_method=start_method,
            timeout=timedelta(seconds=timeout),
        )  # type: ignore[call-arg]
        self._states: list[Any] | None = None
        self._steps: tuple[int, int] | None = None
        self._weightless = self._skipped = False
        self._transport: Transport | None = None
        self._run = ExitStack()

    def _check_names(self, unknown: dict[str, Any]) -> None:
        """Refuses unknown options; `Options.create` does where this does not."""

    # Start and end

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[self.local_rank % len(self.parallel_devices)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_environment(self) -> None:
        environment = self.cluster_environment
        if environment is not None and not dist.is_initialized():
            choose_interface(environment.main_address, environment.main_port)
        self._run.enter_context(gloo_interface())  # Lightning builds process groups of its own during a run
        super().setup_environment()  # type: ignore[misc]
        if self.world_size > 1:
            before = self._transport
            self._transport = open_transport(None, Traffic(), self.root_device, self.options.timeout)
            if before is not None:
                before.close()

    def setup(self, trainer: Any) -> None:
        if self._layer_sync is not None:  # Trainer(sync_batchnorm=True); torch's own works on GPUs only
            self.options = dataclasses.replace(self.options, sync_batchnorm=True)
            self._layer_sync = None
        loop = trainer.fit_loop.epoch_loop
        if self._transport is not None and hasattr(loop, _SIGTERM):
            setattr(loop, _SIGTERM, self._share_sigterm)
            self._run.callback(delattr, loop, _SIGTERM)
        super().setup(trainer)  # type: ignore[misc]

    def configure_ddp(self) -> None:
        """Builds the reduction, where DDP would wrap the model."""
        if getattr(self.precision_plugin, "scaler", None) is not None:  # it looks for Inf itself
            self.options = dataclasses.replace(self.options, check_finite=False)
        if self._transport is not None:
            self._transport.gather_objects(None)  # a site that has failed by now builds no reduction
        self.reduction = GradientReduction(self.lightning_module, **dataclasses.asdict(self.options))
        if self._states is not None:
            self.reduction.load_states(self._states)
        self._states = None

    def teardown(self) -> None:
        try:
            if self.reduction is not None:
                self.reduction.detach(discard=True)  # after an error or a stop some gradients are left
            self._steps = None
            super().teardown()  # type: ignore[misc]
        finally:
            self._run.close()

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other sites why this one stops, and close the connections to them, so that none waits for it."""
        reason = describe(exception)
        if self._transport is not None:
            self._transport.sites.announce(reason)
            self._transport.close()
        if self.reduction is not None:
            self.reduction.abort(reason)
        super().on_exception(exception)  # type: ignore[misc]

    # Training

    def process_dataloader(self, dataloader: Any) -> Any:
        dataloader = super().process_dataloader(dataloader)  # type: ignore[misc]
        trainer = self._trainer
        if trainer is None or not trainer.training or self._transport is None:
            return dataloader
        self._steps = agree_on_steps(dataloader, self._transport)
        own, steps = self._steps or (0, 0)
        return TurnLoader(dataloader, own, steps) if own < steps else dataloader

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step; where it returns None, this site takes part in the step without data."""
        with self._samples_of((args, kwargs)):
            output = super().training_step(*args, **kwargs)  # type: ignore[misc]
        automatic = self.lightning_module.automatic_optimization
        self._skipped = output is None and automatic and self._transport is not None
        if not self._skipped:
            return output
        if self.options.sync_batchnorm:
            raise RuntimeError(
                "training_step returned None: with sync_batchnorm each site needs a loss in every step, since the "
                "other sites wait for its statistics in backward"
            )
        return torch.zeros((), device=self.root_device, requires_grad=True)  # Lightning refuses None between processes

    def _samples_of(self, batch: Any) -> AbstractContextManager[Any]:
        self._weightless = False
        if self._steps is not None and self._trainer is not None:
            self._weightless = not has_turn(self._trainer.fit_loop.epoch_loop.batch_idx, *self._steps)
        if self.reduction is None:
            return nullcontext()
        samples = 0 if self._weightless else batch_size(batch)
        return nullcontext() if samples is None else self.reduction.samples(samples)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Runs backward, and agrees on the gradients before any hook sees them."""
        module = self.lightning_module
        if self._weightless:  # a batch that this site has had before, so that it takes part in the others' steps
            closure_loss = closure_loss * 0.0
        self.pre_backward(closure_loss)
        if not self._skipped:
            closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
            self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        if self.reduction is not None and self.reduction.syncing:
            self.reduction.synchronize()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step an optimizer; one that looks at the loss gets the mean over sites, so that all decide alike."""
        if self._transport is not None and isinstance(getattr(optimizer, "_optimizer", optimizer), torch.optim.LBFGS):
            closure = self._with_mean_loss(closure)
        return super().optimizer_step(optimizer, closure, model, **kwargs)  # type: ignore[misc]

    def _with_mean_loss(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def agreed() -> Any:
            loss = closure()
            assert self._transport is not None
            assert self.reduction is not None
            value = None if loss is None else float(loss)
            losses = self._transport.gather_objects((value, self.reduction.share or 0.0))
            if any(value is None for value, _ in losses):
                return loss
            return torch.as_tensor(sum(value * share for value, share in losses), dtype=loss.dtype, device=loss.device)

        return agreed

    def block_backward_sync(self) -> AbstractContextManager[Any]:
        """Holds gradients back while they accumulate."""
        return nullcontext() if self.reduction is None else self.reduction.no_sync()

    def on_validation_start(self) -> None:
        self._average_buffers()
        super().on_validation_start()  # type: ignore[misc]

    def _average_buffers(self) -> None:
        if self._in_fit and self.reduction is not None and self.options.average_buffers:
            self.reduction.average_buffers()

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._average_buffers()
        return super().lightning_module_state_dict()  # type: ignore[misc,no-any-return]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a checkpoint, with what every site's compressor carries from step to step."""
        if self.reduction is not None:
            own = self.reduction.state_dict()
            checkpoint["dadplug"] = self.reduction.gather_objects(own) if self._in_fit else [own]
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)  # type: ignore[misc]

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[misc]
        self._states = checkpoint.get("dadplug")
        return checkpoint

    # Between sites

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all sites; not after an error, since the others may be gone."""
        if self._interrupted:
            return
        if self._transport is not None:
            self._transport.gather_objects(None)
        else:
            super().barrier(*args, **kwargs)  # type: ignore[misc]

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return one site's object on all sites."""
        if self._transport is None or self._interrupted:
            return super().broadcast(obj, src) if self._transport is None else obj  # type: ignore[misc]
        items = [obj]
        with self._naming_sites():
            dist.broadcast_object_list(items, src, group=self._transport.group)
        return items[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the sites."""
        with self._naming_sites():
            return super().reduce(tensor, self._own_group(group), reduce_op)  # type: ignore[misc]

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor from all sites."""
        with self._naming_sites():
            return super().all_gather(tensor, self._own_group(group), sync_grads)  # type: ignore[misc,no-any-return]

    def _own_group(self, group: Any) -> Any:
        """Replace the group of all processes by one that this site can leave after an error."""
        everyone = group is None or group is dist.group.WORLD
        return group if self._transport is None or not everyone else self._transport.group

    def _share_sigterm(self) -> None:
        """Stop all sites if the first has got SIGTERM, as Lightning does before each batch.

        Lightning asks through the group of all processes, in which sites would wait for one that has failed.
        """
        received = torch.tensor([int(self._trainer.received_sigterm)], device=self.root_device)
        with self._naming_sites():
            dist.broadcast(received, 0, group=self._own_group(None))
        if received.item():
            self.barrier()
            raise sys.modules[type(self._trainer.fit_loop.epoch_loop).__module__].SIGTERMException

    @contextmanager
    def _naming_sites(self) -> Iterator[None]:
        """Turn errors of a connection into ones that name the site."""
        try:
            yield
        except RuntimeError as error:
            if self._transport is None or not any(word in str(error) for word in ("onnection", "imed out")):
                raise
            raise self._transport.lost(error) from error

    @property
    def _trainer(self) -> Any:
        return getattr(self.lightning_module, "_trainer", None)

    @property
    def _interrupted(self) -> bool:
        return self._trainer is not None and self._trainer.interrupted

    @property
    def _in_fit(self) -> bool:
        """Whether all sites are in the middle of a fit, so that they can speak with one another."""
        trainer = self._trainer
        return trainer is not None and trainer.state.fn == "fit" and not self._interrupted
