"""Sequencers at the hub: one for each parameter server of a run, to which each site opens a stream.

The first message on a stream names the parameter server by a key that only its sites know. If it is a start, the
sequencer starts once each site has sent one with the same settings; otherwise all sites get the same error. If it is a
return, the stream replaces that of a lost process of the same site. A site's rank is what its certificate says. A
sequencer ends with the last site that leaves.
"""

from __future__ import annotations

import socket
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from ..errors import MessageError
from ..exchange.traffic import Traffic
from . import hub_messages as messages
from .dealer import OwnDealer, SharedDealer
from .holder import HUB
from .hub_messages import KEY_CHARACTERS, Settings
from .sequencer import Sequencer
from .service import SequencerService

MEMORY = 1 << 30  # bytes of a sequencer's messages
_MOST_SEQUENCERS = 8
_HELLO_SECONDS = 10.0
_START_SECONDS = 60.0  # for the others, if the first site does not tell


class _Start:
    """Start of one sequencer, for which sites come in one by one.

    Args:
        first: the first site.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.settings: dict[int, Settings] = {}  # by rank; sites without valid ones have none
        self.sockets: dict[int, socket.socket] = {}
        self.problem = ""


class SequencerHost:
    """Service of a hub that runs sequencers; see `dadplug.hub.hub_streams.StreamService`.

    Args:
        names: names of the sites, by rank.
        memory: bytes that the messages of one sequencer may take.
    """

    def __init__(self, names: Sequence[str], memory: int = MEMORY) -> None:
        self._names = list(names)
        self._memory = memory
        self._changed = threading.Condition()
        self._starts: dict[str, _Start] = {}
        self._running: dict[str, SequencerService] = {}
        self._events: deque[str] = deque()
        self._closed = False

    def accept(self, slot: int, connected: socket.socket) -> None:
        """Take a stream that a site has opened; return at once."""
        threading.Thread(target=self._greet, args=(slot, connected), name="dadplug-start", daemon=True).start()

    def begin(self, names: Sequence[str]) -> None:
        """Take the names of the sites of the next run, by rank."""
        with self._changed:
            self._names = list(names)

    def events(self) -> Iterator[str]:
        """Yield what has happened since the last call."""
        while self._events:
            yield self._events.popleft()

    def close(self) -> None:
        """End all sequencers: the hub ends, and the streams are closed."""
        with self._changed:
            self._closed = True
            services = [*self._running.values()]
            self._changed.notify_all()
        for service in services:
            service.close()

    def _greet(self, slot: int, connected: socket.socket) -> None:
        try:
            connected.settimeout(_HELLO_SECONDS)
            key, settings = self._check(messages.read(connected))
            if settings is None:
                self._take_back(slot, key, connected)
            else:
                self._take(slot, key, settings, connected)
        except MessageError as error:
            self._events.append(f"{self._names[slot]}: no sequencer: {error}")
            _answer({slot: connected}, str(error), self._names)
        except OSError:
            connected.close()
        except Exception as error:  # a fault while one site is served ends its stream
            for line in traceback.format_exception(error):
                self._events.append(f"fault of the hub: {self._names[slot]}: {line.rstrip()}")
            connected.close()

    def _check(self, message: Any) -> tuple[str, Any]:
        """Return the key of a site's first message; and settings, which are not checked, if it is a start."""
        if type(message) is not tuple or len(message) != 3 or type(message[0]) is not int:
            raise MessageError("the first message of a site is damaged")
        version, key, settings = message
        if version != messages.VERSION:
            raise MessageError(
                f"this site speaks version {version} of the protocol of parameter servers, the hub version "
                f"{messages.VERSION}: upgrade one"
            )
        if type(key) is not str or len(key) != KEY_CHARACTERS:
            raise MessageError("the key of a parameter server is damaged")
        return key, settings

    def _take_back(self, slot: int, key: str, connected: socket.socket) -> None:
        """Take a site that returns."""
        with self._changed:
            service = self._running.get(key)
        if service is None:
            raise MessageError("there is no such training at the hub, it may have ended")
        messages.write(connected, ("", self._names))
        self._events.append(f"{self._names[slot]} returns to its parameter server")
        service.admit(slot, connected)

    def _take(self, slot: int, key: str, settings: Any, connected: socket.socket) -> None:
        """Take a site that starts; the first one waits for the others, and starts the sequencer."""
        with self._changed:
            start = self._starts.get(key)
            if start is None:
                if key in self._running:
                    raise MessageError("this parameter server has been started before")
                if len(self._running) + len(self._starts) >= _MOST_SEQUENCERS:
                    raise MessageError(f"the hub serves {_MOST_SEQUENCERS} parameter servers already: it takes no more")
                start = self._starts[key] = _Start(slot)
            if slot in start.sockets:
                raise MessageError("this site takes part already")
            start.sockets[slot] = connected
            try:
                start.settings[slot] = messages.check_settings(settings, len(self._names))
            except MessageError as error:
                start.problem = start.problem or f"{self._names[slot]}: {error}"
            self._changed.notify_all()
            if start.first != slot:
                return
            seconds = start.settings[slot].timeout if slot in start.settings else _START_SECONDS
            self._changed.wait_for(lambda: self._closed or len(start.sockets) == len(self._names), seconds)
            del self._starts[key]
            missing = [name for rank, name in enumerate(self._names) if rank not in start.sockets]
            if missing:
                start.problem = f"{', '.join(missing)} has not started the parameter server within {seconds:g} s"
            start.problem = start.problem or self._difference(start.settings)
            if not start.problem:
                self._running[key] = self._begin(key, start)
        if start.problem:
            self._events.append(f"no sequencer: {start.problem}")
            _answer(start.sockets, start.problem, self._names)

    def _begin(self, key: str, start: _Start) -> SequencerService:
        settings = start.settings[start.first]
        for connected in start.sockets.values():
            with suppress(OSError):  # the service finds out that the site is lost
                messages.write(connected, ("", self._names))
        workers, shared = settings.workers, settings.deal == "shared"
        dealer = SharedDealer(workers, settings.in_trainer) if shared else OwnDealer(workers)
        names = ", ".join(self._names[rank] for rank in workers)
        self._events.append(f"a sequencer orders the contributions of {names}")
        return SequencerService(
            start.sockets,
            workers,
            Sequencer(workers, settings.make_rules(), balanced=not shared),
            dealer,
            min(settings.limit, self._memory),
            settings.site_timeout,
            Traffic(),
            HUB,
            settings.in_trainer,
            memory=self._memory,
            on_end=lambda: self._end(key),
        )

    def _difference(self, settings: dict[int, Settings]) -> str:
        """Return the first setting in which two sites differ; empty if none does."""
        (first, one), *others = sorted(settings.items())
        for rank, other in others:
            for field, here, there in zip(Settings._fields, one, other, strict=True):
                if here != there:
                    found = f"{field} is {here} at {self._names[first]}, and {there} at {self._names[rank]}"
                    return f"the sites start a parameter server with different settings: {found}"
        return ""

    def _end(self, key: str) -> None:
        """Take note that all sites of a sequencer have left; called in its thread."""
        with self._changed:
            service = self._running.pop(key)
        self._events.append("a sequencer has ended: all of its sites have left")
        service.close()


def _answer(sockets: dict[int, socket.socket], problem: str, names: Sequence[str]) -> None:
    """Refuse sites, and close their streams."""
    for connected in sockets.values():
        with suppress(OSError):
            messages.write(connected, (problem, list(names)))
        connected.close()
