"""Loaders that trainers take for the loader they wrap, passes that begin in the middle, and data that are split."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from ..adaptive import ElasticDataLoader
from ..adaptive.loader import seeded
from ..errors import MismatchError
from ..exchange import Transport
from ..exchange.fields import checked
from ..hogwild import DealtLoader, Hogwild
from ..parameter_server import ParameterServer
from ..parameter_server.dealing import count_batches
from ..step.model_sync.samples import batches_before, takes_part
from ..support.loaders import WrappedLoader
from ..support.refusals import refuse

_PROBES = 8  # samples of a fingerprint
NO_ACCUMULATION = "deal='shared' cannot accumulate gradients: a site does not know how many batches it will have"


class DelegatingLoader(WrappedLoader):
    """Loader whose attributes are those of the wrapped loader, for reading and for writing, but for those of its own.

    Args:
        loader: the wrapped loader.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            super().__setattr__(name, value)
        else:
            setattr(self._loader, name, value)


class UnevenLoader(DelegatingLoader):
    """Loader that repeats its last batch in the steps in which its site does not participate.

    The strategy gives the repeated batches no weight.

    Args:
        loader: the site's own loader.
        own: number of its batches.
        steps: number of batches to yield, at least `own`.
        first: returns the number of the step at which a pass begins, at a site that joins others in mid-epoch.
    """

    _OWN = (*DelegatingLoader._OWN, "_own", "_steps", "_first")

    def __init__(self, loader: Any, own: int, steps: int, first: Callable[[], int] = int) -> None:
        super().__init__(loader)
        self._own, self._steps, self._first = own, steps, first

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        first, own, steps = self._first(), self._own, self._steps
        again = first < steps and not takes_part(first, own, steps)  # the last batch is repeated
        batches, batch = batches_from(self._loader, batches_before(first, own, steps) - again), None
        if again:
            batch = next(batches)
        for step in range(first, steps):
            if takes_part(step, own, steps):
                batch = next(batches)
            yield batch


def compare_lengths(loader: Any, transport: Transport) -> tuple[int, int]:
    """Compare the lengths of all sites' loaders; all sites must call it.

    Args:
        loader: the site's own loader.
        transport: transport to the other sites.

    Returns:
        This site's number of batches and the largest number of any site; equal numbers if no length is known.

    Raises:
        ValueError: if a site has no batches and others do, or only some sites know how many they have.
    """
    own = known_length(loader, -1)
    lengths = [*checked(transport.gather_present(own), int, "length", transport).values()]
    if len(set(lengths)) > 1 and min(lengths) < 1:
        found = ", ".join(f"site {site}: {'unknown' if n < 0 else n}" for site, n in enumerate(lengths))
        raise ValueError(
            f"sites need equally many training batches, or a known number each, at least one ({found}); a loader over "
            "an IterableDataset needs limit_train_batches=n where others' lengths are known"
        )
    return own, max(lengths)


