"""Splitting of a data set over the sites."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from catalyst.utils.torch import any2device
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from ...adaptive import ElasticDataLoader
from ...adaptive.loader import seeded
from ...errors import MismatchError
from ...exchange import Transport
from ...hogwild.dealing import settings_of, with_batches
from ..loaders import DelegatingLoader

SPLIT_DATA = ("auto", True, False)
_PROBES = 8  # samples of a fingerprint


class SiteSampler(Sampler[Any]):
    """Sampler that distributes the samples of another sampler over the sites, each sample to one site.

    The order is drawn with a seed that all sites share, so that it is the same on all of them. No sample is repeated or
    dropped: the sites' numbers of samples may differ by one.

    Args:
        base: sampler of samples or of batches.
        rank: number of this site.
        world_size: number of sites.
        seed: seed of the order; the epoch is added to it.
    """

    def __init__(self, base: Any, rank: int, world_size: int, seed: int) -> None:
        self.base = base
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.epoch = 0
        self._order: list[Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order."""
        self.epoch = epoch
        self._order = None

    @property
    def order(self) -> list[Any]:
        """Order of the samples of all sites in this epoch."""
        if self._order is None:
            with seeded((self.seed + self.epoch) % 2**32):
                self._order = list(self.base)
        return self._order

    def __iter__(self) -> Iterator[Any]:
        return iter(self.order[self.rank :: self.world_size])

    def __len__(self) -> int:
        return len(range(self.rank, len(self.base), self.world_size))

    def __getattr__(self, name: str) -> Any:
        if name == "base":  # not yet there while the sampler is unpickled
            raise AttributeError(name)
        return getattr(self.base, name)


def site_loader(
    loader: Any, split: bool | str, name: str, seed: int, transport: Transport, known: str | None = ""
) -> tuple[Any, str | None]:
    """Split a loader's data over the sites, or return the loader unchanged; all sites must call it together.

    Args:
        loader: loader of this site.
        split: True: split the data set, which is the same on all sites; False: do not, since each site has its own;
            ``"auto"``: split it if it is the same on all sites.
        name: name of the loader, for messages.
        seed: seed of the order of samples.
        transport: transport to the other sites.
        known: what the other sites have got, for a site that joins them in mid-training: the fingerprint of the data
            set that they have split, or None.

    Returns:
        The loader, and the fingerprint of the data set if it is split.

    Raises:
        MismatchError: if `split` is True and the data sets differ, or `split` differs between sites.
    """
    if transport.world_size == 1:
        return loader, None
    own = _fingerprint(loader) if split is not False else None
    by_site = [*transport.gather_present((split, own)).values()]
    if any(other[0] != split for other in by_site):
        raise MismatchError(f"split_data differs between sites: {', '.join(str(other[0]) for other in by_site)}")
    alike = own is not None and all(other[1] == own for other in by_site)
    if known != "":
        alike = known is not None and own == known
        if known is not None and not alike:
            raise MismatchError(f"loader {name!r} is split over the sites, and this one has another data set in it")
    if split is True and not alike:
        raise MismatchError(
            f"loader {name!r} is to be split over the sites, but they do not have the same data set in it; pass "
            "split_data=False where every site brings its own"
        )
    if split is False or not alike:
        return loader, None
    return _split(loader, transport.rank, transport.world_size, seed), own


def _fingerprint(loader: Any) -> str | None:
    """Return a fingerprint of a loader's data set; None if it cannot be split, or is split already."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if isinstance(loader, ElasticDataLoader) or isinstance(loader.sampler, (DistributedSampler, SiteSampler)):
        return None
    dataset: Any = loader.dataset
    size = len(dataset)
    digest = hashlib.sha256(f"{type(loader.dataset).__name__} {size} {loader.batch_size}".encode())
    for place in sorted({probe * (size - 1) // (_PROBES - 1) for probe in range(_PROBES)} if size else ()):
        with seeded(place):  # random augmentations come out the same
            _feed(digest, loader.dataset[place])
    return digest.hexdigest()


def _feed(digest: Any, item: Any) -> None:
    if isinstance(item, torch.Tensor):
        digest.update(str((item.dtype, item.shape)).encode())
        digest.update(item.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(item, np.ndarray):
        digest.update(np.ascontiguousarray(item).tobytes())
    elif isinstance(item, dict):
        for key in sorted(item, key=str):
            digest.update(str(key).encode())
            _feed(digest, item[key])
    elif isinstance(item, (list, tuple)):
        for part in item:
            _feed(digest, part)
    else:
        digest.update(repr(item).encode())


def _split(loader: DataLoader[Any], rank: int, world_size: int, seed: int) -> DataLoader[Any]:
    batches: Any = loader.batch_sampler
    if type(batches) is BatchSampler:
        samples = SiteSampler(batches.sampler, rank, world_size, seed)
        return with_batches(loader, BatchSampler(samples, batches.batch_size, batches.drop_last))
    if batches is not None:  # a sampler of whole batches, which are not to be torn apart
        return with_batches(loader, SiteSampler(batches, rank, world_size, seed))
    samples = SiteSampler(loader.sampler, rank, world_size, seed)
    return DataLoader(loader.dataset, batch_size=None, sampler=samples, **settings_of(loader))


def begin_epoch(loader: Any, name: str, epoch: int, transport: Transport) -> int:
    """Set the epoch of a loader's sampler, and compute the number of steps; all sites must call it together.

    Returns:
        The largest number of batches of any site.

    Raises:
        MismatchError: if the sites have drawn different orders.
    """
    batches = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    sampler = next((each for each in samplers if isinstance(each, SiteSampler)), None)
    if sampler is not None:
        sampler.set_epoch(epoch)
    digest = None if sampler is None else hashlib.sha256(repr(sampler.order).encode()).hexdigest()
    by_site = transport.gather_present((len(loader), digest)).values()
    if len({order for _, order in by_site}) > 1:
        raise MismatchError(
            f"the sampler of loader {name!r} gives every site another order, so that the data cannot be split: let it "
            "depend on the seeds of torch, numpy or random, or split the data beforehand and pass split_data=False"
        )
    steps: int = max(batches for batches, _ in by_site)
    return steps


class DeviceLoader(DelegatingLoader):
    """Loader whose batches are moved to a device.

    Args:
        loader: the loader.
        device: the device.
    """

    _OWN = (*DelegatingLoader._OWN, "_device")

    def __init__(self, loader: Any, device: torch.device) -> None:
        super().__init__(loader)
        self._device = device

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield any2device(batch, self._device)

    def __len__(self) -> int:
        return len(self._loader)
