"""Lightning's strategy for local steps, for either of Lightning's packages, neither of which it imports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ..exchange.exit_reasons import describe
from ..local_steps import LocalOptions, LocalSGD
from ..local_steps.options import Schedule
from ..model_sync.samples import batch_size
from ..model_sync.uneven_inputs import takes_part
from ..signature import takes_keywords_of
from .dad_strategy import DADStrategyBase


class LocalSGDStrategyBase(DADStrategyBase):
    """Lightning strategy for local steps (local SGD, DiLoCo); for ``Trainer(strategy=)``, also as ``"localsgd"``.

    Sites train alone for ``every`` steps and then agree on their parameters; ``"diloco"`` has DiLoCo's outer optimizer.
    Before an evaluation, in checkpoints and at the end of a fit the sites agree, so that they hold one model there.
    Processes, samplers, metrics and evaluation are those of Lightning's ``DDPStrategy``. Sites may have different
    numbers of batches: a site with fewer takes no step in some of the others' steps. The module needs automatic
    optimization and one optimizer.

    `dadplug.LocalSGDStrategy` is the strategy for the one of Lightning's two packages that is in use.

    Args:
        every: steps between two agreements, or a function of the number of steps so far that returns them.
        accelerator: as in ``DDPStrategy``.
        parallel_devices: as in ``DDPStrategy``.
        cluster_environment: as in ``DDPStrategy``; by default the existing connection of the sites, if there is one.
        checkpoint_io: as in ``DDPStrategy``.
        precision_plugin: as in ``DDPStrategy``.
        process_group_backend: as in ``DDPStrategy``.
        start_method: start of the processes: ``"popen"``, ``"spawn"``, ``"fork"`` (notebooks) or ``"forkserver"``.
        options: options of the local steps, with the names and defaults of `dadplug.local_steps.LocalOptions`.

    Attributes:
        local_options: the options of the local steps.
        local: the `LocalSGD` of the last fit, with its traffic; None before it.

    Raises:
        ValueError: if an option or its value is unknown; the message lists the valid ones.

    Example:
        >>> trainer = pl.Trainer(strategy=LocalSGDStrategy(every=64, wire="int8"), accelerator="cpu", devices=2)
        >>> trainer.fit(module, loader)
        >>> print(trainer.strategy.local.traffic.total_bytes_sent)
    """

    local: LocalSGD | None = None

    @takes_keywords_of(LocalOptions)
    def __init__(
        self,
        every: int | Schedule = LocalOptions.every,
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
        self.local_options = LocalOptions.create(every=every, **options)
        super().__init__(
            self.local_options.warm_up_mode,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            start_method=start_method,
            timeout=self.local_options.timeout,
            sync_batchnorm=self.local_options.sync_batchnorm,
        )
        self._accumulates = False
        self._has_trained = False  # since the last step of the optimizer

    # Start and end

    def configure_ddp(self) -> None:
        """Wrap nothing: the local steps are built once there is an optimizer."""
        if self._transport is not None:
            self._transport.gather_objects(None)  # a site that has failed by now builds no local steps

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        if not self.lightning_module.automatic_optimization or len(self.optimizers) != 1:
            raise ValueError("local steps need automatic optimization and one optimizer; DADStrategy takes any module")
        scaled = getattr(self.precision_plugin, "scaler", None) is not None
        self.local_options = dataclasses.replace(
            self.local_options,
            sync_batchnorm=self.options.sync_batchnorm,
            check_finite=self.local_options.check_finite and not scaled,
        )
        self.local = LocalSGD(self.lightning_module, self.optimizers[0], **vars(self.local_options))
        if self._states is not None:
            self.local.load_states([state and state["local"] for state in self._states])

    def teardown(self) -> None:
        if self.local is not None:
            self.local.detach()
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Post the exit reason to the other sites and close the connections, so that no site waits for this one."""
        if self.local is not None:
            self.local.abort(describe(exception))
        super().on_exception(exception)

    # Training

    def _samples_of(self, batch: Any) -> AbstractContextManager[Any]:
        self._weightless = not self._has_batch
        self._has_trained |= not self._weightless
        samples = 0 if self._weightless else batch_size(batch)
        return nullcontext() if self.local is None or samples is None else self.local.samples(samples)

    @property
    def _has_batch(self) -> bool:
        """Whether this site takes part in the current step with a batch of its own."""
        if self._steps is None or self._trainer is None:
            return True
        return takes_part(self._trainer.fit_loop.epoch_loop.batch_idx, *self._steps)

    def _synchronize(self) -> None:
        if self.local is not None and not self._accumulates:
            self.local.synchronize()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step the optimizer, and agree with the other sites if it is time."""
        step = super(DADStrategyBase, self).optimizer_step
        if self.local is None:
            return step(optimizer, closure, model, **kwargs)
        trains, self._has_trained = self._has_trained or self._has_batch, False
        if trains or self.local.synchronous:
            with self.local.stepping():
                output = step(optimizer, closure, model, **kwargs)
        else:  # a batch that this site has had before, as its loader repeats it
            output = closure()
            self.local.idle()
        self._has_trained = False
        return output

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Return a context in which gradients accumulate and are not sent."""
        self._accumulates = True
        try:
            with nullcontext() if self.local is None else self.local.no_sync():
                yield
        finally:
            self._accumulates = False

    def on_train_end(self) -> None:
        self._average_buffers()
        super().on_train_end()

    def _average_buffers(self) -> None:
        """Agree on one model, before an evaluation, a checkpoint, and at the end."""
        if self._in_fit and self.local is not None:
            self.local.finish()

    # Checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, with the state and the optimizer's state of every site."""
        if self.local is not None and self._in_fit:
            own = {"local": self.local.state_dict(), "optimizer": self.local.optimizer.state_dict()}
            checkpoint["dadplug"] = self.local.gather_objects(own)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the state of this site's optimizer; that of site 0 if the checkpoint has no other."""
        states, self._states = self._states, None
        if states is not None and self.global_rank < len(states) and states[self.global_rank] is not None:
            checkpoint = dict(checkpoint) | {"optimizer_states": [states[self.global_rank]["optimizer"]]}
        super().load_optimizer_state_dict(checkpoint)
