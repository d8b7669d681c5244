"""Divisions of a data set: over sites, and into folds."""

from __future__ import annotations

import torch
from torch import Tensor

SPLITS = ("iid", "by-class")


def site_indices(labels: Tensor, site: int, num_sites: int, split: str = "iid", seed: int = 0) -> Tensor:
    """Chooses the samples of one site; those of all sites together are all samples, none twice.

    Args:
        labels: class of each sample.
        site: number of the site.
        num_sites: number of sites.
        split: ``"iid"`` shuffles and deals; ``"by-class"`` gives each site a range of classes of its own.
        seed: seed of the shuffle, the same on all sites.

    Raises:
        ValueError: if the split is unknown, or if a site would get nothing.
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
    """Splits samples for cross-validation: one of several folds to validate on, the others to train on.

    Args:
        samples: number of samples.
        num_folds: number of folds, at least 2.
        fold: which of them to validate on, from 0.
        seed: seed of the shuffle, the same on all sites.

    Returns:
        Indices to train on, and to validate on.

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
