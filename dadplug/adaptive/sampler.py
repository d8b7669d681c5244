"""Sampler that divides a data set over the sites from any position on."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch.distributed as dist
from torch.utils.data import Sampler

from .schedule import order_of, share_of


class ElasticSampler(Sampler[int]):
    """Sampler for any DataLoader: each sample of the data set at one site, from a position on that the program states.

    Unlike ``torch.utils.data.DistributedSampler`` it repeats no samples to make the sites' numbers equal, and the order
    does not depend on the number of sites. Programs that count samples themselves use it; `dadplug.ElasticDataLoader`
    counts them for loops over `dadplug.remaining_epochs_until`.

    Args:
        dataset: the data set, the same at all sites.
        shuffle: whether to shuffle in every epoch.
        seed: seed of the order.
        rank: number of this site; that of the default process group if None.
        num_sites: number of sites; that of the default process group if None.

    Raises:
        ValueError: if the rank is not below the number of sites.

    Example:
        >>> sampler = dadplug.ElasticSampler(dataset)
        >>> loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        >>> sampler.set_epoch(3, used=640)  # in epoch 3, the sites have used 640 samples together
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        *,
        seed: int = 0,
        rank: int | None = None,
        num_sites: int | None = None,
    ) -> None:
        connected = dist.is_available() and dist.is_initialized()
        self._rank = rank if rank is not None else dist.get_rank() if connected else 0
        self._num_sites = num_sites if num_sites is not None else dist.get_world_size() if connected else 1
        if not 0 <= self._rank < self._num_sites:
            raise ValueError(
                f"rank must lie in 0 to {self._num_sites - 1} for {self._num_sites} sites, got {self._rank}"
            )
        self._dataset, self._shuffle, self._seed = dataset, shuffle, seed
        self._epoch = self._used = 0

    def set_epoch(self, epoch: int, used: int = 0) -> None:
        """Set the epoch, and the position at which the next pass begins.

        Args:
            epoch: number of the epoch.
            used: number of samples of the epoch that have been used, by all sites together.

        Raises:
            ValueError: if the data set has fewer samples than that.
        """
        if not 0 <= used <= len(self._dataset):
            raise ValueError(f"used must lie in 0 to {len(self._dataset)}, the length of the data set, got {used}")
        self._epoch, self._used = epoch, used

    def __iter__(self) -> Iterator[int]:
        order = order_of(len(self._dataset), self._shuffle, self._seed, self._epoch, 0)
        return iter(order[self._share].tolist())

    def __len__(self) -> int:
        return len(range(len(self._dataset))[self._share])

    @property
    def _share(self) -> slice:
        return share_of(len(self._dataset), self._used, self._rank, self._num_sites)
