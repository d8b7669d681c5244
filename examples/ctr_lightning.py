"""The training of examples/ctr.py in Lightning."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from ctr_methods import Batches, Outcome, Run, build_renumbered, epoch, loss_of, manual_intent, test_loss
from torch import nn

from dadplug.data import DataPair


def classifier_of(run: Run, net: nn.Module) -> Any:
    """Build Lightning's module around a net."""
    import pytorch_lightning as pl

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch, batch_idx):
            return loss_of(self.net, batch)

        def configure_optimizers(self):
            return torch.optim.Adagrad(self.net.parameters(), lr=run.lr)

    return Classifier()


def recorder_of(run: Run, outcome: Outcome, strategy: Any, data: DataPair) -> Any:
    """Build a callback that writes the results of the epochs into an outcome."""
    import pytorch_lightning as pl

    from dadplug.adapm import Timeline
    from dadplug.adapm.timeline import frequent_keys

    class Recorder(pl.Callback):
        def on_train_epoch_start(self, trainer, module) -> None:
            manager, reduction = strategy.managed.manager, strategy.reduction
            if trainer.current_epoch == 0:
                keys = frequent_keys(data.train.ids, 200)
                self.timeline = Timeline(manager, strategy.managed.managed["net.deep.weight"].table, keys)
            manager.barrier()
            self.before = manager.counts
            self.epoch = epoch(outcome, lambda: manager.traffic.total_bytes_sent + reduction.traffic.total_bytes_sent)
            self.epoch.__enter__()

        def on_train_batch_end(self, trainer, module, outputs, *batch) -> None:
            self.timeline.note()
            run.step(outputs["loss"])

        def on_train_epoch_end(self, trainer, module) -> None:
            manager = strategy.managed.manager
            manager.wait_sync(everywhere=True)
            self.epoch.__exit__(None, None, None)
            pulled, away = (manager.counts[name] - self.before[name] for name in ("pulled", "pulled_remotely"))
            outcome.local_share.append(1 - away / pulled)
            with self.timeline.paused():
                loss = test_loss(module.net, data.test, run.rank, run.sites, manager.gather_objects)
            outcome.log_losses.append(loss)
            run.end_epoch(outcome)
            weights = strategy.managed.managed.values()
            outcome.table_bytes = sum(weight.table.nbytes for weight in weights)
            if trainer.current_epoch == run.epochs - 1:
                outcome.histories = self.timeline.gather()

    return Recorder()


def by_lightning(run: Run, intent: Any = "auto", technique: str = "all") -> Outcome:
    """Train by AdaPM in Lightning.

    Args:
        run: the training; its tables have a row for each id that occurs.
        intent: as for `AdaPMStrategy`.
        technique: as for `AdaPMStrategy`.
    """
    import pytorch_lightning as pl
    from dadplug.runners.pytorch_lightning import AdaPMStrategy

    plain, data = build_renumbered(run)
    outcome = Outcome()
    strategy = AdaPMStrategy(
        intent=intent, lookahead=run.lookahead, technique=technique, interval=run.interval, **run.options
    )

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=run.epochs,
        use_distributed_sampler=False,  # each site has its own rows
        callbacks=[recorder_of(run, outcome, strategy, data)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(classifier_of(run, plain), Batches(data.train, run.batch_size, run.rank, run.sites))
    return outcome


LIGHTNING: dict[str, Callable[[Run], Outcome]] = {
    "adapm": by_lightning,
    "adapm-manual": lambda run: by_lightning(
        run, lambda batch: {f"net.{name}": ids for name, ids in manual_intent(batch).items()}
    ),
    "no-intent": lambda run: by_lightning(run, None, "static"),
}
