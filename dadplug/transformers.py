"""transformers' Trainer between sites: `attach` lets any Trainer train by one of dadplug's modes.

from dadplug.transformers import attach

attach(trainer, mode="rankdad")
trainer.train()
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .hub import current_connection
from .hub.connect import connect
from .local_steps.options import LOCAL_MODE, LocalOptions, options_of
from .options import Options
from .runners.loaders import check_split_data
from .runners.site_trainer import AttachedTrainer, SiteTrainer
from .support.logs import get_logger
from .support.signature import takes_keywords_of

_log = get_logger(__name__)
_STEPS_IN_BACKWARD = ("lomo", "adalomo")  # optimizers, beside those named layerwise


@takes_keywords_of(Options)
def attach(
    trainer: Any,
    mode: str = "rankdad",
    *,
    kit: str | Path | None = None,
    split_data: bool | str = "auto",
    **options: Any,
) -> None:
    """Let a Trainer of transformers, or of a subclass such as those of trl, train by a mode of dadplug.

    Call it once, after the Trainer is built and before ``trainer.train()``. Where a launcher such as torchrun has
    started a process for each site, the model is wrapped in `dadplug.DistributedDataParallel` where the Trainer would
    have wrapped it in torch's class, and all else stays as it is. Sites then count alike, as in torch's class, since
    the Trainer has made their losses shares of one mean.

    Where the sites are connected without a launcher, by `dadplug.connect` or `kit`, each Trainer works as if alone, on
    the data of its site, and gradients are those of one process with the rows, or tokens, of all sites.

    Args:
        trainer: the Trainer.
        mode: name of a method, as in `dadplug.GradientReduction`, or ``"localsgd"`` for local steps, as in
            `dadplug.LocalSGD`, with the options of `dadplug.local_steps.LocalOptions`. ``trainer.reduction`` is the
            `LocalSGD` then; the sites agree on one model before evaluations and checkpoints, and after each epoch.
        kit: folder of this site's kit, by which it connects to a hub, see `dadplug.connect`. With ``min_sites`` sites
            may then leave; one whose program is started again goes on at the step of the others.
        split_data: whether to split the training data over the sites: True; False, where each brings its own; or
            ``"auto"``: with a launcher they are split, without one where all sites have the same data set.
        options: the other options, see `dadplug.options.Options`.

    Raises:
        TypeError: if it is no Trainer.
        ValueError: if an option is not valid, or the Trainer trains in a way that does not go with dadplug; the message
            names the remedy.
        KitError: as in `dadplug.connect`, like RefusedError and SiteError.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=texts)
        >>> attach(trainer, mode="rankdad")
        >>> trainer.train()
        >>> print(trainer.reduction.plan)
    """
    own = _check(trainer, {"mode": mode} | options, kit, split_data)
    launched = trainer.args.world_size > 1
    if kit is not None and not launched:
        connect(kit=kit, timeout=options_of(**own).timeout)
    others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not launched and not others:
        _log.warning(
            "no other site: this Trainer trains alone, without dadplug. Start the script by torchrun, one process for "
            "each site, or connect the sites before, by dadplug.connect(...) or attach(..., kit=...)"
        )
        return
    _mix_in(trainer, AttachedTrainer if launched else SiteTrainer, own, split_data)
    _add_monitors(trainer)


def _check(trainer: Any, options: dict[str, Any], kit: str | Path | None, split_data: bool | str) -> dict[str, Any]:
    """Return the options, with those that follow from the Trainer; raise an error for what does not go."""
    import transformers

    if not isinstance(trainer, transformers.Trainer):
        raise TypeError(f"attach() takes a Trainer of transformers, or of a subclass, got {type(trainer).__name__}")
    for reason in _reasons(trainer):
        raise ValueError(reason)
    check_split_data(split_data)
    own = _complete(trainer, options)
    _check_place(trainer, kit, options_of(**own))
    if trainer.args.world_size == 1:
        _check_alone(trainer)
    if own.get("privacy") is not None and not hasattr(trainer, "_get_num_items_in_batch"):
        raise ValueError(
            "privacy needs transformers 5 or newer, where losses need not be divided by the tokens of a batch: "
            "pip install -U transformers"
        )
    return own


def _mix_in(trainer: Any, kind: type[AttachedTrainer], options: dict[str, Any], split_data: bool | str) -> None:
    """Mix dadplug's part into the class of a Trainer, and let its accelerator wrap models."""
    from .accelerate import use

    base = type(trainer)
    members = {"_use": staticmethod(use), "__module__": base.__module__, "__doc__": base.__doc__}
    trainer.__class__ = type(base.__name__, (kind, base), members)
    trainer.dadplug_options = options | {"split_data": "auto" if kind is SiteTrainer else bool(split_data)}
    trainer.dadplug_split = split_data
    try:
        trainer._use_dadplug()
    except BaseException:
        trainer.__class__ = base
        raise


