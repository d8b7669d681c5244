"""A run of Lightning in which sites leave and return: its checks, the state of a site that joins, and its metrics."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import MismatchError
from ...exchange import Transport, codec
from ...exchange.fields import checked
from ...exchange.restrictions import METRICS, declared
from ...step.model_sync.replicated_model import load_joined
from ...support.refusals import refuse
from ..joining import TrainerState
from ..loaders import known_length
from ..patches import SharedPatch, metrics_of_present_sites
from ..present import gather, metrics_transport, repeating

_AVERAGING = "StochasticWeightAveraging"
_RANKS = "lightning_utilities.core.rank_zero"  # module with the rank by which Lightning decides who prints and logs


class ElasticFit(TrainerState):
    """One fit in which sites leave and return.

    Args:
        strategy: the strategy.
        trainer: Lightning's trainer.
        transport: transport for everything but gradients.
        sends_optimizer: as in `TrainerState`.
        option: the option with which sites may leave, for messages.

    Attributes:
        steps: number of batches in an epoch.
    """

    _training = "fit"
    _kinds = {
        "steps": int,
        "epoch": int,
        "counts": dict[str, tuple[int, int]],
        "stepped": int,
        "stops": bool,
        "callbacks": dict[str, dict[str, Any]],
        "module": dict[str, Any],
        "metrics": dict[str, Any],
    }
    _transport: Transport

    def __init__(
        self, strategy: Any, trainer: Any, transport: Transport, sends_optimizer: bool = True, option: str = "min_sites"
    ) -> None:
        super().__init__(trainer, transport, sends_optimizer)
        self._strategy, self._option = strategy, option
        self.steps = 0

    # The beginning

    def begin(self, run: ExitStack, fits: bool) -> None:
        """Check that nothing needs all sites, and compute metrics over the sites that are present.

        Args:
            run: ends with the run.
            fits: whether the run trains.

        Raises:
            ValueError: if something needs all sites, or cannot be restored at a site that returns.
        """
        if fits:
            refuse(*((wrong, f"{reason}: leave {self._option} out") for wrong, reason in self._reasons()))
        package = type(self._trainer).__module__.split(".trainer.")[0]
        run.enter_context(metrics_of_present_sites(self._transport, [SYNC, _logged(package)]))

    def _reasons(self) -> Iterator[tuple[object, str]]:
        """Yield what cannot go on where sites leave and return, and whether it is there."""
        trainer, module = self._trainer, self._strategy.lightning_module
        by_time = getattr(trainer, "_val_check_time_interval", None)
        takes_iterator = "dataloader_iter" in inspect.signature(module.training_step).parameters
        yield (
            not module.automatic_optimization,
            "a site cannot return into manual optimization, in which a batch may have several steps",
        )
        yield takes_iterator, "a site cannot return into a training_step that takes batches from dataloader_iter"
        yield (
            trainer.reload_dataloaders_every_n_epochs,
            "a site cannot return into a fit with reload_dataloaders_every_n_epochs",
        )
        yield by_time is not None, "each site would validate by its own clock with a time as val_check_interval"
        for callback in trainer.callbacks:
            base: Any = next(each for each in type(callback).__mro__ if each.__name__ == "Callback")
            name = type(callback).__name__
            yield (
                type(callback).on_save_checkpoint is not base.on_save_checkpoint or name == _AVERAGING,
                f"a site that returns cannot get the state of {name}, which is not in its state_dict",
            )

    def _check_state(self) -> None:
        """Raise ValueError for an optimizer with several gradients in a step, or a state that cannot be sent."""
        for optimizer in self._strategy.optimizers:
            if isinstance(getattr(optimizer, "_optimizer", optimizer), torch.optim.LBFGS):
                raise ValueError(f"LBFGS needs all sites in each of a step's gradients: leave {self._option} out")
        try:
            codec.encode(self.state_dict())
        except TypeError as error:
            raise ValueError(f"a site that returns cannot get the state of this training: {error}") from error

    def prepare_validation(self) -> None:
        """Prepare the loaders of the validation at all sites at one time, and show the sites that are present."""
        trainer = self._trainer
        if trainer.enable_validation:
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.setup_data()
            trainer.training = True
        self._show()

    # State of a site that joins

    def _parts(self) -> dict[str, Any]:
        optimizers = [getattr(each, "_optimizer", each) for each in self._strategy.optimizers]
        return {
            "optimizers": optimizers if self._sends_optimizer else None,
            "schedulers": [config.scheduler for config in self._trainer.lr_scheduler_configs],
            "precision": self._strategy.precision_plugin,
        }

    def _progress(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "steps": self.steps,
            "epoch": trainer.fit_loop.epoch_progress.current.processed,
            "counts": {name: (each.total.completed, each.current.completed) for name, each in self._counts().items()},
            "stepped": trainer.fit_loop.epoch_loop._batches_that_stepped,
            "stops": bool(trainer.should_stop),
            "callbacks": {
                each.state_key: state
                for each in trainer.callbacks
                if (state := self._sendable(each.state_key, each.state_dict()))
            },
            "module": self._module_state(),
            "metrics": {**trainer._logger_connector._callback_metrics},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state of another site until `restore`, when there are optimizers."""
        super().load_state_dict(state)
        self.steps = state["steps"]

    def _sendable(self, name: str, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state if it can be sent; with a warning an empty one if not.

        Raises:
            TypeError: if it cannot, and the fit begins.
        """
        try:
            codec.encode(state)
        except TypeError as error:
            if not self._trainer.global_step:
                raise
            warnings.warn(f"{name} begins anew at a site that returns: {error}", stacklevel=2)
            return {}
        return state

    def _module_state(self) -> dict[str, Any]:
        """Return what the module adds to a checkpoint."""
        checkpoint = self._checkpoint()
        usual = set(checkpoint)
        self._strategy.lightning_module.on_save_checkpoint(checkpoint)
        added = {name: value for name, value in checkpoint.items() if name not in usual}
        return self._sendable("what the module's on_save_checkpoint adds", added)

    def _checkpoint(self) -> dict[str, Any]:
        """Return the parts of a checkpoint that a module may look at."""
        trainer, module = self._trainer, self._strategy.lightning_module
        return {"epoch": trainer.current_epoch, "global_step": trainer.global_step, "state_dict": module.state_dict()}

    def _counts(self) -> dict[str, Any]:
        loop = self._trainer.fit_loop.epoch_loop
        optimizer = loop.automatic_optimization.optim_progress.optimizer
        return {
            "batch": loop.batch_progress,
            "scheduler": loop.scheduler_progress,
            "step": optimizer.step,
            "zero_grad": optimizer.zero_grad,
        }

    def restore(self, run: ExitStack) -> None:
        """Restore the state of another site, if this one joins.

        Args:
            run: ends with the run.
        """
        if self.joined is None:
            self._check_state()
        else:
            load_joined(self._training, partial(self._restore, run), self.joined)

    def _restore(self, run: ExitStack, state: dict[str, Any]) -> None:
        trainer, strategy = self._trainer, self._strategy
        self.restore_parts()
        for callback in trainer.callbacks:
            own = state["callbacks"].get(callback.state_key)
            if own is not None:
                if hasattr(callback, "dirpath"):
                    check_paths(own, callback)
                    callback.dirpath = own.get("dirpath", callback.dirpath)  # the same at all sites, as at the start
                callback.load_state_dict(own)
        trainer.should_stop = state["stops"]
        for count in (trainer.fit_loop.epoch_progress.total, trainer.fit_loop.epoch_progress.current):
            _set(count, state["epoch"])
        for name, count in self._counts().items():
            _set(count.total, state["counts"][name][0])
        trainer.fit_loop.epoch_loop._batches_that_stepped = state["stepped"]
        trainer._logger_connector._callback_metrics.update(state["metrics"])
        if state["module"]:
            strategy.lightning_module.on_load_checkpoint(self._checkpoint() | state["module"])
        trainer._checkpoint_connector._loaded_checkpoint = {}  # of ckpt_path, which is older
        run.callback(setattr, trainer, "num_sanity_val_steps", trainer.num_sanity_val_steps)
        trainer.num_sanity_val_steps = 0

    def first_batch(self) -> int:
        """Return the number of the batch at which a pass over the training data begins, and set the loop's counts."""
        joined, self.joined = self.joined, None  # later passes are whole ones
        if joined is None:
            return 0
        for name, count in self._counts().items():
            _set(count.current, joined["counts"][name][1])
        number: int = joined["counts"]["batch"][1]
        self._trainer.fit_loop._data_fetcher.fetched = number
        return number

    def compare_lengths(self, loader: Any) -> tuple[int, int]:
        """Return the lengths of this site's training loader and of an epoch, the largest of all sites' loaders.

        Raises:
            ValueError: if the loader has no length, or there are several.
        """
        own, transport = known_length(loader, 0), self._transport
        found = checked(transport.gather_present(own), int, "length", transport, lambda each: [each])
        refuse(
            (not own, "where sites may leave and return, each needs a training loader of known length"),
            (
                self.steps and self.joined is None,
                f"a site cannot return into a fit with several training loaders: leave {self._option} out",
            ),
        )
        self.steps = self.steps or max(found.values())
        return min(own, self.steps), self.steps

    # After each step

    def end_step(self) -> None:
        """Count a step of the exchange, and show the sites that are present."""
        self._transport.rounds.end_step()
        self._show()

    def _show(self) -> None:
        """Show the sites that are present, and print and log at the first of them."""
        present = self._transport.rounds.present
        self._trainer._logger_connector._progress_bar_metrics["sites"] = f"{len(present)}/{self._transport.world_size}"
        rank = self._transport.rank
        is_first = rank == self._transport.rounds.lowest
        ranks = sys.modules[_RANKS].rank_zero_only
        if (ranks.rank == 0) == is_first:
            return
        ranks.rank = 0 if is_first else max(rank, 1)
        bar, arguments = self._trainer.progress_bar_callback, (self._trainer, self._strategy.lightning_module)
        if bar is not None and is_first:
            bar.enable()
            bar.on_train_start(*arguments)
            bar.on_train_epoch_start(*arguments)
        elif bar is not None:
            bar.disable()


def check_paths(state: dict[str, Any], callback: Any) -> None:
    """Check the paths in the state of a checkpoint callback of another site: Lightning loads and removes such files.

    Args:
        state: the state.
        callback: the callback.

    Raises:
        MismatchError: if one is no checkpoint in the folder of the state, or that is on another machine.
    """
    folder, ends = state.get("dirpath", callback.dirpath), getattr(callback, "FILE_EXTENSION", "")
    check_local(folder, callback.dirpath, "another site")
    paths = [state.get(name) for name in ("best_model_path", "kth_best_model_path", "last_model_path")]
    for path in filter(None, [*paths, *state.get("best_k_models", ())]):
        if not (Path(path).is_relative_to(folder) and ".." not in Path(path).parts and path.endswith(ends)):
            raise MismatchError(f"another site has sent a state of {callback.state_key} with the file {path!r}")


def check_local(path: Any, own: Any, sender: str) -> None:
    """Raise MismatchError if another site names a path on another machine, and this site does not."""
    if "://" in str(path) and "://" not in str(own):
        raise MismatchError(f"{sender} names {path!r}, which is on another machine, and here it would be {own!r}")


def _set(count: Any, value: int) -> None:
    for name in vars(count):
        setattr(count, name, value)


# Metrics over the sites that are present


def _gathering(original: Callable[..., None]) -> Callable[..., None]:
    """Replace the function by which a metric of torchmetrics gathers its state, unless it is a user's."""

    @functools.wraps(original)
    def sync(metric: Any, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        transport = metrics_transport.get()
        if transport is None or (metric.dist_sync_fn is not None and dist_sync_fn is metric.dist_sync_fn):
            arguments = {"dist_sync_fn": dist_sync_fn} if dist_sync_fn is not None else {}
            with declared(METRICS):
                original(metric, **arguments, process_group=process_group)
            return

        def of_present(tensor: Tensor, group: Any = None) -> Sequence[Tensor]:
            return [each.to(tensor.device) for each in gather(transport, tensor.detach())]

        original(metric, dist_sync_fn=of_present, process_group=process_group)

    return repeating(sync)


SYNC = SharedPatch(lambda: importlib.import_module("torchmetrics").Metric, "_sync_dist", _gathering)


@functools.cache
def _logged(package: str) -> SharedPatch:
    """Return the patch of the values that a package's modules log."""
    module = f"{package}.trainer.connectors.logger_connector.result"
    return SharedPatch(lambda: importlib.import_module(module)._ResultMetric, "compute", repeating)
