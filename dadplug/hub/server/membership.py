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
A participant that goes before, or is skipped, counts as a site with 0 samples; nothing is sent again by others. Sums
that the hub has computed from its summands are computed again, under the next number of attempt.

**Order.** The hub has to send all sites the same sequence of frames and announcements, and to replay both. A site that
learns of a drop has therefore seen exactly the frames of the lost site that all others have seen.

**Joining.** A site dials in with its position, the last step that it has closed. If the hub has kept the frames since,
they are replayed; that includes the site's own, so a restarted process can use them. Otherwise a member sends its
state. Parameters do not change while a step is open, hence any member can send the state of the last closed step until
the open one closes; if it goes meanwhile, another one does. Sites become participants when a step closes; while there
are too few, in the open step, which could not close otherwise. Others wait for the state to arrive also with
late="skip": a joiner that never caught up would join for ever.

**Late sites.** With late="skip", a training step closes without a member that has not ended it after `patience` times
the median step. That member ends the step later, and the steps that have been closed since, until it has caught up.
Once it has missed a step, others wait for it again only after it has ended one, so that a site that hangs costs them
one step's patience. Contributors are the members that have ended the step in time; one that is behind by `max_lag`
steps is dropped. Collectives wait for all members. A step in which all contributors are idle waits, too: the data of
the late site are all there is.

**No wait is without limit.** A site is lost if its connection closes, if nothing arrives for `site_timeout` (a stopped
process, a dead link), or if others wait and it does not get on for `progress_timeout` though it is alive (a process
that hangs, but whose thread still sends pings). The third limit is longer, since validation takes its time. With fewer
than `min_sites`, or if no site holds the last closed step, training pauses and `Pause` says for whom it waits.

**Restarts.** See `dadplug.hub.wire.messages.Start`.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum

