"""Tiny data sets of nnU-Net: a ball in noise, at each site with other intensities."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

DATASET = "Dataset101_Balls"
COMMANDS = Path(sys.executable).parent


def write_cases(raw: Path, site: int, cases: int, size: int = 16) -> None:
    """Write the raw data set of a site.

    Args:
        raw: folder for nnUNet_raw.
        site: number of the site, for the random numbers.
        cases: number of cases.
        size: edge of a volume.
    """
    import SimpleITK

    folder = raw / DATASET
    for name in ("imagesTr", "labelsTr"):
        (folder / name).mkdir(parents=True)
    chance = np.random.default_rng(site)
    places = np.stack(np.meshgrid(*[np.arange(size)] * 3, indexing="ij"))
    for case in range(cases):
        centre = chance.uniform(size * 0.3, size * 0.7, (3, 1, 1, 1))
        ball = ((places - centre) ** 2).sum(0) < (size * 0.25) ** 2
        image = chance.normal(100 + 30 * site, 20, ball.shape) + 150 * ball
        for folder_name, values, ending in (("imagesTr", image, "_0000"), ("labelsTr", ball, "")):
            volume = SimpleITK.GetImageFromArray(values.astype(np.float32 if ending else np.uint8))
            SimpleITK.WriteImage(volume, str(folder / folder_name / f"case_{site}{case:02}{ending}.nii.gz"))
    content = {
        "channel_names": {"0": "CT"},
        "labels": {"background": 0, "ball": 1},
        "numTraining": cases,
        "file_ending": ".nii.gz",
    }
    (folder / "dataset.json").write_text(json.dumps(content))


def environment(site: Path) -> dict[str, str]:
    """Return the environment of a site, with its folders and few processes."""
    folders = {f"nnUNet_{name}": str(site / name) for name in ("raw", "preprocessed", "results")}
    few = {"nnUNet_n_proc_DA": "1", "nnUNet_def_n_proc": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    return os.environ | folders | few


def call(site: Path, *command: object, **further: str) -> str:
    """Run a command at a site; return what it has printed."""
    program, *arguments = map(str, command)
    found = [str(COMMANDS / program)] if (COMMANDS / program).exists() else [program]
    done = subprocess.run(
        [*found, *arguments], env=environment(site) | further, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
