"""Messages of the parameter manager to sites that have not opened their channel yet."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import FrameError
from .frames import Head
from .session import FULL_BYTES, Session
from .stream import PackedFrame, SendQueue


class EarlyMessages:
    """Messages that are kept until their receivers open the channel."""

    def __init__(self) -> None:
        self._queues: dict[int, SendQueue] = {}  # by slot
        self._closed: set[int] = set()  # slots of sites that have opened and closed it

    def keep(self, slot: int, frame: PackedFrame, name: str) -> None:
        """Keep a frame, unless the site has closed the channel.

        Args:
            slot: the receiver.
            frame: the frame.
            name: name of the receiver.

        Raises:
            FrameError: if too much is kept.
        """
        if slot in self._closed:
            return
        queue = self._queues.setdefault(slot, SendQueue())
        queue.append(frame)
        if queue.nbytes > FULL_BYTES:
            raise FrameError(f"{name} has not opened the channel that {queue.nbytes} bytes wait for")

    def pass_on(
        self, session: Session, head: Head, body: memoryview, sessions: Mapping[tuple[str, int], Session]
    ) -> None:
        """Pass a message on to one site, or keep it until the site opens the channel; that of a site that left is lost.

        Args:
            session: the sender.
            head: head of the message.
            body: its body.
            sessions: all sessions, by channel and slot.

        Raises:
            FrameError: if too much is kept.
        """
        frame = b"".join((head._replace(slot=session.slot).pack(), body))
        receiver = sessions.get((session.channel, head.slot))
        if receiver is not None:
            receiver.send(frame)
        elif training := sessions.get(("training", head.slot)):
            self.keep(head.slot, frame, training.name)

    def hand_over(self, session: Session) -> None:
        """Hand a site's frames over to its session, which has been opened."""
        self._closed.discard(session.slot)
        session.queue = self._queues.pop(session.slot, session.queue)

    def close(self, slot: int) -> None:
        """Take note that a site has closed the channel."""
        self._closed.add(slot)

    def clear(self) -> None:
        """Forget everything: the sites begin a new run."""
        self._queues.clear()
        self._closed.clear()