from ..wire.messages import (
    FRESH,
    Accept,
    Action,
    Close,
    Drop,
    Join,
    Pause,
    Position,
    Redo,
    Refuse,
    Replay,
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
        WAITING: connected, takes part after the next boundary.
        JOINING: takes part in the open step, and waits for its state.
        MEMBER: takes part, and holds the last closed step.
    """

    ABSENT = "absent"
    WAITING = "waiting"
    JOINING = "joining"
    MEMBER = "member"


class Site:
    """Membership of one site.

    Attributes:
        name: its name in the roster.
        phase: its state.
        instance: random number of its process.
        session: number of connections so far.
        position: its position when it dialled in.
        needs_state: whether it needs a member's state, rather than a replay or nothing.
        heard: time at which bytes arrived from it.
        progressed: time at which frames of a step or a state arrived.
        ended: the last step that it has ended, or missed before it joined.
        idle: whether it has contributed nothing to this step.
        awaited: whether others wait for it, since it has ended a step after the last one that it has missed.
        donor: slot of the member that sends it the state.
        donations: number of states that it has been asked for.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.phase = Phase.ABSENT
        self.instance = self.session = 0
        self.position = FRESH
        self.needs_state = False
        self.heard = self.progressed = 0.0
        self.ended = 0
        self.idle, self.awaited = False, True
        self.donor: int | None = None
        self.donations = 0


class RosterState:
    """Sites of the roster; a site's place is its slot.

    Args:
        roster: names of the sites.

    Raises:
        ValueError: if a name is used twice.
    """

    def __init__(self, roster: Sequence[str]) -> None:
        self._sites = [Site(name) for name in roster]
        self._slots = {name: slot for slot, name in enumerate(roster)}
        if len(self._slots) != len(roster):
            raise ValueError("a name is used twice in the roster")

    def append(self, name: str) -> None:
        """Append a site; raise ValueError if its name is used already."""
        if name in self._slots:
            raise ValueError(f"the name {name!r} is used twice in the roster")
        self._slots[name] = len(self._sites)
        self._sites.append(Site(name))

    def __len__(self) -> int:
        return len(self._sites)

    def __getitem__(self, slot: int) -> Site:
        return self._sites[slot]

    def __iter__(self) -> Iterator[Site]:
        return iter(self._sites)

    def slot(self, name: str) -> int | None:
        """Return a site's slot; None if it is not in the roster."""
        return self._slots.get(name)

    def names(self, slots: Sequence[int]) -> str:
        """Return the names of sites for a message."""
        return ", ".join(self._sites[slot].name for slot in slots)

    def in_phase(self, *phases: Phase) -> list[int]:
        """Return the slots of the sites in one of some states."""
        return [slot for slot, site in enumerate(self._sites) if site.phase in phases]

    def connected(self) -> list[int]:
        """Return the slots of the connected sites."""
        return self.in_phase(Phase.WAITING, Phase.JOINING, Phase.MEMBER)

    def up_to(self, step: int) -> list[int]:
        """Return the slots of the members that have ended a step, or a later one."""
        return [slot for slot in self.in_phase(Phase.MEMBER) if self._sites[slot].ended >= step]

    def ended(self, step: int) -> list[int]:
        """Return the slots of the members that have ended a step."""
        return [slot for slot in self.in_phase(Phase.MEMBER) if self._sites[slot].ended == step]


class History:
    """Closed steps of one life.

    Args:
        life: number of the life.
        step: the last closed step.

    Attributes:
        life: number of the life.
        step: the last closed step.
        attempt: number of the open step's attempt.
    """

    def __init__(self, life: int, step: int) -> None:
        self.life, self.step, self.attempt = life, step, 0
        self._base = Position(life, step)  # that this life started from
        self._oldest = step + 1  # step whose frames are kept

    @property
    def position(self) -> Position:
        """Position of a site that has closed the last step."""
        return Position(self.life, self.step)

    @property
    def open_step(self) -> int:
        """Number of the step that closes next."""
        return self.step + 1

    def start(self, positions: Sequence[Position]) -> Position:
        """Start from the highest position of the sites, and return it: that with the most sites, of several.

        Args:
            positions: those of the connected sites.
        """
        counts = Counter(positions)
        self._base = max(counts, key=lambda position: (position.step, counts[position], position.life))
        self.step, self.attempt = self._base.step, 0
        self._oldest = self.open_step
        return self._base

    def close(self, kept_steps: int) -> None:
        """Close the open step.

        Args:
            kept_steps: number of closed steps whose frames are kept.
        """
        self.step, self.attempt = self.open_step, 0
        self._oldest = max(self._oldest, self.open_step - kept_steps)

    def forget(self, step: int) -> None:
        """Record that the frames of a step, and of all steps before, are no longer kept."""
        self._oldest = max(self._oldest, min(step, self.step) + 1)

    def continued(self, position: Position) -> Position | None:
        """Return the position in this life of a site that can go on by the frames that are kept.

        Args:
            position: its position.

        Returns:
            The position; None if the site needs a state.
        """
        life, step = (self.life, self._base.step) if position == self._base else position
        follows = life == self.life and step + 1 >= self._oldest and (step > 0 or self.step == 0)
        return Position(life, step) if follows else None


_MEDIAN_OF, _MEDIAN_NEEDS = 32, 5  # steps
_JITTER = 0.05  # seconds by which no member is late


class StepTimes:
    """Times of the open step and of those before it.

    Args:
        now: the time, in seconds.

    Attributes:
        regular: whether the time of the open step counts, since its participants have not changed and none was late.
        first_end: time at which a member was the first to end the open step.
    """

    def __init__(self, now: float) -> None:
        self.regular = True
        self.first_end = self._start = now
        self._durations: deque[float] = deque(maxlen=_MEDIAN_OF)

    def begin(self, now: float) -> None:
        """Begin a step, or begin the open one anew."""
        self._start = now

    def close(self, now: float, counts: bool) -> None:
        """Close the open step, and begin the next one.

        Args:
            now: the time, in seconds.
            counts: whether its time is one of those that lateness is measured by.
        """
        if self.regular and counts:
            self._durations.append(now - self._start)
        self._start, self.regular = now, True

    @property
    def known(self) -> bool:
        """Whether enough steps have been timed to know when one is late."""
        return len(self._durations) >= _MEDIAN_NEEDS

    def late_at(self, patience: float) -> float:
        """Return when members that have not ended the open step are late.

        No site is late if all are slow: where the first member has taken longer than a median step, the others have as
        much time beyond it.

        Args:
            patience: the time that they have, in median steps.
        """
        median = statistics.median(self._durations)
        since_start = self._start + max(_JITTER, patience * median)
        return max(since_start, self.first_end + max(_JITTER, (patience - 1) * median))


class Membership:
    """State machine of the hub's members.

    Args:
        roster: names of the sites; a site's place is its slot.
        rules: the rules.
        life: random number, different for every process of the hub.
        now: the time, in seconds.
        closed: the last closed step, from the hub's log; None where it is unknown.

    Attributes:
        started: whether training has started.
        round: kind of the open step, as those that have ended it say.

    Raises:
        ValueError: if the rules do not fit the roster.
    """

    def __init__(
        self, roster: Sequence[str], rules: Rules, life: int, now: float, closed: Position | None = None
    ) -> None:
        self._sites = RosterState(roster)
        self.replace_rules(rules)
        self._history = History(*(closed or Position(life, 0)))
        self._times = StepTimes(now)
        self._created = now
        self.started = closed is not None
        self.round = RoundKind.FIRST
        self._pause: Pause | None = None
        self._actions: list[Action] = []

    def replace_rules(self, rules: Rules) -> None:
        """Replace the rules, or raise ValueError if they do not fit the roster."""
        if rules.min_sites > len(self._sites):
            raise ValueError(f"min_sites={rules.min_sites}, but the roster has {len(self._sites)} sites")
        self._rules = rules

    def append(self, names: Sequence[str]) -> None:
        """Append sites that are new in the roster; they are absent until they dial in."""
        for name in names:
            self._sites.append(name)

    @property
    def life(self) -> int:
        """Number of the life."""
        return self._history.life

    @property
    def step(self) -> int:
        """The last closed step."""
        return self._history.step

    @property
    def open_step(self) -> int:
        """Number of the step that closes next."""
        return self._history.open_step

    @property
    def attempt(self) -> int:
        """Number of the open step's attempt."""
        return self._history.attempt

    @property
    def participants(self) -> list[int]:
        """Slots of the sites that take part in the open step."""
        return self._sites.in_phase(Phase.MEMBER, Phase.JOINING)

    def phase(self, slot: int) -> Phase:
        """Return a site's state."""
        return self._sites[slot].phase

    def accepts(self, slot: int, step: int) -> bool:
        """Return whether a site's frame for a step counts; otherwise it is to be discarded."""
        return self.started and step == self.open_step and self._sites[slot].phase is Phase.MEMBER

    def dial(self, name: str, instance: int, position: Position, now: float) -> list[Action]:
        """Take a site that dials in; its name has been verified.

        Args:
            name: its name.
            instance: random number of its process; the same when the process dials again.
            position: the last step it has closed; `FRESH` if it begins.
            now: the time, in seconds.
        """
        slot = self._sites.slot(name)
        if slot is None:
            return [Refuse(name, f"site {name!r} is not in the hub's roster", False)]
        site = self._sites[slot]
        if site.phase is not Phase.ABSENT and site.instance != instance:
            reason = f"another process is connected as site {name!r}; should it be dead, try again"
            return [Refuse(name, f"{reason} in {self._rules.site_timeout:g} s", True)]
        if position.step < 0 or (self.started and position.life == self.life and position.step > self.step):
            reason = f"site {name!r} claims to have closed step {position.step}, the hub is at step {self.step}"
            return [Refuse(name, reason, False)]
        if site.phase is not Phase.ABSENT:
            self._drop(slot, "its process has dialled again")
        site.phase, site.instance, site.position = Phase.WAITING, instance, position
        site.heard = site.progressed = now
        site.session += 1
        if self.started:
            self._accept(slot)
        else:
            self._actions.append(Accept(slot, None, False, site.session))
        return self._advance(now)

    def go_on(self, members: Mapping[int, int], now: float) -> list[Action]:
        """Go on after the closed step with the sites that hold it; numbers of their processes by slot."""
        for slot, instance in members.items():
            site = self._sites[slot]
            site.phase, site.instance, site.ended = Phase.MEMBER, instance, self.step
            site.heard = site.progressed = now
        self._times.begin(now)
        return self._advance(now)

    def heard(self, slot: int, now: float, progress: bool = False) -> None:
        """Record that bytes have arrived from a site.

        Args:
            slot: the site.
            now: the time, in seconds.
            progress: whether they belong to a step or a state, rather than a ping.
        """
        site = self._sites[slot]
        site.heard = now
        if progress:
            site.progressed = now

    def behind(self, slot: int) -> bool:
        """Return whether a member has missed the last closed step, and not ended it since."""
        site = self._sites[slot]
        return site.phase is Phase.MEMBER and site.ended < self.step

    def end(self, slot: int, step: int, now: float, idle: bool = False) -> list[Action]:
        """Take a site's END of a step.

        Args:
            slot: the site.
            step: the step; one that it has missed if it is late.
            now: the time, in seconds.
            idle: whether the site contributes nothing to the step.
        """
        site = self._sites[slot]
        if site.phase is Phase.ABSENT:
            return []
        self.heard(slot, now, progress=True)
        if site.phase is not Phase.MEMBER or not site.ended < step <= self.open_step:
            self._drop(slot, f"it has ended step {step}, which it does not take part in")
        else:
            if step == self.open_step and not self._sites.ended(self.open_step):
                self._times.first_end = now
            site.ended, site.idle, site.awaited = step, idle, True
        return self._advance(now)

    def joined(self, slot: int, position: Position, now: float) -> list[Action]:
        """Take a joiner's report that it has a state.

        Args:
            slot: the site.
            position: position of the state.
            now: the time, in seconds.
        """
        site = self._sites[slot]
        if site.phase is Phase.ABSENT:
            return []
        self.heard(slot, now, progress=True)
        if position != self._history.position or site.phase is Phase.WAITING:
            self._drop(slot, f"it holds step {position.step} of another history, not step {self.step}")
        elif site.phase is Phase.JOINING:
            site.phase, site.donor, site.needs_state = Phase.MEMBER, None, False
            self._times.begin(now)  # it was not late before
        return self._advance(now)

    def close(self, slot: int, reason: str, now: float) -> list[Action]:
        """Take the end of a site's connection."""
        if self._sites[slot].phase is not Phase.ABSENT:
            self._drop(slot, reason)
        return self._advance(now)

    def admit(self, now: float) -> list[Action]:
        """Make all waiting sites participants of the open step; they are sent the state of the last one."""
        self._admit(self._sites.in_phase(Phase.WAITING), now)
        return self._advance(now)

    def forget(self, step: int) -> None:
        """Record that the frames of a step, and of all steps before, are no longer kept."""
        self._history.forget(step)

    def tick(self, now: float) -> list[Action]:
        """Let time pass; to be called at `deadline`, at the latest."""
        for slot, site in enumerate(self._sites):
            if site.phase is not Phase.ABSENT and now >= site.heard + self._rules.site_timeout:
                self._drop(slot, f"silent for {self._rules.site_timeout:g} s")
            elif (until := self._progress_deadline(slot)) is not None and now >= until:
                what = "not received its state" if site.phase is Phase.JOINING else f"not ended step {self.open_step}"
                self._drop(slot, f"alive, but has {what} for {self._rules.progress_timeout:g} s")
        return self._advance(now)

    def deadline(self) -> float | None:
        """Return the time at which `tick` has to be called; None if nothing depends on time."""
        times = [s.heard + self._rules.site_timeout for s in self._sites if s.phase is not Phase.ABSENT]
        times += [until for slot in self.participants if (until := self._progress_deadline(slot)) is not None]
        if self._may_skip() and self.round is RoundKind.FIRST:
            times.append(self._times.late_at(self._rules.patience))
        if not self.started and self._rules.start_timeout is not None and self._enough(self._sites.connected()):
            times.append(self._created + self._rules.start_timeout)
        return min(times, default=None)

    def _enough(self, slots: Sequence[int]) -> bool:
        return self.round is not RoundKind.FIRST or len(slots) >= self._rules.min_sites

    def _drop(self, slot: int, reason: str) -> None:
        site = self._sites[slot]
        took_part = slot in self.participants
        site.phase, site.donor = Phase.ABSENT, None
        for other in self._sites:
            if other.donor == slot:
                other.donor = None
        self._actions.append(Drop(slot, self.open_step, reason))
        if took_part:
            self._redo(self.participants)

    def _redo(self, participants: Sequence[int]) -> None:
        """Begin a new attempt, since the open step's participants have changed."""
        self._times.regular = False
        self._history.attempt += 1
        if participants:
            self._actions.append(Redo(self.open_step, self.attempt, tuple(participants)))

    def _advance(self, now: float) -> list[Action]:
        """Start, admit, close and pause as far as possible, and return the actions."""
        if not self.started:
            self._try_start(now)
        if self.started:
            self._restart_if_lost(now)
            self._admit_if_paused(now)
            self._assign_donors(now)
            if self._try_close(now):
                self._assign_donors(now)
        self._announce_pause()
        actions = list(self._actions)
        self._actions.clear()
        return actions

    def _try_start(self, now: float) -> None:
        connected, limit = self._sites.connected(), self._rules.start_timeout
        in_time = limit is None or now < self._created + limit
        if len(connected) == len(self._sites) or (not in_time and self._enough(connected)):
            self._start(now)

    def _accept(self, slot: int) -> None:
        """Accept a site that dials in during training, and have the frames replayed that it lacks."""
        site = self._sites[slot]
        position = self._history.continued(site.position)
        site.needs_state = position is None
        self._actions.append(Accept(slot, self._history.position, site.needs_state, site.session))
        if position is not None:
            site.position = position
            self._actions.append(Replay(slot, position.step + 1))

    def _restart_if_lost(self, now: float) -> None:
        """Start again from an older step, if all sites are here and none has the last closed one."""
        needy = [site for site in self._sites if site.phase is not Phase.ABSENT and site.needs_state]
        if len(needy) == len(self._sites):
            self._history.life += 1
            self._start(now)

    def _start(self, now: float) -> None:
        """Start training from the highest position of the connected sites."""
        connected = self._sites.connected()
        winner = self._history.start([self._sites[slot].position for slot in connected])
        holders = [slot for slot in connected if self._sites[slot].position == winner]
        self._actions.append(Start(Position(self._history.life, winner.step), tuple(holders)))
        for slot in connected:
            self._sites[slot].needs_state, self._sites[slot].donor = slot not in holders, None
            self._join(slot, now)
            self._actions.append(Replay(slot, self._history.open_step))
        self.started = True
        self._times.begin(now)
        self._times.regular = True

    def _admit_if_paused(self, now: float) -> None:
        """Make all waiting sites participants of the open step, if it cannot close without them."""
        waiting = self._sites.in_phase(Phase.WAITING)
        if not waiting or (self._enough(self.participants) and self._sites.in_phase(Phase.MEMBER)):
            return
        self._admit(waiting, now)
        self._redo(self.participants)

    def _admit(self, slots: Sequence[int], now: float) -> None:
        """Make waiting sites participants of the open step."""
        for slot in slots:
            self._times.regular = False
            self._join(slot, now)
            if self._sites[slot].needs_state:
                self._actions.append(Replay(slot, self._history.open_step))

    def _join(self, slot: int, now: float) -> None:
        site = self._sites[slot]
        site.phase = Phase.JOINING if site.needs_state else Phase.MEMBER
        site.ended, site.progressed = self._history.step, now
        site.awaited = True
        self._actions.append(Join(slot, self._history.open_step, site.session))

    def _assign_donors(self, now: float) -> None:
        """Ask a member for its state for each joiner without a donor, the one that was asked least often.

        A member that is behind does not hold the last closed step yet.
        """
        members = self._sites.up_to(self._history.step)
        for slot in self._sites.in_phase(Phase.JOINING) if members else ():
            joiner = self._sites[slot]
            if joiner.donor is None:
                joiner.donor = min(members, key=lambda member: self._sites[member].donations)
                joiner.progressed = now
                self._sites[joiner.donor].donations += 1
                self._actions.append(SendState(joiner.donor, slot, self._history.step))

    def _try_close(self, now: float) -> bool:
        """Close the open step if its contributors are known."""
        ended, members = self._sites.ended(self.open_step), self._sites.in_phase(Phase.MEMBER)
        if self._sites.in_phase(Phase.JOINING) or not ended or not self._enough(ended):
            return False
        missing = [slot for slot in members if slot not in ended]
        if missing:
            if not self._may_skip() or self._waits_for(missing, now):
                return False
            self._skip(missing, ended)
        self._actions.append(Close(self.open_step, tuple(ended), self.attempt))
        self._times.close(now, self.round is RoundKind.FIRST)
        self._history.close(self._rules.kept_steps)
        self.round = RoundKind.FIRST
        for slot in missing:
            if self.step - self._sites[slot].ended >= self._rules.max_lag:
                self._drop(slot, f"late: it is {self._rules.max_lag} steps behind")
        self._admit(self._sites.in_phase(Phase.WAITING), now)
        return True

    def _skip(self, slots: Sequence[int], ended: Sequence[int]) -> None:
        """Record that members miss the open step, whose time counts where no site has waited for them."""
        regular = self._times.regular and not any(self._sites[slot].awaited for slot in slots)
        for slot in slots:
            self._sites[slot].awaited = False
            self._actions.append(Skip(slot, self.open_step))
        self._redo(ended)
        self._times.regular = regular

    def _may_skip(self) -> bool:
        """Return whether the open step can close without its late members once they are late."""
        ended = self._sites.ended(self.open_step)
        return (
            self._rules.late == "skip"
            and self._times.known
            and self._enough(ended)
            and self.round is not RoundKind.COLLECTIVE
            and any(not self._sites[slot].idle for slot in ended)
            and not self._sites.in_phase(Phase.JOINING)
        )

    def _waits_for(self, missing: Sequence[int], now: float) -> bool:
        """Return whether one of the members that have not ended the open step is still waited for."""
        if self.round is RoundKind.FURTHER:
            return any(not self.behind(slot) for slot in missing)
        awaited = any(self._sites[slot].awaited for slot in missing)
        return awaited and now < self._times.late_at(self._rules.patience)

    def _progress_deadline(self, slot: int) -> float | None:
        """Return when a participant is lost though it is alive; None while no site waits for it."""
        site = self._sites[slot]
        if site.phase is Phase.JOINING and site.donor is not None:
            return max(site.progressed, self._sites[site.donor].progressed) + self._rules.progress_timeout
        if site.phase is Phase.MEMBER and site.ended < self.open_step and self._sites.ended(self.open_step):
            return max(site.progressed, self._times.first_end) + self._rules.progress_timeout
        waiting = [each.progressed for each in self._sites if each.phase is Phase.JOINING and each.donor is None]
        if waiting and self.behind(slot):  # it would be the donor
            return max(site.progressed, *waiting) + self._rules.progress_timeout
        return None

    def _announce_pause(self) -> None:
        absent, count = tuple(self._sites.in_phase(Phase.ABSENT)), len(self.participants)
        waiting, pause = f"waiting for {self._sites.names(absent)}", None
        if not self.started:
            pause = Pause(absent, waiting)
        elif not self._enough(self.participants):
            here = f"{count} {'is' if count == 1 else 'are'} connected"
            pause = Pause(absent, f"{self._rules.min_sites} sites are needed and {here}: {waiting}")
        elif not self._sites.in_phase(Phase.MEMBER):
            pause = Pause(absent, f"no connected site holds step {self.step}: {waiting}")
        if pause == self._pause or (self.started and not self._sites.connected()):  # no site waits any more
            return
        self._pause = pause
        self._actions.append(Resume(self.open_step) if pause is None else pause)
