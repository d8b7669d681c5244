"""Data sets by name, and their division over sites: ``load_dataset("digits")``. The sets are in ``examples/zoo``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from .errors import DataError
from .examples.zoo import transforms
from .examples.zoo.clicks import Clicks, clicks, criteo, generated, read_criteo, renumbered
from .examples.zoo.images import MNIST, DataPair, Images, Samples, digits, mnist
from .examples.zoo.photos import Photos, dogsvscats
from .support.refusals import refuse
from .support.registry import Registry

__all__ = [
    "DATASETS",
    "MNIST",
    "SPLITS",
    "Clicks",
    "DataError",
    "DataPair",
    "Images",
    "Photos",
    "Samples",
    "fold_indices",
    "generated",
    "load_dataset",
    "read_criteo",
    "register_dataset",
    "renumbered",
    "site_indices",
    "transforms",
]


SPLITS = ("iid", "by-class")


def site_indices(labels: Tensor, site: int, num_sites: int, split: str = "iid", seed: int = 0) -> Tensor:
    """Return the indices of one site's samples; the sites' samples are a partition of all samples.

    Args:
        labels: of shape (n,), the class of each sample.
        site: number of the site.
        num_sites: number of sites.
        split: ``"iid"`` for an i.i.d. split; ``"by-class"`` for a range of classes per site.
        seed: seed of the shuffle, equal on all sites.

    Returns:
        Indices in ascending order.

    Raises:
        ValueError: if the split is unknown or the site would get no samples.

    Example:
        >>> import torch
        >>> from dadplug.data import site_indices
        >>> site_indices(torch.tensor([0, 1, 0, 1]), site=1, num_sites=2, split="by-class")
        tensor([1, 3])
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; valid ones are {', '.join(SPLITS)}")
    if split == "by-class":
        present = torch.unique(labels)
        mine = present.tensor_split(num_sites)[site]
        indices = torch.nonzero(torch.isin(labels, mine)).flatten()
    else:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        indices = order[site::num_sites].sort().values
    if not len(indices):
        raise ValueError(f"site {site} of {num_sites} gets no samples: there are too few for a split {split!r}")
    return indices


def fold_indices(samples: int, num_folds: int, fold: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the indices of training and validation samples for cross-validation.

    Args:
        samples: number of samples.
        num_folds: number of folds, at least 2.
        fold: number of the validation fold, from 0.
        seed: seed of the shuffle, equal on all sites.

    Returns:
        Indices of training samples and of validation samples, in ascending order.

    Raises:
        ValueError: if a number is out of range.
    """
    refuse(
        (
            not 2 <= num_folds <= samples,
            f"num-folds must lie in 2 to {samples}, the number of samples, got {num_folds}",
        ),
        (not 0 <= fold < num_folds, f"k must lie in 0 to {num_folds - 1} for {num_folds} folds, got {fold}"),
    )
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    folds = order.tensor_split(num_folds)
    train = torch.cat([part for index, part in enumerate(folds) if index != fold])
    return train.sort().values, folds[fold].sort().values


@dataclass(frozen=True)
class DataSource:
    """Registered data set.

    Attributes:
        load: function that loads it, of a path where it has files, else of nothing.
        has_files: whether it is read from a folder or file.
    """

    load: Callable[..., DataPair]
    has_files: bool


DATASETS: Registry[str, DataSource] = Registry("dataset")

Load = TypeVar("Load", bound=Callable[..., DataPair])


def register_dataset(name: str, *, has_files: bool) -> Callable[[Load], Load]:
    """Register the function that loads a data set; a decorator.

    Args:
        name: name of the data set.
        has_files: whether the function takes the path of a folder or file; otherwise it takes nothing.

    Example:
        >>> from dadplug.data import DataPair, generated, register_dataset
        >>> @register_dataset("more clicks", has_files=False)
        ... def more_clicks(samples=50_000):
        ...     clicks = generated(samples=samples)
        ...     return DataPair(clicks.subset(slice(0, 40_000)), clicks.subset(slice(40_000, None)), classes=2)
    """

    def decorate(load: Load) -> Load:
        DATASETS.register(name)(DataSource(load, has_files))
        return load

    return decorate


register_dataset("clicks", has_files=False)(clicks)
register_dataset("criteo", has_files=True)(criteo)
register_dataset("digits", has_files=False)(digits)
register_dataset("dogsvscats", has_files=True)(dogsvscats)
register_dataset("mnist", has_files=True)(mnist)


def load_dataset(name: str, data_dir: str | Path | None = None) -> DataPair:
    """Load a data set by name.

    Args:
        name: name of the data set, in upper or lower case.
        data_dir: folder or file of the data set; None for the folder ``data``, and for data sets without files.

    Raises:
        ValueError: if there is no such data set; the message lists the valid names. If a data set without files is
            given a folder.
        DataError: if it cannot be loaded.

    Example:
        >>> from dadplug.data import load_dataset
        >>> len(load_dataset("clicks").train)
        8000
    """
    source = DATASETS[name]
    if source.has_files:
        return source.load(Path("data" if data_dir is None else data_dir))
    if data_dir is not None:
        raise ValueError(
            f"the data set {name!r} has no files: choose the data set of the files in {data_dir}, or leave data_dir out"
        )
    return source.load()
