"""One site of the tests of Lightning with a parameter server; see `returning_steps`."""

import json
import sys

import elastic_lightning
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from returning_steps import EPOCHS, Case, Steps, digest, net, samples
from torch.utils.data import DataLoader

import dadplug


class Record(pl.Callback):
    """Record of the steps and the validations of this process."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def setup(self, trainer, module, stage) -> None:
        self.steps = Steps(self.case, lambda: trainer.current_epoch)

    def on_validation_end(self, trainer, module) -> None:
        if trainer.sanity_checking:
            return
        server, metrics = trainer.strategy.server, trainer.callback_metrics
        line = {"validation": trainer.current_epoch, "step": trainer.global_step, "version": server.version}
        line |= {"digest": digest(module.net, server), "lr": trainer.optimizers[0].param_groups[0]["lr"]}
        line |= {"metrics": {name: float(metrics[name]) for name in ("loss", "metric_loss")}}
        self.case.write(**line, present=server.present_sites)


class Module(elastic_lightning.Module):
    """Module whose steps are recorded, those without a batch excepted."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.net, self.record = net(), record

    def training_step(self, batch, batch_idx):
        self.record.steps.begin(batch[0], batch=batch_idx, global_step=self.trainer.global_step)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9), "interval": "step"}]


def run(case: Case) -> None:
    case.connect()
    record = Record(case)
    trainer = pl.Trainer(
        strategy=dadplug.ParameterServerStrategy(**case.options()),
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        use_distributed_sampler=False,
        precision="64-true",
        logger=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[
            record,
            EarlyStopping("loss", patience=1000),
            ModelCheckpoint(f"{case.folder}/checkpoints", monitor="loss", save_last=True),
        ],
    )
    module = Module(record)
    first = 0 if case.deal == "shared" else 5 * case.rank
    trainer.fit(module, case.loader(), DataLoader(samples(first, first + 30), 6))
    case.write(best=trainer.checkpoint_callback.best_model_path, step=trainer.global_step)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Case(**json.loads(sys.argv[1])))
