"""Checks of an accelerator's arguments and configuration; accelerate is not imported here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..support.refusals import refuse
from .loaders import check_split_data

_SHARDING = {
    "fsdp_plugin": ("ACCELERATE_USE_FSDP", "FSDP"),
    "deepspeed_plugin": ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
    "deepspeed_plugins": ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
    "megatron_lm_plugin": ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
    "torch_tp_plugin": ("ACCELERATE_USE_TP", "tensor parallelism"),
    "parallelism_config": ("ACCELERATE_USE_PARALLELISM_CONFIG", "a parallelism_config"),
}
"""Arguments of accelerate's class that divide a model over processes: the variable that a launcher sets, and a name."""


def announced() -> int:
    """Return the number of processes of the default process group, or of what a launcher has announced."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def refuse_sharding(given: Mapping[str, Any]) -> None:
    """Raise ValueError if models are to be divided over processes.

    Args:
        given: arguments of accelerate's class, by name.
    """
    for argument, (variable, name) in _SHARDING.items():
        asked = given.get(argument) is not None
        if asked or os.environ.get(variable, "false").lower() in ("true", "1"):
            where = (
                f"leave {argument}= out" if asked else f"start without what sets {variable}, see `accelerate config`"
            )
            raise ValueError(
                f"{name} divides the model over processes, and dadplug needs all of it at each site: {where}"
            )


def check_place(given: Mapping[str, Any]) -> None:
    """Raise ValueError if accelerate would let each process train alone, or would not use the precision asked for.

    Args:
        given: arguments of accelerate's class, by name.
    """
    on_cpu = bool(given.get("cpu")) or os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1")
    alone = not on_cpu and not torch.accelerator.is_available()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
    launched = "ACCELERATE_DYNAMO_BACKEND" in os.environ and "MASTER_ADDR" in os.environ  # which it sets for several
    refuse(
        (
            alone and announced() > 1,
            f"{announced()} processes have been started, and without a GPU accelerate lets each of them train alone: "
            "give the Accelerator cpu=True",
        ),
        (
            (on_cpu or alone) and launched and announced() == 1 and not any(name in os.environ for name in names),
            "accelerate launch --cpu starts one process on a machine, whatever --num_processes says, unless it gets "
            "--mpirun_hostfile: leave --cpu out and give --multi_gpu, with Accelerator(cpu=True) in the script, which "
            "starts all of them on CPUs, or use torchrun, or set RANK and WORLD_SIZE for each process",
        ),
    )
    precision = given.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    _check_precision(str(precision), "cpu" if on_cpu or alone else "gpu")


def _check_precision(precision: str, device_type: str) -> None:
    refuse(
        (
            precision == "fp16" and device_type == "cpu",
            "mixed_precision='fp16' has no effect on CPUs, where accelerate would train in float32: give 'bf16' or "
            "'no'",
        ),
        (
            precision == "fp8",
            "mixed_precision='fp8' replaces linear layers by others, whose gradients dadplug does not know: give "
            "'bf16'",
        ),
    )


def check_configuration(accelerator: Any, split_data: bool | str) -> None:
    """Raise ValueError if an accelerator is configured in a way that does not go with dadplug."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    processes = kind == "NO" or kind.startswith("MULTI_")
    refuse((not processes, f"distributed type {kind} does not go with dadplug: start one process for each CPU or GPU"))
    check_split_data(split_data)
    _check_precision(accelerator.mixed_precision, accelerator.device.type)
    refuse(
        (
            accelerator.split_batches,
            "split_batches=True divides each batch over the processes, and where it does not divide evenly leaves some "
            "of them without rows: leave it out, and give the loader the batch size of one process",
        ),
        (
            accelerator.dispatch_batches,
            "dispatch_batches=True sends the data of process 0 to all sites in each step: leave it out, so that each "
            "site loads its own part",
        ),
    )
    for name in ("comm_hook", "comm_wrapper"):
        asked = getattr(accelerator.ddp_handler, name, "no")
        hook = str(getattr(asked, "value", asked))
        remedy = "mode='powersgd'" if "power" in hook else f"wire={hook.replace('fp16', 'bf16')!r}"
        refuse(
            (
                hook != "no",
                f"{name}={hook!r} in DistributedDataParallelKwargs: the mode decides what is sent. Leave it out, and "
                f"give the Accelerator {remedy} for what it did",
            )
        )
