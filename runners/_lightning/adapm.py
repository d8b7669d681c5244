"""Lightning's strategy for embeddings whose rows are spread over the sites (AdaPM)."""

from __future__ import annotations

import functools
import inspect
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ...adapm import AdaModel, IntentError, join_shards, load_shards
from ...adapm.shards import ShardSave, on_all_sites
from ...errors import SiteError
from ...reduction import GradientReduction
from ...support.files import replacing
from ...support.refusals import refuse
from ...support.signature import check_choice, takes_keywords_of
from ..management import LookaheadLoader, ManagedEmbeddings, Management, Stub, nothing, shape_only
from .strategies import DADStrategyBase
from .strategy import StrategyArguments

_HOOKS = ("on_before_batch_transfer", "on_after_batch_transfer")
# Methods that need a trainer, and look up nothing.
_SILENT = ("log", "log_dict", "print", "manual_backward", "clip_gradients", "toggle_optimizer", "untoggle_optimizer")


class AdaPMStrategyBase(ManagedEmbeddings, DADStrategyBase):
    """Lightning strategy for models whose embedding rows are spread over the sites (AdaPM); for ``Trainer(strategy=)``.

    During a fit the rows of the module's nn.Embedding and nn.EmbeddingBag layers are managed as by
    `dadplug.adapm.AdaModel`, the train loader is read ahead as by `dadplug.adapm.AdaDataLoader`, and all other
    parameters are trained as by `DADStrategy`. Validation reads rows and writes none. Checkpoints hold whole tables and
    the state of their optimizer under the names of the plain module. After the fit the module is a plain module again,
    with all its weights.

    Args:
        mode: method for all parameters that are not managed, see `dadplug.GradientReduction`.
        checkpoint: ``"whole"``: site 0 writes whole tables into Lightning's file; ``"sharded"``: each site writes its
            own rows into a folder beside the file, see `dadplug.adapm.save_shards`.
        intent: function from a batch to the ids that it looks up, by the names of weights, such as
            ``lambda batch: {"words.weight": batch[0]}``; ``"auto"`` finds them by a forward pass of shapes through
            training_step; None for no lookahead.
        lookahead: number of batches that are announced in advance.
        reduce: ``"mean"`` or ``"sum"`` of the sites' gradients of rows, see `dadplug.adapm.AdaModel`.
        technique: effect of intents, see `dadplug.adapm.ParameterManager`.
        interval: minimum time between two rounds of synchronisation, in seconds.
        backend: ``"builtin"`` or ``"adapm"``, see `dadplug.adapm.ParameterManager`.
        arguments: all other arguments of `DADStrategy`.

    Attributes:
        managed: the `AdaModel` of the running fit, with its tables and traffic; None outside of a fit.
        reduction: the `GradientReduction` of the other parameters.

    Raises:
        ValueError: if an option or its value is unknown; the message lists the valid ones.
        RuntimeError: if both of Lightning's packages are imported and the strategy is not that of a given package.

    Example:
        >>> trainer = pl.Trainer(strategy=AdaPMStrategy(lookahead=8), accelerator="cpu", devices=2)
        >>> trainer.fit(module, loader)
    """

    _needs_optimizers = True
    _always_reduces = False

    @takes_keywords_of(Management, DADStrategyBase.__init__)
    def __init__(self, mode: str = "dsgd", *, fused: bool = False, checkpoint: str = "whole", **arguments: Any) -> None:
        check_choice("checkpoint", checkpoint, ("whole", "sharded"))
        super().__init__(mode, fused=fused, **self._split(StrategyArguments, mode, arguments))
        self._sharded = checkpoint == "sharded"
        self._shards: str | None = None
        self._stamp: str | None = None
        self._loader: Any = None

    # Start and end

    def _build_reduction(self, model: Any, settings: dict[str, Any]) -> GradientReduction | None:
        trainer = self._trainer
        refuse(
            (
                getattr(self.precision_plugin, "scaler", None) is not None,
                "managed rows have no part in a GradScaler: use precision='bf16-mixed' or '32-true'",
            ),
            (
                trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value",
                "managed rows cannot be clipped by value: use gradient_clip_algorithm='norm'",
            ),
        )
        reduction = super()._build_reduction(model, settings)
        if self.managed is not None and self.managed.managed:  # the norm is that of all sites' rows
            self._replace_clipping()
        return reduction

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        if self.managed is None or not self.managed.managed or self._exchange.holds:
            super()._clip_by_norm(optimizer, clip_val)
        else:
            self.managed.clip_grad_norm_(clip_val, parameters=self.precision_plugin.main_params(optimizer))

    def teardown(self) -> None:
        self._give_back(self._interrupted)  # other sites may have exited after an error
        self._loader = None
        super().teardown()

    # Training

    def process_dataloader(self, dataloader: Any) -> Any:
        dataloader = super().process_dataloader(dataloader)
        managed = self.managed
        if managed is None or not self._reads_ahead(self.world_size) or not self._trainer.training:
            return dataloader
        self._loader = _Lookahead(dataloader, managed, self._management, self._trainer)
        return self._loader

    def on_train_start(self) -> None:
        if self._loader is not None and self._trainer.train_dataloader is not self._loader:
            raise ValueError(
                "AdaPMStrategy reads one train loader ahead, and there are several: use one, or intent=None, with "
                "which rows are pulled when they are used"
            )
        super().on_train_start()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._loader is None or self.managed is None:
            return super().training_step(*args, **kwargs)
        with self._loader.watch():
            return super().training_step(*args, **kwargs)

    def _agree(self) -> None:
        super()._agree()
        if self._in_fit and self.managed is not None:
            self.managed.manager.wait_sync(everywhere=True)  # all sites evaluate the same tables

    # Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint is read after the tables have been created, which read its shards."""
        return self._sharded

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.managed is None:
            return super().lightning_module_state_dict()
        if self._interrupted:
            raise RuntimeError(
                "no checkpoint can be written after an error: rows are spread over sites that may be gone. Resume from "
                "the last one before it"
            )
        self._agree()
        return {} if self._sharded else self.managed.state_dict()

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        if self._shards is not None and self.managed is not None:
            load_shards(self.managed, self._shards, self._owner, self._stamp)
            self._shards = None
        elif self._shards is not None:
            whole = {**checkpoint, "state_dict": join_shards(self._shards, self._stamp)["model"]}
            super().load_model_state_dict(whole, strict=strict)
        elif self.managed is None:
            super().load_model_state_dict(checkpoint, strict=strict)
        else:
            self.managed.load_state_dict(checkpoint["state_dict"], strict=strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        plain = getattr(optimizer, "_optimizer", optimizer)
        if self.managed is None or plain is not self._owner:
            state: dict[str, Any] = super().optimizer_state(optimizer)
            return state
        return {} if self._sharded else self.managed.optimizer_state_dict(plain)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if self.managed is None or optimizer is not self._owner:
                optimizer.load_state_dict(state)
            elif state:
                self.managed.load_optimizer_state_dict(optimizer, state)
            elif self._shards is not None:  # read by a strategy that writes whole checkpoints
                self.load_model_state_dict(checkpoint)
        self._load_states()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if not self._sharded or self.managed is None:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        save = ShardSave(self.managed, shards_of(filepath), self._owner)
        checkpoint["dadplug_shards"] = save.write()
        try:  # the older file, which refers to the older shards, is replaced before they go
            what = f"{filepath} cannot be written"
            on_all_sites(self.managed, lambda: self._write_file(checkpoint, filepath, storage_options), what)
        except SiteError:
            raise
        except Exception:
            save.abandon()
            raise
        save.commit()

    def _write_file(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        """Write Lightning's file atomically."""
        if type(self.checkpoint_io).__name__ != "TorchCheckpointIO":  # it may write later, or no file
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        partial = Path(f"{filepath}.part")
        with replacing(Path(filepath), partial) if self.global_rank == 0 else nullcontext():
            super().save_checkpoint(checkpoint, partial, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        stamp = checkpoint.get("dadplug_shards")
        self._shards = shards_of(checkpoint_path) if stamp else None
        self._stamp = stamp if isinstance(stamp, str) else None  # True in files of earlier versions
        return checkpoint

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        shutil.rmtree(shards_of(filepath), ignore_errors=True)


def shards_of(path: Any) -> str:
    """Return the folder of the shards that belong to a checkpoint file."""
    return f"{path}.shards"


class _Lookahead(LookaheadLoader):
    """`LookaheadLoader` that calls a copy of a module as Lightning does.

    Args:
        loader: train loader.
        model: managed Lightning module.
        management: options of the managed embeddings.
        trainer: Lightning's trainer.
    """

    def __init__(self, loader: Any, model: AdaModel, management: Management, trainer: Any) -> None:
        super().__init__(loader, model, management, owner="AdaPMStrategy", step="training_step")
        try:
            len(loader)
        except (TypeError, NotImplementedError):
            self._held = 1  # Lightning holds a batch of such a loader, to know which is the last
        self._trainer = trainer
        self._prepared: Any = None

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):  # a position that is ahead of training's
            raise AttributeError(name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "worker_init_fn":
            setattr(self.loader, name, value)
        else:
            super().__setattr__(name, value)

    def _step(self, module: Any, batch: Any) -> None:
        """Call the copy of the module as Lightning calls the module."""
        if self._prepared is not module:
            _prepare(module, len(self._trainer.optimizers), len(self._trainer.lr_scheduler_configs))
            self._prepared = module
        for hook in _HOOKS:
            if self._trainer.datamodule is not None and _is_users(self._trainer.datamodule, hook):
                raise IntentError(f"the data module has a hook {hook} of its own")
            batch = getattr(module, hook)(batch, 0)
        parameters = inspect.signature(module.training_step).parameters
        several = len(parameters) > 1 or any(each.kind is each.VAR_POSITIONAL for each in parameters.values())
        module.training_step(*((batch, self._number) if several else (batch,)))


def _prepare(module: Any, optimizers: int, schedules: int) -> None:
    """Replace what a training step calls besides lookups by stubs, in a copy of the module."""
    for name in _SILENT:
        setattr(module, name, nothing)
    if not module.automatic_optimization:
        module.optimizers = functools.partial(_stubs, optimizers)
        module.lr_schedulers = functools.partial(_stubs, schedules)
    metrics = sys.modules.get("torchmetrics")
    for child in module.modules():
        if metrics is not None and isinstance(child, metrics.Metric):
            child.forward = child.update = child.compute = shape_only


def _is_users(item: Any, name: str) -> bool:
    module = str(getattr(getattr(type(item), name, None), "__module__", ""))
    return module.split(".")[0] not in ("lightning", "pytorch_lightning")


def _stubs(count: int, *args: Any, **kwargs: Any) -> Any:
    return Stub() if count == 1 else [Stub() for _ in range(count)] or None
