"""Membership of the hub: which sites take part in a step, and when it closes.

A state machine without input or output. Events come in as method calls with the time in seconds; every method returns
the actions that follow, to be carried out in their order. Nothing here depends on sockets, clocks or threads, so that
random histories can test it.

**Slots.** A site's rank is its slot in the roster, for good. An absent site is an idle one: the world size stays.

A site that is new in the roster gets the next slot, also during a run that goes on without some sites (`append`): all
exchanges have room for it from the end of the training step in which it could join first.

**Steps.** A step is one round of exchanges that ends with each participant's END: a training step, or a collective at
set-up. Only one step is open, number `step + 1`. It closes once all participants have ended it and at least `min_sites`
have. Closing fixes its contributors, once: every site applies the frames of exactly these, so that replicas stay equal.
A participant that goes before, or is skipped, counts as a site with 0 samples; nothing is sent again by others.

**Order.** The hub has to send all sites the same sequence of frames and announcements. A site that learns of a drop has
therefore seen exactly the frames of the lost site that all others have seen.

**Start.** Training starts once all sites are connected. By `StartTerms` it starts without some of them, once enough
have been connected for a time; the others join as those that return.

**Joining.** A site that connects after the start takes part from the open step on: it is sent the frames of this step
so far, and all later ones. A member sends it its state as of the beginning of a training step, while it ends the first
round of this step; if the member goes meanwhile, another one is asked. A member that has ended the open step can answer
at once: one such is asked if nothing arrives from the first one for half of `site_timeout`, and the next one after
twice that time. None is asked once the site reports that it has all of a state, which it may take long to load.

The others wait `SHORT_STATE` seconds for the state. If it takes longer, training steps close without the site. Once it
has the state, it ends the steps that have been closed since, one after the other, from the frames that it was sent. The
others wait for it when it is behind by `_NEAR` rounds only, and also when it does not catch up: after as many further
rounds as it was behind when it got the state. Collectives wait for it, unless its state will be one of after them.

**Late sites.** With late="skip", a training step closes without a member that has not ended it after `patience` times
the median step, or, with a patience of 0, `site_timeout` after the first member has ended it. That member ends the step
later, and the steps that have been closed since, until it has caught up.
Once it has missed a step, others wait for it again only after it has ended one, so that a site that hangs costs them
one step's patience. A further round of a step closes in the same way, once `min_sites` have ended it: what the late
site has sent in the step does not count. Contributors are the members that have ended the step in time; one that is
behind by `max_lag` steps is dropped. Collectives wait for all members. A step in which all contributors are idle waits,
too: the data of the late site are all there is.

**No wait is without limit.** The hub ends a site whose connection is lost or silent (`close`). A site that is alive is
dropped if others wait and it does not get on for `progress_timeout` (a process that hangs, but whose thread still sends
pings). This limit is longer, since validation takes its time. With fewer than `min_sites`, or if no site holds the last
closed step, training pauses and `Pause` says for whom it waits.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Sequence
from enum import Enum

from ..wire.messages import (
    ALL_SITES,
    Accept,
    Action,
    Close,
    Drop,
    Join,
    Pause,
    Position,
    Resume,
    RoundKind,
    Rules,
    SendState,
    Skip,
    Start,
)


class Phase(Enum):
    """State of a site.

    Attributes:
        ABSENT: not connected.
        WAITING: connected, before training has started.
        JOINING: takes part in the open step, and waits for its state.
        MEMBER: takes part, and holds the last closed step.
    """

    ABSENT = "absent"
    WAITING = "waiting"
    JOINING = "joining"
    MEMBER = "member"


class Site:
    """Membership of one site.

    Args:
        slot: its slot.
        name: its name in the roster.

    Attributes:
        slot: its slot.
        name: its name in the roster.
        phase: its state.
        entered: time at which it has joined last.
        progressed: time at which frames of a step or a state arrived from it, or for it.
        ended: the last step that it has ended, or missed before it joined.
        idle: whether it has contributed nothing to this step.
        awaited: whether others wait for it, since it has ended a step after the last one that it has missed.
        donor: slot of the member that sends it the state.
        asked: time at which the donor was asked.
        patience: seconds without a part of the state after which another donor is asked.
        donations: number of states that it has been asked for.
        answered: whether the donor has ended the first round of a training step since it was asked, with its state.
        loads: whether it has all of the state, so that no other donor is asked.
        until: the closed step from which on others wait for it although it has not caught up; 0 where they wait anyway.
        held: whether others wait for its state, since too many bytes wait for it.
    """

    def __init__(self, slot: int, name: str) -> None:
        self.slot, self.name = slot, name
        self.phase = Phase.ABSENT
        self.entered = self.progressed = 0.0
        self.ended = 0
        self.idle, self.awaited = False, True
        self.donor: int | None = None
        self.asked = self.patience = 0.0
        self.donations = self.until = 0
        self.answered = self.loads = self.held = False

    def enter(self, phase: Phase, step: int, patience: float, now: float) -> None:
        """Begin to take part after a closed step."""
        self.phase, self.ended, self.awaited = phase, step, True
        self.until, self.held = 0, False
        self.entered = self.progressed = now
        self.donor, self.patience = None, patience

    def behind(self, step: int) -> bool:
        """Return whether it is a member that has missed a step, the last closed one, and not ended it since."""
        return self.phase is Phase.MEMBER and self.ended < step

    def lags(self, step: int) -> bool:
        """Return whether it is behind, or may be once it has the state for which it waits."""
        return self.behind(step) or self.phase is Phase.JOINING

    def hold(self) -> bool:
        """Let the others wait for a site that joins, or catches up; return whether it is one."""
        self.held |= self.phase is Phase.JOINING or bool(self.until)
        return self.held

    def receive(self, now: float, complete: bool = False) -> None:
        """Record that a site that joins has acknowledged frames among which its state is, or that it has all of it."""
        if self.phase is Phase.JOINING:
            self.progressed = now
            self.loads |= complete


_MOST_REQUESTS = 0xFFFF  # with a number of their own; the tag of a frame has 16 bits
_MEDIAN_OF, _MEDIAN_NEEDS = 32, 5  # steps
_LONG_STATE = 5.0  # seconds
SHORT_STATE = 1.0  # seconds for which others wait for the state of a site that joins
_NEAR = 2  # rounds: a training step has one or two
_JITTER = 0.05  # seconds by which no member is late


class Pace:
    """Times of the open step, and of the last ones, from which follows when members are late.

    Args:
        now: the time, in seconds.

    Attributes:
        began: beginning of the open step.
        first_end: its first END of a member.
        last_end: its last one.
        regular: whether its time counts, since its participants have not changed and none was late.
        durations: seconds of the last steps.
    """

    def __init__(self, now: float) -> None:
        self.began = self.first_end = self.last_end = now
        self.regular = True
        self.durations: deque[float] = deque(maxlen=_MEDIAN_OF)

    @property
    def median(self) -> float | None:
        """Median seconds of the last steps; None before one has closed."""
        return statistics.median(self.durations) if self.durations else None

    def late_at(self, rules: Rules) -> float:
        """Return when members that have not ended the open step are late; infinity before enough steps have closed.

        No site is late if all are slow: where the first member has taken longer than a median step, the others have as
        much time beyond it.
        """
        patience, median = rules.patience, self.median
        if not patience:
            return self.first_end + rules.site_timeout
        if median is None or len(self.durations) < _MEDIAN_NEEDS:
            return math.inf
        since_start = self.began + max(_JITTER, patience * median)
        return max(since_start, self.first_end + max(_JITTER, (patience - 1) * median))


class Membership:
    """State machine of the hub's members.

    Args:
        names: names of the sites; a site's place is its slot.
        rules: the rules.
        life: random number, different for every run and every process of the hub.
        now: the time, in seconds.

    Attributes:
        sites: the sites by slot.
        life: number of the history that closed steps belong to.
        step: the last closed step.
        started: whether training has started.
        start: when it may start without all sites.
        round: kind of the open step, as those that have ended it say.
        pace: times of the open step, and of the last ones.

    Raises:
        ValueError: if the rules do not fit the roster.
    """

    def __init__(self, names: Sequence[str], rules: Rules, life: int, now: float) -> None:
        self.sites: list[Site] = []
        self.append(names)
        self.replace_rules(rules)
        self.life, self.step = life, 0
        self.started = False
        self.start = ALL_SITES
        self._enough_since: float | None = None  # when so many sites as may start were connected; None: they are not
        self.round = RoundKind.FIRST
        self.pace = Pace(now)
        self._pause: Pause | None = None
        self._requests = 0  # for states
        self._actions: list[Action] = []

    def replace_rules(self, rules: Rules) -> None:
        """Replace the rules, or raise ValueError if they do not fit the roster."""
        if rules.min_sites > len(self.sites):
            raise ValueError(f"min_sites={rules.min_sites}, but the roster has {len(self.sites)} sites")
        self._rules = rules

    def append(self, names: Sequence[str]) -> None:
        """Append sites that are new in the roster; they are absent until they connect."""
        self.sites += [Site(slot, name) for slot, name in enumerate(names, len(self.sites))]

    @property
    def open_step(self) -> int:
        """Number of the step that closes next."""
        return self.step + 1

    @property
    def position(self) -> Position:
        """Position of a site that has closed the last step."""
        return Position(self.life, self.step)

    @property
    def participants(self) -> list[int]:
        """Slots of the sites that take part in the open step."""
        return [site.slot for site in self._in_phase(Phase.MEMBER, Phase.JOINING)]

    def _in_phase(self, *phases: Phase) -> list[Site]:
        """Return the sites in one of some states."""
        return [site for site in self.sites if site.phase in phases]

    def _ended(self, step: int) -> list[Site]:
        """Return the members that have ended a step, which may be the open one, or a later one."""
        return [site for site in self._in_phase(Phase.MEMBER) if site.ended >= step]

    # Events

    def dial(self, slot: int, now: float) -> list[Action]:
        """Take a site that connects; once training has started, it takes part in the open step.

        Args:
            slot: the site.
            now: the time, in seconds.
        """
        if self.started:
            self.pace.regular = False
            self._actions.append(Accept(slot, self.position, True))
            self._join(self.sites[slot], Phase.JOINING, now)
        else:
            self.sites[slot].phase = Phase.WAITING
            self._actions.append(Accept(slot, None, False))
        return self._advance(now)

    def go_on(self, step: int, slots: Sequence[int], now: float) -> list[Action]:
        """Go on with a run of another process of the hub.

        Args:
            step: its last closed step.
            slots: the sites that hold it.
            now: the time, in seconds.
        """
        self.started, self.step = True, step
        for slot in slots:
            self.sites[slot].enter(Phase.MEMBER, step, self._rules.site_timeout / 2, now)
        self.pace.began = now
        return self._advance(now)

    def end(self, slot: int, step: int, now: float, idle: bool = False) -> list[Action]:
        """Take a site's END of a step.

        Args:
            slot: the site.
            step: the step; one that it has missed if it is late.
            now: the time, in seconds.
            idle: whether the site contributes nothing to the step.
        """
        site, pace = self.sites[slot], self.pace
        if site.phase is Phase.ABSENT:
            return []
        site.progressed = now
        if site.phase is not Phase.MEMBER or not site.ended < step <= self.open_step:
            self._drop(slot, f"it has ended step {step}, which it does not take part in")
        else:
            if step == self.open_step:
                pace.first_end = pace.first_end if self._ended(step) else now
                pace.last_end = now
            site.ended, site.idle, site.awaited = step, idle, True
            if step >= self.step:
                site.until, site.held = 0, False
        return self._advance(now)

    def joined(self, slot: int, position: Position, now: float) -> list[Action]:
        """Take a joiner's report that it has a state.

        Args:
            slot: the site.
            position: position of the state.
            now: the time, in seconds.
        """
        site = self.sites[slot]
        if site.phase is Phase.ABSENT:
            return []
        site.progressed = now
        known = position.life == self.life and site.ended <= position.step <= self.step
        if not known or site.phase is Phase.WAITING:
            self._drop(slot, f"it holds step {position.step} of another history, not step {self.step}")
        elif site.phase is Phase.JOINING:
            site.phase, site.donor, site.ended = Phase.MEMBER, None, position.step
            if site.behind(self.step):
                site.until = 2 * self.step - site.ended + _NEAR
            else:
                self.pace.began = now  # it was not late before
        return self._advance(now)

    def close(self, slot: int, reason: str, now: float) -> list[Action]:
        """Take the end of a site's connection."""
        if self.sites[slot].phase is not Phase.ABSENT:
            self._drop(slot, reason)
        return self._advance(now)

    def tick(self, now: float) -> list[Action]:
        """Let time pass."""
        for site in self._in_phase(Phase.MEMBER, Phase.JOINING):
            until = self._progress_deadline(site)
            if until is not None and now >= until:
                joins = site.phase is Phase.JOINING
                what = "not received its state" if joins else f"not ended step {self.open_step}"
                self._drop(site.slot, f"alive, but has {what} for {self._rules.progress_timeout:g} s")
        for site in self._in_phase(Phase.JOINING):
            self._replace_donor(site, now)
        return self._advance(now)

    # What follows

    def _drop(self, slot: int, reason: str) -> None:
        self.sites[slot].phase = Phase.ABSENT
        for site in self.sites:
            if slot in (site.slot, site.donor):
                site.donor = None
        self._actions.append(Drop(slot, self.open_step, reason))
        self.pace.regular = False

    def _advance(self, now: float) -> list[Action]:
        """Close and pause as far as possible, and return the actions."""
        if not self.started and self._may_start(now):
            self._start(now)
        if self.started:
            self._assign_donors(now)
            self._try_close(now)
        self._announce_pause(now)
        actions = list(self._actions)
        self._actions.clear()
        return actions

    def _may_start(self, now: float) -> bool:
        """Return whether all sites are connected, or enough have been for so long as they wait for the others."""
        here = len(self._in_phase(Phase.WAITING))
        if here == len(self.sites):
            return True
        if not self.start.sites or here < self.start.sites:
            self._enough_since = None
            return False
        self._enough_since = now if self._enough_since is None else self._enough_since
        return now >= self._enough_since + self.start.seconds

    def _start(self, now: float) -> None:
        """Start training with the sites that are connected."""
        self.started = True
        if self.start.sites:  # until the sites state what they require
            self._rules = dataclasses.replace(self._rules, min_sites=1)
        self._actions.append(Start(self.position, tuple(site.slot for site in self._in_phase(Phase.ABSENT))))
        for site in self._in_phase(Phase.WAITING):
            self._join(site, Phase.MEMBER, now)
        self.pace.began, self.pace.regular = now, True

    def _join(self, site: Site, phase: Phase, now: float) -> None:
        """Announce a participant of the open step."""
        site.enter(phase, self.step, self._rules.site_timeout / 2, now)
        self._actions.append(Join(site.slot, self.open_step))

    def _assign_donors(self, now: float) -> None:
        """Ask a member for its state for each joiner without a donor, the one that was asked least often.

        A member that is behind does not hold the last closed step yet.
        """
        members = self._ended(self.step)
        for joiner in self._in_phase(Phase.JOINING) if members else ():
            if joiner.donor is None:
                joiner.progressed = now
                self._ask(joiner, members, now)

    def _ask(self, joiner: Site, members: Sequence[Site], now: float) -> None:
        """Ask one of some members for its state for a joiner."""
        donor = min(members, key=lambda member: member.donations)
        donor.donations += 1
        joiner.donor, joiner.asked, joiner.answered, joiner.loads = donor.slot, now, False, False
        self._requests = self._requests % _MOST_REQUESTS + 1
        self._actions.append(SendState(donor.slot, joiner.slot, self.step, self._requests))

    def _replace_donor(self, joiner: Site, now: float) -> None:
        """Ask another member for its state for a joiner that lacks some, of which nothing has arrived for too long."""
        if joiner.donor is None or joiner.loads or now < max(joiner.asked, joiner.progressed) + joiner.patience:
            return
        step = self.step if joiner.answered else self.open_step
        able = [each for each in self._ended(step) if each.slot != joiner.donor]
        if able:
            joiner.patience *= 2
            self._ask(joiner, able, now)

    def _try_close(self, now: float) -> None:
        """Close the open step if its contributors are known.

        Late members may miss it; its time counts then where no site has waited for them.
        """
        ended = self._ended(self.open_step)
        if not ended or not self._enough(ended):
            return
        joining, members = self._in_phase(Phase.JOINING), self._in_phase(Phase.MEMBER)
        missing = [site for site in members if site not in ended]
        if any(self._awaits_state(site, now) for site in joining):
            return
        late = [site for site in missing if not self._catches_up(site)]
        if late:
            if self._waits_for(late, ended, now):
                return
            self.pace.regular &= not any(site.awaited for site in late)
        for site in late:
            site.awaited = False
        self._actions += [Skip(site.slot, self.open_step, site in late) for site in (*missing, *joining)]
        self._actions.append(Close(self.open_step, tuple(site.slot for site in ended)))
        if self.round is RoundKind.FIRST:
            if self.pace.regular:
                self.pace.durations.append(now - self.pace.began)
            for site in joining:
                site.answered |= site.donor is not None
        self.pace.began, self.pace.regular = now, True
        self.step += 1
        self.round = RoundKind.FIRST
        for site in late:
            if self.step - site.ended >= self._rules.max_lag:
                self._drop(site.slot, f"late: it is {self._rules.max_lag} steps behind")

    def _awaits_state(self, site: Site, now: float) -> bool:
        """Return whether the open step waits for the state of a site that joins."""
        if self.round is RoundKind.COLLECTIVE:
            return site.answered  # else it gets a state of after this round
        begins = site.ended == self.step  # it joins in this step
        return site.held or (begins and now < max(site.entered, self.pace.last_end) + SHORT_STATE)

    def _catches_up(self, site: Site) -> bool:
        """Return whether a member that has joined catches up, so that the open step does not wait for it."""
        if self.round is RoundKind.COLLECTIVE or site.held or not site.until or not site.behind(self.step):
            return False
        return self.round is RoundKind.FURTHER or (self.step > site.ended + _NEAR and self.step < site.until)

    def _enough(self, sites: Sequence[object]) -> bool:
        return self.round is not RoundKind.FIRST or len(sites) >= self._rules.min_sites

    def _waits_for(self, missing: Sequence[Site], ended: Sequence[Site], now: float) -> bool:
        """Return whether the open step waits for one of the members that have not ended it.

        Args:
            missing: these members.
            ended: those that have.
            now: the time, in seconds.
        """
        late_at, collective = self.pace.late_at(self._rules), self.round is RoundKind.COLLECTIVE
        if self._rules.late != "skip" or collective or late_at == math.inf or all(site.idle for site in ended):
            return True
        if self.round is RoundKind.FURTHER:  # who has missed a round of the step has no part in this one
            missing = [site for site in missing if not site.behind(self.step)]
            if missing and len(ended) < self._rules.min_sites:
                return True
        return any(site.awaited for site in missing) and now < late_at

    def _progress_deadline(self, site: Site) -> float | None:
        """Return when a participant is lost though it is alive; None while no site waits for it."""
        if site.phase is Phase.JOINING and site.donor is not None:
            return max(site.progressed, self.sites[site.donor].progressed) + self._rules.progress_timeout
        if site.phase is Phase.MEMBER and site.ended < self.open_step and self._ended(self.open_step):
            return max(site.progressed, self.pace.first_end) + self._rules.progress_timeout
        waiting = [each.progressed for each in self._in_phase(Phase.JOINING) if each.donor is None]
        if waiting and site.behind(self.step):  # it would be the donor
            return max(site.progressed, *waiting) + self._rules.progress_timeout
        return None

    def _is_awaited_long(self, site: Site, now: float) -> bool:
        """Return whether others have waited for the state of a site long enough to announce a pause."""
        needed = site.held or (site.answered and self.round is RoundKind.COLLECTIVE)
        needed |= not self._enough(self._in_phase(Phase.MEMBER))
        return needed and site.donor is not None and now >= site.entered + _LONG_STATE

    def _announce_pause(self, now: float) -> None:
        missing, count = self._in_phase(Phase.ABSENT), len(self.participants)
        absent = tuple(site.slot for site in missing)
        pause, waiting = None, f"waiting for {', '.join(site.name for site in missing)}"
        if not self.started:
            pause = Pause(absent, waiting + self.start.in_words(self._enough_since is not None))
        elif not self._enough(self.participants):
            here = f"{count} {'is' if count == 1 else 'are'} connected"
            pause = Pause(absent, f"{self._rules.min_sites} sites are needed and {here}: {waiting}")
        elif not self._in_phase(Phase.MEMBER):
            pause = Pause(absent, f"no connected site holds step {self.step}: {waiting}")
        elif slow := [site for site in self._in_phase(Phase.JOINING) if self._is_awaited_long(site, now)]:
            pause = Pause((), f"{', '.join(each.name for each in slow)} joins, and receives the state of the training")
        if pause == self._pause or (self.started and not count):  # no site waits any more
            return
        self._pause = pause
        self._actions.append(Resume(self.open_step) if pause is None else pause)
