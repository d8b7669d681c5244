"""Hospitals train one U-Net on their own volumes in three dimensions over a hub, with MONAI.

    python examples/two_hospitals_segmentation.py
    python examples/two_hospitals_segmentation.py --sites 4

runs everything on this machine, once for each of the `--modes`: kits, the hub, and a process for each hospital. The
volumes are synthetic (MONAI's `create_test_image_3d`), and differ between hospitals in noise, contrast and sizes of
the objects. It draws the Dice of all hospitals' validation volumes over the megabytes that a hospital has sent.

    python examples/two_hospitals_segmentation.py --kit kits/berlin --modes rankdad

is what a hospital runs on a machine of its own. Sites on a trusted network start by torchrun, without a hub:

    torchrun --nproc-per-node 2 examples/two_hospitals_segmentation.py --modes rankdad
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import dadplug
from dadplug.support.processes import free_port

HOSPITALS = ("berlin", "lyon", "oslo", "porto")
PROJECT = """
name = "segmentation"
hub = "127.0.0.1:{port}"
sites = {sites}
hub_at = "berlin"    # a member runs the hub, which may see the factors that rankdad sends
"""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--modes", nargs="+", default=["dsgd", "rankdad"], help="methods, one run each (default: dsgd rankdad)")
    add("--sites", type=int, choices=(2, 4), default=2, help="number of hospitals on this machine (default: 2)")
    add("--kit", type=Path, help="kit of this hospital, which then runs alone in this process")
    add("--epochs", type=int, default=16, help="epochs (default: 16)")
    add("--volumes", type=int, default=8, help="training volumes of a hospital (default: 8)")
    add("--size", type=int, default=32, help="edge of a volume in voxels (default: 32)")
    add("--out", type=Path, default=Path("logs/segmentation"), help="folder of results (default: logs/segmentation)")
    return parser.parse_args()


# What a hospital does.


def volumes(site: int, count: int, size: int, first: int = 0) -> list[dict[str, torch.Tensor]]:
    """Return synthetic volumes of a hospital, with its own noise, contrast and sizes of objects."""
    from monai.data import create_test_image_3d

    made = []
    for number in range(first, first + count):
        image, label = create_test_image_3d(
            size, size, size, num_objs=5, rad_min=2 + site % 2, rad_max=size // 5 + site, num_seg_classes=1,
            noise_max=0.3 + 0.15 * site, channel_dim=0, random_state=np.random.RandomState(1000 * site + number),
        )  # fmt: skip
        contrast = 1.0 - 0.15 * site
        made.append({"image": torch.tensor(contrast * image).float(), "label": torch.tensor(label).float()})
    return made


def evaluator_of(network: torch.nn.Module, site: int, size: int) -> Any:
    """Return an evaluator by sliding windows, whose Dice is that of the validation volumes of all hospitals."""
    from monai.engines import SupervisedEvaluator
    from monai.handlers import MeanDice, from_engine
    from monai.inferers import SlidingWindowInferer
    from monai.transforms import Activationsd, AsDiscreted, Compose

    return SupervisedEvaluator(
        torch.device("cpu"),
        DataLoader(volumes(site, 4, size, first=500)),
        network,
        inferer=SlidingWindowInferer([size] * 3, overlap=0.25),
        postprocessing=Compose([Activationsd("pred", sigmoid=True), AsDiscreted("pred", threshold=0.5)]),
        key_val_metric={"dice": MeanDice(output_transform=from_engine(["pred", "label"]))},
    )


def loader_of(site: int, arguments: argparse.Namespace) -> DataLoader:
    from monai.data import CacheDataset
    from monai.transforms import Compose, EnsureTyped, RandFlipd

    flips = [RandFlipd(["image", "label"], 0.5, axis) for axis in range(3)]
    transform = Compose([EnsureTyped(["image", "label"]), *flips])
    data = CacheDataset(volumes(site, arguments.volumes, arguments.size), transform, progress=False)
    return DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(site))


def train(site: int, mode: str, arguments: argparse.Namespace) -> None:
    """Train at one hospital, and write a line of JSON for each validation."""
    from ignite.engine import Events
    from monai.engines import SupervisedTrainer
    from monai.handlers import CheckpointSaver, ValidationHandler
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet

    from dadplug.monai import SiteHandler, save_at_each_site

    folder = arguments.out / mode / HOSPITALS[site]
    folder.mkdir(parents=True, exist_ok=True)
    log = (folder / "log.jsonl").open("w")
    torch.manual_seed(0)
    network = UNet(3, 1, 1, channels=(8, 16, 32), strides=(2, 2), num_res_units=1, norm="instance")
    evaluator, sites = evaluator_of(network, site, arguments.size), SiteHandler(mode)
    trainer = SupervisedTrainer(
        torch.device("cpu"),
        arguments.epochs,
        loader_of(site, arguments),
        network,
        torch.optim.Adam(network.parameters(), 5e-3),
        DiceCELoss(sigmoid=True),
        epoch_length=max(1, arguments.volumes // 2),  # the same at all hospitals
        train_handlers=[
            sites,  # the first handler
            ValidationHandler(2, evaluator),
            save_at_each_site(CheckpointSaver(str(folder), {"network": network}, save_final=True)),
        ],
    )

    @trainer.on(Events.EPOCH_COMPLETED(every=2))
    def write() -> None:
        epoch, dice = trainer.state.epoch, float(evaluator.state.metrics["dice"])
        sent = sites.reduction.traffic.total_bytes_sent / 1e6
        log.write(json.dumps({"epoch": epoch, "dice": dice, "megabytes": sent}) + "\n")
        log.flush()
        if site == 0:
            print(f"{mode:8} epoch {epoch:3}  Dice {dice:.3f}  {sent:8.3f} MB", flush=True)

    trainer.run()
    differing = sites.reduction.first_difference()
    sites.detach()
    if differing is not None:
        raise RuntimeError(f"the hospitals' networks differ in {differing!r}")


# What starts the hub and the hospitals on this machine.


def run(mode: str, arguments: argparse.Namespace) -> None:
    """Train once, with a hub and a process for each hospital."""
    names = HOSPITALS[: arguments.sites]
    with tempfile.TemporaryDirectory() as folder:
        project, kits = Path(folder) / "project.toml", Path(folder) / "kits"
        project.write_text(PROJECT.format(port=free_port(), sites=json.dumps(names)))
        python = [sys.executable]
        dadplug_command = [*python, "-m", "dadplug"]
        subprocess.run([*dadplug_command, "provision", project, "--out", kits], check=True, stdout=subprocess.DEVNULL)
        keys = ("epochs", "volumes", "size", "out")
        options = [f"--{key}={getattr(arguments, key)}" for key in keys] + ["--modes", mode]
        processes = [subprocess.Popen([*dadplug_command, "hub", kits / "hub"], stdout=subprocess.DEVNULL)]
        try:
            sites = [subprocess.Popen([*python, __file__, "--kit", kits / name, *options]) for name in names]
            processes += sites
            for name, process in zip(names, sites, strict=True):
                if process.wait():
                    raise SystemExit(f"{name} has ended with status {process.returncode}")
        finally:
            for process in processes:
                process.terminate()
                process.wait()


def results(mode: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    lines = (arguments.out / mode / HOSPITALS[0] / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def draw(arguments: argparse.Namespace) -> None:
    """Draw the Dice over the megabytes that a hospital has sent."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("without a picture: pip install 'dadplug[examples]'")
        return
    figure = Figure((6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for mode in arguments.modes:
        lines = results(mode, arguments)
        axes.plot([line["megabytes"] for line in lines], [line["dice"] for line in lines], marker=".", label=mode)
    axes.set(
        xscale="log", ylim=(0, 1), xlabel="MB sent by a hospital", ylabel="mean Dice of all validation volumes",
        title=f"U-Net in 3D, {arguments.sites} hospitals with volumes of their own",
    )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend()
    path = arguments.out / "segmentation.png"
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    if arguments.kit is not None:
        dadplug.connect(kit=arguments.kit)
        train(HOSPITALS.index(arguments.kit.name), arguments.modes[0], arguments)
    elif "WORLD_SIZE" in os.environ:
        dadplug.connect()
        for mode in arguments.modes:
            train(int(os.environ["RANK"]), mode, arguments)
    else:
        for mode in arguments.modes:
            run(mode, arguments)
        draw(arguments)
        for mode in arguments.modes:
            last = results(mode, arguments)[-1]
            print(f"{mode}: Dice {last['dice']:.3f} after {last['megabytes']:.3f} MB sent by each hospital")


if __name__ == "__main__":
    main()
