"""Hubs that run in a thread on loopback, and simple sites to test them."""

import itertools
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hub_kits
from frame_parts import Frame, Reader
from msgspec.structs import replace
from support import free_port, until

from dadplug.hub.pki.kits import Kit
from dadplug.hub.secure import tls
from dadplug.hub.server.hub import Hub
from dadplug.hub.server.journal import Journal
from dadplug.hub.wire.messages import (
    FRESH,
    VERSION,
    Close,
    Head,
    Hello,
    Kind,
    Leave,
    Start,
    Welcome,
    frames,
    pack_control,
    read_control,
)
from dadplug.hub.wire.streams import SendQueue, Stream
from dadplug.parameter_server.service import SequencerHost

TIMEOUT = 60.0  # seconds, for a busy machine
_INSTANCES = itertools.count(1)


class HubLog:
    """Hub whose journal is read.

    Attributes:
        log: lines of its journal.
    """

    log: list[str]

    def await_line(self, text: str, timeout: float = TIMEOUT) -> str:
        """Wait for a line of the journal that contains a text, and return it."""
        found: list[str] = []

        def look() -> bool:
            found[:] = [line for line in self.log if text in line]
            return bool(found)

        until(look, lambda: f"no line with {text!r} in {self.log}", timeout)
        return found[0]


class RunningHub(HubLog):
    """A hub that runs.

    Attributes:
        hub: the hub.
        kits: folder of the kits.
        address: host and port of the hub.
    """

    def __init__(self, hub: Hub, kits: Path, log: list[str]) -> None:
        self.hub, self.kits, self.address, self.log = hub, kits, hub.address, log

    def kit(self, name: str) -> Kit:
        """Load the kit of a site."""
        return Kit.load(self.kits / name)


@contextmanager
def running_hub(
    folder: Path,
    sites: tuple[str, ...] = ("a", "b"),
    site_timeout: float = TIMEOUT,
    policy: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[RunningHub]:
    """Run a hub in a thread.

    Args:
        folder: folder for the kits; they are made if it is missing. Their roster has the hub's address.
        sites: names of the sites.
        site_timeout: seconds of silence after which a site counts as lost.
        policy: policy of each site.
        settings: further arguments of `Hub`.
    """
    if not folder.exists():
        address = f"127.0.0.1:{free_port()}"
        policies = dict.fromkeys(sites, policy or {})
        hub_kits.make(folder, hub=address, hub_names=[], sites=list(sites), hub_at=sites[0], policy=policies)
    log: list[str] = []
    kit = Kit.load(folder / "hub")
    settings = {"service": SequencerHost(sites)} | settings
    hub = Hub(kit, site_timeout=site_timeout, journal=Journal(log.append), **settings)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            hub.run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="hub", daemon=True)
    thread.start()
    try:
        yield RunningHub(hub, folder, log)
    finally:
        hub.stop("the test is over")
        thread.join(TIMEOUT)
        if failures:
            raise failures[0]
        assert not thread.is_alive(), "the hub has not ended"


def add_site(hub: RunningHub, names: str, **entries: Any) -> None:
    """Provision the project of a running hub with a further site, whose name is the last one."""
    address = "{}:{}".format(*hub.address)
    hub_kits.make(hub.kits, **{"hub": address, "hub_names": [], "sites": list(names), "hub_at": names[0]} | entries)
    hub.await_line(f"the roster has new sites: {names[-1]}")


