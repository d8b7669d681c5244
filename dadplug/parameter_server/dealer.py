"""Dealers of data: which site trains on which batch, and when an epoch is over for all.

State machines without input or output, as the sequencer: events come in as method calls, which return answers.

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

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple


class Deal(IntEnum):
    """Kinds of answers to sites."""

    EPOCH = 1
    """An epoch begins; its number since the start of the training."""
    BATCH = 2
    """Number of a batch in the epoch's order."""
    NONE = 3
    """There is no batch at present."""
    OVER = 4
    """The epoch is over; its number in the phase."""


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


class Dealer(ABC):
    """Dealer of data to some sites.

    Args:
        sites: ranks of the sites that train.

    Attributes:
        epochs: number of epochs that have begun since the start of the training, on which their orders depend.
    """

    def __init__(self, sites: Iterable[int]) -> None:
        self.epochs = 0
        self._sites = set(sites)  # that have neither left nor finished the phase
        self._absent: set[int] = set()

    @abstractmethod
    def begin(self, site: int, number: int, batches: int) -> list[Answer]:
        """Record that a site begins an epoch of the phase.

        Args:
            site: the site.
            number: number of the epoch in the phase.
            batches: number of batches.

        Raises:
            ValueError: if it contradicts other sites.
        """

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

    def passed(self, site: int, number: int) -> list[Answer]:
        """Record that a site has passed over all of its data in an epoch of the phase."""
        raise ValueError("passes are not counted")

    def makes_wait(self, site: int) -> bool:
        """Return whether a site waits for an answer that depends on other sites."""
        return False

    @property
    def has_for_another(self) -> bool:
        """Whether a site that returns would have data in the present epoch."""
        return True

    def finish(self, site: int) -> list[Answer]:
        """Record that a site has ended its phase."""
        self._sites.discard(site)
        return self._without(site)

    def leave(self, site: int) -> list[Answer]:
        """Record that a site has left."""
        self._absent.add(site)
        return self.finish(site)

    def join(self, site: int) -> None:
        """Record that a site that has left is back."""
        self._absent.discard(site)
        self._sites.add(site)

    def end_phase(self, sites: Iterable[int]) -> None:
        """Record that a phase is over, and the next one begins with some sites."""
        self._sites = set(sites)

    @abstractmethod
    def _without(self, site: int) -> list[Answer]:
        """Go on without a site."""


class SharedDealer(Dealer):
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
        self._returned: deque[int] = deque()  # batches that have been dealt, and that nobody has any more
        self._dealt: dict[int, deque[int]] = {}
        self._waiting: list[int] = []
        self._epoch_of: dict[int, int] = {}  # that a site is at
        self._beginning: dict[int, tuple[int, int]] = {}  # epochs that sites wait for, and their batches
        self._digest: tuple[int, bytes] = (-1, b"")

    def begin(self, site: int, number: int, batches: int) -> list[Answer]:
        others = [(self._number, self._batches), *self._beginning.values()]
        for other, count in others:
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

    def end_phase(self, sites: Iterable[int]) -> None:
        super().end_phase(sites)
        self._number, self._unused, self._next = -1, 0, self._batches
        self._returned.clear()
        self._epoch_of.clear()

    def makes_wait(self, site: int) -> bool:
        return site in self._waiting or site in self._beginning

    def _without(self, site: int) -> list[Answer]:
        self._give_back(site)
        self._beginning.pop(site, None)
        if site in self._waiting:
            self._waiting.remove(site)
        return self._progress()

    @property
    def has_for_another(self) -> bool:
        return self._has_for(-1)

    def _has_for(self, site: int) -> bool:
        kept = len(self._sites - self._had - {site}) if self._reserves and site in self._had | {-1} else 0
        return self._left > kept

    @property
    def _left(self) -> int:
        """Number of batches that nobody has."""
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
        """Return the answers for which sites have waited."""
        answers = self._begin_waiting()
        while (site := next((each for each in self._waiting if self._has_for(each)), None)) is not None:
            self._waiting.remove(site)
            answers.append(self._deal(site, resumes=True))
        if not self._unused:
            answers += [Answer(site, Deal.OVER, self._number, resumes=True) for site in self._waiting]
            self._waiting.clear()
        return answers

    def _begin_waiting(self) -> list[Answer]:
        ahead = {site for site, (number, _) in self._beginning.items() if number > self._number}
        if ahead and (
            not self._unused or ahead >= self._sites
        ):  # the rest of an epoch that all have ended early is left
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
                kind = Deal.EPOCH if number == self._number else Deal.OVER
                answers.append(Answer(site, kind, self.epochs - 1 if number == self._number else number, True))
        return answers


class OwnDealer(Dealer):
    """Counter of the sites' passes over data of their own."""

    def __init__(self, sites: Iterable[int]) -> None:
        super().__init__(sites)
        self._passes: dict[int, int] = {}
        self._over = 0  # epochs of the phase

    def begin(self, site: int, number: int, batches: int) -> list[Answer]:
        self._passes[site] = max(self._passes.get(site, 0), number)
        return [Answer(site, Deal.OVER, self._over - 1)] if number < self._over else []

    def passed(self, site: int, number: int) -> list[Answer]:
        self._passes[site] = max(self._passes.get(site, 0), number + 1)
        return self._progress()

    def end_phase(self, sites: Iterable[int]) -> None:
        super().end_phase(sites)
        self._passes.clear()
        self._over = 0

    def _without(self, site: int) -> list[Answer]:
        return self._progress()

    def _progress(self) -> list[Answer]:
        least = min((self._passes.get(site, 0) for site in self._sites), default=0)
        if least <= self._over:
            return []
        self._over = least
        return [Answer(site, Deal.OVER, least - 1) for site in sorted(self._sites)]
