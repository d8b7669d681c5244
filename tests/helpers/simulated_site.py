"""Site without a network, for random histories of the hub's membership."""

from __future__ import annotations

from collections import deque

from dadplug.hub import actions
from dadplug.hub.actions import FRESH, Position


class SimulatedSite:
    """A site; what it sends to the hub goes into `up`, what it has been sent waits in `down`."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.instance = slot
        self.position, self.digest = FRESH, 0
        self.disconnect()

    def disconnect(self) -> None:
        self.connected = self.frozen = self.hangs = self.is_leaving = False
        self.up: deque[tuple] = deque()
        self.down: deque[object] = deque()
        self.awaits_state = self.takes_part = self.has_ended = False
        self.frames: dict[int, dict[int, object]] = {}

    def receive(self) -> None:
        message = self.down.popleft()
        if self.is_leaving:
            return
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
            self.up.append(("joined", position))

    def on_accept(self, message: actions.Accept) -> None:
        if message.position is not None and not message.needs_state:
            self.position = Position(message.position.life, self.position.step)
        self.dialled = self.position
        self.awaits_state, self.session = message.needs_state, message.session

    def on_start(self, message: actions.Start) -> None:
        self.frames, self.takes_part, self.has_ended = {}, False, False
        self.awaits_state = self.slot not in message.holders
        if not self.awaits_state and self.position == self.dialled:
            self.position = message.position
        elif not self.awaits_state:  # it has received another state meanwhile
            self.up.append(("lost",))
            self.is_leaving = True

    def on_join(self, message: actions.Join) -> None:
        self.frames.setdefault(message.step, {}).pop(message.slot, None)
        if (message.slot, message.session) == (self.slot, self.session):
            self.takes_part, self.has_ended = True, False

    def on_drop(self, message: actions.Drop) -> None:
        self.frames.setdefault(message.step, {}).pop(message.slot, None)

    def on_sendstate(self, message: actions.SendState) -> None:
        assert not self.awaits_state
        assert self.position.step == message.step
        self.up.append(("state", message.joiner, self.position, self.digest))

    def on_close(self, message: actions.Close) -> None:
        assert not self.awaits_state, "a step has closed while a state was under way"
        assert message.step == self.position.step + 1
        frames = self.frames.pop(message.step, {})
        self.digest = hash((self.digest, message.step, *((slot, frames[slot]) for slot in message.contributors)))
        self.position = Position(self.position.life, message.step)
        self.has_ended = False

    def on_other(self, message: object) -> None:
        pass

    on_skip = on_redo = on_pause = on_resume = on_other

    def work(self, serial: int) -> None:
        """Send the frames of the open step, as this site sees it."""
        if self.takes_part and not self.awaits_state and not self.has_ended and not self.hangs:
            step = self.position.step + 1
            self.frames.setdefault(step, {})[self.slot] = serial
            self.up += [("frame", step, serial), ("end", step)]
            self.has_ended = True
