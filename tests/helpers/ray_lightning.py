"""A training in Lightning that Ray's workers and sites under torchrun run alike; as a program, it is that of a site."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, BATCH, SITES, EPOCHS, ACCUMULATED, CLIP, LR = 48, 4, 2, 2, 2, 0.2, 0.05
TRAINER = {"max_epochs": EPOCHS, "accumulate_grad_batches": ACCUMULATED, "gradient_clip_val": CLIP, "logger": False}
TRAINER |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
TRAINER |= {"num_sanity_val_steps": 0}
OPTIONS: dict[str, dict[str, Any]] = {"dad": {}, "rankdad": {"rank": 2, "wire": "int8"}}


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(ROWS, 10, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(4, (ROWS,), generator=generator))


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def alone(rows: list[list[float]]) -> dict[str, Tensor]:
    """Train in one process, without Lightning, on the rows that the sites have had.

    Args:
        rows: by site, the first numbers of the rows in their order, which Lightning's samplers choose.
    """
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    dataset = data()
    places = {float(value): place for place, value in enumerate(dataset.tensors[0][:, 0])}
    for step, start in enumerate(range(0, len(rows[0]), BATCH)):
        batch = [places[value] for own in rows for value in own[start : start + BATCH]]
        (loss_of(model, dataset[batch]) / ACCUMULATED).backward()
        if step % ACCUMULATED == ACCUMULATED - 1:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def train(strategy: Any, folder: Path, ckpt_path: str | None = None, **trainer_arguments: Any) -> dict[str, Any]:
    """Train with a strategy; return the parameters, and what the trainer has said of itself.

    Args:
        strategy: the strategy.
        folder: folder of the checkpoint that is written after the first epoch.
        ckpt_path: a checkpoint to begin with.
        trainer_arguments: further arguments of the Trainer; ``prepare`` is called with it.
    """
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.rows: list[float] = []

        def training_step(self, batch: Any, index: int) -> Tensor:
            self.rows += batch[0][:, 0].tolist()
            loss = loss_of(self.net, batch)
            self.log("loss", loss, on_epoch=True, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("valid", loss_of(self.net, batch), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=LR)

    class Middle(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 0 and ckpt_path is None:
                trainer.save_checkpoint(folder / "middle.ckpt")

    prepare = trainer_arguments.pop("prepare", lambda trainer: trainer)
    callbacks = [Middle(), *trainer_arguments.pop("callbacks", ())]
    module, loader = Module(), DataLoader(data(), batch_size=BATCH)
    trainer = prepare(
        pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=1,
            callbacks=callbacks,
            **TRAINER,
            **trainer_arguments,
        )
    )
    trainer.fit(module, loader, DataLoader(data(), batch_size=BATCH), ckpt_path=ckpt_path)
    reduction = getattr(trainer.strategy, "reduction", None)
    return {
        "parameters": module.net.state_dict(),
        "world_size": trainer.world_size,
        "rank": trainer.global_rank,
        "rows": module.rows,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "traffic": None if reduction is None else reduction.traffic.total_bytes_sent,
    }


def main(folder: Path) -> None:
    """Train as a site under torchrun, with `dadplug.DADStrategy`."""
    import lightning.pytorch  # noqa: F401 (the package that is meant)
    import torch.distributed as dist

    import dadplug

    dadplug.connect()
    for mode, options in OPTIONS.items():
        found = train(dadplug.DADStrategy(mode, **options), folder)
        torch.save(found, folder / f"torchrun-{mode}-{dist.get_rank()}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
