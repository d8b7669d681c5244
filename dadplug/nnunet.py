"""nnU-Net's trainer between sites: `nnUNetTrainerDadplug`, which ``nnUNetv2_train`` finds by name.

    python -m dadplug nnunet install  # once
    export DADPLUG_KIT=kits/a
    nnUNetv2_train 101 3d_fullres 0 -tr nnUNetTrainerDadplug

Each site works as nnU-Net does alone, on its own data, with the batch size of the plans, and writes its own files. The
sites exchange gradients, and at the end of an epoch losses and the sums of the pseudo Dice. Names with a mode and a
number of epochs work, too: ``nnUNetTrainerDadplug_dsgd_100epochs``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from .ddp import DistributedDataParallel
from .errors import MismatchError, SiteError
from .exchange import Traffic, open_transport
from .hub import current_connection
from .hub.connect import check_kit, connect
from .local_steps.options import LOCAL_MODE, options_class, options_of
from .local_steps.wrapped import LocalModel
from .runners.joining import TrainerState
from .step.methods import method_names
from .step.model_sync import sameness
from .support.files import PRIVATE, load_tensors, write_file
from .support.refusals import refuse
from .support.signature import named_value

try:
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
except ImportError as error:
    raise ImportError(
        f'dadplug.nnunet needs nnU-Net ({error}): pip install nnunetv2, or install dadplug with the extra "nnunet"'
    ) from error

if TYPE_CHECKING:
    _Trainer = Any
else:
    _Trainer = object  # in the class of a trainer, nnU-Net's class comes after it

__all__ = ["DadplugTraining", "nnUNetTrainerDadplug"]

KIT = "DADPLUG_KIT"
"""Environment variable with the folder of this site's kit."""
OPTIONS = "DADPLUG_OPTIONS"
"""Environment variable with options, as NAME=VALUE, separated by blanks."""

_OF_START = ("start_sites", "start_after")
_OWN_NAMES = ("dataset_name", "plans_name", "image_reader_writer", "configurations")  # of the plans, at each site
_LATEST = "checkpoint_latest.pth"  # the only one that training continues from
_COUNTS = ("tp_hard", "fp_hard", "fn_hard")
_VARIANT = re.compile(r"nnUNetTrainerDadplug(?:_(?!\d)(?P<mode>[a-z]+))?(?:_(?P<epochs>\d+)epochs?)?")
_REMEDY = (
    ". All sites need the same trainer, configuration and labels, and plans from one fingerprint: merge the sites' "
    "fingerprints by `python -m dadplug nnunet merge`, and plan at each site by `python -m dadplug nnunet plan`"
)

_CONTINUE = (
    ". Start all sites with --c from checkpoints of one epoch, or all without --c: where they differ, copy the "
    "checkpoint_latest.pth of one site to the others"
)


