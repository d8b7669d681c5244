"""Lightning's strategy for training between sites, for either of Lightning's packages, neither of which it imports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..exchange import Traffic, Transport, open_transport
from ..exchange.addresses import choose_interface, gloo_interface
from ..exchange.exit_reasons import describe
from ..model_sync import replicas
from ..model_sync.samples import batch_size
from ..model_sync.uneven_inputs import takes_part
from ..options import Options
from ..reduction import GradientReduction
from ..signature import takes_keywords_of
from ._lightning.collectives import SiteCollectives
from ._lightning.elastic_fit import ElasticFit
from ._lightning.environment import SiteEnvironment
from ._lightning.uneven_loader import UnevenLoader, compare_lengths

_SIGTERM = "_broadcast_sigterm_tensor"  # of Lightning's loop over batches, since 2.6


class DADStrategyBase(SiteCollectives):
    """Lightning strategy that trains one model between sites; for ``Trainer(strategy=)``.

    Processes, samplers, metrics and evaluation are those of Lightning's ``DDPStrategy``. Gradients are agreed on at the
    end of each backward pass (the last one, with accumulation), before any hook, clipping or optimizer reads them.

    If the sites are connected already, by `dadplug.connect`, Lightning starts no processes: pass ``devices=1``. Sites
    may have different numbers of batches: a site with fewer repeats a batch with weight zero in some steps.

    With ``min_sites``, over a hub, training goes on without a site that leaves, and the site returns if its program is
    started again: it goes on at the batch of the epoch that the others are at, with their states of model, optimizer,
    schedules and callbacks. Metrics and collectives are those of the sites that are present. The first of them prints
    and logs, and each of them writes the checkpoints.

    `dadplug.DADStrategy` is the strategy for the one of Lightning's two packages that is in use;
    `dadplug.runners.lightning.DADStrategy` and `dadplug.runners.pytorch_lightning.DADStrategy` are those for a given
    package.

    Args:
        mode: name of a method, such as ``"dsgd"``, ``"dad"`` or ``"rankdad"``.
        accelerator: as in ``DDPStrategy``.
        parallel_devices: as in ``DDPStrategy``.
        cluster_environment: as in ``DDPStrategy``; by default the existing connection of the sites, if there is one.
        checkpoint_io: as in ``DDPStrategy``.
        precision_plugin: as in ``DDPStrategy``.
        process_group_backend: as in ``DDPStrategy``.
        start_method: start of the processes: ``"popen"``, ``"spawn"``, ``"fork"`` (notebooks) or ``"forkserver"``.
        options: options of the gradient reduction, with the names and defaults of `dadplug.options.Options`.

    Attributes:
        options: the options of the gradient reduction.
        reduction: the `GradientReduction` of the last fit, with its plan and traffic; None before it.

    Raises:
        ValueError: if the mode, an option or its value is unknown; the message lists the valid ones. If there is no hub
            with ``min_sites``.
        RuntimeError: if both of Lightning's packages are imported and the strategy is not that of a given package.

    Example:
        >>> trainer = pl.Trainer(strategy=DADStrategy(mode="rankdad"), accelerator="cpu", devices=2)
        >>> trainer.fit(module, loader)
        >>> print(trainer.strategy.reduction.plan)
    """

    reduction: GradientReduction | None = None
    _sites_may_leave = True

    @takes_keywords_of(Options)
    def __init__(
        self,
        mode: str = "rankdad",
        *,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        start_method: str = "popen",
        **options: Any,
    ) -> None:
        self._check_names(options)
        if cluster_environment is None and SiteEnvironment.detect():
            cluster_environment = SiteEnvironment()
        self.options = Options.create(mode=mode, **options)
        if not self._sites_may_leave:
            self.options.check_all_stay("AdaPMStrategy")
        if self.options.min_sites is not None and cluster_environment is None:
            raise ValueError(
                "min_sites needs a hub, which knows who is there: dadplug.connect(kit=...) before the strategy is built"
            )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            start_method=start_method,
            timeout=timedelta(seconds=self.options.timeout),
        )
        self._states: list[Any] | None = None
        self._steps: tuple[int, int] | None = None
        self._weightless = self._skipped = False
        self._transport: Transport | None = None
        self._elastic: ElasticFit | None = None  # where sites may leave and return
        self._run = ExitStack()

    def _check_names(self, options: dict[str, Any]) -> None:
        """Raise ValueError for unknown options; `Options.create` does if this does not."""

    # Start and end

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
        self._run.enter_context(gloo_interface())  # Lightning builds process groups of its own during a run
        super().setup_environment()
        if self.world_size > 1:
            before = self._transport
            timeout, rules = self.options.timeout, self.options.requirements
            self._transport = open_transport(
                None, Traffic(), self.root_device, timeout, requirements=rules, for_trainer=True
            )
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
        if self._elastic_transport is None:
            super().setup(trainer)
            return
        self._elastic = ElasticFit(self, trainer, self._elastic_transport)
        self._elastic.begin(self._run, fits=trainer.state.fn == "fit")
        if trainer.state.fn == "fit":
            super().setup(trainer)
            self._elastic.restore(self._run)
        else:
            self._set_up_evaluation(trainer)

    def _set_up_evaluation(self, trainer: Any) -> None:
        """Prepare an evaluation as ``DDPStrategy`` does, which waits for site 0."""
        assert self._transport is not None
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        replicas.broadcast_model(self.model, self._transport)
        self.setup_precision_plugin()

    def configure_ddp(self) -> None:
        """Build the reduction, where DDP would wrap the model."""
        if getattr(self.precision_plugin, "scaler", None) is not None:  # it looks for Inf itself
            self.options = dataclasses.replace(self.options, check_finite=False)
        if self._transport is not None:
            self._transport.gather_objects(None)  # a site that has failed by now builds no reduction
        state = None if self._elastic is None else {"trainer": self._elastic}
        self.reduction = GradientReduction(self.lightning_module, state=state, **dataclasses.asdict(self.options))
        if self._states is not None and not self._joins:
            self.reduction.load_states(self._states)
        self._states = None

    @property
    def _joins(self) -> bool:
        """Whether this site joins others in mid-training, up to the end of its first step."""
        return self._elastic is not None and self._elastic.joins

    def on_train_start(self) -> None:
        if self._elastic is not None:
            self._elastic.prepare_validation()
        super().on_train_start()

    @property
    def is_global_zero(self) -> bool:
        """Whether this site prints and logs: site 0, or the first one that is present where sites may leave."""
        transport = self._elastic_transport
        return self.global_rank == (0 if transport is None else transport.lowest)

    def teardown(self) -> None:
        try:
            if self.reduction is not None:
                self.reduction.detach(discard=True)  # after an error or a stop some gradients are left
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
        if self.reduction is not None:
            self.reduction.abort(reason)
        super().on_exception(exception)

    # Training

    def process_dataloader(self, dataloader: Any) -> Any:
        dataloader = super().process_dataloader(dataloader)
        trainer = self._trainer
        if trainer is None or not trainer.training or self._transport is None:
            return dataloader
        if self._elastic is not None:
            loader = self._elastic.wrap(dataloader)
            self._steps = loader.place
            return loader
        self._steps = compare_lengths(dataloader, self._transport)
        own, steps = self._steps or (0, 0)
        return UnevenLoader(dataloader, own, steps) if own < steps else dataloader

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step; if it returns None, this site participates in the step without data."""
        with self._samples_of((args, kwargs)):
            output = super().training_step(*args, **kwargs)
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
            self._weightless = not takes_part(self._trainer.fit_loop.epoch_loop.batch_idx, *self._steps)
        if self.reduction is None:
            return nullcontext()
        samples = 0 if self._weightless else batch_size(batch)
        return nullcontext() if samples is None else self.reduction.samples(samples)

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
        if self.reduction is not None and self.reduction.syncing:
            self.reduction.synchronize()
            if self._elastic is not None:
                self._elastic.end_step()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step an optimizer; one that uses the loss gets the mean over sites, so that all sites decide alike."""
        if self._transport is not None and isinstance(getattr(optimizer, "_optimizer", optimizer), torch.optim.LBFGS):
            closure = self._with_mean_loss(closure)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

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
        """Return a context in which gradients accumulate and are not sent."""
        return nullcontext() if self.reduction is None else self.reduction.no_sync()

    def on_validation_start(self) -> None:
        self._average_buffers()
        super().on_validation_start()

    def _average_buffers(self) -> None:
        if self._in_fit and self.reduction is not None and self.options.average_buffers:
            self.reduction.average_buffers()

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._average_buffers()
        return super().lightning_module_state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, with the compressor state of every site."""
        if self.reduction is not None:
            own = self.reduction.state_dict()
            checkpoint["dadplug"] = self.reduction.gather_objects(own) if self._in_fit else [own]
        if self._elastic is None:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        else:  # each site writes its own files, since any of them may leave
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self._elastic is None:
            super().remove_checkpoint(filepath)
        else:
            with suppress(FileNotFoundError):  # sites of one machine may share the file
                self.checkpoint_io.remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._states = checkpoint.get("dadplug")
        return checkpoint
