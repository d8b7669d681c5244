"""Fingerprints of nnU-Net data sets: those of all sites merged without an image, and plans that are made from them.

A fingerprint (``dataset_fingerprint.json``) has the shape and spacing of each case, and statistics of the intensities
of foreground voxels. Merging needs nothing of nnU-Net.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from ..support.files import write_file

_CHANNELS = "foreground_intensity_properties_per_channel"
_CROPPED = "median_relative_size_after_cropping"
_SITES = "merged_from"  # number of merged fingerprints; nnU-Net does not read it
_NORMAL = NormalDist()
_SAMPLES = 1e8  # foreground voxels that nnU-Net draws: their extremes are about these quantiles
_SHARES = {
    "min": 1 / _SAMPLES,
    "percentile_00_5": 0.005,
    "median": 0.5,
    "percentile_99_5": 0.995,
    "max": 1 - 1 / _SAMPLES,
}
_SCORES = [_NORMAL.inv_cdf(share) for share in _SHARES.values()]


def merge(fingerprints: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the fingerprints of all sites into one, in which each case counts alike.

    The result does not depend on the order of the sites. Shapes, spacings, means, standard deviations and extremes are
    those of all cases. Medians and percentiles are interpolated between those of the sites.

    Args:
        fingerprints: contents of the files, by a name for messages.

    Raises:
        ValueError: if one is no fingerprint, has been merged already, or has other channels than the others.
    """
    for name, each in fingerprints.items():
        _check(name, each)
        if _SITES in each:
            raise ValueError(f"{name} has been merged already: give the sites' own fingerprints")
    first, *others = fingerprints
    channels = fingerprints[first][_CHANNELS].keys()
    for name in others:
        found = fingerprints[name][_CHANNELS].keys()
        if found != channels:
            raise ValueError(
                f"{name} has the channels {sorted(found)} and {first} has {sorted(channels)}: all sites need the same "
                "channel_names in dataset.json"
            )
    every = list(fingerprints.values())
    cases = sorted(pair for each in every for pair in zip(each["spacings"], each["shapes_after_crop"], strict=True))
    weights = [len(each["spacings"]) / len(cases) for each in every]
    return {
        "spacings": [spacing for spacing, _ in cases],
        "shapes_after_crop": [shape for _, shape in cases],
        _CHANNELS: {name: _merge_channel([each[_CHANNELS][name] for each in every], weights) for name in channels},
        _CROPPED: math.fsum(weight * each[_CROPPED] for weight, each in zip(weights, every, strict=True)),
        _SITES: len(every),
    }


def _check(name: str, fingerprint: Mapping[str, Any]) -> None:
    """Raise ValueError for what is no fingerprint."""
    try:
        values = [each[what] for each in fingerprint[_CHANNELS].values() for what in (*_SHARES, "mean", "std")]
        sizes = len(fingerprint["spacings"]), len(fingerprint["shapes_after_crop"])
        fits = all(map(math.isfinite, [*values, fingerprint[_CROPPED]])) and sizes[0] == sizes[1] > 0
    except (KeyError, TypeError, AttributeError):
        fits = False
    remedy = (
        "copy the dataset_fingerprint.json of nnUNetv2_extract_fingerprint here again, or for `plan` the merged file"
    )
    if not fits:
        raise ValueError(f"{name} is no complete fingerprint: {remedy}")


def _merge_channel(channels: Sequence[Mapping[str, float]], weights: Sequence[float]) -> dict[str, float]:
    """Merge the statistics of one channel."""
    pairs = list(zip(weights, channels, strict=True))
    mean = math.fsum(weight * each["mean"] for weight, each in pairs)
    variance = math.fsum(weight * (each["std"] ** 2 + (each["mean"] - mean) ** 2) for weight, each in pairs)
    merged = {"mean": mean, "std": math.sqrt(variance)}
    merged |= {"min": min(each["min"] for each in channels), "max": max(each["max"] for each in channels)}
    return merged | {name: _quantile(name, pairs) for name in _SHARES if name not in merged}


def _quantile(name: str, pairs: Sequence[tuple[float, Mapping[str, float]]]) -> float:
    """Find a quantile of the mixture of the sites' distributions, which are normal between the known quantiles."""
    values = [each[name] for _, each in pairs]
    low, high = min(values), max(values)

    def share(value: float) -> float:
        return math.fsum(
            weight * _NORMAL.cdf(float(np.interp(value, [each[known] for known in _SHARES], _SCORES)))
            for weight, each in pairs
        )

    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if share(middle) >= _SHARES[name] else (middle, high)
    return high


def merge_files(paths: Sequence[Path], out: Path) -> int:
    """Merge the fingerprints in some files into a new file; return the number of cases.

    Raises:
        ValueError: as in `merge`, or if a file is named twice, cannot be read, or is no JSON.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError("a fingerprint is named twice: name each site's once")
    merged = merge({str(path): _read(path) for path in paths})
    out.parent.mkdir(parents=True, exist_ok=True)
    write_file(out, json.dumps(merged, indent=2).encode())
    return len(merged["spacings"])


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}): check its name, or copy it here again") from error
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): copy it here again") from error


def plan(dataset: int, agreed: Path, planner: str, memory: float | None, name: str | None) -> None:
    """Plan at a site from the merged fingerprint, in place of its own.

    The own fingerprint is kept beside it as ``dataset_fingerprint_own.json``.

    Args:
        dataset: number of the data set at this site.
        agreed: file of the merged fingerprint.
        planner: class of nnU-Net that plans.
        memory: memory of a GPU in GB that it plans for; None for its own default.
        name: name of the plans; None for its own default.

    Raises:
        ImportError: if nnU-Net is not installed.
        ValueError: if the file is no merged fingerprint, or there is no such planner.
    """
    try:
        import nnunetv2
        from nnunetv2.paths import nnUNet_preprocessed
        from nnunetv2.utilities.dataset_name_id_conversion import convert_id_to_dataset_name
        from nnunetv2.utilities.find_class_by_name import recursive_find_python_class
    except ImportError as error:
        raise ImportError(f"planning needs nnU-Net ({error}): pip install 'dadplug[nnunet]'") from error
    fingerprint = _read(agreed)
    _check(str(agreed), fingerprint)
    if _SITES not in fingerprint:
        raise ValueError(
            f"{agreed} is no merged fingerprint: make it by `python -m dadplug nnunet merge`, once for all sites"
        )
    room = "experiment_planning"
    found = recursive_find_python_class(str(Path(nnunetv2.__path__[0]) / room), planner, f"nnunetv2.{room}")
    if found is None:
        raise ValueError(f"nnU-Net has no planner {planner!r}: leave -pl out, or see its documentation")
    folder = Path(nnUNet_preprocessed) / convert_id_to_dataset_name(dataset)
    folder.mkdir(parents=True, exist_ok=True)
    present, own = folder / "dataset_fingerprint.json", folder / "dataset_fingerprint_own.json"
    if present.exists() and _SITES not in _read(present):
        shutil.copyfile(present, own)
    write_file(present, json.dumps(fingerprint, indent=2).encode())
    settings = {"gpu_memory_target_in_gb": memory, "plans_name": name}
    made = found(dataset, **{what: value for what, value in settings.items() if value is not None})
    made.dataset_json = {**made.dataset_json, "numTraining": len(fingerprint["spacings"])}
    made.plan_experiment()
