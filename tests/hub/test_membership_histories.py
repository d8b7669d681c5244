"""Random histories of the membership: sites, their links and the hub itself fail, at any moment and in any order.

Each simulated site keeps a digest of the frames that it has applied, as a stand-in for its parameters. Messages wait in
queues in both directions until a rule delivers them, and are lost with their connection. DADPLUG_HISTORIES sets the
number of histories.

Histories are elastic runs, as `dadplug.hub.server.relay` has them: steps are of several kinds, sites that connect are
admitted to a first round that a site has ended, rules are replaced during training, silent sites are dropped, and a run
ends with its last site.
"""

import os
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Part
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dadplug.hub.server.membership import Membership, Phase
from dadplug.hub.server.run import orphaned
from dadplug.hub.wire import messages as actions
from dadplug.hub.wire.messages import FRESH, Position, RoundKind, Rules, StartTerms


def kind_of(step: int) -> RoundKind:
    """Return the kind of a step, the same at all sites: training steps of one or two rounds, and collectives."""
    return (RoundKind.FIRST, RoundKind.FIRST, RoundKind.FURTHER, RoundKind.COLLECTIVE, RoundKind.FIRST)[step % 5]


class SimulatedSite:
    """A site; what it sends to the hub goes into `up`, what it has been sent waits in `down`.

    Args:
        slot: its slot.
    """

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.position, self.digest = FRESH, 0
        self.disconnect()

    def disconnect(self) -> None:
        self.connected = self.frozen = self.hangs = self.idles = False
        self.up: deque[tuple] = deque()
        self.down: deque[object] = deque()
        self.awaits_state = self.takes_part = self.has_ended = False
        self.requests: list[actions.SendState] = []  # to be answered at the beginning of a training step
        self.frames: dict[int, dict[int, object]] = {}
        self.closed: dict[int, actions.Close] = {}  # steps that this site has not ended yet

    def receive(self) -> None:
        message = self.down.popleft()
        if isinstance(message, tuple):
            kind, *fields = message
            {"frame": self.on_frame, "state": self.on_state}[kind](*fields)
        else:
            getattr(self, f"on_{type(message).__name__.lower()}")(message)

    def on_frame(self, step: int, slot: int, content: object) -> None:
        self.frames.setdefault(step, {})[slot] = content

    def on_state(self, position: Position, digest: int) -> None:
        if self.awaits_state:
            self.position, self.digest, self.awaits_state = position, digest, False
            self.closed = {step: close for step, close in self.closed.items() if step > position.step}
            self.frames = {step: frames for step, frames in self.frames.items() if step > position.step}
            self.up.append(("joined", position))

    def on_accept(self, message: actions.Accept) -> None:
        self.awaits_state = message.needs_state

    def on_start(self, message: actions.Start) -> None:
        self.position, self.digest = message.position, 0

    def on_join(self, message: actions.Join) -> None:
        self.void(message.step, message.slot)
        if message.slot == self.slot:
            self.takes_part, self.has_ended = True, False

    def on_drop(self, message: actions.Drop) -> None:
        self.void(message.step, message.slot)

    def void(self, step: int, slot: int) -> None:
        self.frames.setdefault(step, {}).pop(slot, None)

    def on_sendstate(self, message: actions.SendState) -> None:
        if message.donor == self.slot:
            assert not self.awaits_state
            assert self.position.step <= message.step
            self.requests.append(message)
            self.answer()

    def answer(self) -> None:
        """Send the states that are due at the beginning of a training step."""
        if kind_of(self.position.step + 1) is RoundKind.FIRST:
            due = [each for each in self.requests if each.step <= self.position.step]
            self.requests = [each for each in self.requests if each not in due]
            self.up += [("state", each, self.position, self.digest) for each in due]

    def on_close(self, message: actions.Close) -> None:
        assert self.awaits_state or message.step == self.position.step + 1 + len(self.closed)
        self.closed[message.step] = message
        # A site that has been replayed a step has no part in it.
        if not self.awaits_state and (self.has_ended or not self.takes_part):
            self.apply()

    def apply(self) -> None:
        """Apply the next closed step, if there is one."""
        message = self.closed.pop(self.position.step + 1, None)
        if message is None:
            return
        assert kind_of(message.step) is not RoundKind.COLLECTIVE or self.slot in message.contributors
        frames = self.frames.pop(message.step, {})
        self.digest = hash((self.digest, message.step, *((slot, frames[slot]) for slot in message.contributors)))
        self.position = Position(self.position.life, message.step)
        self.has_ended = False
        self.answer()

    def on_other(self, message: object) -> None:
        pass

    on_pause = on_resume = on_other

    def work(self, serial: int) -> None:
        """Send the frames of this site's step, which the hub may have closed already."""
        if self.takes_part and not self.awaits_state and not self.has_ended and not self.hangs:
            step = self.position.step + 1
            if step not in self.closed:
                self.frames.setdefault(step, {})[self.slot] = serial
            kind = kind_of(step)
            self.up += [("frame", step, serial), ("end", step, kind, self.idles and kind is RoundKind.FIRST)]
            self.has_ended = True
            self.apply()


