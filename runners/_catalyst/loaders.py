"""Splitting of a data set over the sites."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from catalyst.utils.torch import any2device
from torch.utils.data import BatchSampler, DataLoader

from ...errors import MismatchError
from ...exchange import Transport
from ...hogwild.training import settings_of, with_batches
from ..loaders import DelegatingLoader, SiteSampler, fingerprint


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
    own = fingerprint(loader) if split is not False else None
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
