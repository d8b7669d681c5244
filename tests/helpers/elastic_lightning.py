"""One site of the tests of Lightning where sites leave and return: trains, and is killed where it is told.

Run as ``elastic_lightning.py CASE``, where the case is JSON, see `Case`. Writes a line of JSON for each step.
"""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytorch_lightning as pl
import torch
from elastic_data import BATCH, SiteCase, digest, net, optimisation, train_data, valid_data
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

import dadplug


@dataclass(frozen=True)
class Case(SiteCase):
    """One process of a site, killed at the beginning of a step.

    Attributes:
        pause: seconds after each step.
        accumulate: number of batches of a step.
    """

    mode: str = "dsgd"
    pause: float = 0.0
    accumulate: int = 1


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.loaded = -1  # step of the state that `on_load_checkpoint` was given
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.mean = MeanMetric().set_dtype(torch.float64)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        outputs = self.net(batch[0])
        loss = nn.functional.cross_entropy(outputs, batch[1])
        self.accuracy.update(outputs, batch[1])
        self.mean.update(loss, len(batch[0]))
        self.log("accuracy", self.accuracy)
        self.log("metric_loss", self.mean)
        self.log("loss", loss, sync_dist=True)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["of_module"] = {"step": checkpoint["global_step"]}

    def on_load_checkpoint(self, checkpoint):
        self.loaded = checkpoint["of_module"]["step"]

    def configure_optimizers(self):
        optimizer, scheduler = optimisation(self)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Record(pl.Callback):
    """Record of steps and validations; kills the process."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.file = (Path(case.folder) / "log.jsonl").open("a", buffering=1)
        self.first = 0.0

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        self.first = float(batch[0][0, 0])
        self.before = getattr(trainer.strategy._exchange, "agreements", 0)
        if trainer.global_step == self.case.leave:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_before_backward(self, trainer, module, loss) -> None:
        while self.case.hold and Path(self.case.hold).exists():  # after the logged loss, which all sites wait for
            time.sleep(0.01)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        step = trainer.global_step
        number = trainer.fit_loop.epoch_loop.total_batch_idx
        line = {"number": number, "step": step, "epoch": trainer.current_epoch, "batch": batch_idx, "first": self.first}
        exchange = trainer.strategy._exchange
        line |= {"present": exchange.present_sites, "digest": digest(module.net)}
        line |= {"agreements": getattr(exchange, "agreements", 0), "before": self.before}
        line |= {"weights": [float(each.detach().sum()) for each in module.net.parameters()]}
        line |= {"zero": trainer.is_global_zero, "sites": trainer.progress_bar_metrics["sites"]}
        line |= {"loaded": module.loaded}
        line |= {
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "reduced": getattr(exchange, "step", 0) if not self.case.every else exchange.steps,
        }
        self.file.write(json.dumps(line) + "\n")
        if self.case.stop and trainer.strategy.broadcast(Path(self.case.stop).exists()):
            trainer.should_stop = True
        time.sleep(self.case.pause)

    def on_validation_end(self, trainer, module) -> None:
        if not trainer.sanity_checking:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            line = {"validation": trainer.current_epoch, "metrics": metrics, "digest": digest(module.net)}
            self.file.write(json.dumps(line) + "\n")


def run(case: Case) -> None:
    dadplug.connect(kit=case.kit, timeout=200, **case.terms)
    slot = torch.distributed.get_rank()
    record = Record(case)
    trainer = pl.Trainer(
        strategy=(dadplug.LocalSGDStrategy if case.every else dadplug.DADStrategy)(**case.options()),
        accelerator="cpu",
        devices=1,
        max_epochs=case.epochs,
        accumulate_grad_batches=case.accumulate,
        use_distributed_sampler=False,
        precision="64-true",
        logger=False,
        enable_model_summary=False,
        enable_progress_bar=case.bar,
        log_every_n_steps=1,
        callbacks=[
            record,
            EarlyStopping("loss", patience=1000),
            ModelCheckpoint(f"{case.folder}/checkpoints", monitor="loss", save_top_k=2, save_last=True),
        ],
    )
    module = Module()
    loaders = DataLoader(train_data(slot), BATCH), DataLoader(valid_data(slot), BATCH)
    trainer.fit(module, *loaders)
    assert trainer.strategy._exchange.first_difference() is None
    torch.save(module.net.state_dict(), f"{case.folder}/model.pth")
    tested = trainer.validate(module, loaders[1], verbose=False)
    result = {"digest": digest(module.net), "tested": tested[0], "best": trainer.checkpoint_callback.best_model_path}
    (Path(case.folder) / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Case(**json.loads(sys.argv[1])))