class TestSite:
    """A site that does what a test tells it, one thing at a time.

    Args:
        kit: its kit.
        address: address of the hub.
        channel: channel of its connection.
        hello: fields of its first message that differ from the usual ones.

    Attributes:
        answer: the hub's answer to its first message.
        received: number of frames of the hub.
        taken: frames of the hub that `take` has not returned, pings excluded.
        pings: pings of the hub.
        queue: frames to the hub.
        lost: how the connection was lost; None if it was not.
        redials: whether `take` connects again when the connection is lost.
        others: sites that get on while `take` waits.
    """

    __test__ = False

    def __init__(self, kit: Kit, address: tuple[str, int], channel: str = "training", **hello: Any) -> None:
        self.kit, self.address, self.slot = kit, address, kit.slot
        self.hello = replace(Hello(VERSION, next(_INSTANCES), FRESH, channel), **hello)
        self.received = 0
        self.taken: list[Frame] = []
        self.pings: list[Frame] = []
        self.queue = SendQueue()
        self.answer: Any = None
        self.redials = False
        self.others: list[TestSite] = []
        self.lost: OSError | None = None
        self.dial()

    def dial(self) -> None:
        """Connect to the hub, again if need be, and wait for its answer."""
        end = time.monotonic() + TIMEOUT
        while not self._try():
            assert time.monotonic() < end, f"the hub cannot be reached: {self.lost}"

    def _try(self) -> bool:
        """Connect once; return whether the hub has answered."""
        self.lost, self._answered = None, False
        try:
            self.stream = Stream(tls.dial(self.kit, TIMEOUT, self.address))
            self._reader = Reader(self.stream.connection)
            self._send(pack_control(replace(self.hello, received=self.received), self.slot))
        except OSError as error:
            self.lost = error
            return False
        until(lambda: self.pump() or self._answered or self.lost is not None)
        return self._answered

    def _send(self, frame: bytes) -> None:
        self.stream.notes.append(frame)
        while not self.stream.flush(SendQueue()):
            select.select([], [self.stream.connection], [], TIMEOUT)

    def pump(self) -> None:
        """Receive what has arrived and send what the connection takes."""
        try:
            self._pump()
        except OSError as error:  # what arrived before may still be of interest
            self.lost = error

    def _pump(self) -> None:
        while self.lost is None and (frame := self._reader.next()) is not None:
            if not self._answered:
                self.answer = read_control(frame.body, 100)
                self._answered = True
                if isinstance(self.answer, Welcome) and self.answer.resumed:
                    self.queue.resume(self.answer.received)
            elif frame.head.kind is Kind.PING:
                self.pings.append(frame)
                self.queue.acknowledge(frame.head.step)
            else:
                self.received += 1
                self.taken.append(frame)
        if self._answered and self.lost is None:
            self.stream.flush(self.queue)

    def send(self, kind: Kind, content: bytes = b"", wait: bool = True, **fields: int) -> None:
        """Send a message in pieces.

        Args:
            kind: its kind.
            content: the message.
            wait: whether to wait until it is sent.
            fields: fields of its head; step 1 by default.
        """
        head = Head(kind, **({"slot": self.slot, "step": 1} | fields))
        if not content:
            self.queue.append(head.pack())
        for packed, body in frames(head, memoryview(content)):
            self.queue.append(packed + bytes(body))
        while wait and self.queue.unsent_bytes:
            self.pump()
            time.sleep(0.001)

    def control(self, message: Any) -> None:
        """Send a control message."""
        self.queue.append(pack_control(message, self.slot))
        until(lambda: self.pump() or not self.queue.unsent_bytes)

    def leave(self, reason: str = "") -> None:
        """Say goodbye."""
        self.control(Leave(reason))

    def ping(self) -> None:
        """Acknowledge what has been received."""
        self.stream.notes.append(Head(Kind.PING, self.slot, step=self.received).pack())
        self.pump()

    def take(self, kind: Kind | None = None) -> Frame:
        """Wait for a frame, of a kind if given, and return it; those before it of other kinds are kept."""

        def find() -> Frame | None:
            return next((each for each in self.taken if kind is None or each.head.kind is kind), None)

        def get_on() -> None:
            if self.lost is not None and self.redials:
                self.dial()
            for site in (self, *self.others):
                site.pump()

        until(lambda: find() is not None or get_on() or find() is not None, lambda: f"no {kind} frame: {self.lost}")
        frame = find()
        assert frame is not None
        self.taken.remove(frame)
        return frame

    def message(self, nbytes: int, kind: Kind = Kind.PAYLOAD) -> bytes:
        """Wait for a message of a size, and return it."""
        parts: list[bytes] = []
        while sum(map(len, parts)) < nbytes:
            parts.append(self.take(kind).body)
        return b"".join(parts)

    def action(self, *types: type) -> Any:
        """Wait for an action of one of some types, and return it; others are left out."""
        while True:
            found = read_control(self.take(Kind.CONTROL).body, 100)
            if isinstance(found, types):
                return found

    def cut(self) -> None:
        """Reset the connection, as if the link had failed."""
        raw = socket.socket(fileno=self.stream.connection.detach())
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        raw.close()

    def close(self) -> None:
        """Close the connection."""
        self.stream.connection.close()


def together(hub: RunningHub, names: str = "ab", channel: str = "training") -> list[TestSite]:
    """Return sites that have all connected, and whose training has started."""
    sites = [TestSite(hub.kit(name), hub.address, channel) for name in names]
    for site in sites if channel == "training" else ():
        site.action(Start)
    return sites


def close_step(sites: list[TestSite], step: int = 1) -> None:
    """Let sites end a step, and wait until it is closed."""
    for site in sites:
        site.send(Kind.END, step=step)
    for site in sites:
        assert site.action(Close).step == step


def exchange(a: TestSite, b: TestSite) -> None:
    """Check that two sites go on: what one sends reaches the other."""
    a.send(Kind.PAYLOAD, b"still here")
    assert b.message(10) == b"still here"
