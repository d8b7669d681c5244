"""Loaders whose batches sites are dealt, and loaders of a site's own data whose epochs end at all sites together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from ..adaptive.loader import seeded
from ..exchange import codec
from ..hogwild.dealing import check_loader, with_batches
from .dealer import Deal
from .frames import Frame, Kind
from .log import Log
from .options import ServerOptions

_AHEAD, _MOST_AHEAD = 2, 16  # batches that a site asks for before it needs them


class LogLink(NamedTuple):
    """Connection of a loader to the log.

    Attributes:
        log: the log.
        flush: sends the gradients that have not been sent, and reports batches without any.
        wait: applies commits until a condition holds.
    """

    log: Log
    flush: Callable[[bool], None]
    wait: Callable[[Callable[[], bool]], None]


class SiteLoader:
    """Loader of one site; all its attributes but those below are those of another loader.

    Args:
        loader: the other loader.
        link: the connection to the log.

    Attributes:
        unreported: number of dealt batches that this site has taken, and that no contribution has reported as used.
    """

    def __init__(self, loader: Any, link: LogLink) -> None:
        self.unreported = 0
        self._loader = loader
        self._log, self._flush, self._wait = link

    def __getattr__(self, name: str) -> Any:
        if name == "_loader" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)


class OwnLoader(SiteLoader):
    """Loader of a site's own data, whose epochs end at all sites together: a fast site makes further passes.

    Args:
        loader: a loader of this site's data.
        samples: number of samples of this site; that of the loader's data set if None.
        by_samples: whether this site's share of the step size is proportional to it; otherwise it is that of others.
        link: the connection to the log.

    Raises:
        ValueError: if the number of samples is not known.
    """

    def __init__(self, loader: Any, samples: int | None, by_samples: bool, link: LogLink) -> None:
        super().__init__(loader, link)
        count = _count_samples(loader) if samples is None and by_samples else samples
        self._share = count if by_samples and count else 1

    def __iter__(self) -> Iterator[Any]:
        self._flush(False)
        epoch = self._log.begin_epoch(samples=self._share)
        batches = 0
        while self._log.over < epoch:
            for batch in self._loader:
                if self._log.over >= epoch:
                    return
                batches += 1
                yield batch
            if not batches:
                raise ValueError("the loader of this site has no batches")
            self._log.send(Kind.PASSED, epoch)


class SharedLoader(SiteLoader):
    """Loader of the batches that this site is dealt of a data set that all sites have.

    There is no length: it is not known before the epoch is over.

    Args:
        loader: a DataLoader over a data set with a length, the same on all sites.
        seed: seed of the batches' order.
        link: the connection to the log.

    Raises:
        TypeError: if it is no DataLoader.
        ValueError: if its batches cannot be dealt.
    """

    def __init__(self, loader: Any, seed: int, link: LogLink) -> None:
        count_batches(loader)
        super().__init__(loader, link)
        self._seed = seed
        self._order: list[list[int]] = []
        self._given: list[int] = []  # the batch that ended a wait
        self._asked = 0  # batches that the dealer has not answered for
        self._ahead = _AHEAD
        self._dealt = with_batches(loader, _Sampler(self._draw))

    def __len__(self) -> int:
        raise TypeError("the number of batches that this site is dealt is not known")

    def __iter__(self) -> Iterator[Any]:
        self._flush(False)
        self._log.begin_epoch(used=len(self._loader.batch_sampler))
        self._asked, self._given = 0, []
        answer = self._receive()
        while answer.used not in (Deal.EPOCH, Deal.OVER):  # answers for batches of an epoch that has been ended early
            answer = self._receive()
        if answer.used == Deal.EPOCH:
            self._order = draw_order(self._loader, self._seed, answer.number)
            digest = hashlib.sha256(codec.encode(self._order)).digest()
            self._log.send(Kind.ORDER, answer.number, body=digest)
        while answer.used != Deal.OVER:
            for batch in self._dealt:
                self.unreported += 1
                yield batch
            self._flush(True)
            self._log.send(Kind.DRAW, used=1)
            answer = self._receive()
            self._given = [answer.number] if answer.used == Deal.BATCH else []

    def _draw(self) -> Iterator[list[int]]:
        """Return the indices of the batches that this site is dealt, until there is none at present."""
        yield from (self._order[number] for number in self._given)
        first, ended = True, False
        while True:
            while not ended and self._asked < self._ahead:
                self._log.send(Kind.DRAW)
                self._asked += 1
            if not self._asked:
                return
            if not first and not self._log.deals:  # the way to the dealer is long
                self._ahead = min(self._ahead + 1, _MOST_AHEAD)
            answer = self._receive()
            self._asked, first = self._asked - 1, False
            if answer.used == Deal.BATCH:
                yield self._order[answer.number]
            else:
                ended = True

    def _receive(self) -> Frame:
        self._wait(lambda: bool(self._log.deals))
        return self._log.deals.popleft()


def count_batches(loader: Any) -> int:
    """Return the number of batches of an epoch that is dealt.

    Raises:
        TypeError: if the loader is no DataLoader.
        ValueError: if its batches cannot be dealt.
    """
    check_loader(loader, "a parameter server")
    if not hasattr(loader.batch_sampler, "__len__"):
        raise ValueError("the loader's number of batches is not known: deal='shared' needs a sampler with a length")
    return len(loader.batch_sampler)


class _Sampler:
    """Sampler of batches from a function."""

    def __init__(self, draw: Callable[[], Iterator[list[int]]]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[list[int]]:
        return self._draw()


def make_loader(options: ServerOptions, loader: Any, samples: int | None, seed: int, link: LogLink) -> SiteLoader:
    """Return the loader of a site, as the option ``deal`` says; see `OwnLoader` and `SharedLoader`."""
    if options.deal == "shared":
        return SharedLoader(loader, seed, link)
    return OwnLoader(loader, samples, options.weighting == "samples", link)


def _count_samples(loader: Any) -> int:
    """Return the number of samples of a loader's data set.

    Raises:
        ValueError: if it is not known, or there are none.
    """
    try:
        count = len(loader.dataset)
    except (AttributeError, TypeError):
        raise ValueError(
            "the number of samples of this site is not known: pass samples= to loader(), since a site's share of the "
            "step size is proportional to it"
        ) from None
    if not count:
        raise ValueError("the loader of this site has no samples")
    return count


def draw_order(loader: Any, seed: int, epoch: int) -> list[list[int]]:
    """Return the batches of a loader in an epoch, as lists of indices; the same at all sites.

    Args:
        loader: a DataLoader. Its samplers, also those with a generator of their own, are seeded meanwhile.
        seed: seed of the training.
        epoch: number of the epoch since the start.
    """
    samplers = (loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    generators = {id(each): each for each in (getattr(sampler, "generator", None) for sampler in samplers)}
    number = int.from_bytes(hashlib.sha256(repr((seed, epoch)).encode()).digest()[:4], "little")
    for sampler in samplers:
        if sampler is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
    with ExitStack() as stack:
        stack.enter_context(seeded(number))
        for generator in generators.values():
            if isinstance(generator, torch.Generator):
                stack.callback(generator.set_state, generator.get_state())
                generator.manual_seed(number)
        return [list(map(int, batch)) for batch in loader.batch_sampler]
