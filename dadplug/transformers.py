"""transformers' Trainer between sites: `attach` lets any Trainer train by one of dadplug's modes.

from dadplug.transformers import attach

attach(trainer, mode="rankdad")
trainer.train()
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .hub import current_connection
from .hub.connect import check_start, connect
from .local_steps.options import LOCAL_MODE, LocalOptions, options_of
from .options import Options
from .runners.loaders import check_split_data
from .runners.site_trainer import AttachedTrainer, SiteTrainer
from .support.logs import get_logger
from .support.refusals import refuse
from .support.signature import takes_keywords_of

_log = get_logger(__name__)
_STEPS_IN_BACKWARD = ("lomo", "adalomo")  # optimizers, beside those named layerwise


@takes_keywords_of(Options)
def attach(
    trainer: Any,
    mode: str = "rankdad",
    *,
    kit: str | Path | None = None,
    start_sites: int | None = None,
    start_after: float | None = None,
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
        start_sites: with a kit and ``min_sites``: number of sites with which training may start.
        start_after: with ``start_sites``: seconds for which so many sites wait for the others, 60 by default.
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
    own = {"mode": mode} | options
    check_start(kit, start_sites, start_after)
    _check(trainer, own, kit, split_data)
    launched = trainer.args.world_size > 1
    if kit is not None and not launched:
        connect(kit=kit, timeout=options_of(**own).timeout, start_sites=start_sites, start_after=start_after)
    others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not launched and not others:
        _log.warning(
            "no other site: this Trainer trains alone, without dadplug. Start the script by torchrun, one process for "
            "each site, or connect the sites before, by dadplug.connect(...) or attach(..., kit=...)"
        )
        return
    _mix_in(trainer, AttachedTrainer if launched else SiteTrainer, own, split_data)
    _show_traffic(trainer)


def _check(trainer: Any, options: dict[str, Any], kit: str | Path | None, split_data: bool | str) -> None:
    """Raise an error for what does not go with dadplug."""
    import transformers

    if not isinstance(trainer, transformers.Trainer):
        raise TypeError(f"attach() takes a Trainer of transformers, or of a subclass, got {type(trainer).__name__}")
    _check_model(trainer)
    _check_settings(trainer)
    check_split_data(split_data)
    _check_weights(trainer, options)
    _check_place(trainer, kit, options_of(**options))
    is_new = hasattr(trainer, "_run_epoch") and hasattr(trainer, "_get_num_items_in_batch")
    refuse(
        (
            trainer.args.world_size == 1 and not is_new,
            "sites without a launcher need transformers 5 or newer: pip install -U transformers",
        ),
        (
            options.get("privacy") is not None and not is_new,
            "privacy needs transformers 5 or newer, where losses need not be divided by the tokens of a batch: "
            "pip install -U transformers",
        ),
    )


def _show_traffic(trainer: Any) -> None:
    """Add the callback that logs what is sent, unless there is one."""
    from .callbacks.transformers import TrafficMonitor

    if not any(isinstance(each, TrafficMonitor) for each in trainer.callback_handler.callbacks):
        trainer.add_callback(TrafficMonitor())


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


def _check_model(trainer: Any) -> None:
    """Raise ValueError if dadplug cannot wrap the model of a Trainer."""
    args, accelerator, model = trainer.args, trainer.accelerator, trainer.model
    plain = getattr(accelerator, "parallelism_config", None)
    sizes = {f"{name}_size": getattr(plain, f"{name}_size", 1) or 1 for name in ("tp", "cp", "sp", "dp_shard")}
    sizes["tp_size"] = max(sizes["tp_size"], getattr(model, "tp_size", None) or 1)
    split = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    refuse(
        (isinstance(trainer, AttachedTrainer), "this Trainer is attached already: call attach() once"),
        (
            trainer.is_in_train or trainer.state.global_step > 0,
            "this Trainer has begun to train: call attach() before trainer.train(), on a new Trainer",
        ),
        (
            isinstance(model, (DataParallel, DistributedDataParallel)) or trainer.model_wrapped is not model,
            "the model is wrapped already, by torch's DistributedDataParallel or another wrapper: give the Trainer the "
            "model itself, which attach() wraps",
        ),
        (
            getattr(model, "_is_accelerate_prepared", False) and not accelerator._models,
            "the model has been prepared by another Accelerator: give the Trainer the model itself",
        ),
        (
            trainer.is_deepspeed_enabled,
            "DeepSpeed divides optimizer and gradients itself: leave deepspeed= out of the TrainingArguments",
        ),
        (
            trainer.is_fsdp_enabled or getattr(trainer, "is_fsdp_xla_enabled", False),
            "FSDP divides the model over processes, and dadplug needs all of it at each site: leave fsdp= out of the "
            "TrainingArguments",
        ),
        (
            split,
            f"the model or its batches are divided over processes ({', '.join(split)}), and dadplug needs all of the "
            "model at each site: leave parallelism_config= and tp_plan= out",
        ),
        (
            trainer.is_model_parallel or getattr(trainer, "is_distributed_loading_by_transformers", False),
            "the model was loaded in parts, on several devices or processes: load it on one device, without "
            "device_map= and distributed_config=",
        ),
        (
            args.n_gpu > 1,
            f"the Trainer uses {args.n_gpu} GPUs in one process, by torch.nn.DataParallel: start a process for each, "
            "by torchrun --nproc-per-node, or show it one, by CUDA_VISIBLE_DEVICES=0",
        ),
    )


def _check_settings(trainer: Any) -> None:
    """Raise ValueError if training arguments do not go with dadplug."""
    args, optimizer = trainer.args, trainer.optimizer
    name = str(getattr(args.optim, "value", args.optim))
    own = {id(parameter) for parameter in trainer.model.parameters()}
    groups = [] if optimizer is None else optimizer.param_groups
    stepped = {id(each) for group in groups for each in group["params"]}
    refuse(
        (
            trainer.accelerator.split_batches,
            "split_batches divides each batch of a loader over the processes, and leaves some without rows: leave it "
            "out of accelerator_config=, and give the rows of one process as per_device_train_batch_size",
        ),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size lets each process find a batch of its own after a failure, and the others wait for "
            "it: leave it out, and give per_device_train_batch_size",
        ),
        (
            name in _STEPS_IN_BACKWARD or "layerwise" in name,
            f"optim={name!r} steps during the backward pass, before gradients are synchronized: take another one, such "
            "as 'adamw_torch'",
        ),
        (
            optimizer is not None and not stepped & own,
            "the optimizer in optimizers= has none of the model's parameters: build it from "
            "trainer.model.parameters(), or leave it out",
        ),
    )


def _check_weights(trainer: Any, options: dict[str, Any]) -> None:
    """Raise ValueError if processes are to count by samples, and the Trainer has weighted their losses."""
    args = trainer.args
    by_tokens = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    over_all = args.world_size > 1 and by_tokens and args.average_tokens_across_devices
    refuse(
        (
            options["mode"] == LOCAL_MODE and over_all,
            "local steps do not wait for other processes, and the Trainer divides each loss by the tokens of all of "
            "them: set average_tokens_across_devices=False in the TrainingArguments",
        ),
        (
            options.get("weighting") == "samples" and over_all,
            "weighting='samples' would weight losses a second time, which the Trainer divides by the "
            "tokens of all processes: leave it out, or set average_tokens_across_devices=False",
        ),
    )


def _check_place(trainer: Any, kit: str | Path | None, options: Options | LocalOptions) -> None:
    """Raise ValueError if the processes are started in a way in which they would not train together."""
    launched, announced = trainer.args.world_size > 1, int(os.environ.get("WORLD_SIZE", "1"))
    connected, elastic = current_connection() is not None, options.min_sites is not None
    refuse(
        (
            not launched and announced > 1,
            f"a launcher has started {announced} processes, and the Trainer works alone in each of them: without GPUs "
            "it needs use_cpu=True in the TrainingArguments",
        ),
        (
            launched and kit is not None and not connected,
            "a launcher has connected the processes already: call dadplug.connect(kit=...) before the "
            "TrainingArguments are made, or start the script without a launcher at each site",
        ),
        (
            elastic and launched,
            "min_sites needs a Trainer that works without the other processes: start the script without a launcher at "
            "each site, with attach(..., kit=...)",
        ),
        (
            elastic and kit is None and not connected,
            "min_sites needs a hub, which tracks the sites that are present: attach(..., kit=...)",
        ),
    )