def known_length(loader: Any, unknown: int) -> int:
    """Return the length of a loader, or a number that stands for an unknown length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return unknown


class HogwildLoader(DelegatingLoader):
    """Loader of the batches that this process is dealt, of unknown length, for trainers.

    A pass that was given up does not disturb the next one.

    Args:
        loader: the DataLoader.
        hogwild: the training.
        ahead: number of batches that the trainer takes before it trains on the first of them.
        limit: number of batches of an epoch, of all processes together; all if None.
    """

    _OWN = (*DelegatingLoader._OWN, "_hogwild", "_ahead", "_limit", "_dealt", "_batches")

    def __init__(self, loader: Any, hogwild: Hogwild, ahead: int, limit: int | None = None) -> None:
        super().__init__(loader)
        self._hogwild, self._ahead, self._limit = hogwild, ahead, limit
        self._dealt: DealtLoader | None = None
        self._batches: Generator[Any, None, None] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._dealt is None:  # not earlier: trainers set attributes of the loader
            self._dealt = self._hogwild.deal(self._loader, ahead=self._ahead, limit=self._limit)
        if self._batches is not None:
            self._batches.close()
        self._batches = iter(self._dealt)
        return self._batches

    def finish(self) -> None:
        """Report that all batches that this process has taken are finished."""
        if self._dealt is not None:
            self._dealt.finish()


class ServerLoader(DelegatingLoader):
    """Loader of the batches that this site is dealt by a parameter server, of a data set that all sites have.

    Its length is the number of batches of an epoch, of all sites together: each site takes part in so many steps of a
    trainer, and makes those for which it has a batch.

    Args:
        loader: the DataLoader.
        server: returns the server; called once a pass begins.
        pads: whether the loader goes on up to its length with batches that are not to be trained on.
        first: returns the number of steps that a pass leaves out, at a site that returns; called once a pass begins.

    Attributes:
        deals: whether the last batch that was taken is to be trained on.
        running: whether a pass has begun and batches are left in it.

    Raises:
        TypeError: if it is no DataLoader.
        ValueError: if its batches cannot be dealt.
    """

    _OWN = (*DelegatingLoader._OWN, "_server", "_dealt", "_pads", "_first", "_batches", "deals", "running")

    def __init__(
        self, loader: Any, server: Callable[[], ParameterServer], pads: bool, first: Callable[[], int] = int
    ) -> None:
        super().__init__(loader)
        self._batches = count_batches(loader)
        self._server, self._pads, self._first = server, pads, first
        self._dealt: Any = None
        self.deals = self.running = False

    @property
    def unused(self) -> bool:
        """Whether no pass has begun so far."""
        return self._dealt is None

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        if self._dealt is None:
            self._dealt = self._server().loader(self._loader)
        sites = len(self._server().present_sites)
        if self._pads and self._batches < sites:  # metrics of an epoch are those of sites with batches
            raise ValueError(
                f"deal='shared' needs a batch for each of the {sites} sites, and there are {self._batches}"
            )
        batch: Any = ()
        count, self.deals, self.running = self._first(), True, True
        for batch in self._dealt:
            count += 1
            yield batch
        self.deals = self.running = False
        for _ in range(self._batches - count if self._pads else 0):
            yield batch


def batches_from(loader: Any, first: int) -> Iterator[Any]:
    """Return an iterator over a loader's batches from one on, in the order of a whole pass.

    Those before are not loaded, if it is torch's loader, without workers that outlive a pass.

    Args:
        loader: the loader.
        first: number of batches to leave out.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if not first or sampler is None or type(loader) is not DataLoader or loader.persistent_workers:
        batches: Iterator[Any] = iter(loader)
        for _ in range(first):
            next(batches)
        return batches
    rest = itertools.islice(sampler, first, None)
    object.__setattr__(loader, "batch_sampler", rest)  # torch refuses it once a loader is made
    try:
        return iter(loader)
    finally:
        object.__setattr__(loader, "batch_sampler", sampler)


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


def check_split_data(value: bool | str) -> None:
    """Check the option ``split_data`` of a trainer.

    Raises:
        ValueError: if it is neither True, False nor ``"auto"``.
    """
    if value not in ("auto", True, False):
        raise ValueError(f"unknown split_data {value!r}; valid ones are 'auto', True, False")


def fingerprint(loader: Any) -> str | None:
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


def data_to_split(
    loader: Any, split: bool | str, name: str, gather: Callable[..., list[Any]], known: str | None = ""
) -> str | None:
    """Agree on whether the data of a loader are split over the sites; all sites must call it together.

    Args:
        loader: loader of this site.
        split: True: split the data set, which is the same on all sites; False: do not, since each site has its own;
            ``"auto"``: split it if it is the same on all sites.
        name: name of the loader, for messages.
        gather: `Transport.gather_objects`, or that of a reduction.
        known: what the other sites have got, for a site that joins them in mid-training.

    Returns:
        The fingerprint of the data set if it is split, else None.

    Raises:
        MismatchError: if `split` is True and the data sets differ, or `split` differs between sites.
    """
    own = fingerprint(loader) if split is not False else None
    every = [(split, known)] if known != "" else gather((split, own), tuple[bool | str, str | None], "split of data")
    by_site = [each for each in every if each is not None]
    if any(other[0] != split for other in by_site):
        raise MismatchError(f"split_data differs between sites: {', '.join(str(other[0]) for other in by_site)}")
    alike = own is not None and all(other[1] == own for other in by_site)
    refuse(
        (known and not alike, f"loader {name!r} is split over the sites, and this one has another data set in it"),
        (
            split is True and not alike,
            f"loader {name!r} is to be split over the sites, but they do not have the same data set in it; pass "
            "split_data=False where every site brings its own",
        ),
        error=MismatchError,
    )
    return own if alike else None


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