class TrainingState(TrainerState):
    """State of nnU-Net's trainer at the beginning of a step, which a site gets that joins the others."""

    _place = None  # each program has one training
    _kinds = {"epoch": int, "iteration": int, "logged": str, "best": float | None}

    def _parts(self) -> dict[str, Any]:
        return {"optimizer": self._trainer.optimizer, "scaler": self._trainer.grad_scaler}

    def _progress(self) -> dict[str, Any]:
        trainer = self._trainer
        epoch = trainer.current_epoch
        logged = {name: values[:epoch] for name, values in trainer.logger.get_checkpoint().items()}
        return {
            "description": trainer.dadplug_description(),
            "epoch": epoch,
            "iteration": trainer.iteration,
            "logged": json.dumps(logged, default=float),
            "best": None if trainer._best_ema is None else float(trainer._best_ema),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state of another site until training begins.

        Raises:
            SiteError: if it has begun: a trainer cannot go on at another step.
            MismatchError: if the others train by other plans.
        """
        if self._trainer.wrapped is not None:
            raise SiteError(
                "this site was cut off, and the others have gone on without it: start its program again to return"
            )
        own = self._trainer.dadplug_description()
        sameness.compare(state["description"], own, "the other sites", "this site", _REMEDY)
        super().load_state_dict(state)


class DadplugTraining(_Trainer):
    """Part of an nnU-Net trainer that trains with other sites; for subclasses of any of nnU-Net's trainers.

    The sites are those of the hub that the kit in ``DADPLUG_KIT`` names, or processes that a launcher such as torchrun
    has started. Of several processes that write to one folder, the first one writes.

    Attributes:
        dadplug_options: options of `dadplug.options.Options`, or with ``mode="localsgd"`` those of
            `dadplug.local_steps.LocalOptions`; besides ``start_sites`` and ``start_after``, as in `dadplug.connect`.
            Those in ``DADPLUG_OPTIONS`` go before.
        pooled_dice: whether plans with ``batch_dice`` take the Dice loss of the batches of all sites, as nnU-Net's DDP
            does, in several small exchanges a step. Where sites may leave, and with local steps, it is always that of
            the site's own batch.
        wrapped: the model that exchanges gradients, with ``reduction``; None before training.
        iteration: number of iterations in this epoch so far.

    Raises:
        ValueError: if an option is not valid; the message lists the valid ones.

    Example:
        >>> class nnUNetTrainerOurs(DadplugTraining, nnUNetTrainerNoMirroring):
        ...     dadplug_options = {"mode": "rankdad", "rank": 8, "min_sites": 2}
    """

    network: Any  # these two are nnU-Net's
    num_epochs: int
    dadplug_options: Mapping[str, Any] = {}
    pooled_dice = True
    wrapped: Any = None
    iteration = 0
    _epochs = 0  # of a variant for another number of epochs
    _lock: Any = None  # file that is locked while this process writes to the folder of results
    _checkpoint: Path | None = None  # that was loaded
    _iterations = 0  # of a whole epoch
    _start_at = 0  # iteration of the first epoch

    def __init__(
        self,
        plans: dict[str, Any],
        configuration: str,
        fold: int,
        dataset_json: dict[str, Any],
        device: torch.device = torch.device("cuda"),  # noqa: B008  (nnU-Net stores the arguments by these names)
    ) -> None:
        given = {"mode": "rankdad", **self.dadplug_options}
        given |= map(named_value, shlex.split(os.environ.get(OPTIONS, "")))
        self._start = {name: given.pop(name) for name in _OF_START if name in given}
        self.pooled_dice = given.pop("pooled_dice", self.pooled_dice)
        self._options = {name: _parsed(given["mode"], name, value) for name, value in given.items()}
        own = options_of(**self._options)  # which checks them
        self._elastic, self._timeout, self._requirements = own.min_sites is not None, own.timeout, own.requirements
        super().__init__(plans, configuration, fold, dataset_json, device)
        self.num_epochs = self._epochs or self.num_epochs
        self.is_ddp, self.local_rank = False, 0  # each process works as nnU-Net does alone
        self.device = device
        if device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % max(1, torch.cuda.device_count()))
            torch.cuda.set_device(self.device)
        else:
            self.grad_scaler = None
        self._lock_folder()

    def _lock_folder(self) -> None:
        """Write no files where another process writes to the same folder."""
        import fcntl

        self._lock = open(Path(self.output_folder) / ".dadplug.lock", "a")  # noqa: SIM115  (held by the process)
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            print(f"another process writes to {self.output_folder}: this one trains with it, and writes no files")
            self.local_rank = 1

    # The start

    def on_train_start(self) -> None:
        """Prepare the data as nnU-Net does; then connect to the other sites, and start from equal models.

        A training that has ended, which ``--c`` starts again for its validation, connects to no site.

        Raises:
            KitError: if the kit cannot be read, or is not valid at present; before the data are prepared.
            MismatchError: if plans, labels, epochs or checkpoints differ between sites; it names the sites.
            SiteError: if a site does not come in time.
        """
        kit = os.environ.get(KIT) or None
        connected = kit or current_connection()
        refuse((self._elastic and not connected, f"min_sites needs a hub: set {KIT} to the folder of this site's kit"))
        trains = self.current_epoch < self.num_epochs
        connects = trains and not dist.is_initialized()
        if connects:
            check_kit(kit, self._timeout, **self._start)  # before the data are prepared, which may take hours
        super().on_train_start()  # before others wait for this site, and before processes could inherit connections
        if not trains:
            return
        if connects:
            backend = "gloo" if self.device.type == "cpu" and kit is None else None
            connect(kit=kit, backend=backend, timeout=self._timeout, **self._start)
        self._iterations = self.num_iterations_per_epoch
        transport = open_transport(
            None, Traffic(), self.device, self._timeout, requirements=self._requirements, for_trainer=True
        )
        sameness.check_alike(self.dadplug_description(), transport, _REMEDY)
        sameness.check_alike({"first epoch": str(self.current_epoch)}, transport, _CONTINUE)
        transport.close()
        self._wrap()

    def dadplug_description(self) -> dict[str, str]:
        """Return what has to be the same at all sites, by name; digests of the plans, which contain statistics."""
        plans = {f"plans, {name}": value for name, value in self.plans_manager.plans.items() if name not in _OWN_NAMES}
        plans["plans, configuration"] = self.configuration_manager.configuration
        plans |= {what: self.dataset_json.get(what) for what in ("labels", "channel_names", "regions_class_order")}
        found = {what: _digest(value) for what, value in sorted(plans.items())}
        names = ("configuration_name", "num_epochs", "num_val_iterations_per_epoch", "initial_lr", "pooled_dice")
        found["iterations in an epoch"] = str(self._iterations)
        return found | {name: str(getattr(self, name)) for name in names}

    def _wrap(self) -> None:
        """Wrap the model, and go on from a checkpoint, or where this site joins from the state of the others."""
        joining, options = TrainingState(self), dict(self._options)
        state = {"training": joining} if self._elastic else None
        if options["mode"] == LOCAL_MODE:
            del options["mode"]
            wrapped: DistributedDataParallel = LocalModel(
                self.network, self.optimizer, state=state, in_trainer=True, **options
            )
        else:
            wrapped = DistributedDataParallel(self.network, state=state, broadcast_buffers=False, **options)
        self.wrapped = wrapped
        if joining.joined is not None:
            self._go_on(joining)
        else:
            self._restore_memories()
        if wrapped.reduction.world_size > 1 and not self._elastic and not isinstance(wrapped, LocalModel):
            for part in self.loss.modules():
                if getattr(part, "batch_dice", False) and hasattr(part, "ddp"):
                    part.ddp = self.pooled_dice

    def _go_on(self, joining: TrainingState) -> None:
        """Go on at the iteration of the other sites."""
        joined = joining.joined
        assert joined is not None
        joining.restore_parts()
        self.current_epoch, self._start_at = int(joined["epoch"]), int(joined["iteration"])
        self.num_iterations_per_epoch = self._iterations - self._start_at
        self.logger.load_checkpoint(json.loads(joined["logged"]))
        self._best_ema = joined["best"]
        self.print_to_log_file(f"joined the other sites in epoch {self.current_epoch}, iteration {self._start_at}")

    # Training

    def on_train_epoch_start(self) -> None:
        """Begin an epoch, or the rest of one."""
        super().on_train_epoch_start()
        self.iteration, self._start_at = self._start_at, 0

    def train_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Train on a batch; gradients are those of all sites when backward has ended."""
        plain, self.network = self.network, self.wrapped
        try:
            result: dict[str, Any] = super().train_step(batch)
        finally:
            self.network = plain
        self.iteration += 1
        return result

    def on_train_epoch_end(self, train_outputs: list[dict[str, Any]]) -> None:
        """Make the sites' models equal, and log the mean loss of all of them."""
        self.num_iterations_per_epoch = self._iterations
        self.wrapped.make_equal()
        if getattr(self.wrapped.reduction.options, "average_buffers", False):
            self.wrapped.reduction.average_buffers()
        losses = self._gather([float(each["loss"]) for each in train_outputs], list[float], "list of losses")
        super().on_train_epoch_end([{"loss": loss} for each in losses.values() for loss in each])

    def on_validation_epoch_end(self, val_outputs: list[dict[str, Any]]) -> None:
        """Log the pseudo Dice over the validation batches of all sites, and print that of each site."""
        own = {name: np.sum([each[name] for each in val_outputs], 0, dtype=float).tolist() for name in _COUNTS}
        own["loss"] = [float(np.mean([each["loss"] for each in val_outputs]))]
        sites = self._gather(own, dict[str, list[float]], "sums of the pseudo Dice")
        for name, found in sites.items():
            if {what: len(values) for what, values in found.items()} != {what: len(own[what]) for what in own}:
                raise MismatchError(f"{name} has sent sums of the pseudo Dice of other classes than this site has")
            tp, fp, fn = (np.array(found[what]) for what in _COUNTS)
            with np.errstate(invalid="ignore"):
                dice = 2 * tp / (2 * tp + fp + fn)  # NaN for a class that is in no batch, as in nnU-Net
            self.print_to_log_file(f"Pseudo dice at {name}", [round(float(each), 4) for each in dice])
        super().on_validation_epoch_end(
            [{name: np.array(values) for name, values in each.items()} for each in sites.values()]
        )

    def _gather(self, item: Any, kind: Any, what: str) -> dict[str, Any]:
        """Gather an object from each site that is present, by its name."""
        reduction = self.wrapped.reduction
        every = reduction.gather_objects(item, kind, what)
        return {name: each for name, each in zip(reduction.sites, every, strict=True) if each is not None}

    def on_train_end(self) -> None:
        """Write the last checkpoint, and end the exchange; each site validates on its own cases afterwards."""
        super().on_train_end()
        if self.wrapped is not None:
            self._memory_file(Path(self.output_folder) / _LATEST).unlink(missing_ok=True)
            self.wrapped.reduction.detach()

    def perform_actual_validation(self, save_probabilities: bool = False) -> None:
        """Validate on this site's own cases, in the process that writes the files."""
        if self.local_rank == 0:
            super().perform_actual_validation(save_probabilities)

    # Checkpoints

    def _memory_file(self, checkpoint: Path) -> Path:
        """Return the file of what this process keeps besides a checkpoint."""
        return checkpoint.with_suffix(f".dadplug{self.wrapped.reduction.site_rank}.pt")

    def save_checkpoint(self, filename: str) -> None:
        """Write a checkpoint, and beside the latest one what this process's reduction keeps from step to step."""
        path, part = Path(filename), Path(f"{filename}.part")
        try:
            super().save_checkpoint(str(part))
            if self.local_rank == 0 and part.exists():
                part.replace(path)  # a full disk leaves the last one as it was
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        if path.name == _LATEST and self.wrapped is not None and not self.disable_checkpointing:
            content = BytesIO()
            torch.save({"epoch": self.current_epoch + 1, "state": self.wrapped.site_state()}, content)
            write_file(self._memory_file(path), content.getvalue(), PRIVATE)

    def load_checkpoint(self, filename_or_checkpoint: Any) -> None:
        """Load a checkpoint; training continues from it, with what this process's reduction has kept."""
        super().load_checkpoint(filename_or_checkpoint)
        if isinstance(filename_or_checkpoint, str):
            self._checkpoint = Path(filename_or_checkpoint)

    def _restore_memories(self) -> None:
        """Restore what the reduction has kept, where all sites have it; else all of them begin anew."""
        if self._checkpoint is None:
            return
        path = self._memory_file(self._checkpoint)
        saved: Any = load_tensors(path, str(path)) if path.exists() else None
        has = saved is not None and saved["epoch"] == self.current_epoch
        if all(self._gather(has, bool, "answer").values()):
            self.wrapped.load_site_state(saved["state"])
        else:
            self.print_to_log_file("a site lacks the state of its compression: it begins anew at all sites")


class nnUNetTrainerDadplug(DadplugTraining, nnUNetTrainer):
    """nnU-Net's default trainer between sites; see `DadplugTraining`."""


def __getattr__(name: str) -> Any:
    found = _VARIANT.fullmatch(name)
    if found is None or found["mode"] not in (None, LOCAL_MODE, *method_names()):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    members: dict[str, Any] = {"__module__": __name__, "__doc__": nnUNetTrainerDadplug.__doc__}
    if found["mode"]:
        members["dadplug_options"] = {"mode": found["mode"]}
    if found["epochs"]:
        members["_epochs"] = int(found["epochs"])
    return type(name, (nnUNetTrainerDadplug,), members)


def _parsed(mode: str, name: str, value: Any) -> Any:
    """Parse the text of an option, as command lines do."""
    field = options_class(mode).__dataclass_fields__.get(name)
    kind = field.metadata["kind"] if field is not None else None
    return kind(value) if kind is not None and isinstance(value, str) else value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]
