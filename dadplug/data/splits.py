"""Splits of a data set over sites and into folds."""

from __future__ import annotations

import torch
from torch import Tensor

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
    if not 2 <= num_folds <= samples:
        raise ValueError(f"num-folds must lie in 2 to {samples}, the number of samples, got {num_folds}")
    if not 0 <= fold < num_folds:
        raise ValueError(f"k must lie in 0 to {num_folds - 1} for {num_folds} folds, got {fold}")
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    folds = order.tensor_split(num_folds)
    train = torch.cat([part for index, part in enumerate(folds) if index != fold])
    return train.sort().values, folds[fold].sort().values
