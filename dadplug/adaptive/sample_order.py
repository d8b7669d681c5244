"""Order that a program's own sampler gives, drawn alike at all sites and after a restart."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler


def check_sampler(sampler: Any) -> None:
    """Check that a sampler gives an order that can be drawn again.

    Args:
        sampler: the sampler.

    Raises:
        ValueError: if it cannot.
    """
    if isinstance(sampler, DistributedSampler):
        raise ValueError("an AdaptiveDataLoader divides the data over the sites: leave out the DistributedSampler")
    if not hasattr(sampler, "__len__"):
        raise ValueError("the sampler needs a length, so that its samples can be divided over the sites")
    if getattr(sampler, "generator", None) is not None:
        raise ValueError(
            "a sampler with a generator of its own gives another order after a restart: leave out the generator, and "
            "give the AdaptiveDataLoader a seed"
        )


def order_of_sampler(sampler: Any, *key: int) -> Tensor:
    """Return the indices that a sampler gives in a pass, the same whenever the pass is begun.

    Random numbers of torch, numpy and Python are drawn from a seed of the pass meanwhile.

    Args:
        sampler: the sampler; one with ``set_epoch`` is given the epoch.
        key: numbers that name the pass: seed, epoch, number of the pass in the epoch.
    """
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(key[1])
    digest = hashlib.sha256(repr(key).encode()).digest()
    with seeded(int.from_bytes(digest[:4], "little")):
        return torch.tensor(list(sampler), dtype=torch.int64)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw random numbers of torch, numpy and Python from a seed, inside a ``with`` block."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would change those of GPUs for good
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