def _reasons(trainer: Any) -> Iterator[str]:
    """Yield why a Trainer cannot train by dadplug, with remedies."""
    args, accelerator = trainer.args, trainer.accelerator
    plain = getattr(accelerator, "parallelism_config", None)
    if isinstance(trainer, AttachedTrainer):
        yield "this Trainer is attached already: call attach() once"
    if trainer.is_in_train or trainer.state.global_step > 0:
        yield "this Trainer has begun to train: call attach() before trainer.train(), on a new Trainer"
    if isinstance(trainer.model, (DataParallel, DistributedDataParallel)) or trainer.model_wrapped is not trainer.model:
        yield (
            "the model is wrapped already, by torch's DistributedDataParallel or another wrapper: give the Trainer the "
            "model itself, which attach() wraps"
        )
    if getattr(trainer.model, "_is_accelerate_prepared", False) and not accelerator._models:
        yield "the model has been prepared by another Accelerator: give the Trainer the model itself"
    if trainer.is_deepspeed_enabled:
        yield "DeepSpeed divides optimizer and gradients itself: leave deepspeed= out of the TrainingArguments"
    if trainer.is_fsdp_enabled or getattr(trainer, "is_fsdp_xla_enabled", False):
        yield (
            "FSDP divides the model over processes, and dadplug needs all of it at each site: leave fsdp= out of the "
            "TrainingArguments"
        )
    sizes = {f"{name}_size": getattr(plain, f"{name}_size", 1) or 1 for name in ("tp", "cp", "sp", "dp_shard")}
    sizes["tp_size"] = max(sizes["tp_size"], getattr(trainer.model, "tp_size", None) or 1)
    if split := [f"{name}={size}" for name, size in sizes.items() if size > 1]:
        yield (
            f"the model or its batches are divided over processes ({', '.join(split)}), and dadplug needs all of the "
            "model at each site: leave parallelism_config= and tp_plan= out"
        )
    if trainer.is_model_parallel or getattr(trainer, "is_distributed_loading_by_transformers", False):
        yield (
            "the model was loaded in parts, on several devices or processes: load it on one device, without "
            "device_map= and distributed_config="
        )
    if args.n_gpu > 1:
        yield (
            f"the Trainer uses {args.n_gpu} GPUs in one process, by torch.nn.DataParallel: start a process for each, "
            "by torchrun --nproc-per-node, or show it one, by CUDA_VISIBLE_DEVICES=0"
        )
    yield from _reasons_of_settings(trainer)


def _reasons_of_settings(trainer: Any) -> Iterator[str]:
    """Yield which training arguments do not go with dadplug, with remedies."""
    args = trainer.args
    if trainer.accelerator.split_batches:
        yield (
            "split_batches divides each batch of a loader over the processes, and leaves some without rows: leave it "
            "out of accelerator_config=, and give the rows of one process as per_device_train_batch_size"
        )
    if args.auto_find_batch_size:
        yield (
            "auto_find_batch_size lets each process find a batch of its own after a failure, and the others wait for "
            "it: leave it out, and give per_device_train_batch_size"
        )
    name = str(getattr(args.optim, "value", args.optim))
    if name in _STEPS_IN_BACKWARD or "layerwise" in name:
        yield (
            f"optim={name!r} steps during the backward pass, before gradients are synchronized: take another one, such "
            "as 'adamw_torch'"
        )
    if trainer.optimizer is not None:
        own = {id(parameter) for parameter in trainer.model.parameters()}
        stepped = [each for group in trainer.optimizer.param_groups for each in group["params"]]
        if not any(id(parameter) in own for parameter in stepped):
            yield (
                "the optimizer in optimizers= has none of the model's parameters: build it from "
                "trainer.model.parameters(), or leave it out"
            )


def _complete(trainer: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options, with those that follow from the Trainer.

    Raises:
        ValueError: if sites are to count by samples, and the Trainer has weighted their losses.
    """
    if trainer.args.world_size == 1:
        return options
    by_tokens = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if options["mode"] == LOCAL_MODE and by_tokens and trainer.args.average_tokens_across_devices:
        raise ValueError(
            "local steps do not wait for other processes, and the Trainer divides each loss by the tokens of all of "
            "them: set average_tokens_across_devices=False in the TrainingArguments"
        )
    if options.get("weighting") == "samples" and by_tokens and trainer.args.average_tokens_across_devices:
        raise ValueError(
            "weighting='samples' would weight losses a second time, which the Trainer divides by the "
            "tokens of all processes: leave it out, or set average_tokens_across_devices=False"
        )
    return options


def _check_place(trainer: Any, kit: str | Path | None, options: Options | LocalOptions) -> None:
    """Raise ValueError if the processes are started in a way in which they would not train together."""
    launched, announced = trainer.args.world_size > 1, int(os.environ.get("WORLD_SIZE", "1"))
    if not launched and announced > 1:
        raise ValueError(
            f"a launcher has started {announced} processes, and the Trainer works alone in each of them: without GPUs "
            "it needs use_cpu=True in the TrainingArguments"
        )
    if launched and kit is not None and current_connection() is None:
        raise ValueError(
            "a launcher has connected the processes already: call dadplug.connect(kit=...) before the "
            "TrainingArguments are made, or start the script without a launcher at each site"
        )
    if options.min_sites is not None and launched:
        raise ValueError(
            "min_sites needs a Trainer that works without the other processes: start the script without a launcher at "
            "each site, with attach(..., kit=...)"
        )
    if options.min_sites is not None and kit is None and current_connection() is None:
        raise ValueError("min_sites needs a hub, which tracks the sites that are present: attach(..., kit=...)")


def _check_alone(trainer: Any) -> None:
    """Raise ValueError if a Trainer lacks what sites with data of their own need."""
    parts = ("_run_epoch", "_maybe_log_save_evaluate", "_get_num_items_in_batch", "_prepare_for_training")
    if not all(hasattr(trainer, name) for name in parts):
        raise ValueError("sites without a launcher need transformers 5 or newer: pip install -U transformers")


def _add_monitors(trainer: Any) -> None:
    """Let traffic and ranks be logged, where the Trainer has no such callback."""
    from .callbacks.transformers import TrafficMonitor

    if not any(isinstance(each, TrafficMonitor) for each in trainer.callback_handler.callbacks):
        trainer.add_callback(TrafficMonitor())
