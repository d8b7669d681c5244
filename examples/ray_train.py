"""Sites are workers of Ray Train, which goes on from a checkpoint after a worker is lost: python examples/ray_train.py.

    python examples/ray_train.py                                        two workers on this machine, digits
    python examples/ray_train.py --dataset mnist --data-dir DIR         MNIST
    python examples/ray_train.py --address auto --workers 4             on a cluster, see docs/guides/ray.md

Each worker trains on its share of the data. After each epoch the first one reports a checkpoint, from which Ray starts
all workers again if one is lost, up to --max-failures times.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader

import dadplug
from dadplug.data import load_dataset, site_indices
from dadplug.models import build_for


def train(config: dict) -> None:
    """Train at one worker, from the last checkpoint on."""
    dadplug.connect()  # Ray has connected the workers: this is for the same loop under torchrun
    torch.manual_seed(0)
    model, data = build_for(load_dataset(config["dataset"], config["data_dir"]), "mnistnet")
    reduction = dadplug.GradientReduction(model, mode=config["mode"], **config["options"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    first = resume(model, optimizer, reduction)
    mine = data.train.subset(site_indices(data.train.labels, reduction.site_rank, reduction.world_size))
    for epoch in range(first, config["epochs"]):
        shuffled = torch.Generator().manual_seed(epoch)  # so that a restart repeats the order
        for images, labels in DataLoader(mine, config["batch_size"], shuffle=True, generator=shuffled):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            reduction.synchronize()
            optimizer.step()
        reduction.join(optimizer.step)  # a worker may have one batch less
        reduction.average_buffers()
        model.eval()
        with torch.no_grad():
            accuracy = float((model(data.test.images).argmax(1) == data.test.labels).float().mean())
        model.train()
        report(epoch, accuracy, model, optimizer, reduction)


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, reduction: dadplug.GradientReduction) -> int:
    """Load the last checkpoint, if there is one; return the number of the next epoch."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder, "state.pt"))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    reduction.load_states(state["reduction"])
    return state["epoch"] + 1


def report(
    epoch: int,
    accuracy: float,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    reduction: dadplug.GradientReduction,
) -> None:
    """Report the epoch to Ray; the first worker's report has the checkpoint, with the compressor state of all."""
    state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state["reduction"] = reduction.gather_objects(reduction.state_dict())
    traffic = reduction.traffic
    metrics = {"epoch": epoch, "accuracy": accuracy, "bytes": traffic.bytes_sent, "dense_bytes": traffic.dense_bytes}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if reduction.site_rank == 0:
            torch.save(state, Path(folder, "state.pt"))
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="address of a Ray cluster, or auto (default: start one on this machine)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--dataset", default="digits", choices=("digits", "mnist"))
    parser.add_argument("--data-dir", help="folder of MNIST's files, at the same path at each worker")
    parser.add_argument("--mode", default="rankdad")
    parser.add_argument("--rank", type=int, help="rank of rankdad (default: its own)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of a worker")
    parser.add_argument("--max-failures", type=int, default=1, help="restarts after a lost worker")
    parser.add_argument("--log-dir", type=Path, default=Path("logs/ray_train"), help="folder of the checkpoints")
    arguments = parser.parse_args()
    if arguments.address is None:
        ray.init(address="local", num_cpus=arguments.workers, include_dashboard=False)
    else:
        ray.init(address=arguments.address)
    names = ("dataset", "data_dir", "mode", "epochs", "batch_size")
    options = {} if arguments.rank is None else {"rank": arguments.rank}
    result = TorchTrainer(
        train,
        train_loop_config={name: getattr(arguments, name) for name in names} | {"options": options},
        scaling_config=ScalingConfig(num_workers=arguments.workers),
        run_config=RunConfig(
            storage_path=str(arguments.log_dir.resolve()),
            failure_config=FailureConfig(max_failures=arguments.max_failures),
        ),
    ).fit()
    last = result.metrics
    ratio = last["dense_bytes"] / last["bytes"]
    print(f"accuracy {last['accuracy']:.3f}; {last['bytes'] / 1e6:.3f} MB a step, {ratio:.1f} times fewer than DDP's")


if __name__ == "__main__":
    main()
