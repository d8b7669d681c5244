"""Sites of nnU-Net for tests: tiny data sets and plans, and processes of its commands."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import nnunet_train
import numpy as np
from json_lines import LineLog

DATASET = "Dataset101_Balls"
COMMANDS = Path(sys.executable).parent
ENDED = 900.0  # seconds for a process, on a busy machine; a test has 1800
_SET = {
    "channel_names": {"0": "CT"},
    "labels": {"background": 0, "ball": 1},
    "numTraining": 2,
    "file_ending": ".nii.gz",
}


def write_cases(site: Path, number: int, cases: int, size: int = 16) -> None:
    """Write the raw data set of a site: a ball in noise, at each site with other intensities.

    Args:
        site: folder of the site.
        number: number of the site, for the random numbers.
        cases: number of cases.
        size: edge of a volume.
    """
    import SimpleITK

    folder = site / "raw" / DATASET
    for name in ("imagesTr", "labelsTr"):
        (folder / name).mkdir(parents=True)
    chance = np.random.default_rng(number)
    places = np.stack(np.meshgrid(*[np.arange(size)] * 3, indexing="ij"))
    for case in range(cases):
        centre = chance.uniform(size * 0.3, size * 0.7, (3, 1, 1, 1))
        ball = ((places - centre) ** 2).sum(0) < (size * 0.25) ** 2
        image = chance.normal(100 + 30 * number, 20, ball.shape) + 150 * ball
        for kind, values, ending in (("imagesTr", image, "_0000"), ("labelsTr", ball, "")):
            volume = SimpleITK.GetImageFromArray(values.astype(np.float32 if ending else np.uint8))
            SimpleITK.WriteImage(volume, str(folder / kind / f"case_{number}{case:02}{ending}.nii.gz"))
    (folder / "dataset.json").write_text(json.dumps(_SET | {"numTraining": cases}))


def _configuration(dimensions: int) -> dict[str, Any]:
    threes, kind = [[3] * dimensions] * 3, f"{dimensions}d"
    network = {
        "n_stages": 3,
        "features_per_stage": [4, 8, 8],
        "conv_op": f"torch.nn.modules.conv.Conv{kind}",
        "kernel_sizes": threes,
        "strides": [[1] * dimensions, [2] * dimensions, [2] * dimensions],
        "n_conv_per_stage": [1, 1, 1],
        "n_conv_per_stage_decoder": [1, 1],
        "conv_bias": True,
        "norm_op": f"torch.nn.modules.instancenorm.InstanceNorm{kind}",
        "norm_op_kwargs": {"eps": 1e-05, "affine": True},
        "dropout_op": None,
        "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    }
    return {
        "data_identifier": f"nnUNetPlans_{kind}",
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": 2,
        "patch_size": [8] * dimensions,
        "spacing": [1.0] * dimensions,
        "normalization_schemes": ["CTNormalization"],
        "use_mask_for_norm": [False],
        "batch_dice": dimensions == 2,
        "architecture": {
            "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
            "arch_kwargs": network,
            "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
        },
    }


def write_plans(site: Path) -> None:
    """Write plans, as if a data set without images had been preprocessed, for trainers with numbered batches."""
    folder = site / "preprocessed" / DATASET
    plans = {
        "dataset_name": DATASET,
        "plans_name": "nnUNetPlans",
        "image_reader_writer": "SimpleITKIO",
        "transpose_forward": [0, 1, 2],
        "transpose_backward": [0, 1, 2],
        "configurations": {"2d": _configuration(2), "3d_fullres": _configuration(3)},
        "experiment_planner_used": "ExperimentPlanner",
        "label_manager": "LabelManager",
        "foreground_intensity_properties_per_channel": {"0": {"mean": 1.0}},
    }
    for each in plans["configurations"].values():
        (folder / each["data_identifier"]).mkdir(parents=True)
        (folder / each["data_identifier"] / "none.b2nd").touch()
    for name, content in (("nnUNetPlans", plans), ("dataset", _SET), ("dataset_fingerprint", {})):
        (folder / f"{name}.json").write_text(json.dumps(content))


class Site:
    """A site, in a folder of its own.

    Args:
        folder: the folder.
        number: number of the site.

    Attributes:
        started: processes of all sites.
    """

    started: ClassVar[list[subprocess.Popen[bytes]]] = []

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number = folder, number
        self.log = folder / "output.txt"
        self.process: subprocess.Popen[bytes] | None = None

    def environment(self, **further: object) -> dict[str, str]:
        """Return the environment of the site, with its folders and few processes."""
        folders = {f"nnUNet_{name}": str(self.folder / name) for name in ("raw", "preprocessed", "results")}
        few = {"nnUNet_n_proc_DA": "1", "nnUNet_def_n_proc": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
        return os.environ | folders | few | {name: str(value) for name, value in further.items()}

    def call(self, program: str, *arguments: object) -> str:
        """Run a command; return what it has printed."""
        found = [sys.executable, "-m", "dadplug"] if program == "dadplug" else [str(COMMANDS / program)]
        command = [*found, *map(str, arguments)]
        done = subprocess.run(command, env=self.environment(), capture_output=True, text=True, timeout=ENDED)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def train(
        self, *arguments: str, trainer: str = "nnUNetTrainerTiny", configuration: str = "3d_fullres", **further: object
    ) -> None:
        """Start to train, in the folder of results of the trainer.

        Args:
            arguments: further arguments of nnUNetv2_train.
            trainer: its class in `tiny_trainers`.
            configuration: its configuration.
            further: environment variables.
        """
        self.results = self.folder / "results" / DATASET / f"{trainer}__nnUNetPlans__{configuration}" / "fold_0"
        command = [sys.executable, nnunet_train.__file__, "101", configuration, "0", "-tr", trainer, "-device", "cpu"]
        settings = {"nnUNet_n_proc_DA": "0"} | further
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *arguments], env=self.environment(**settings), stdout=log, stderr=log
            )
        self.started.append(self.process)

    def end(self, status: int = 0) -> str:
        """Wait for the end of a training; return what it has printed."""
        assert self.process is not None
        found = self.process.wait(ENDED)
        assert found == status, self.log.read_text()
        return self.log.read_text()

    def steps(self) -> dict[int, dict[str, Any]]:
        """Return the lines of the steps, by number; of a repeated step the last one."""
        return {line["step"]: line for line in LineLog(self.results / "steps.jsonl").read()}

    def await_step(self, step: int) -> None:
        """Wait until the site has made a step."""
        ends = time.monotonic() + ENDED
        while not (self.results / "steps.jsonl").exists() or max(self.steps(), default=-1) < step:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < ends, self.log.read_text()
            time.sleep(0.05)

    def logged(self) -> dict[str, list[Any]]:
        """Return what nnU-Net has logged in all epochs."""
        found: dict[str, list[Any]] = json.loads((self.results / "logged.json").read_text())
        return found
