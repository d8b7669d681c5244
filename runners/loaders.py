"""Loaders that trainers take for the loader that they wrap, and passes over a loader that begin in its middle."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any, ClassVar

from torch.utils.data import DataLoader

from ..exchange import Transport
from ..hogwild import DealtLoader, Hogwild
from ..model_sync.samples import batches_before, takes_part
from ..parameter_server import ParameterServer
from ..parameter_server.dealing import count_batches

NO_ACCUMULATION = "deal='shared' cannot accumulate gradients: a site does not know how many batches it will have"


class DelegatingLoader:
    """Loader whose attributes are those of the wrapped loader, for reading and for writing, but for those of its own.

    Args:
        loader: the wrapped loader.
    """

    _OWN: ClassVar[tuple[str, ...]] = ("_loader",)
    """Names of its own attributes."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self._OWN:  # not set yet while a copy is built
            raise AttributeError(name)
        return getattr(self._loader, name)

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
    lengths = transport.gather_objects(own)
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
