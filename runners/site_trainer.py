"""Classes that `dadplug.transformers.attach` mixes into the class of a Trainer; transformers is not imported here.

`AttachedTrainer` is for processes that a launcher has started. They stay those of the Trainer, which divides data and
gathers metrics; gradients, and what the reduction keeps from step to step, are dadplug's. `SiteTrainer` is for sites
without a launcher, such as those of a hub: each Trainer works as if alone, and nothing but dadplug's messages
leaves the site.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..ddp import DistributedDataParallel
from ..errors import MismatchError, SiteError
from ..exchange.fields import fits, invalid
from ..reduction import GradientReduction
from ..step.model_sync import sameness
from ..step.model_sync.replicated_model import load_joined
from ..step.model_sync.samples import takes_part
from .joining import TrainerState
from .loaders import SiteSampler, UnevenLoader, data_to_split, known_length
from .patches import METRICS_KIND, merge_metrics, metrics_by_site

_STATE = "optimizer and trainer"  # name of the training's state among those that a site that joins gets


if TYPE_CHECKING:
    _Trainer = Any
else:
    _Trainer = object  # in the class of a trainer, that trainer's own class comes after it


class AttachedTrainer(_Trainer):
    """Part of a Trainer whose models are wrapped in `dadplug.DistributedDataParallel`.

    Attributes:
        dadplug_options: options of the reduction.
    """

    model_wrapped: Any
    optimizer: Any
    dadplug_options: Mapping[str, Any]
    _use: Callable[..., None]  # see `dadplug.accelerate.use`
    _equal_at = -1  # step at which the sites' models were made equal

    @property
    def reduction(self) -> GradientReduction | None:
        """The gradient reduction of the model that is trained; None before the first training."""
        wrapped = self._wrapper
        return None if wrapped is None else wrapped.reduction

    @property
    def _trained(self) -> GradientReduction:
        """The gradient reduction in training."""
        reduction = self.reduction
        if reduction is None or _plain(reduction.model) is not self.model:
            raise RuntimeError("the Trainer has not wrapped its model by dadplug: is its accelerator another one now?")
        return reduction

    @property
    def _wrapper(self) -> DistributedDataParallel | None:
        found = self.accelerator._wrapped
        return found[-1] if found else None

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator anew, as a search for hyperparameters does."""
        super().create_accelerator_and_postprocess()
        self._use_dadplug()

    def _use_dadplug(self) -> None:
        """Let the accelerator wrap the models that it prepares from now on."""
        release = self.accelerator.free_memory  # accelerate's: each training begins with it, and keeps the wrapper
        self._use(self.accelerator, in_trainer=True, **self.dadplug_options)
        self.accelerator.free_memory = release

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Train; see transformers."""
        self._forget_evaluation()
        self._equal_at = -1
        handler = self.callback_handler  # what adds to the logs comes before what passes them on
        handler.callbacks.sort(key=lambda each: not getattr(each, "adds_to_logs", False))
        return super()._inner_training_loop(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log the losses of all sites, evaluate and save; see transformers."""
        reduction = self.reduction
        with nullcontext() if reduction is None else reduction.naming_sites():
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def _forget_evaluation(self) -> None:
        """Let the model be wrapped: accelerate takes one for prepared that has been prepared for an evaluation."""
        wrapper = self._wrapper
        if wrapper is not None and _plain(wrapper.module) is self.model:
            return
        if wrapper is not None:  # of a model that `model_init` has replaced
            wrapper.reduction.detach(discard=True)
            self.accelerator._wrapped.clear()
        model: Any
        for model in (self.model, self.model_wrapped):
            if model.__dict__.pop("_is_accelerate_prepared", False):
                self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        self.model_wrapped = self.model

    def _run_epoch(self, **kwargs: Any) -> None:
        """Train for an epoch; after it, sites whose models may differ agree on one.

        Raises:
            MismatchError: if the sites have different numbers of batches.
        """
        self._compare_lengths(known_length(kwargs["train_dataloader"], 0))
        super()._run_epoch(**kwargs)
        AttachedTrainer._agree(self)

    def _compare_lengths(self, own: int) -> None:
        lengths = self._trained.gather_objects(own, int, "number of batches")
        if len(set(lengths)) > 1:
            raise MismatchError(
                f"the sites have different numbers of batches, {' and '.join(map(str, lengths))}: leave "
                "even_batches=False out of accelerator_config=, or set dataloader_drop_last=True"
            )

    def _make_equal(self) -> None:
        """Agree on one model in training, once after a step."""
        if self._wrapper is not None and self.is_in_train and self._equal_at != self.state.global_step:
            self._equal_at = self.state.global_step
            self._agree()

    def _agree(self) -> None:
        assert self._wrapper is not None
        self._wrapper.make_equal()

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; in training, sites whose models may differ agree on one before."""
        self._make_equal()
        return super().evaluate(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, and for a checkpoint what this process's reduction keeps.

        For a checkpoint, sites whose models may differ agree on one before.
        """
        is_checkpoint = _internal_call and self.is_in_train and output_dir is not None
        if is_checkpoint:
            self._make_equal()
        super().save_model(output_dir, _internal_call)
        if is_checkpoint and not (self.args.save_only_model and not self.dadplug_options.get("private")):
            Path(str(output_dir)).mkdir(parents=True, exist_ok=True)  # process 0 may not have come here yet
            self.accelerator.save_memories(output_dir)

    @property
    def _is_private(self) -> bool:
        return self.dadplug_options.get("privacy") is not None

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Take the micro-batches of a step, and count their items.

        With `privacy` nothing is counted: by a number of tokens the loss of a sample would depend on the others.
        """
        batches, items = super().get_batch_samples(*args, **kwargs)
        return batches, None if self._is_private else items

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a micro-batch; with `privacy` its loss is not divided by their number, as sums of gradients are."""
        parts = getattr(self, "current_gradient_accumulation_steps", 1)
        if not self._is_private or parts == 1:
            return super().training_step(*args, **kwargs)
        self.current_gradient_accumulation_steps = 1
        try:
            return super().training_step(*args, **kwargs) / parts  # what is logged
        finally:
            self.current_gradient_accumulation_steps = parts

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; see transformers."""
        if self._wrapper is not None and not self.accelerator._models:
            self.accelerator._models.append(self._wrapper)  # else a second training prepares the model once more
        return super().evaluation_loop(*args, **kwargs)

    # Checkpoints

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore what this process's reduction has kept, with the states of optimizer and scheduler.

        Raises:
            MismatchError: if the sites' checkpoints are of different steps.
        """
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        reduction = self._trained
        found = reduction.gather_objects(self.state.global_step, int, "step")
        steps = {name: step for name, step in zip(reduction.sites, found, strict=True) if step is not None}
        if len(set(steps.values())) > 1:
            where = ", ".join(f"{name}: {step}" for name, step in steps.items())
            raise MismatchError(
                f"the sites would resume at different steps ({where}): give all of them a checkpoint of one step"
            )
        self.accelerator.load_memories(checkpoint)
        self.accelerator.load_private(checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self.state.best_model_checkpoint is not None:
            self.accelerator.load_private(self.state.best_model_checkpoint)


def _plain(model: nn.Module) -> nn.Module:
    """Return the model that torch.compile has wrapped."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


class TrainingState(TrainerState):
    """State of a Trainer of a site; `joined` is given up when training begins."""

    _kinds = {"state": str, "batches": int, "split": str | None}

    def _parts(self) -> dict[str, Any]:
        trainer = self._trainer
        parts = {"scheduler": trainer.lr_scheduler, "scaler": trainer.accelerator.scaler}
        return {"optimizer": trainer.optimizer, **parts}

    def _progress(self) -> dict[str, Any]:
        trainer = self._trainer
        kept = dict(trainer.state.stateful_callbacks)
        for callback in [*trainer.callback_handler.callbacks, trainer.control]:
            name = type(callback).__name__
            if name in kept and not isinstance(kept[name], list):
                kept[name] = callback.state()
        return {
            "state": json.dumps(asdict(trainer.state) | {"stateful_callbacks": kept}),
            "batches": trainer.batches_in_epoch,
            "split": trainer.split_data,
        }

    @property
    def _place(self) -> Any:
        return self._trainer.trainings

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state of another site until training begins.

        Raises:
            SiteError: if it has begun: a trainer cannot go on at another step.
            MismatchError: if the others are in a later training of the program.
        """
        if self._trainer.reduction is not None:
            raise SiteError(
                "this site was cut off, and the others have gone on without it: start its program again to return"
            )
        super().load_state_dict(state)

    def restored(self) -> str:
        """Return the state of another site as the text of a checkpoint, with the folder of this site.

        Raises:
            MismatchError: if callbacks have arguments or attributes that those of this site do not have, or the best
                checkpoint is none.
        """
        found: list[str] = []
        assert self.joined is not None
        load_joined(self._training, lambda text: found.append(self._checked(text)), self.joined["state"])
        return found[0]

    def _checked(self, text: str) -> str:
        state, trainer = json.loads(text), self._trainer
        for name, given in state["stateful_callbacks"].items():
            callbacks = [*trainer.callback_handler.callbacks, trainer.control]
            own = [each.state() for each in callbacks if type(each).__name__ == name]
            for here, there in zip(own, given if isinstance(given, list) else [given], strict=False):
                if _names(here) != _names(there):
                    raise invalid("state of its trainer", "another site", f"callback {name} has {there!r:.100}")
        if not fits(state["global_step"], int):
            raise invalid("state of its trainer", "another site", f"global_step is {state['global_step']!r:.100}")
        if (best := state["best_model_checkpoint"]) is not None:
            name = Path(best).name
            if not re.fullmatch(r"checkpoint-\d+", name):
                raise invalid("state of its trainer", "another site", f"{best!r:.100} is no checkpoint")
            state["best_model_checkpoint"] = str(Path(trainer.args.output_dir) / name)
        return json.dumps(state)


def _names(state: dict[str, Any]) -> dict[str, list[str]]:
    """Return the names of the arguments and attributes in the state of a callback."""
    return {part: sorted(values) for part, values in state.items()}


class SiteTrainer(AttachedTrainer):
    """Part of a Trainer that works as if alone, on data of its own, and exchanges gradients with other sites.

    A site counts by its rows, or by its tokens where the loss is divided by their number, so that gradients are those
    of one process with the rows of all sites. An epoch has as many batches as the site with the most has; the others
    skip some steps, spread over the epoch. Metrics of evaluations in training are means over the sites, by samples, so
    that all of them decide alike.

    Attributes:
        trainings: number of trainings so far.
        batches_in_epoch: number of batches of an epoch.
        dadplug_split: whether to split the data set over the sites: True, False, or ``"auto"`` where all have the same.
        split_data: fingerprint of the data set that is split over the sites; None where each has its own.
    """

    trainings = 0
    batches_in_epoch = 0
    dadplug_split: bool | str = "auto"
    split_data: str | None = None
    _training: TrainingState
    _ahead: deque[tuple[bool, int | None]]  # of the micro-batches of a step: whether they count, and stated samples
    _position = 0  # micro-batches of the epoch so far
    _own_batches = 0  # of this site's data in an epoch
    _parts = 1  # micro-batches of the step that count
    _begins = False  # whether training has been called, and its loader is not there yet
    _silent = False  # whether the loss does not count
    _returns_to: str | None = None  # folder that stands for a checkpoint, at a site that joins the others

    def _use_dadplug(self) -> None:
        self._training = TrainingState(self)
        self._ahead = deque()
        self.dadplug_options = {**self.dadplug_options, "state": {_STATE: self._training}}
        super()._use_dadplug()

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        if trial is not None:
            raise ValueError("sites without a launcher cannot search for hyperparameters: start the script by torchrun")
        self._forget_evaluation()
        self._begins = True
        self.trainings += 1
        if self._wrapper is None:
            self.create_optimizer()  # here a site that joins gets its state
            self.model_wrapped, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        with self._returning(resume_from_checkpoint) as start:
            output = super()._inner_training_loop(batch_size, args, start, trial, ignore_keys_for_eval)
        if self.args.load_best_model_at_end:
            self._share_best_model()
        return output

    @contextmanager
    def _returning(self, checkpoint: Any) -> Iterator[Any]:
        """Yield the checkpoint to begin with: where this site joins, one of the state that it has got."""
        joined = self._training.joined
        if joined is None:
            yield checkpoint
            return
        restores = self.args.restore_callback_states_from_checkpoint
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "trainer_state.json").write_text(self._training.restored())
            self._returns_to = folder
            self.args.restore_callback_states_from_checkpoint = True  # all sites have to stop early, or none
            try:
                yield folder
            finally:
                self._returns_to = self._training.joined = None
                self.args.restore_callback_states_from_checkpoint = restores

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and checkpoint == self._returns_to:
            self._training.restore_parts()
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    # Data

    def get_train_dataloader(self) -> Any:
        """Return the loader of the site's own data, in training with as many batches as the site with the most has.

        Raises:
            ValueError: if the number of batches is not known, or 0.
        """
        loader = super().get_train_dataloader()
        if not self._begins:
            return loader
        self._begins = False
        base, reduction, joined = getattr(loader, "base_dataloader", loader), self._trained, self._training.joined
        sampler = getattr(base, "batch_sampler", None)
        self.split_data = data_to_split(
            base,
            self.dadplug_split,
            "training",
            reduction.gather_objects,
            *(() if joined is None else (joined["split"],)),
        )
        if self.split_data is not None:
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            sampler = SiteSampler(sampler, reduction.site_rank, reduction.world_size, seed)
        own = self._own_batches = known_length(sampler, 0)
        if joined is not None:
            self.batches_in_epoch = joined["batches"]
        else:
            lengths = reduction.gather_objects(own, int, "number of batches")
            self.batches_in_epoch = max(each or 0 for each in lengths)
        if own == 0:
            raise ValueError(
                "this site has no batch to train on, or a data set without a length: each site needs one batch"
            )
        object.__setattr__(base, "batch_sampler", UnevenLoader(sampler, own, self.batches_in_epoch))
        return loader

    def _compare_lengths(self, own: int) -> None:
        """Compare nothing: `get_train_dataloader` has made the lengths equal."""

    def _run_epoch(self, **kwargs: Any) -> None:
        """Train for an epoch, from its beginning or the position of a checkpoint."""
        resumes = kwargs["resume_from_checkpoint"] is not None and kwargs["epoch"] == kwargs["epochs_trained"]
        self._position = kwargs["steps_trained_in_current_epoch"] if resumes else 0
        super()._run_epoch(**kwargs)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Take the micro-batches of a step, and count the items of those that count."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        own, steps = self._own_batches, self.batches_in_epoch
        counts: list[tuple[bool, int | None]] = []
        for place, batch in enumerate(batches, self._position):
            counted = takes_part(place, own, steps)
            samples = None if counted else 0
            if counted and items is not None:
                samples = int(self._get_num_items_in_batch([batch], device))
            counts.append((counted, samples))
        self._position += len(batches)
        self._ahead = deque(counts)
        self._parts = sum(counted for counted, _ in counts)
        if items is not None and 0 < self._parts < len(batches):
            items = torch.full_like(items, sum(samples or 0 for _, samples in counts))
        return batches, items

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a micro-batch, with the weight that it has among those of all sites."""
        counted, samples = self._ahead.popleft() if self._ahead else (True, None)
        self.current_gradient_accumulation_steps = max(1, self._parts)
        stated: AbstractContextManager[Any] = nullcontext() if samples is None else self._trained.samples(samples)
        self._silent = not counted
        try:
            with stated:
                return super().training_step(*args, **kwargs)
        finally:
            self._silent = False

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss; zero for a batch that stands for a step that this site skips."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if not self._silent:
            return loss
        return (loss[0] * 0.0, *loss[1:]) if isinstance(loss, tuple) else loss * 0.0

    # Evaluation

    def _agree(self) -> None:
        """Agree on one model; sites that may leave average running statistics."""
        super()._agree()
        reduction = self._trained
        if reduction.options.min_sites is not None and getattr(reduction.options, "average_buffers", False):
            reduction.average_buffers()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate on the site's own data; metrics are those of all sites in training."""
        output = super().evaluation_loop(*args, **kwargs)
        if not self.is_in_train or self.reduction is None:
            return output
        own = {name: float(value) for name, value in output.metrics.items() if isinstance(value, (int, float))}
        every = self._trained.gather_objects((own, output.num_samples), METRICS_KIND, "list of metrics")
        by_site = {rank: each for rank, each in enumerate(every) if each is not None}
        merged = merge_metrics([*by_site.values()]) | metrics_by_site(by_site, self._trained.sites)
        return output._replace(metrics={**output.metrics, **merged})

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model: each site has files of its own, and the model would write those of rank 0 only."""
        model: Any = self.model
        model.should_save_on_this_rank = lambda is_main_process=True: is_main_process
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            del model.should_save_on_this_rank

    def _share_best_model(self) -> None:
        """Load the best model of another site, where this one was absent then and has none; all sites call it."""
        reduction = self._trained
        have = reduction.gather_objects(self.state.best_model_checkpoint is not None, bool, "answer")
        if any(have) and False in have:
            giver = have.index(True)
            sameness.take_over(reduction, giver, sameness.tensors_of(reduction.shared))
