"""Fixed versions of stock Catalyst callbacks: clipping, accumulation, checkpoints by one site, and fused steps."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from catalyst.callbacks.backward import BackwardCallback
from catalyst.callbacks.checkpoint import Checkpoint, CheckpointCallback
from catalyst.callbacks.metrics.accuracy import AccuracyCallback
from catalyst.callbacks.misc import TqdmCallback
from catalyst.callbacks.optimizer import OptimizerCallback
from catalyst.core.callback import Callback, CallbackOrder, CallbackWrapper, IOptimizerCallback
from catalyst.core.misc import get_original_callback
from catalyst.utils.torch import pack_checkpoint, unpack_checkpoint
from tqdm.auto import tqdm

from ..patches import SharedPatch
from .engine import save_whole


def adapt(callback: Callback) -> Callback:
    """Return the fixed version of a stock callback; other callbacks are returned unchanged.

    The given callback is replaced by another object, which shares its attributes, and not changed otherwise. The method
    resolution order of a user's subclass is: its own methods, the fixed ones, those of the stock class.
    """
    if isinstance(callback, CallbackWrapper):
        wrapper = copy.copy(callback)
        wrapper.callback = adapt(callback.callback)
        return wrapper
    for stock, fixed in _FIXED.items():
        if isinstance(callback, stock):
            kind: Any = type(callback)
            adapted: Any = object.__new__(fixed if kind is stock else type(kind.__name__, (kind, fixed), {}))
            adapted.__dict__ = vars(callback)
            return adapted
    return callback


def accumulation_steps(callbacks: Iterable[Callback]) -> int:
    """Return the number of batches of an update.

    Args:
        callbacks: callbacks of a run.

    Raises:
        ValueError: if they have different ones.
    """
    steps = {
        callback.accumulation_steps
        for callback in callbacks
        if isinstance(callback, IOptimizerCallback) and hasattr(callback, "accumulation_steps")
    }
    if len(steps) > 1:
        raise ValueError(f"optimizer callbacks with different accumulation_steps, {sorted(steps)}, cannot go together")
    return steps.pop() if steps else 1


class FixedBackward(BackwardCallback):
    """Backward callback that accumulates without traffic until an update is due, and clips the agreed gradients.

    Of several ones, the last exchanges the gradients of all.
    """

    def on_batch_end(self, runner: Any) -> None:
        if not runner.is_train_loader:
            return
        loss = runner.batch_metrics[self.metric_key]
        if getattr(getattr(runner.reduction, "options", None), "privacy", None) is None:
            loss = loss / runner.micro_batches  # private sums are divided by the expected batch of all of them
        if not (runner.update_due and self in runner.exchanging):
            with nullcontext() if runner.reduction is None else runner.reduction.no_sync():
                runner.engine.backward(loss)
            return
        runner.engine.backward(loss, fused=runner.fused_optimizers())
        norm = clip(self.grad_clip_fn, runner)
        if norm is not None and self._log_gradient:
            runner.batch_metrics[f"{self._prefix_gradient}/norm"] = norm


class FixedOptimizer(OptimizerCallback):
    """Optimizer callback that steps when an update is due, also at the end of an epoch, and clips before the step.

    For an optimizer without momentum the stock callback logs None, which Catalyst cannot average; this one logs none.
    """

    def _get_lr_momentum_stats(self) -> dict[str, Any]:
        return {name: value for name, value in super()._get_lr_momentum_stats().items() if value is not None}

    def on_batch_end(self, runner: Any) -> None:
        if runner.is_train_loader and runner.update_due:
            runner.take_part()
            norm = clip(self.grad_clip_fn, runner)
            if norm is not None:
                runner.batch_metrics[f"{self._prefix_gradient}/norm"] = norm
            runner.step_optimizer(self.optimizer)
            self.optimizer.zero_grad()
        runner.batch_metrics.update(self._get_lr_momentum_stats())


def clip(function: Any, runner: Any) -> Any:
    """Clip the agreed gradients by the function of a callback, if it has one; return what the function returns."""
    if function is None:
        return None
    runner.engine.unscale_gradients()
    return runner.clip_gradients(function)


def exchanging_callbacks(callbacks: Iterable[Callback], *, private: bool) -> list[FixedBackward]:
    """Return the backward callbacks that exchange gradients: the last one, and those that clip what is agreed.

    Args:
        callbacks: the callbacks of a run, in their order.
        private: whether gradients of samples are clipped, so that the sum of several passes has no bound of one.
    """
    found = [each for each in map(get_original_callback, callbacks) if isinstance(each, FixedBackward)]
    return [each for each in found if private or each is found[-1] or each.grad_clip_fn is not None]


class FixedCheckpoint(CheckpointCallback):
    """Checkpoint callback: site 0 writes files with all sites' compressor states, and all sites load its files.

    Where sites may leave, each of them writes the files, which are equal, and the first one that is present counts.
    """

    @property
    def on_epoch_end(self) -> Any:
        """Method that the stock callback has chosen, bound to this callback instead of the user's."""
        return types.MethodType(vars(self)["on_epoch_end"].__func__, self)

    def _save(self, runner: Any, obj: Any, logprefix: str) -> str:
        logpath = f"{logprefix}.pth"
        states = runner.reduction_states() if self.mode == "runner" else None
        parts = runner.checkpoint_parts(saving=True)
        runner.save_private(logpath)
        if not runner.engine.writes:
            return logpath
        if self.mode == "runner":
            save_whole(pack_checkpoint(**(obj | parts), dadplug=states), logpath)
        elif isinstance(obj, dict):
            save_whole(pack_checkpoint(model=parts["model"]), logpath)
        else:
            save_whole(parts["model"].state_dict(), logpath)
        return logpath

    def _handle_epoch(self, runner: Any, score: float) -> None:
        if runner.engine.writes:
            super()._handle_epoch(runner, score)
            return
        if self.mode == "runner":
            runner.reduction_states()  # site 0 writes them
        runner.checkpoint_parts(saving=True)
        logpath = f"{self.logdir}/{self.mode}.{runner.epoch_step:04d}.pth"
        for path in (logpath, *([f"{self.logdir}/{self.mode}.last.pth"] if self.save_last else [])):
            runner.save_private(path)
        self._storage.append(Checkpoint(obj=runner.model, logpath=logpath, metric=score))
        self._storage.sort(key=lambda saved: saved.metric, reverse=not self._minimize)
        del self._storage[self.topk :]

    def _load(
        self,
        runner: Any,
        resume_logpath: Any = None,
        resume_model: str | None = None,
        resume_runner: str | None = None,
    ) -> None:
        if runner.engine.transport.rounds.joins:  # the others' state is newer
            return
        for path in (resume_logpath, resume_model):
            if path is not None:
                with runner.keeping_private(path):
                    load_model(runner, runner.load_shared(path))
        if resume_runner is not None:
            with runner.keeping_private(resume_runner):
                load_runner(runner, runner.load_shared(resume_runner))


