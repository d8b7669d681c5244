"""Hogwild! in programs whose processes Lightning itself starts: new programs, spawned and forked processes."""

from __future__ import annotations

import pytest
import support

pytest.importorskip("pytorch_lightning")

# Each step takes 1 from the rows of its batch, so that the table counts how often each sample was used.
PROGRAM = """
import sys, warnings
import torch
from torch.utils.data import DataLoader, TensorDataset
warnings.filterwarnings("ignore")
import pytorch_lightning as pl
import dadplug

class Rows(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(40, 1, sparse=True)
        torch.nn.init.zeros_(self.table.weight)

    def training_step(self, batch, batch_idx):
        return self.table(batch[0]).sum()

    def on_train_end(self):
        sys.stdout.write(f"steps {self.trainer.global_step};\\n")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

if __name__ == "__main__":
    trainer = pl.Trainer(strategy=sys.argv[1], accelerator="cpu", devices=2, max_epochs=3, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    module = Rows()
    trainer.fit(module, DataLoader(TensorDataset(torch.arange(40)), batch_size=4, shuffle=True))
    counts = -module.table.weight.detach().flatten()
    sys.stdout.write(f"counts {int(counts.min())} {int(counts.max())};\\n")
"""


@pytest.mark.parametrize(("strategy", "processes"), [("hogwild", 2), ("hogwild_spawn", 1), ("hogwild_notebook", 1)])
def test_each_sample_is_used_once_an_epoch_by_processes_of_lightnings_launchers(tmp_path, strategy, processes):
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    env = {"MASTER_PORT": str(support.free_port())}
    (only,) = support.run_programs([[str(path), strategy]], env=env, preload=["pytorch_lightning"])
    assert only.status == 0, only.errors
    assert only.output.count("steps 30;") == 2
    assert only.output.count("counts 3 3;") == processes