# Random histories of the membership: sites, their links and the hub itself fail, at any moment and in any order


HISTORIES = int(os.environ.get("DADPLUG_HISTORIES", "150"))
SITE_TIMEOUT, PROGRESS_TIMEOUT = 5.0, 20.0
SLOTS = st.integers(0, 3)


class Histories(RuleBasedStateMachine):
    @initialize(
        count=st.integers(2, 4),
        min_sites=st.integers(1, 4),
        late=st.sampled_from(["wait", "skip"]),
        rounds=st.integers(0, 7),
        start=st.builds(StartTerms, st.integers(0, 4), st.sampled_from([0, 3000])),
    )
    def begin(self, count, min_sites, late, rounds, start):
        self.start = start._replace(sites=min(start.sites, count))
        self.rules_ = Rules(min(min_sites, count), late, 2.0, SITE_TIMEOUT, PROGRESS_TIMEOUT, max_lag=3)
        self.sites = [SimulatedSite(slot) for slot in range(count)]
        self.now = 0.0
        self.serial = self.lives = 0
        self.closed: dict[Position, tuple[int, ...]] = {}  # over all lives
        self.digests = {FRESH: 0}
        self.start_hub()
        for _ in range(rounds):
            self.settle()

    def start_hub(self) -> None:
        self.lives += 1
        names = [f"s{site.slot}" for site in self.sites]
        self.hub = Membership(names, self.rules_, 1000 * self.lives, self.now)
        self.hub.start = self.start
        self.frames: list[tuple] = []  # of the open step
        self.routes: dict[int, actions.SendState] = {}  # joiner: the last request for it
        self.ended: dict[int, float] = {}  # END of the open step: when
        self.waiting: list[SimulatedSite] = []  # to be admitted to a first round
        self.silent: dict[int, float] = {}  # since when a site is frozen
        self.paused = self.lacks_sites = self.admits = False
        self.opened = self.hub.open_step

    # The hub's process around the state machine.

    def carry_out(self, todo: list[actions.Action]) -> None:
        for action in todo:
            getattr(self, f"do_{type(action).__name__.lower()}")(action)
        if self.hub.started:
            for slot in orphaned(self.hub):
                self.carry_out(self.hub.close(slot, "no site holds the state", self.now))
            if self.hub.started and not self.hub.participants:
                self.restart_the_hub()  # the run has ended with its last site

    def admit_waiting(self) -> None:
        """Admit the sites that wait to the open step, which a site has ended."""
        waiting, self.waiting = self.waiting, []
        for site in waiting:
            self.carry_out(self.hub.dial(site.slot, self.now))

    def announce(self, action: object) -> None:
        for site in self.sites:
            if site.connected:
                site.down.append(action)

    def do_accept(self, action):
        self.sites[action.slot].connected = True
        self.sites[action.slot].down.append(action)

    def do_start(self, action):
        assert action.position == self.hub.position
        here = [site.slot for site in self.sites if site.connected]
        assert sorted([*action.absent, *here]) == list(range(len(self.sites)))
        if action.absent:
            assert 0 < self.start.sites <= len(here)
        if self.start.sites:  # until the sites require more
            self.rules_ = replace(self.rules_, min_sites=1)
        self.starting, self.admits = True, False
        self.digests[action.position] = 0
        self.announce(action)

    def do_join(self, action):
        assert action.step == self.opened
        assert self.starting or self.kind is RoundKind.FIRST, "a site joins in the middle of a training step"
        self.ended.pop(action.slot, None)
        self.announce(action)
        self.sites[action.slot].down.extend(self.frames)

    def do_sendstate(self, action):
        assert self.hub.sites[action.donor].phase is Phase.MEMBER
        assert not self.hub.sites[action.donor].behind(self.hub.step)
        self.routes[action.joiner] = action
        self.sites[action.donor].down.append(action)

    def do_drop(self, action):
        self.ended.pop(action.slot, None)
        self.silent.pop(action.slot, None)
        self.routes = {j: each for j, each in self.routes.items() if action.slot not in (j, each.donor)}
        self.frames = [frame for frame in self.frames if frame[2] != action.slot]
        self.sites[action.slot].disconnect()
        self.announce(action)

    def do_skip(self, action):
        assert self.rules_.late == "skip" or not action.late
        assert action.slot not in self.ended
        assert self.kind is not RoundKind.COLLECTIVE or self.hub.sites[action.slot].phase is Phase.JOINING

    def do_close(self, action):
        position = Position(self.hub.life, action.step)
        assert position not in self.closed, "a step has two sets of contributors"
        assert self.kind is not RoundKind.FIRST or len(action.contributors) >= self.rules_.min_sites
        assert set(action.contributors) == set(self.ended), "the contributors are not those that have ended the step"
        assert action.step == self.opened
        self.closed[position] = action.contributors
        frames = {slot: content for _, _, slot, content in self.frames}
        content = ((slot, frames[slot]) for slot in action.contributors)
        before = self.digests[Position(self.hub.life, action.step - 1)]
        self.digests[position] = hash((before, action.step, *content))
        self.announce(action)
        self.opened += 1
        self.starting = self.admits = False
        self.ended, self.frames = {}, []

    def do_pause(self, action):
        slow = [self.hub.sites[slot].phase is Phase.JOINING for slot in self.routes]
        assert action.waiting_for or any(slow), "a pause that waits for nobody, and no state is under way"
        self.paused, self.lacks_sites = True, bool(action.waiting_for)

    def do_resume(self, action):
        assert self.paused
        if self.lacks_sites:
            self.ended = dict.fromkeys(self.ended, self.now)  # such pauses do not count
        self.paused = self.lacks_sites = False

    @property
    def kind(self) -> RoundKind:
        return kind_of(self.opened)

    # What happens.

    @rule(slot=SLOTS)
    def dial(self, slot):
        site = self.sites[slot % len(self.sites)]
        if site.connected or site in self.waiting:
            return
        if self.hub.started:
            self.waiting.append(site)
            if self.admits:
                self.admit_waiting()
        else:
            self.carry_out(self.hub.dial(site.slot, self.now))

    @rule(slots=st.sets(SLOTS, min_size=1), rounds=st.integers(1, 3), dialling=st.booleans())
    def train(self, slots, rounds, dialling):
        """Some sites work, and all their messages arrive; those without a connection may dial."""
        for slot in sorted(slots) * rounds:
            if dialling:
                self.dial(slot)
            self.deliver_down(slot, 1000)
            self.work(slot)
            self.deliver_up(slot, 1000)

    @rule(slot=SLOTS)
    def work(self, slot):
        self.serial += 1
        self.sites[slot % len(self.sites)].work(self.serial)

    @rule(slot=SLOTS, idles=st.booleans())
    def run_out_of_data(self, slot, idles):
        self.sites[slot % len(self.sites)].idles = idles

    @rule(min_sites=st.integers(1, 4), late=st.sampled_from(["wait", "skip"]))
    def replace_rules(self, min_sites, late):
        if self.hub.started:
            self.rules_ = replace(self.rules_, min_sites=min(min_sites, len(self.sites)), late=late)
            self.hub.replace_rules(self.rules_)

    @rule(slot=SLOTS, count=st.integers(1, 3))
    def deliver_up(self, slot, count):
        site = self.sites[slot % len(self.sites)]
        for _ in range(count):
            if not site.up or site.frozen:
                return
            kind, *fields = site.up.popleft()
            self.hub.sites[site.slot].progressed = self.now
            getattr(self, f"take_{kind}")(site, *fields)

    def is_open(self, site, step) -> bool:
        """Return whether a step is the open one, and a site takes part in it."""
        return self.hub.started and step == self.opened and self.hub.sites[site.slot].phase is Phase.MEMBER

    def take_frame(self, site, step, content):
        if self.is_open(site, step):
            frame = ("frame", step, site.slot, content)
            self.frames.append(frame)
            for other in self.sites:
                if other.connected and other is not site:
                    other.down.append(frame)

    def take_end(self, site, step, kind, idle):
        if self.is_open(site, step):
            assert kind is self.kind
            self.hub.round = kind
            self.admits = kind is RoundKind.FIRST
            if self.admits:
                self.admit_waiting()
            self.ended[site.slot] = self.now
        self.carry_out(self.hub.end(site.slot, step, self.now, idle))

    def take_state(self, site, request, position, digest):
        if self.routes.get(request.joiner) is request:
            self.sites[request.joiner].down.append(("state", position, digest))

    def take_joined(self, site, position):
        self.carry_out(self.hub.joined(site.slot, position, self.now))

    @rule(slot=SLOTS, count=st.integers(1, 5))
    def deliver_down(self, slot, count):
        site = self.sites[slot % len(self.sites)]
        for _ in range(count):
            if site.down and not site.frozen:
                site.receive()

    @rule(slot=SLOTS, dies=st.booleans())
    def disconnect(self, slot, dies):
        """A connection closes, in half of the cases since the process has been killed."""
        site = self.sites[slot % len(self.sites)]
        if site in self.waiting:
            self.waiting.remove(site)
        if site.connected:
            self.carry_out(self.hub.close(site.slot, "connection closed", self.now))
        if dies:
            site.position, site.digest = FRESH, 0

    @rule(slot=SLOTS)
    def freeze(self, slot):
        site = self.sites[slot % len(self.sites)]
        if site.connected:
            site.frozen = True
            self.silent.setdefault(site.slot, self.now)

    @rule(slot=SLOTS)
    def hang(self, slot):
        self.sites[slot % len(self.sites)].hangs = True

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 30.0]))
    def let_time_pass(self, seconds):
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 1.0)
            for slot, since in list(self.silent.items()):
                if self.now >= since + SITE_TIMEOUT:
                    self.carry_out(self.hub.close(slot, "silent", self.now))
            self.carry_out(self.hub.tick(self.now))

    @precondition(lambda self: self.hub.started)
    @rule()
    def restart_the_hub(self):
        for site in self.sites:
            site.disconnect()
        self.start_hub()

    # What always holds.

    @invariant()
    def replicas_are_equal(self):
        for site in self.sites:
            assert site.digest == self.digests[site.position], f"replica {site.slot} differs at {site.position}"

    @invariant()
    def nobody_waits_for_ever(self):
        for slot, since in self.ended.items():
            longest = 4 * (PROGRESS_TIMEOUT + SITE_TIMEOUT)  # a late site catches up with 3 steps
            assert self.lacks_sites or self.now - since <= longest + 30.0, f"site {slot} waits"

    def teardown(self):
        """Once all are well, all become members, and steps close with all of them."""
        for site in self.sites:
            site.frozen = site.hangs = site.idles = False
        self.silent.clear()
        for _ in range(20):
            self.settle()
            last = self.closed.get(Position(self.hub.life, self.hub.step), ())
            if len(last) == len(self.sites):
                break
        assert len(last) == len(self.sites)
        step = self.hub.step
        self.settle()
        self.settle()
        assert self.hub.step >= step + 2
        self.replicas_are_equal()

    def settle(self):
        for site in self.sites:
            self.dial(site.slot)
        for site in self.sites * 2:
            self.deliver_down(site.slot, 1000)
            self.serial += 1
            site.work(self.serial)
            self.deliver_up(site.slot, 1000)
        self.now += 0.01


Histories.TestCase.settings = settings(
    max_examples=HISTORIES,
    stateful_step_count=40,
    deadline=None,
    phases=[Part.explicit, Part.reuse, Part.generate, Part.shrink],
    suppress_health_check=list(HealthCheck),
)
TestHistories = pytest.mark.timeout(300 + HISTORIES)(Histories.TestCase)
