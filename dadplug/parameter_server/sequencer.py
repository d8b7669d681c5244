"""Sequencer: the order in which contributions of sites are committed to the log.

A state machine without input or output. Events come in as method calls; `decide` returns the next entry of the log,
until there is none. Nothing here depends on sockets, clocks or threads, so that random histories can test it.

**Versions.** The log is a sequence of commits. A replica that has applied the first v of them has version v. A
contribution is a gradient that a site has computed at a version, its *base*. A commit consists of contributions, and
makes the next version. The age τ of a contribution is the version that it is committed at minus its base.

**Quorum.** A commit takes place once contributions of `quorum` sites are pending; it contains all that are. Sites that
have finished or left are not waited for.

**Staleness.** No contribution is committed with an age above `staleness`. So a commit waits while a site is computing
at a version that would be further behind after it: fast sites wait for slow ones. A site that has more than
`staleness` contributions pending waits for them, and continues at the version that they make. With ``staleness=0``
every commit therefore contains a contribution of every site.

With ``late="drop"`` no commit waits for a site that is behind. A contribution whose age would be above `staleness` is
dropped. With ``staleness=0`` and ``quorum=m`` this is m-synchronous SGD (arXiv:2602.03802).

**Phases.** A site that has no further contribution for now finishes. Once all have, and nothing is pending, the phase
is over, all replicas have one version, and the next phase begins with all sites that have not left.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from .rules import Rules

_KEPT = 64  # versions that a site may be behind with late="drop": the sequencer holds what it has not received


class SequenceError(ValueError):
    """A site's message contradicts its earlier ones."""


class Entry(NamedTuple):
    """Contribution in a commit.

    Attributes:
        site: the site.
        number: number of the contribution, among those of its site.
        base: version that it was computed at.
        samples: samples that it stands for.
        scale: factor of the learning rate, by its age.
    """

    site: int
    number: int
    base: int
    samples: int
    scale: float


class Decision(NamedTuple):
    """Entry of the log.

    Attributes:
        version: the version after it.
        entries: the committed contributions, by site and number; without any, the version is that before it.
        dropped: site and number of contributions that are too late.
        over: whether the phase is over.
    """

    version: int
    entries: tuple[Entry, ...] = ()
    dropped: tuple[tuple[int, int], ...] = ()
    over: bool = False


class _Pending(NamedTuple):
    number: int
    base: int
    samples: int


@dataclass
class _Site:
    """State of one site.

    Attributes:
        reached: version that its next contribution is computed at, at least.
        count: contributions so far.
        pending: contributions that are not committed yet.
        finished: whether it has no further contribution in this phase.
        here: whether it has not left.
    """

    reached: int = 0
    count: int = 0
    pending: list[_Pending] = field(default_factory=list)
    finished: bool = False
    here: bool = True


class Sequencer:
    """Order of the contributions of some sites.

    Args:
        sites: ranks of the sites that contribute.
        rules: staleness, quorum, and treatment of late contributions.

    Attributes:
        version: number of commits so far.
    """

    def __init__(self, sites: Iterable[int], rules: Rules) -> None:
        self.version = 0
        self._rules = rules
        self._sites = {site: _Site() for site in sorted(sites)}

    # Events

    def contribute(self, site: int, number: int, base: int, reached: int, samples: int) -> None:
        """Record a contribution.

        Args:
            site: the site.
            number: its number among the site's contributions, from 0.
            base: version that it was computed at.
            reached: version at which the site goes on.
            samples: samples that it stands for.

        Raises:
            SequenceError: if it contradicts what the site has sent before; nothing has changed then.
        """
        state = self._sites[site]
        if state.finished:
            raise SequenceError(f"contribution {number} follows the end of the phase")
        if number != state.count:
            raise SequenceError(f"contribution {number} follows {state.count} contributions")
        if not state.reached <= base <= self.version:
            raise SequenceError(f"contribution {number} was computed at version {base} of {self.version}")
        if samples < 1:
            raise SequenceError(f"contribution {number} has {samples} samples")
        if reached < base:
            raise SequenceError(f"contribution {number} of version {base} is followed by work at version {reached}")
        self.reach(site, reached)
        state.count += 1
        state.pending.append(_Pending(number, base, samples))

    def reach(self, site: int, version: int) -> None:
        """Record that a site goes on at a version.

        Raises:
            SequenceError: if there is no such version, or the site was at a later one.
        """
        state = self._sites[site]
        if not state.reached <= version <= self.version:
            raise SequenceError(
                f"version {version} follows version {state.reached}, and the last one is {self.version}"
            )
        state.reached = version

    def finish(self, site: int) -> None:
        """Record that a site has no further contribution in this phase.

        Raises:
            SequenceError: if it has said so before.
        """
        if self._sites[site].finished:
            raise SequenceError("the end of the phase was announced twice")
        self._sites[site].finished = True

    def leave(self, site: int) -> None:
        """Record that a site has left; what it has contributed stays valid."""
        self._sites[site].here = False
        self._sites[site].finished = True

    # Decisions

    def decide(self) -> Decision | None:
        """Return the next entry of the log; None if it depends on further events."""
        dropped = self._drop_late()
        if self._commits():
            entries = self._commit()
            return Decision(self.version, entries, dropped)
        if all(state.finished and not state.pending for state in self._sites.values()) and self.present:
            for site in self.present:
                self._sites[site].finished = False
                self._sites[site].reached = self.version
            return Decision(self.version, (), dropped, True)
        return Decision(self.version, (), dropped) if dropped else None

    def _drop_late(self) -> tuple[tuple[int, int], ...]:
        if self._rules.late != "drop":
            return ()
        oldest = self.version - self._rules.staleness
        dropped = []
        for site, state in self._sites.items():
            dropped += [(site, each.number) for each in state.pending if each.base < oldest]
            state.pending = [each for each in state.pending if each.base >= oldest]
        return tuple(dropped)

    def _commits(self) -> bool:
        contributing = [site for site, state in self._sites.items() if state.pending]
        working = [site for site, state in self._sites.items() if state.pending or not state.finished]
        return len(contributing) >= min(self._rules.quorum, len(working)) > 0 and not self._held_back()

    def _held_back(self) -> list[int]:
        """Return the sites that would be too far behind after a commit."""
        staleness = self._rules.staleness
        limit = max(staleness, _KEPT) if self._rules.late == "drop" else staleness
        behind = []
        for site, state in self._sites.items():
            waits = len(state.pending) > staleness  # and goes on at the version that the commit makes
            if not state.finished and not waits and self.version + 1 - state.reached > limit:
                behind.append(site)
        return behind

    def _commit(self) -> tuple[Entry, ...]:
        entries = []
        for site, state in self._sites.items():
            for each in state.pending:
                scale = self._rules.scale(self.version - each.base)
                entries.append(Entry(site, each.number, each.base, each.samples, scale))
            state.pending = []
        self.version += 1
        return tuple(entries)

    # Reports

    @property
    def present(self) -> list[int]:
        """Sites that have not left."""
        return [site for site, state in self._sites.items() if state.here]

    @property
    def awaited(self) -> list[int]:
        """Sites without whose next message nothing more can be decided."""
        if any(state.pending for state in self._sites.values()):
            if behind := self._held_back():
                return behind
            return [site for site, state in self._sites.items() if not state.pending and not state.finished]
        return [site for site, state in self._sites.items() if not state.finished]
