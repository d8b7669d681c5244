"""Adapters of the monitors to Lightning, for either of its packages, neither of which is imported here."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ..adaptive import AdaptiveDataLoader
from ..step.model_sync.samples import batch_size
from ..support.refusals import refuse
from . import monitors


class MonitorAdapter(monitors.Adapter):
    """Adapter that makes a monitor a ``Callback`` of Lightning.

    Values go to the trainer's loggers, and those in `Monitor.shown` to the progress bar as well. The constructor takes
    the monitor's arguments.
    """

    on_train_epoch_start = monitors.Adapter._start
    on_train_batch_start = monitors.Adapter._begin

    @property
    def _monitor(self) -> Any:
        return self._monitors[0]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the values of the batch."""
        values = self._monitor.end(getattr(trainer.strategy, "reduction", None), batch_size(batch) or 0)
        shown = {name: values.pop(name) for name in self._monitor.shown if name in values}
        for each, bar in ((values, False), (shown, True)):
            if each:
                pl_module.log_dict(each, on_step=True, on_epoch=False, prog_bar=bar, batch_size=1)


class AdaptiveBatchSizeAdapter(MonitorAdapter):
    """Adapter of `AdaptiveBatchSize`, which replaces the training loader for the time of a fit."""

    def setup(self, trainer: Any, pl_module: Any, **named: str) -> None:
        """Replace the training loader, before anything asks for it.

        Args:
            trainer: the trainer.
            pl_module: the module.
            named: what is set up, under the name that Lightning gives it.

        Raises:
            ValueError: if the trainer accumulates gradients, or divides no data over the sites.
        """
        if "fit" not in named.values():
            return
        refuse(
            (
                trainer.accumulate_grad_batches != 1,
                "AdaptiveBatchSize needs a trainer without accumulate_grad_batches",
            ),
            (
                trainer.world_size > 1 and not trainer._accelerator_connector.use_distributed_sampler,
                "AdaptiveBatchSize divides one data set over the sites, and with use_distributed_sampler=False each "
                "site has its own: use a dadplug.AdaptiveDataLoader(source=...) in a loop of your own",
            ),
        )
        self._loader: ChangingLoader | None = None
        source = trainer.fit_loop._data_source
        source.dataloader = functools.partial(self._replace, trainer, source.dataloader)

    def _replace(self, trainer: Any, original: Callable[[], Any]) -> Any:
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        self._loader = ChangingLoader(self._monitor.convert(original(), trainer.world_size, seed), trainer)
        return self._loader

    def on_fit_end(self, trainer: Any, pl_module: Any, *_: BaseException) -> None:
        """Leave the trainer as it was."""
        vars(trainer.fit_loop._data_source).pop("dataloader", None)

    on_exception = on_fit_end

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a pass with the present batch."""
        self._start()
        if self._loader is not None:
            self._loader.begin(trainer.current_epoch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the values of the batch."""
        if self._loader is not None:
            self._loader.end_batch()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def state_dict(self) -> Any:
        """Return the batch and the progress, for checkpoints."""
        return self._monitor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._monitor.load_state_dict(state)

    def picture(self, path: str) -> None:
        """Draw batch, gain, noise scale and goodput over the steps.

        Args:
            path: path of the PNG file.
        """
        self._monitor.picture(path)


class ChangingLoader:
    """Loader whose length the trainer follows when the batch changes in mid-epoch.

    It is no DataLoader, so that the trainer does not divide its data a second time.

    Args:
        loader: the loader.
        trainer: the trainer.
    """

    def __init__(self, loader: AdaptiveDataLoader, trainer: Any) -> None:
        self.loader, self._trainer = loader, trainer
        self._batches: Iterator[Any] | None = None
        self._given = 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self._batches, self._given = iter(self.loader), 0
        for batch in self._batches:
            self._given += 1
            self._follow()
            yield batch

    def begin(self, epoch: int) -> None:
        """Begin an epoch.

        Args:
            epoch: its number.
        """
        self.loader.set_epoch(epoch)
        self._follow()

    def end_batch(self) -> None:
        """End a batch; after the last one the loader's pass ends, which the trainer does not wait for."""
        if self._batches is not None and self._given == len(self.loader):
            next(self._batches, None)
            self._batches = None

    def _follow(self) -> None:
        """Let the trainer know the number of batches, unless it has limited that itself."""
        trainer, loop, length = self._trainer, self._trainer.fit_loop, len(self.loader)
        if trainer.limit_train_batches != 1.0 or loop.max_batches == length:
            return
        loop.max_batches = length
        loop._combined_loader.limits = [math.inf]  # the limits are those of the first length
        if loop._data_fetcher is not None:
            loop._data_fetcher.length = length
        if isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = max(1, int(length * trainer.val_check_interval))


def build_adapters(callback: type, module: str) -> list[Any]:
    """Build the callbacks for one of Lightning's packages.

    Args:
        callback: the package's ``Callback``.
        module: name of the module that contains them.
    """
    return monitors.build_adapters(
        lambda kind: (AdaptiveBatchSizeAdapter if kind is monitors.AdaptiveBatchSize else MonitorAdapter, callback),
        module,
        "trainer = pl.Trainer(strategy=DADStrategy(), callbacks=[{}])",
    )


def by_environment(module: str) -> list[Any]:
    """Build the callbacks that the environment variable DADPLUG_CALLBACKS lists, separated by commas.

    It serves as an entry point of Lightning's callback factories, which every Trainer calls.

    Args:
        module: name of the module with the callbacks for one of Lightning's packages.

    Raises:
        ValueError: if a name is not that of a callback without arguments.
    """
    names = [name.strip() for name in os.environ.get("DADPLUG_CALLBACKS", "").split(",") if name.strip()]
    for name in names:
        if name not in ("BatchTimer", "TrafficMonitor", "RankMonitor", "ReplicaCheck"):
            raise ValueError(
                f"unknown callback {name!r} in DADPLUG_CALLBACKS; valid ones are BatchTimer, TrafficMonitor, "
                "RankMonitor, ReplicaCheck"
            )
    return [getattr(sys.modules[module], name)() for name in names]
