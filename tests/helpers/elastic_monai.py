"""One site of the tests of MONAI's trainer over a hub: trains and validates, and is killed in an iteration.

Run as ``elastic_monai.py CASE``, where the case is JSON: kit, folder, stop and leave. Writes a line of JSON for each
iteration, and for each validation.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import dadplug

LENGTH = 4  # iterations of an epoch


def site_data(site: int) -> list[dict[str, torch.Tensor]]:
    """Return volumes with a box of the site's own brightness."""
    made = []
    for number in range(LENGTH):
        generator = torch.Generator().manual_seed(10 * site + number)
        label = torch.zeros(1, 8, 8, 8)
        start = torch.randint(0, 4, (3,), generator=generator).tolist()
        label[(0, *(slice(each, each + 4) for each in start))] = 1.0
        noise = torch.randn(label.shape, generator=generator)
        made.append({"image": (1.0 + site) * label + 0.3 * noise, "label": label})
    return made


def main(case: dict[str, Any]) -> None:
    dadplug.connect(kit=case["kit"], timeout=200)
    from ignite.engine import Events
    from monai.engines import SupervisedEvaluator, SupervisedTrainer
    from monai.handlers import MeanDice, ValidationHandler, from_engine
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet
    from monai.transforms import Activationsd, AsDiscreted, Compose

    from dadplug.monai import SiteHandler

    site = ord(Path(case["kit"]).name) - ord("a")
    log, device = (Path(case["folder"]) / "log.jsonl").open("a"), torch.device("cpu")
    torch.manual_seed(site)  # all start from the first site's values
    network = UNet(3, 1, 1, channels=(4, 8), strides=(2,), norm="batch")
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    handler = SiteHandler("rankdad", min_sites=1, site_timeout=5.0, state={"scheduler": scheduler}, timeout=200)
    last = Compose([Activationsd("pred", sigmoid=True), AsDiscreted("pred", threshold=0.5)])
    evaluator = SupervisedEvaluator(
        device, DataLoader(site_data(site)[: 1 + site]), network, postprocessing=last,
        key_val_metric={"dice": MeanDice(output_transform=from_engine(["pred", "label"]))},
    )  # fmt: skip
    trainer = SupervisedTrainer(
        device, 1000, DataLoader(site_data(site)), network, optimizer, DiceLoss(sigmoid=True), epoch_length=LENGTH,
        train_handlers=[handler, ValidationHandler(1, evaluator)],
    )  # fmt: skip

    def write(**line: Any) -> None:
        log.write(json.dumps(line) + "\n")
        log.flush()

    @trainer.on(Events.ITERATION_STARTED)
    def leave() -> None:
        if trainer.state.iteration == case["leave"]:
            os.kill(os.getpid(), signal.SIGKILL)

    @trainer.on(Events.ITERATION_COMPLETED)
    def after() -> None:
        values = torch.cat([each.detach().reshape(-1) for each in network.parameters()])
        digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]
        state, reduction = trainer.state, handler.reduction
        write(step=state.iteration, epoch=state.epoch, digest=digest, present=reduction.present_sites,
              lr=scheduler.get_last_lr()[0], reduced=reduction.step)  # fmt: skip
        stop = Path(case["stop"])
        if stop.exists() and state.iteration >= int(stop.read_text()):
            trainer.terminate()

    @trainer.on(Events.EPOCH_COMPLETED)
    def validated() -> None:
        write(validation=trainer.state.epoch, dice=float(evaluator.state.metrics["dice"]))
        scheduler.step()

    trainer.run()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
