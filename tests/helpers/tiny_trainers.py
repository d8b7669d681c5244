"""Trainers of nnU-Net for tests, found by nnUNet_extTrainer: few iterations, on batches that are numbered."""

import hashlib
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from dadplug.nnunet import DadplugTraining


class Numbered:
    """Loader of batches that follow from site and number; a batch of all sites has those of each in turn."""

    def __init__(self, sites, labels, shapes, patch, batch):
        self.sites, self.labels, self.shapes, self.patch, self.batch, self.number = (
            sites,
            labels,
            shapes,
            patch,
            batch,
            0,
        )

    def __next__(self):
        data, targets = [], []
        for site in self.sites:
            chance = np.random.default_rng([site, self.number])
            target = chance.integers(0, self.labels, (self.batch, 1, *self.patch))
            data.append(torch.tensor(chance.normal(size=target.shape) + 2 * target, dtype=torch.float32))
            targets.append(torch.tensor(target, dtype=torch.int16))
        self.number += 1
        whole = torch.cat(targets)
        scaled = [torch.nn.functional.interpolate(whole.float(), shape).short() for shape in self.shapes]
        return {"data": torch.cat(data), "target": scaled}


class Tiny:
    """Few iterations on numbered batches; losses and digests of the weights go to a file."""

    def __init__(self, plans, configuration, fold, dataset_json, device):  # nnU-Net stores them by these names
        torch.manual_seed(int(os.environ.get("SEED", 0)))
        super().__init__(plans, configuration, fold, dataset_json, device)
        self.num_epochs, self.num_iterations_per_epoch, self.num_val_iterations_per_epoch = 2, 4, 2
        self.save_every = 1
        self.logger.plot_progress_png = lambda folder: None  # which takes seconds
        self.counted = 0
        for name, value in json.loads(os.environ.get("SETTINGS", "{}")).items():
            setattr(self, name, value)

    def get_dataloaders(self):
        if "SITES" not in os.environ:
            return super().get_dataloaders()
        sites, patch = json.loads(os.environ["SITES"]), self.configuration_manager.patch_size
        shapes = [
            [round(scale * edge) for scale, edge in zip(scales, patch)]
            for scales in self._get_deep_supervision_scales()
        ]
        made = [Numbered([site + 100 * what for site in sites], 2, shapes, patch, self.batch_size) for what in (0, 1)]
        made[0].number = self.current_epoch * self.num_iterations_per_epoch
        made[1].number = self.current_epoch * self.num_val_iterations_per_epoch
        if "WAITS_AT" not in os.environ and "READY" in os.environ:  # what follows is the connection
            Path(os.environ["READY"]).touch()
        return made

    def train_step(self, batch):
        number, self.counted = self.number(), self.counted + 1
        if os.environ.get("LEAVE") == str(number):
            os.kill(os.getpid(), signal.SIGKILL)
        while number == int(os.environ.get("WAITS_AT", -1)) and not Path(os.environ["READY"]).exists():
            time.sleep(0.05)
        time.sleep(float(os.environ.get("PAUSE", 0)))
        result = super().train_step(batch)
        reduction = getattr(getattr(self, "wrapped", None), "reduction", None)
        line = {
            "step": number,
            "epoch": self.current_epoch,
            "loss": float(result["loss"]),
            "lr": self.optimizer.param_groups[0]["lr"],
            "digest": self.digest(),
            "batch": len(batch["data"]),
            "present": reduction and reduction.present_sites,
            "gradient": self.norm(),
        }
        with (Path(self.output_folder) / "steps.jsonl").open("a") as file:
            print(json.dumps(line), file=file)
        return result

    def perform_actual_validation(self, save_probabilities=False):
        if "SITES" not in os.environ:
            super().perform_actual_validation(save_probabilities)

    def number(self):
        """Return the number of the step among those of all epochs."""
        if not isinstance(self, DadplugTraining):
            return self.counted
        return self.current_epoch * self._iterations + self.iteration

    def norm(self):
        return (
            float(sum(each.grad.double().square().sum() for each in self.network.parameters() if each.grad is not None))
            ** 0.5
        )

    def digest(self):
        values = [each.detach().numpy().tobytes() for each in self.network.state_dict().values()]
        return hashlib.sha256(b"".join(values)).hexdigest()[:16]

    def on_train_end(self):
        super().on_train_end()
        logged = json.dumps(self.logger.get_checkpoint(), default=float)
        (Path(self.output_folder) / "logged.json").write_text(logged)
        torch.save(self.network.state_dict(), Path(self.output_folder) / "weights.pt")


class nnUNetTrainerTiny(Tiny, DadplugTraining, nnUNetTrainer):
    """One that trains with other sites."""


class nnUNetTrainerTinyAlone(Tiny, nnUNetTrainer):
    """nnU-Net's own."""