class FixedTqdm(TqdmCallback):
    """Progress bar of the first site that is present, with the number of sites where some may leave."""

    tqdm: Any

    def on_loader_start(self, runner: Any) -> None:
        self.tqdm = None
        if runner.engine.is_main_process:
            title = f"{runner.epoch_step}/{runner.num_epochs} * Epoch ({runner.loader_key})"
            self.tqdm = tqdm(total=runner.loader_batch_len, desc=title)

    def on_batch_end(self, runner: Any) -> None:
        if self.tqdm is None:
            return
        values = {name: float(value) for name, value in sorted(runner.batch_metrics.items())}
        shown = {name: f"{value:3.3f}" if value > 1e-3 else f"{value:1.3e}" for name, value in values.items()}
        self.tqdm.set_postfix(**shown | ({"sites": runner.engine.sites} if runner.engine.sites else {}))
        self.tqdm.update()

    def on_loader_end(self, runner: Any) -> None:
        if self.tqdm is not None:
            self.tqdm.clear()
            self.tqdm.close()
            self.tqdm = None

    on_exception = on_loader_end


def load_model(runner: Any, checkpoint: dict[str, Any]) -> None:
    """Load a model from a checkpoint of either mode."""
    if any(str(key).startswith("model") and str(key).endswith("state_dict") for key in checkpoint):
        unpack_checkpoint(checkpoint=checkpoint, model=runner.checkpoint_parts(saving=False)["model"])
    else:
        runner.checkpoint_parts(saving=False)["model"].load_state_dict(checkpoint)


def load_runner(runner: Any, checkpoint: dict[str, Any]) -> None:
    """Load the whole state of a checkpoint of mode ``"runner"``, from which training continues."""
    if "epoch_step" not in checkpoint:
        raise ValueError(
            'this checkpoint holds a model, no training: CheckpointCallback(mode="runner") writes one to go on from'
        )
    unpack_checkpoint(checkpoint=checkpoint, **runner.checkpoint_parts(saving=False))
    for counter in ("epoch_step", "batch_step", "sample_step"):
        setattr(runner, counter, checkpoint[counter])
    states = checkpoint.get("dadplug")
    if states is not None:
        runner.load_states(states, runner.engine.process_index)


_FIXED = {
    BackwardCallback: FixedBackward,
    OptimizerCallback: FixedOptimizer,
    CheckpointCallback: FixedCheckpoint,
    TqdmCallback: FixedTqdm,
}


# Fused steps

_CLIPPING = {"max_norm", "norm_type"}


def fused_callbacks(callbacks: Iterable[Callback]) -> tuple[list[FixedOptimizer], str]:
    """Return the callbacks that step, and why their steps cannot be fused; the reason is empty if they can.

    Args:
        callbacks: the callbacks of a run.
    """
    chosen = [each for each in callbacks if CallbackOrder.Backward <= each.order <= CallbackOrder.Optimizer]
    stepping = [each for each in chosen if type(each) is FixedOptimizer]
    reason = next(filter(None, map(_reason_against, chosen)), "")
    return stepping, reason or ("" if stepping else "there is no OptimizerCallback")


def _reason_against(callback: Callback) -> str:
    """Return why gradients are formed for a callback from backward to the step; empty if they need not be."""
    inner = callback.callback if isinstance(callback, CallbackWrapper) else callback
    if type(callback) not in (FixedBackward, FixedOptimizer):
        return f"{type(inner).__name__} may read the gradients"
    function = callback.grad_clip_fn
    if function is None:
        return ""
    known = isinstance(function, functools.partial) and function.func is torch.nn.utils.clip_grad_norm_
    known = known and not function.args and function.keywords.keys() <= _CLIPPING
    return "" if known else "gradients are not clipped by clip_grad_norm_"


# Names of older versions


def _accepting(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if "topk_args" in kwargs:
            kwargs.setdefault("topk", kwargs.pop("topk_args"))
        original(self, *args, **kwargs)

    return init


# Scripts for Catalyst before version 22 write ``AccuracyCallback(topk_args=)``, which is ``topk=`` now. They build the
# callback after the runner and before `train`, so that the patch is open from a runner's constructor to the end of its
# training.
OLDER_NAMES = SharedPatch(lambda: AccuracyCallback, "__init__", _accepting)
