"""Accelerate's `Accelerator` with dadplug's modes in place of the reduction of torch's DistributedDataParallel.

`Accelerator` is a subclass. `use` turns an accelerator that another library has made, such as that of transformers'
Trainer, into one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from .ddp import DistributedDataParallel
from .errors import MismatchError
from .exchange.restrictions import METRICS, STATES, declared
from .hub import current_connection
from .hub.connect import check_start, connect
from .local_steps.options import LOCAL_MODE, LocalOptions, options_class, options_of
from .options import Options
from .runners.accelerate_checks import announced, check_configuration, check_place, refuse_sharding
from .step.model_sync.private import is_private, load_private_state, private_state
from .support.environment import environment
from .support.files import load_tensors
from .support.logs import get_logger
from .support.refusals import refuse
from .support.signature import split_keywords, takes_keywords_of

try:
    import accelerate
    from accelerate.data_loader import prepare_data_loader
except ImportError as error:
    raise ImportError(
        'dadplug.accelerate needs accelerate: pip install accelerate, or install dadplug with the extra "accelerate"'
    ) from error

if tuple(map(int, accelerate.__version__.split(".")[:2])) < (1, 1):
    raise ImportError(f"dadplug.accelerate needs accelerate 1.1 or newer, got {accelerate.__version__}")

_log = get_logger(__name__)
_MOST_SITES = 1 << 16
_OF_WRAPPER = ("broadcast_buffers", "state")  # arguments of `DistributedDataParallel` that are no options


class Accelerator(accelerate.Accelerator):
    """An accelerator whose `prepare` wraps models in `dadplug.DistributedDataParallel`.

    Everything else is accelerate's. Sites are the processes that ``accelerate launch`` or another launcher has started,
    or those that `dadplug.connect` has connected before. In one process, the model is trained alone by the same method.

    Args:
        arguments: arguments of accelerate's class, by position.
        mode: name of a method, as in `dadplug.GradientReduction`, or ``"localsgd"`` for local steps, as in
            `dadplug.LocalSGD`, with the options of `dadplug.local_steps.LocalOptions`. ``model.reduction`` is the
            `LocalSGD` then: call its ``finish()`` before evaluations and at the end.
        kit: folder of this site's kit, by which it connects to a hub first, see `dadplug.connect`.
        start_sites: with a kit and ``min_sites``: number of sites with which training may start.
        start_after: with ``start_sites``: seconds for which so many sites wait for the others, 60 by default.
        split_data: True: all sites hold the same data, and prepared loaders divide them, as accelerate does. False:
            each site has data of its own, and its loaders keep all of them. ``"auto"``: False over a hub, else True.
        keywords: the other options, see `dadplug.options.Options`, and the keywords of accelerate's class.

    Raises:
        ValueError: if an option is not valid, or accelerate is asked for what does not go with dadplug: models that are
            divided over processes, float16 without a GPU, communication hooks, loaders that split or dispatch batches.

    Example:
        >>> accelerator = dadplug.accelerate.Accelerator(cpu=True, mode="rankdad")
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> for inputs, targets in loader:
        ...     optimizer.zero_grad()
        ...     accelerator.backward(criterion(model(inputs), targets))
        ...     optimizer.step()
    """

    _options: dict[str, Any]
    _wrapped: list[DistributedDataParallel]
    _split_data: bool
    _in_trainer = False  # see `use`
    _joining: dict[str, Any]  # objects whose state a site gets that joins in mid-training

    @takes_keywords_of(Options, accelerate.Accelerator.__init__)
    def __init__(
        self,
        *arguments: Any,
        mode: str = "rankdad",
        kit: str | Path | None = None,
        start_sites: int | None = None,
        start_after: float | None = None,
        split_data: bool | str = "auto",
        **keywords: Any,
    ) -> None:
        options, rest = split_keywords(options_class(mode), keywords)
        options = {"mode": mode} | options
        _check_options(options)
        known = signature(accelerate.Accelerator.__init__).parameters
        given = dict(zip(list(known)[1:], arguments, strict=False)) | rest
        refuse_sharding(given)
        if unknown := [name for name in rest if name not in known]:
            raise options_class(mode).unknown(unknown[0])
        check_start(kit, start_sites, start_after)
        if kit is not None:
            connect(kit=kit, start_sites=start_sites, start_after=start_after)
        check_place(given)
        with _as_launched():
            super().__init__(*arguments, **rest)
        refuse(
            (
                self.num_processes == 1 and announced() > 1,
                f"{announced()} processes have been started, and accelerate's state was made before as that of one: "
                "make this Accelerator before PartialState() and other objects of accelerate, and with cpu=True on "
                "CPUs",
            )
        )
        self._begin(options, split_data)

    def _begin(self, options: dict[str, Any], split_data: bool | str = "auto") -> None:
        """Wrap the models that are prepared from now on.

        Args:
            options: options of the reduction, and arguments of the wrapper.
            split_data: as in the class.
        """
        _check_options(options)
        check_configuration(self, split_data)
        refuse(
            (
                options.get("min_sites") is not None and current_connection() is None,
                "min_sites needs a hub, which tracks the sites that are present: give the Accelerator kit=",
            )
        )
        if self.scaler is not None:
            options.setdefault("check_finite", False)  # the scaler looks for Inf itself
        if self.ddp_handler is not None:
            options.setdefault("broadcast_buffers", self.ddp_handler.broadcast_buffers)
        self._options = options
        self._split_data = current_connection() is None if split_data == "auto" else bool(split_data)
        self._wrapped, self._joining, self._loads_from = [], {}, ""
        self.register_save_state_pre_hook(lambda models, weights, folder: self.save_memories(folder))
        self.register_load_state_pre_hook(lambda models, folder: self._before_loading(folder))

    @property
    def _elastic(self) -> bool:
        """Whether training goes on without a site that leaves."""
        return self._options.get("min_sites") is not None

    # Preparation

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers for training, in any order; see accelerate.

        With ``min_sites``, a site that joins in mid-training gets the states of the optimizers and schedulers that are
        prepared together with the model, and of the objects that `register_for_checkpointing` has got before.

        Args:
            args: the objects.
            device_placement: for each, whether to move it to the accelerator's device.

        Raises:
            ValueError: if a model is wrapped already, or an optimizer has no parameter of the models.
        """
        models = [each for each in args if isinstance(each, nn.Module)]
        for model in models:
            self._check_model(model)
        own = _identities([*models, *self._wrapped])
        optimizers = [each for each in args if isinstance(each, Optimizer)]
        if own:
            for optimizer in optimizers:
                _refuse_others(optimizer, own)
        schedulers = [each for each in args if isinstance(each, LRScheduler)]
        kinds = {"optimizer": optimizers, "scheduler": schedulers, "object": self._custom_objects}
        self._joining = {f"{kind} {n}": each for kind, found in kinds.items() for n, each in enumerate(found)}
        try:
            return super().prepare(*args, device_placement=device_placement)
        finally:
            self._joining = {}

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Place a model on its device, and wrap it in `dadplug.DistributedDataParallel` if it is to be trained.

        Args:
            model: the model.
            device_placement: whether to move it to the accelerator's device; as the accelerator does by default.
            evaluation_mode: whether the model is used without being trained, and not wrapped.

        Raises:
            ValueError: if it is wrapped already, or on several devices.
        """
        if self._is_prepared(model):
            return model
        trained = any(parameter.requires_grad for parameter in model.parameters())
        if evaluation_mode or not trained:
            evaluated: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
            return evaluated
        self._check_model(model)
        placed = model
        if not getattr(model, "_is_accelerate_prepared", False):  # for an evaluation before
            placed = super().prepare_model(model, device_placement, evaluation_mode=True)
        elif not any(model is each for each in self._models):
            self._models.append(model)
        for each in (model, placed):  # which are not what `prepare` returns
            vars(each).pop("_is_accelerate_prepared", None)
        try:
            wrapped = self._wrap(placed)
        except BaseException:
            self._models[:] = [each for each in self._models if each is not model]
            raise
        vars(wrapped)["_is_accelerate_prepared"] = True
        self._wrapped.append(wrapped)
        return wrapped

    def _wrap(self, model: nn.Module) -> DistributedDataParallel:
        options, found = self._options, [each for name, each in self._joining.items() if name.startswith("optimizer")]
        if self._takes_local_steps:
            from .local_steps.wrapped import LocalModel

            refuse(
                (
                    len(found) != 1 or self._wrapped,
                    "mode='localsgd' is for one model with one optimizer: prepare both in one call, and put further "
                    "models into one module",
                )
            )
            own = {name: value for name, value in options.items() if name in LocalOptions.names()}
            own["state"] = options.get("state") or (self._joining if self._elastic else None)
            optimizer = getattr(found[0], "optimizer", found[0])
            return LocalModel(model, optimizer, in_trainer=self._in_trainer, **own)
        if self._elastic:
            options = {"state": self._joining} | options
            refuse(
                (
                    self._wrapped,
                    "min_sites goes with one model: train the others without it, or put them in one module",
                ),
                (
                    not any(name.startswith("optimizer") for name in options["state"]),
                    "a site that joins in mid-training needs the state of the optimizer: with min_sites, prepare model "
                    "and optimizer in one call",
                ),
            )
        return DistributedDataParallel(model, **options)

    @property
    def _takes_local_steps(self) -> bool:
        return bool(self._options["mode"] == LOCAL_MODE)

    def _is_prepared(self, model: nn.Module) -> bool:
        prepared = isinstance(model, DistributedDataParallel) and getattr(model, "_is_accelerate_prepared", False)
        return prepared or any(model is each for each in self._wrapped)

    def _check_model(self, model: nn.Module) -> None:
        """Raise ValueError if a model cannot be wrapped."""
        if self._is_prepared(model):
            return
        wrapped = [inner for each in self._wrapped for inner in (each.module, getattr(each.module, "_orig_mod", None))]
        devices = {parameter.device for parameter in model.parameters()}
        places = ", ".join(sorted(map(str, devices)))
        elsewhere = devices and {each.type for each in devices} != {self.device.type}
        refuse(
            (
                isinstance(model, (TorchDDP, DataParallel)),
                f"the model is wrapped in {type(model).__name__} already: give prepare() the model itself, which is "
                ".module of it, since the Accelerator wraps it",
            ),
            (
                any(model is each for each in wrapped),
                "the model is prepared already: use what the first prepare() has returned",
            ),
            (
                torch.device("meta") in devices,
                "the model has parameters on the meta device: load or initialise them before prepare()",
            ),
            (
                len(devices) > 1 and not self.device_placement,
                f"the model is on several devices ({places}): move all of it to one before prepare()",
            ),
            (
                elsewhere and not self.device_placement,
                f"the model is on {places}, and the accelerator on {self.device}: move the model there before "
                "prepare(), or leave out device_placement=False",
            ),
        )

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Optimizer:
        """Prepare an optimizer; before its first step, it is compared with the models.

        Args:
            optimizer: the optimizer.
            device_placement: as in `prepare`.
        """
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            due = iter((True,))  # a hook may not remove itself, where others follow it

            def check(*_: Any) -> None:
                if next(due, False) and self._wrapped:
                    _refuse_others(optimizer, _identities(self._wrapped))
                    if any(each.reduction.world_size > 1 for each in self._wrapped):
                        _refuse_unknown(optimizer, _identities(self._wrapped))

            optimizer.register_step_pre_hook(check)
        prepared: Optimizer = super().prepare_optimizer(optimizer, device_placement)
        return prepared

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> DataLoader[Any]:
        """Prepare a loader: each site loads its part of the data, or all of them with ``split_data=False``.

        Args:
            data_loader: the loader.
            device_placement: whether batches are moved to the accelerator's device.
            slice_fn_for_dispatch: without effect.

        Raises:
            ValueError: with ``min_sites``, if the sites would exchange the state of a generator.
        """
        if getattr(data_loader, "_is_accelerate_prepared", False) or self.num_processes == 1:
            found: DataLoader[Any] = super().prepare_data_loader(data_loader, device_placement)
            return found
        if self._split_data:
            if self.dispatch_batches is None and isinstance(data_loader.dataset, IterableDataset):
                warnings.warn(
                    "an iterable data set is read by each site, which keeps its part of the batches; accelerate itself "
                    "reads it in process 0 and sends the batches. It has to give the same samples in the same order at "
                    "all sites: confirm that by DataLoaderConfiguration(dispatch_batches=False), or give the "
                    "Accelerator split_data=False where each site has samples of its own",
                    stacklevel=2,
                )
            before, self.dataloader_config.dispatch_batches = self.dispatch_batches, False
            prepared: DataLoader[Any]
            try:
                prepared = super().prepare_data_loader(data_loader, device_placement)
            finally:
                self.dataloader_config.dispatch_batches = before
        else:
            prepared = self._keep_data(
                data_loader, self.device_placement if device_placement is None else device_placement
            )
        if self._elastic and getattr(prepared, "rng_types", None):
            self._dataloaders.remove(prepared)
            raise ValueError(
                "the sites would exchange the order of a shuffled loader in each epoch, which min_sites does not "
                "allow: give the Accelerator split_data=False, where each site has data of its own, or "
                "dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=...)"
            )
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler) -> Any:
        """Prepare a scheduler: it is stepped once for each site, as accelerate does, or once with ``split_data=False``.

        Args:
            scheduler: the scheduler.
        """
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches |= not self._split_data  # each site's loader has all of its batches, then
        return prepared

    def _keep_data(self, loader: DataLoader[Any], device_placement: bool) -> Any:
        """Prepare a loader of data that only this site has."""
        prepared = prepare_data_loader(
            loader,
            self.device,
            num_processes=1,
            process_index=0,
            put_on_device=device_placement,
            rng_types=[],
            dispatch_batches=False,
            use_seedable_sampler=self.use_seedable_sampler,
            non_blocking=self.non_blocking,
        )
        prepared._drop_last = True  # no site's last batch has rows of others, which gather_for_metrics would leave out
        self._dataloaders.append(prepared)
        return prepared

    # Training

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run a backward pass; accelerate divides the loss by the number of micro-batches, but not with `privacy`.

        The gradients of samples are clipped then, and their sum is divided by the expected batch, which is that of all
        micro-batches.

        Args:
            loss: the loss of a micro-batch.
            kwargs: as accelerate takes them.
        """
        if self._options.get("privacy") is not None:
            loss = loss * self.gradient_accumulation_steps
        super().backward(loss, **kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate a model's gradients: the next backward pass outside of the block synchronizes all of them.

        Args:
            model: a prepared model.
        """
        if isinstance(model, DistributedDataParallel):  # also in one process, where accelerate's does nothing
            with model.no_sync():
                yield
        else:
            with super().no_sync(model):
                yield

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Let sites have different numbers of batches inside a ``with`` block, on CPUs as well as on GPUs.

        Args:
            joinables: the prepared models that are trained inside.
            even_batches: in place of the loaders' own setting inside of the block; where it is True, and all sites have
                the same data, they have equally many batches.

        Raises:
            ValueError: if something else than a prepared model is given.
        """
        for each in joinables:
            if not isinstance(each, DistributedDataParallel):
                raise ValueError(
                    f"join_uneven_inputs takes the models that prepare() has returned, got {type(each).__name__}"
                )
        even = self.even_batches if even_batches is None else even_batches
        enable = self.num_processes > 1 and not (even and self._split_data)
        samplers: list[Any] = [getattr(each, "batch_sampler", None) for each in self._dataloaders]
        changed = [each for each in samplers if hasattr(each, "even_batches")] if even_batches is not None else []
        with ExitStack() as restored:
            for sampler in changed:
                restored.callback(setattr, sampler, "even_batches", sampler.even_batches)
                sampler.even_batches = even_batches
            with _joined(joinables, enable):
                yield

    # State

    @declared(METRICS)
    def gather(self, tensor: Any) -> Any:
        with self._naming_sites():
            return super().gather(tensor)

    @declared(METRICS)
    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        with self._naming_sites():
            return super().reduce(tensor, reduction, scale)

    def _naming_sites(self) -> AbstractContextManager[None]:
        return self._wrapped[-1].reduction.naming_sites() if self._wrapped else nullcontext()

    @declared(METRICS)
    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return super().pad_across_processes(tensor, *args, **kwargs)

    def save_memories(self, output_dir: str) -> None:
        """Write what this site's reductions keep from step to step; `save_state` does so by itself.

        Args:
            output_dir: folder of the checkpoint, which exists.
        """
        if not self._wrapped:
            return
        first = self._wrapped[0].reduction
        if any(each.reduction.pending for each in self._wrapped):
            _log.warning(
                "save_state while gradients are accumulated, which checkpoints do not contain: save where "
                "accelerator.sync_gradients is True"
            )
        states = [each.site_state() for each in self._wrapped]
        own = (
            [private_state(each.reduction.shared, self._optimizers) for each in self._wrapped] if self._private else []
        )
        saved = {"sites": first.world_size, "states": states, "private": own}
        torch.save(saved, _memory_path(output_dir, first.site_rank))

    @property
    def _private(self) -> Any:
        """Patterns of the names of what stays at this site."""
        return self._options.get("private")

    def load_private(self, input_dir: str) -> None:
        """Restore this site's own private layers after a checkpoint that another process may have written.

        `load_state` does so by itself.

        Args:
            input_dir: folder of the checkpoint.

        Raises:
            MismatchError: if it has none of this site.
        """
        saved = _read_memory(input_dir, self._wrapped[0].reduction.site_rank) if self._private else None
        if self._private and not (saved and saved.get("private")):
            raise MismatchError(f"the checkpoint {input_dir} has no private layers of this site: copy its file there")
        for wrapped, own in zip(self._wrapped, saved["private"] if saved else (), strict=False):
            load_private_state(wrapped.reduction.shared, self._optimizers, own)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the norm of gradients; see accelerate. Private layers are clipped by a norm of their own.

        Args:
            parameters: the parameters.
            max_norm: largest norm.
            norm_type: which norm.

        Returns:
            The norm before, without private layers.
        """
        every = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        norm = super().clip_grad_norm_([each for each in every if not is_private(each)], max_norm, norm_type)
        torch.nn.utils.clip_grad_norm_([each for each in every if is_private(each)], max_norm, norm_type)
        return norm

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Write a checkpoint; see accelerate. With local steps, all sites agree on one model before.

        Args:
            args: as in accelerate.
            kwargs: as in accelerate.
        """
        for each in self._wrapped:
            each.make_equal()
        return super().save_state(*args, **kwargs)

    def _before_loading(self, folder: str) -> None:
        self._loads_from = folder
        if not self._takes_local_steps:
            self.load_memories(folder)

    def load_memories(self, input_dir: str) -> None:
        """Restore what `save_memories` has written, as `load_state` does; all sites must call it.

        Args:
            input_dir: folder of the checkpoint.

        Raises:
            RuntimeError: if this site has joined a running training.
            ValueError: if the checkpoint is of another number of models, or of another mode.
        """
        for number, each in enumerate(self._wrapped):
            reduction = each.reduction
            rank, count = reduction.site_rank, reduction.world_size
            if self._elastic and each.steps:
                raise RuntimeError(
                    "this site has joined a running training and has the state of the others: call load_state() only "
                    "where model.steps is 0"
                )
            saved = _read_memory(input_dir, rank)
            if saved is not None and len(saved["states"]) != len(self._wrapped):
                raise ValueError(
                    f"the checkpoint {input_dir} is of {len(saved['states'])} models, and {len(self._wrapped)} are "
                    "prepared: prepare those that were prepared when it was written, in the same order"
                )
            own = None if saved is None else saved["states"][number]
            sites = 0 if saved is None else saved["sites"]
            found = [each for each in reduction.gather_objects(sites, int, "number of sites") if each is not None]
            if all(each == count for each in found):
                assert own is not None
                each.load_site_state(own)
            elif any(found):
                more = range(count, min(max(found), _MOST_SITES)) if rank == 0 else ()
                further = [_read_memory(input_dir, other) for other in more]
                parts = [own, *(None if part is None else part["states"][number] for part in further)]
                with declared(STATES):
                    gathered = reduction.gather_objects(parts, list[dict[str, Any] | None], "list of states")
                each.load_site_states([*(part[0] if part else None for part in gathered), *(gathered[0] or [None])[1:]])
            elif rank == 0:
                _log.warning(
                    "%s has no state of dadplug: training goes on, and what the compressors keep from step to step "
                    "begins anew",
                    input_dir,
                )

    def load_state(self, input_dir: str | None = None, **kwargs: Any) -> None:
        """Restore what `save_state` has written, with what the reductions keep; all sites must call it.

        Args:
            input_dir: the folder, as in accelerate.
            kwargs: further arguments of accelerate's method.

        Raises:
            MismatchError: if sites have loaded different weights.
        """
        super().load_state(input_dir, **kwargs)
        if self._takes_local_steps:  # after those of model and optimizer
            self.load_memories(self._loads_from)
        self.load_private(self._loads_from)
        for each in self._wrapped:
            differs = None if self._elastic else each.reduction.first_difference()
            if differs is not None:
                raise MismatchError(
                    f"the sites have loaded different weights (parameter {differs!r}): give all of them one checkpoint"
                )

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the model inside of a prepared one; see accelerate.

        Args:
            model: the prepared model.
            args: as in accelerate.
            kwargs: as in accelerate.
        """
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        unwrapped: nn.Module = super().unwrap_model(inner, *args, **kwargs)
        return unwrapped

    def free_memory(self, *objects: Any) -> Any:
        """Release the prepared objects, and detach dadplug from the models; see accelerate.

        Args:
            objects: objects to release, in whose place None is returned.
        """
        for each in self._wrapped:
            each.reduction.detach(discard=True)
        self._wrapped.clear()
        return super().free_memory(*objects)


def use(
    accelerator: accelerate.Accelerator, mode: str = "rankdad", *, in_trainer: bool = False, **options: Any
) -> None:
    """Let an accelerator that exists wrap the models that it prepares from now on in dadplug's class.

    Args:
        accelerator: the accelerator, of accelerate's class or a subclass of it.
        mode: name of a method, as in `dadplug.GradientReduction`.
        in_trainer: whether all sites take as many steps in an epoch, by a trainer, see `dadplug.LocalSGD`.
        options: the other options, see `dadplug.options.Options`, and ``split_data``, ``broadcast_buffers`` and
            ``state`` of `Accelerator` and `dadplug.DistributedDataParallel`.

    Raises:
        ValueError: as in `Accelerator`, or if a model is wrapped already.
    """
    refuse(
        (isinstance(accelerator, Accelerator), "the accelerator uses dadplug already"),
        (
            any(not getattr(each, "_is_accelerate_prepared", False) for each in accelerator._models),
            "the accelerator has wrapped a model in torch's class already: call use() before prepare()",
        ),
    )
    split_data = options.pop("split_data", "auto")
    _check_options({"mode": mode} | options)
    refuse_sharding({})
    check_configuration(accelerator, split_data)
    kind = type(accelerator)
    own = Accelerator if kind is accelerate.Accelerator else type(kind.__name__, (Accelerator, kind), {})
    accelerator.__class__ = own
    accelerator._in_trainer = in_trainer
    accelerator._begin({"mode": mode} | options, split_data)


# Checks


def _check_options(options: Mapping[str, Any]) -> None:
    options_of(**{name: value for name, value in options.items() if name not in _OF_WRAPPER})


@contextmanager
def _joined(models: Sequence[DistributedDataParallel], enable: bool) -> Iterator[None]:
    """Let sites have different numbers of batches for some models, which the others may train in any order.

    A site that has left takes part in the steps of all of them at the same time, with a thread for each.
    """
    contexts = [model.join(enable=enable) for model in models]
    with ExitStack() as entered:
        for context in contexts:
            entered.enter_context(context)
        yield
        if len(contexts) > 1:
            entered.pop_all()
            with ThreadPoolExecutor(len(contexts)) as pool:
                for ended in [pool.submit(context.__exit__, None, None, None) for context in contexts]:
                    ended.result()


def _identities(models: Sequence[nn.Module]) -> set[int]:
    return {id(parameter) for model in models for parameter in model.parameters()}


def _refuse_others(optimizer: Optimizer, own: set[int]) -> None:
    """Raise ValueError if an optimizer has none of the parameters whose `id` are given."""
    if not any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
        raise ValueError(
            f"the optimizer {type(optimizer).__name__} has none of the parameters of the models that are prepared: "
            "create it from model.parameters() of the model that prepare() gets"
        )


def _refuse_unknown(optimizer: Optimizer, own: set[int]) -> None:
    """Raise ValueError if an optimizer has gradients of parameters whose `id` are not among those given."""
    for number, group in enumerate(optimizer.param_groups):
        for each in group["params"]:
            if id(each) not in own and each.grad is not None:
                raise ValueError(
                    f"the optimizer steps a parameter of no prepared model (group {number}, shape {[*each.shape]}), "
                    "which would differ between sites: prepare the module that has it, too"
                )


# Processes and files


def _as_launched() -> AbstractContextManager[None]:
    """Let accelerate find a process group that exists, such as that of `dadplug.connect`, as if by a launcher."""
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    connected = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not connected or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return nullcontext()
    own = {"WORLD_SIZE": str(dist.get_world_size()), "RANK": str(dist.get_rank()), "LOCAL_RANK": "0"}
    own |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}  # of a group that exists: not used
    return environment({name: os.environ.get(name) for name in names} | own)


def _memory_path(folder: str, rank: int) -> Path:
    return Path(folder) / f"dadplug_{rank}.bin"


def _read_memory(folder: str, rank: int) -> dict[str, Any] | None:
    path = _memory_path(folder, rank)
    saved: dict[str, Any] | None = load_tensors(path, str(path)) if path.is_file() else None
    return saved
