"""Random histories of keys: sites leave and join at any moment, and take the hub's announcements at their own pace.

The hub sends all that happens in one order; each site has a queue of what it has not taken yet. A site sends in the
step that it knows as open, once it has all keys. Sites that have left try to open what is sent after that.
DADPLUG_HISTORIES sets the number of histories.
"""

import os
from collections import deque

import hub_kits
import pytest
from frame_parts import read
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Part
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from key_groups import Group

from dadplug.errors import SealingError
from dadplug.hub.pki.kits import Kit
from dadplug.hub.secure.epochs import Epochs, answers
from dadplug.hub.wire.messages import Head, Kind

SITES = "abcd"
KITS: list[Kit] = []


@pytest.fixture(scope="module", autouse=True)
def _kits(tmp_path_factory):
    folder = hub_kits.make(tmp_path_factory.mktemp("epochs") / "kits", sites=list(SITES))
    KITS[:] = [Kit.load(folder / name) for name in SITES]


def opens(site: Epochs, head: Head, body: bytes) -> bool:
    """Return whether a site finds something in a frame."""
    try:
        return bool(site.open(head, body))
    except SealingError:
        return False


class KeyHistories(RuleBasedStateMachine):
    """A run of sites a, b and c, to which d may be added."""

    def __init__(self) -> None:
        super().__init__()
        self.group = Group(KITS, (0, 1, 2))
        self.sites = self.group.sites
        self.queues = {slot: deque() for slot in self.sites}
        self.steps = dict.fromkeys(self.sites, 1)  # as the sites know them
        self.step = 1
        self.round: list[tuple] = []  # frames of the open step
        self.ghosts: list = []  # sites that have left, with the slot
        self.read = dict.fromkeys(self.sites, 0)
        self.offers: dict[int, bytes] = {}

    def announce(self, *event) -> None:
        for queue in self.queues.values():
            queue.append(event)

    def take(self, slot: int) -> None:
        """Let a site take the next announcement."""
        site, (what, *event) = self.sites[slot], self.queues[slot].popleft()
        if what == "frame":
            sender, content, head, body = event
            if sender != slot:
                self.check(slot, site.open(head, body))
        elif what == "key" and event[0] == slot:
            self.check(slot, site.take(*event[1:]))
        elif what == "leave":
            site.leave(event[0])
        elif what == "join" and event[0] == slot:
            site.enter(event[3])
        elif what == "join":
            site.take(event[0], event[2])
            site.join(event[0], event[1])
        elif what == "close":
            site.confirm(*event)
            self.steps[slot] = event[0] + 1
        assert not site.refused
        while site.posts:
            receiver, content = site.posts.popleft()
            if receiver in self.queues and answers(content, self.offers[receiver]):
                self.queues[receiver].append(("key", receiver, slot, content))

    def check(self, slot: int, opened: list) -> None:
        for head, content in opened:
            assert bytes(content) == f"{head.slot} in {head.step}".encode()
            self.read[slot] += 1

    def settle(self) -> None:
        while any(self.queues.values()):
            for slot, queue in self.queues.items():
                if queue:
                    self.take(slot)

    @rule(slot=st.integers(0, 3), count=st.integers(1, 8))
    def get_on(self, slot, count):
        for _ in range(min(count, len(self.queues.get(slot, ())))):
            self.take(slot)

    @rule(slot=st.integers(0, 3))
    def send(self, slot):
        site = self.sites.get(slot)
        if site is None or not site.complete or self.steps[slot] != self.step:
            return
        content = f"{slot} in {self.step}".encode()
        for head, body in read(*site.frames(Head(Kind.PAYLOAD, slot, step=self.step), memoryview(content))):
            self.round.append(("frame", slot, content, head, body))
            self.announce(*self.round[-1])
            for ghost, left in self.ghosts:
                if slot != left:
                    assert not opens(ghost, head, body)

    @precondition(lambda self: len(self.sites) > 1)
    @rule(slot=st.integers(0, 3))
    def leave(self, slot):
        if slot not in self.sites or not any(each.members for other, each in self.sites.items() if other != slot):
            return  # nobody would have the state of the run
        left = self.sites.pop(slot)
        del self.queues[slot]
        self.round = [each for each in self.round if each[1] != slot]
        self.announce("leave", slot)
        if left.complete and left.members:
            self.settle()  # members that have not been told may still send what the site can read
            self.ghosts.append((left, slot))

    @precondition(lambda self: len(self.sites) < len(SITES) and len(self.sites) > 0)
    @rule(slot=st.integers(0, 3))
    def join(self, slot):
        if slot in self.sites:
            return
        joiner = self.group.fresh(slot)
        offer, members = joiner.offer(), list(self.sites)
        self.offers[slot] = offer
        self.sites[slot], self.queues[slot] = joiner, deque()
        self.steps[slot], self.read[slot] = self.step, 0
        self.announce("join", slot, self.step, offer, members)
        self.queues[slot].extend(self.round)

    @rule()
    def close(self):
        """Close the step, once all sites have taken everything, as all have ended it then."""
        self.settle()
        for slot in list(self.sites):
            assert self.sites[slot].complete
            self.send(slot)
        before = dict(self.read)
        self.settle()
        assert all(self.read[slot] - before[slot] >= len(self.sites) - 1 for slot in self.sites)
        self.announce("close", self.step, list(self.sites))
        self.round.clear()
        self.step += 1


KeyHistories.TestCase.settings = settings(
    max_examples=int(os.environ.get("DADPLUG_HISTORIES", "20")),
    stateful_step_count=30,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Part.generate, Part.shrink],
)
TestKeyHistories = KeyHistories.TestCase
