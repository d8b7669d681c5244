"""Dealing of data: which site trains on which batch, when an epoch is over for all, and the loaders of the sites.

The dealers are state machines without input or output, as the sequencer: events come in as method calls, which return
answers.

**Shared.** All sites have one data set. Its batches are handed out on demand, in one order. A batch counts as used once
the sequencer has the contribution that it is part of. Batches that a site was dealt and has not used go to others when
it leaves, or ends its epoch early. An epoch is over when all its batches are used; until then sites for which there is
none wait. So each batch is used exactly once an epoch.

**Own.** Each site has data of its own. An epoch is over once every site has passed over all of its data; sites that are
faster go on with further passes meanwhile.

The epochs of a phase are numbered from 0 at each site, so that a site that is late, or has left and is back, is not
taken for one that is ahead.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from ..exchange import codec
from ..support.loaders import DrawnBatches, WrappedLoader, check_loader, with_batches
from .streams import Deal, Frame, FrameKind, Log

DEALS = ("own", "shared")
_AHEAD, _MOST_AHEAD = 2, 16  # batches that a site asks for before it needs them


class Answer(NamedTuple):
    """Answer to a site.

    Attributes:
        site: the site.
        deal: kind of the answer.
        number: as the kind says.
        resumes: whether the site was idle and goes on.
    """

    site: int
    deal: Deal
    number: int = 0
    resumes: bool = False


class OwnDealer:
    """Counter of the sites' passes over data of their own.

    Args:
        sites: ranks of the sites that train.

    Attributes:
        epochs: number of epochs that have begun since the start of the training, on which their orders depend.
    """

    def __init__(self, sites: Iterable[int]) -> None:
        self.epochs = 0
        self._sites = set(sites)  # that have neither left nor finished the phase
        self._passes: dict[int, int] = {}
        self._over = 0  # epochs of the phase

    def begin(self, site: int, number: int, batches: int) -> list[Answer]:
        """Record that a site begins an epoch of the phase.

        Args:
            site: the site.
            number: number of the epoch in the phase.
            batches: number of batches.

        Raises:
            ValueError: if it contradicts other sites.
        """
        self._passes[site] = max(self._passes.get(site, 0), number)
        return [Answer(site, Deal.OVER, self._over - 1)] if number < self._over else []

    def passed(self, site: int, number: int) -> list[Answer]:
        """Record that a site has passed over all of its data in an epoch of the phase."""
        self._passes[site] = max(self._passes.get(site, 0), number + 1)
        return self._progress()

    def order(self, epoch: int, digest: bytes) -> None:
        """Check that all sites have one order of the batches.

        Args:
            epoch: number of the epoch since the start.
            digest: digest of the order at one site.

        Raises:
            ValueError: if it is another one than that of the site that was first.
        """
        raise ValueError("batches are not dealt")

    def draw(self, site: int, waits: bool) -> list[Answer]:
        """Deal a batch to a site; it is idle until there is one if it waits and gets no answer."""
        raise ValueError("batches are not dealt")

    def use(self, site: int, count: int) -> list[Answer]:
        """Record that a site has used the first batches of those that it was dealt and has not used."""
        if count:
            raise ValueError("batches are not dealt")
        return []

    def makes_wait(self, site: int) -> bool:
        """Return whether a site waits for an answer that depends on other sites."""
        return False

    @property
    def has_for_another(self) -> bool:
        """Whether a site that returns would have data in the present epoch."""
        return True

    def finish(self, site: int) -> list[Answer]:
        """Record that a site has ended its phase, or has left."""
        self._sites.discard(site)
        return self._progress()

    def join(self, site: int) -> None:
        """Record that a site that has left is back."""
        self._sites.add(site)

    def end_phase(self, sites: Iterable[int]) -> None:
        """Record that a phase is over, and the next one begins with some sites."""
        self._sites = set(sites)
        self._passes.clear()
        self._over = 0

    def _progress(self) -> list[Answer]:
        """Return the answers that other sites have waited for."""
        least = min((self._passes.get(site, 0) for site in self._sites), default=0)
        if least <= self._over:
            return []
        self._over = least
        return [Answer(site, Deal.OVER, least - 1) for site in sorted(self._sites)]


class SharedDealer(OwnDealer):
    """Dealer of the batches of one data set.

    Args:
        sites: ranks of the sites that train.
        reserves: whether one batch of an epoch is kept for each site that has had none so far.
    """

    def __init__(self, sites: Iterable[int], reserves: bool = False) -> None:
        super().__init__(sites)
        self._reserves = reserves
        self._had: set[int] = set()  # sites that have had a batch in the epoch
        self._number = -1  # of the epoch in the phase
        self._batches = self._unused = 0
        self._next = 0  # first of the batches that have not been dealt; a list of all would be as long as a site says
        self._returned: deque[int] = deque()  # batches that have been dealt, and that no site has any more
        self._dealt: dict[int, deque[int]] = {}
        self._waiting: list[int] = []
        self._epoch_of: dict[int, int] = {}  # that a site is at
        self._beginning: dict[int, tuple[int, int]] = {}  # epochs that sites wait for, and their batches
        self._digest: tuple[int, bytes] = (-1, b"")

    def begin(self, site: int, number: int, batches: int) -> list[Answer]:
        for other, count in [(self._number, self._batches), *self._beginning.values()]:
            if other == number and count != batches:
                raise ValueError(f"its data set has {batches} batches, and that of other sites has {count}")
        self._give_back(site)
        self._beginning[site] = number, batches
        return self._progress()

    def order(self, epoch: int, digest: bytes) -> None:
        if epoch == self._digest[0] and digest != self._digest[1]:
            raise ValueError("its loader has another order of batches than those of other sites")
        self._digest = epoch, digest

    def draw(self, site: int, waits: bool) -> list[Answer]:
        if self._epoch_of.get(site) != self._number:  # others have gone on to the next one
            return [Answer(site, Deal.OVER if waits else Deal.NONE)]
        if self._has_for(site):
            return [self._deal(site)]
        if not waits:
            return [Answer(site, Deal.NONE)]
        if self._dealt.get(site):
            raise ValueError("it waits for further batches, and has some")
        if site not in self._waiting:
            self._waiting.append(site)
        return self._progress()

    def use(self, site: int, count: int) -> list[Answer]:
        dealt = self._dealt.get(site, deque())
        if count > len(dealt):
            raise ValueError(f"it has used {count} batches, and was dealt {len(dealt)}")
        for _ in range(count):
            dealt.popleft()
        self._unused -= count
        return self._progress() if count else []

    def passed(self, site: int, number: int) -> list[Answer]:
        raise ValueError("passes are not counted")

    def makes_wait(self, site: int) -> bool:
        return site in self._waiting or site in self._beginning

    @property
    def has_for_another(self) -> bool:
        return self._has_for(-1)

    def finish(self, site: int) -> list[Answer]:
        self._give_back(site)
        self._beginning.pop(site, None)
        if site in self._waiting:
            self._waiting.remove(site)
        return super().finish(site)

    def end_phase(self, sites: Iterable[int]) -> None:
        super().end_phase(sites)
        self._number, self._unused, self._next = -1, 0, self._batches
        self._returned.clear()
        self._epoch_of.clear()

    def _has_for(self, site: int) -> bool:
        kept = len(self._sites - self._had - {site}) if self._reserves and site in self._had | {-1} else 0
        return self._left > kept

    @property
    def _left(self) -> int:
        """Number of batches that no site has."""
        return len(self._returned) + self._batches - self._next

    def _give_back(self, site: int) -> None:
        self._returned.extendleft(reversed(self._dealt.pop(site, ())))

    def _deal(self, site: int, resumes: bool = False) -> Answer:
        if self._returned:
            batch = self._returned.popleft()
        else:
            batch, self._next = self._next, self._next + 1
        self._had.add(site)
        self._dealt.setdefault(site, deque()).append(batch)
        return Answer(site, Deal.BATCH, batch, resumes)

    def _progress(self) -> list[Answer]:
        answers = self._begin_waiting()
        for site in list(self._waiting):
            if self._has_for(site):
                self._waiting.remove(site)
                answers.append(self._deal(site, resumes=True))
        if not self._unused:
            answers += [Answer(site, Deal.OVER, self._number, resumes=True) for site in self._waiting]
            self._waiting.clear()
        return answers

    def _begin_waiting(self) -> list[Answer]:
        """Begin the next epoch if it can begin; return the answers to the sites that have waited for it."""
        ahead = {site for site, (number, _) in self._beginning.items() if number > self._number}
        if ahead and (not self._unused or ahead >= self._sites):  # an epoch that all have ended early is left
            self._number, self._batches = min(self._beginning[site] for site in ahead)
            self.epochs += 1
            self._unused = self._batches
            self._next = 0
            self._returned.clear()
            self._had.clear()
        answers = []
        for site, (number, _) in list(self._beginning.items()):
            if number <= self._number:
                del self._beginning[site]
                self._epoch_of[site] = number
                begins = number == self._number
                kind, count = (Deal.EPOCH, self.epochs - 1) if begins else (Deal.OVER, number)
                answers.append(Answer(site, kind, count, True))
        return answers


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


class SiteLoader(WrappedLoader):
    """Loader of one site; all its attributes but those below are those of another loader.

    Args:
        loader: the other loader.
        link: the connection to the log.

    Attributes:
        unreported: number of dealt batches that this site has taken, and that no contribution has reported as used.
    """

    def __init__(self, loader: Any, link: LogLink) -> None:
        super().__init__(loader)
        self.unreported = 0
        self._log, self._flush, self._wait = link


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
            self._log.send(FrameKind.PASSED, epoch)


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
        super().__init__(loader, link)
        count_batches(loader)  # refuse loaders whose batches cannot be dealt
        self._seed = seed
        self._order: list[list[int]] = []
        self._given: list[int] = []  # the batch that ended a wait
        self._asked = 0  # batches that the dealer has not answered for
        self._ahead = _AHEAD
        self._dealt = with_batches(loader, DrawnBatches(self._draw))

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
            self._log.send(FrameKind.ORDER, answer.number, body=digest)
        while answer.used != Deal.OVER:
            for batch in self._dealt:
                self.unreported += 1
                yield batch
            self._flush(True)
            self._log.send(FrameKind.DRAW, used=1)
            answer = self._receive()
            self._given = [answer.number] if answer.used == Deal.BATCH else []

    def _draw(self) -> Iterator[list[int]]:
        """Return the indices of the batches that this site is dealt, until there is none at present."""
        yield from (self._order[number] for number in self._given)
        first, ended = True, False
        while True:
            while not ended and self._asked < self._ahead:
                self._log.send(FrameKind.DRAW)
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


def draw_order(loader: Any, seed: int, epoch: int) -> list[list[int]]:
    """Return the batches of a loader in an epoch, as lists of indices; the same at all sites.

    Args:
        loader: a DataLoader. Its samplers, also those with a generator of their own, are seeded meanwhile.
        seed: seed of the training.
        epoch: number of the epoch since the start.
    """
    from ..adaptive.loader import seeded

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
