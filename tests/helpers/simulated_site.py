"""Site without a network, for random histories of the hub's membership."""

from __future__ import annotations

from collections import deque

from dadplug.hub.wire import messages as actions
from dadplug.hub.wire.messages import FRESH, Position, RoundKind


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
            self.closed = {}
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
        assert not self.awaits_state
        assert self.position.step == message.step
        self.up.append(("state", message.joiner, self.position, self.digest))

    def on_close(self, message: actions.Close) -> None:
        assert not self.awaits_state, "a step has closed while a state was under way"
        assert message.step == self.position.step + 1 + len(self.closed)
        self.closed[message.step] = message
        if self.has_ended or not self.takes_part:  # a site that has been replayed a step has no part in it
            self.apply()

    def apply(self) -> None:
        """Apply the next closed step, if there is one."""
        message = self.closed.pop(self.position.step + 1, None)
        if message is None:
            return
        frames = self.frames.pop(message.step, {})
        self.digest = hash((self.digest, message.step, *((slot, frames[slot]) for slot in message.contributors)))
        self.position = Position(self.position.life, message.step)
        self.has_ended = False

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
