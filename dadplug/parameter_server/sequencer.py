"""Sequencer: the order in which contributions of sites are committed to the log.

A state machine without input or output. Events come in as method calls; `decide` returns the next entry of the log,
until there is none. Nothing here depends on sockets, clocks or threads, so that random histories can test it: the
caller states the time.

**Versions.** The log is a sequence of commits. A replica that has applied the first v of them has version v. A
contribution is a gradient that a site has computed at a version, its *base*. A commit consists of contributions, and
makes the next version. The age τ of a contribution is the version that it is committed at minus its base.

**Quorum.** A commit takes place once contributions of `quorum` sites are pending; it contains all that are. Sites that
have finished or left are not waited for.

**Commit window.** Sites of equal speed contribute at nearly the same times. If each contribution were a commit of its
own, every site would make a step of the optimizer for each of them. So with `gather` above 0 a contribution waits for
another site that is expected soon: one interval after its last contribution, where the interval is the median of its
latest ones. The wait lasts at most the part `gather` of the interval of the site that waits, and ends when a site has
two contributions pending. No site stops computing meanwhile, unless `staleness` is 1. With ``staleness=0`` there is no
wait: each commit has one contribution of every site, or ``late="drop"`` says how many make one.

**Staleness.** No contribution is committed with an age above `staleness`. So a commit waits while a site is computing
at a version that would be further behind after it: fast sites wait for slow ones. A site that has more than
`staleness` contributions pending waits for them, and continues at the version that they make. With ``staleness=0``
every commit therefore contains a contribution of every site.

With ``late="drop"`` no commit waits for a site that is behind. A contribution whose age would be above `staleness` is
dropped. With ``staleness=0`` and ``quorum=m`` this is m-synchronous SGD (arXiv:2602.03802).

**Shares.** With ``balanced=True`` the summed step size of each site is proportional to its data, however fast it is. A
commit alone would be a step of size m = sum of n_j s_j / sum of n_j, for contributions of n_j samples with the factor
s_j of late ones. Each site earns the part p_i m of it, by its share p_i of the data, and a site that contributes
spends what it has earned since its last contribution: that is the weight of its contributions, in place of s_j.

**Idle sites.** A site that waits for data is idle: no commit waits for it. It resumes at the version that the log has
then.

**Phases.** A site that has no further contribution for now finishes. Once all have, and nothing is pending, the phase
is over, all replicas have one version, and the next phase begins with all sites that have not left.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from msgspec import Meta

from ..errors import SequenceError
from ..exchange.fields import COUNT
from ..support.signature import check_choice, number, whole_number
from ..support.structs import Count, Slot

LATE = ("scale", "drop", "keep")
_MOST = 64  # times what the largest other site states, as much as samples and data of a site count for
_AHEAD = 8  # contributions above `staleness` + 1 that may be pending: a loader sends some without a wait
_INTERVALS = 5  # of which the median is taken
_KEPT = 64  # versions that a site may be behind with late="drop": the sequencer holds what it has not received
_OVERDUE = 0.5  # part of its interval after which an expected contribution is not waited for any more


class Rules(NamedTuple):
    """Rules of a sequencer. Made by `make_rules`, which checks them.

    Attributes:
        staleness: the largest number of versions between the one that a contribution was computed at and the one that
            it is committed to.
        quorum: number of sites whose contributions make a commit.
        late: ``"scale"``, ``"drop"`` or ``"keep"``.
        gather: the largest part of its site's step for which a contribution waits for those of other sites.
    """

    staleness: Count
    quorum: Annotated[int, Meta(ge=1)]
    late: Annotated[str, Meta(pattern=rf"\A({'|'.join(LATE)})\Z")]
    gather: Annotated[float, Meta(ge=0, le=1)] = 0.0

    def scale(self, age: int) -> float:
        """Return the factor of the learning rate for a contribution.

        Args:
            age: number of versions τ that have been committed since it was computed.
        """
        return 1.0 / (1 + age) if self.late == "scale" else 1.0


def make_rules(staleness: int, quorum: int, late: str, gather: float = 0.0) -> Rules:
    """Check the options of a parameter server that do not depend on the sites.

    Args:
        staleness: a whole number of at least 0.
        quorum: a whole number of at least 1.
        late: one of `LATE`.
        gather: a number from 0 to 1.

    Raises:
        ValueError: if one of them is not valid.
    """
    whole_number(0)("staleness", staleness)
    whole_number(1)("quorum", quorum)
    check_choice("late", late, LATE)
    number("a number from 0 to 1", lambda value: 0 <= value <= 1)("gather", gather)
    return Rules(staleness, quorum, late, float(gather))


class Entry(NamedTuple):
    """Contribution in a commit.

    Attributes:
        site: the site.
        number: number of the contribution, among those of its site.
        base: version that it was computed at.
        samples: samples that it stands for.
        scale: factor of the learning rate, by its age and by its site's share.
    """

    site: Slot
    number: Count
    base: Count
    samples: Count
    scale: float


class Decision(NamedTuple):
    """Entry of the log.

    Attributes:
        version: the version after it.
        entries: the committed contributions, by site and number; without any, the version is that before it.
        dropped: site and number of contributions that are too late.
        over: whether the phase is over.
    """

    version: Count
    entries: Annotated[tuple[Entry, ...], Meta(max_length=1 << 16)] = ()
    dropped: Annotated[tuple[tuple[Slot, Count], ...], Meta(max_length=1 << 16)] = ()
    over: bool = False

    @property
    def keys(self) -> list[tuple[int, int]]:
        """Site and number of the contributions that are decided on, the committed ones first."""
        return [*((entry.site, entry.number) for entry in self.entries), *self.dropped]


@dataclass
class _Site:
    """State of one site.

    Attributes:
        reached: version that its next contribution is computed at, at least.
        count: contributions so far.
        before: contributions before it returned.
        pending: contributions that are not committed yet.
        finished: whether it has no further contribution in this phase.
        here: whether it has not left.
        idle: whether it waits for data.
        data: what its share is proportional to; 0 until it is declared.
        samples: samples of its largest contribution.
        credit: step size that it has earned and not spent.
        last: time at which it has contributed, or resumed.
        timed: whether the time from then to its next contribution is an interval.
        intervals: its latest intervals between contributions.
    """

    reached: int = 0
    count: int = 0
    before: int = 0
    pending: list[Entry] = field(default_factory=list)
    finished: bool = False
    here: bool = True
    idle: bool = False
    data: float = 0.0
    samples: int = 0
    credit: float = 0.0
    last: float = 0.0
    timed: bool = False
    intervals: deque[float] = field(default_factory=lambda: deque(maxlen=_INTERVALS))

    @property
    def working(self) -> bool:
        """Whether a further contribution is to be expected of it before it is given anything."""
        return not self.finished and not self.idle

    @property
    def interval(self) -> float:
        """Median of its latest intervals; 0 if there is none."""
        return statistics.median(self.intervals) if self.intervals else 0.0


class Sequencer:
    """Order of the contributions of some sites.

    Args:
        sites: ranks of the sites that contribute.
        rules: staleness, quorum, and treatment of late contributions.
        balanced: whether sites that declare their data have shares of the step size in proportion to it.

    Attributes:
        version: number of commits so far.
        due: time at which `decide` is to be called again, if nothing happens before; None if that is not needed.
    """

    def __init__(self, sites: Iterable[int], rules: Rules, balanced: bool = False) -> None:
        self.version = 0
        self.due: float | None = None
        self._rules = rules
        self._now = 0.0
        self._balanced = balanced
        self._sites = {site: _Site() for site in sorted(sites)}

    # Events

    def advance(self, now: float) -> None:
        """Record the present time, in seconds; only differences matter."""
        self._now = now

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
        if self._balanced and not state.data and any(each.data for each in self._sites.values()):
            raise SequenceError("other sites train on loaders of server.loader(...), and this one does not")
        if not 1 <= samples <= COUNT:
            raise SequenceError(f"contribution {number} has {samples} samples")
        if sum(each.number >= state.before for each in state.pending) > self._rules.staleness + _AHEAD:
            raise SequenceError(f"contribution {number} follows {len(state.pending)} that are not committed")
        if reached < base:
            raise SequenceError(f"contribution {number} of version {base} is followed by work at version {reached}")
        self.reach(site, reached)
        state.count += 1
        if state.timed:
            state.intervals.append(self._now - state.last)
        state.last, state.timed = self._now, True
        state.samples = max(state.samples, samples)
        state.pending.append(Entry(site, number, base, samples, 1.0))

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
        self._sites[site].finished, self._sites[site].idle = True, False

    def leave(self, site: int) -> None:
        """Record that a site has left; what it has contributed stays valid."""
        state = self._sites[site]
        state.here, state.finished, state.idle, state.credit = False, True, False, 0.0

    def join(self, site: int) -> int:
        """Record that a site that has left is back, and works at the present version.

        Returns:
            The number of its next contribution.
        """
        state = self._sites[site]
        state.here, state.finished, state.before = True, False, state.count
        self.resume(site)
        state.intervals.clear()  # a process that takes its place may have another speed
        return state.count

    def idle(self, site: int) -> None:
        """Record that a site waits for data."""
        self._sites[site].idle = True

    def resume(self, site: int) -> None:
        """Record that a site goes on at the present version, which it has received by then."""
        state = self._sites[site]
        if not state.finished:
            state.idle, state.reached = False, self.version
            state.last, state.timed = self._now, False

    def declare(self, site: int, data: float) -> None:
        """Record what a site's share is proportional to."""
        self._sites[site].data = data

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
                self.resume(site)
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
        working = [site for site, state in self._sites.items() if state.pending or state.working]
        enough = len(contributing) >= min(self._rules.quorum, len(working)) > 0
        possible = enough and not self._undeclared() and not self._held_back()
        self.due = self._window_end() if possible else None
        return possible and self.due is None

    def _window_end(self) -> float | None:
        """Return the time until which a commit waits for contributions that are expected; None if it does not."""
        part, sites = self._rules.gather, self._sites.values()
        pending = [state for state in sites if state.pending]
        if not part or not self._rules.staleness or any(len(state.pending) > 1 for state in pending):
            return None
        latest = min(state.last + part * state.interval for state in pending)
        given_up = [
            state.last + (1 + _OVERDUE) * state.interval
            for state in sites
            if state.working and not state.pending and state.intervals and state.last + state.interval <= latest
        ]
        due = min(latest, max(given_up, default=self._now))
        return due if due > self._now else None

    def _undeclared(self) -> list[int]:
        """Return the sites without which shares are not known yet."""
        if not self._balanced or not any(state.data for state in self._sites.values()):
            return []
        return [site for site, state in self._sites.items() if state.working and not state.data]

    def _held_back(self) -> list[int]:
        """Return the sites that would be too far behind after a commit."""
        staleness = self._rules.staleness
        limit = max(staleness, _KEPT) if self._rules.late == "drop" else staleness
        behind = []
        for site, state in self._sites.items():
            waits = len(state.pending) > staleness  # and goes on at the version that the commit makes
            if state.working and not waits and self.version + 1 - state.reached > limit:
                behind.append(site)
        return behind

    def _commit(self) -> tuple[Entry, ...]:
        entries: list[Entry] = []
        for site, state in self._sites.items():
            most = self._most(site, "samples")
            for each in state.pending:
                scale = self._rules.scale(self.version - each.base)
                entries.append(each._replace(samples=int(min(each.samples, most)), scale=scale))
            state.pending = []
        self.version += 1
        return tuple(self._shared(entries) if self._balanced else entries)

    def _most(self, site: int, name: str) -> float:
        """Return the most that a number of a site counts for: so many times what the largest other site states."""
        others = (getattr(each, name) for other, each in self._sites.items() if other != site)
        return _MOST * max(others, default=0) or math.inf

    def _shared(self, entries: list[Entry]) -> list[Entry]:
        """Return the contributions of a commit with scales by the shares of their sites."""
        contributing = {entry.site for entry in entries}
        earning = {
            site: state
            for site, state in self._sites.items()
            if state.data and (site in contributing or not state.finished)
        }
        if not contributing <= earning.keys():  # no site has declared anything
            return entries
        sizes = {site: min(state.data, self._most(site, "data")) for site, state in earning.items()}
        data, samples = sum(sizes.values()), sum(entry.samples for entry in entries)
        size = sum(entry.samples * entry.scale for entry in entries) / samples
        for site, state in earning.items():
            state.credit += size * sizes[site] / data
        shared = []
        for entry in entries:
            scales = sum(other.samples * other.scale for other in entries if other.site == entry.site)
            factor = earning[entry.site].credit * samples / scales
            shared.append(entry._replace(scale=entry.scale * factor))
        for site in contributing:
            earning[site].credit = 0.0
        return shared

    # Reports

    @property
    def present(self) -> list[int]:
        """Sites that have not left."""
        return [site for site, state in self._sites.items() if state.here]

    @property
    def awaited(self) -> list[int]:
        """Sites without whose next message nothing more can be decided."""
        if any(state.pending for state in self._sites.values()):
            if behind := self._undeclared() or self._held_back():
                return behind
            return [site for site, state in self._sites.items() if not state.pending and state.working]
        return [site for site, state in self._sites.items() if not state.finished]
