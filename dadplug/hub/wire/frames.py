"""Wire format between sites and the hub: frames of a fixed head and at most 128 kB.

**Pieces.** A message of any size is cut into frames, so that the hub passes its first bytes on before it has the last
ones, holds at most one frame of each connection, and can mix the messages of several sites on one connection: a slow
sender holds up nobody. The head takes 32 bytes, 0.02% of a full frame, which fills eight records of TLS. The hub passes
a piece on once it is whole, 10 ms at 100 Mbit/s. Where payloads take a second line from the hub, pieces are half as
large.

**Sizes.** A head is checked as soon as it is complete, before anything is allocated for the body. Pieces of a message
come in order and without gaps, and within the size that the receiver expects: sites know the sizes of gathers and sums
before a step. Where they do not (objects, states, late rows without a header), an exchange of 8 bytes with the size
goes first, and is checked against a limit. An unexpected frame is an error of the connection, which is closed: there is
no way to resume in the middle of a stream.

**Exchanges.** A frame belongs to a step and, within it, to an exchange. Exchanges are numbered by the plan, not by
counting: a site that learns of a drop sooner than another may leave out an exchange that has become empty. What the
interface `dadplug.exchange.Transport` offers becomes:

- gather: each site sends a `PAYLOAD`, which the hub passes on to all others;
- all-reduce: each site sends a `SUMMAND`; the hub adds them up in the order of slots and sends the `SUM` to all, with
  the number of the attempt as its tag: sums of an older attempt are void;
- broadcast: the contributor with the lowest slot sends a `PAYLOAD`, the others none; objects: two gathers, sizes first;
- the reason why a site leaves: `Leave`, which the hub announces as the reason of `Drop`.

Each step ends with `END`; set-up collectives are steps of their own. `STATE` goes from a member to a joiner, `MESSAGE`
(of byte streams) from one site to another, or to the hub. The hub passes both on to one site. In what a site sends, the
slot names the receiver of these two kinds, and the sender in all others; in what the hub sends, always the sender.

**Control messages** are the actions of `dadplug.hub.wire.messages` and the classes below, encoded by the codec, which runs no
code that the sender chooses; types and ranges of their fields are checked as well. The hub puts its announcements into
the same sequence as the frames, and replays them with these.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, NamedTuple, get_type_hints

import torch

from ...errors import DamagedError, FrameError
from ...exchange import codec
from ...exchange.transport import Requirements
from .messages import (
    Accept,
    Close,
    Continue,
    Drop,
    Grow,
    Join,
    Pause,
    Position,
    Redo,
    Refuse,
    Repeat,
    Replay,
    Report,
    Resume,
    SendState,
    Skip,
    Start,
)

VERSION = 6

_HEAD = struct.Struct("<HBBHHIQQI")
HEAD_BYTES = _HEAD.size
PIECE_BYTES = (1 << 17) - HEAD_BYTES  # of a frame's body, at most
SHORT_PIECE_BYTES = (1 << 16) - HEAD_BYTES  # the same for payloads that take two lines
_MAGIC = 0xDAD9
_LONGEST_TEXT = 2000  # characters


class Kind(IntEnum):
    """Kind of a frame."""

    CONTROL = 1
    PAYLOAD = 2
    SUMMAND = 3
    SUM = 4
    END = 5
    STATE = 6
    MESSAGE = 7
    PING = 8


_KINDS = (Kind.CONTROL, *Kind)  # by their numbers, from 1
_EMPTY = (Kind.END, Kind.PING)  # kinds without a body


class Head(NamedTuple):
    """Head of a frame.

    Attributes:
        kind: what the frame holds.
        slot: slot of a site, see above.
        step: number of the step.
        exchange: number of the exchange in the step.
        offset: bytes of the message before this piece.
        length: bytes of this piece.
        tag: for `SUM` the attempt; for `STATE` a number that tells one transfer from another.
    """

    kind: Kind
    slot: int
    step: int = 0
    exchange: int = 0
    offset: int = 0
    length: int = 0
    tag: int = 0

    def pack(self) -> bytes:
        """Return the head as bytes.

        Raises:
            struct.error: if a number is out of range.
        """
        return self.pack_piece(self.offset, self.length)

    def pack_piece(self, offset: int, length: int) -> bytes:
        """Return the head of a piece of the same message as bytes.

        Args:
            offset: bytes of the message before the piece.
            length: bytes of the piece.
        """
        return _HEAD.pack(_MAGIC, self.kind, 0, self.slot, self.tag, self.exchange, self.step, offset, length)

    @classmethod
    def unpack(cls, content: bytes | bytearray | memoryview) -> Head:
        """Return the head that `pack` has made bytes of.

        Raises:
            FrameError: if they are no valid head.
        """
        magic, kind, reserved, slot, tag, exchange, step, offset, length = _HEAD.unpack(content)
        if magic != _MAGIC or reserved:
            raise FrameError("these bytes are not the beginning of a frame: the other end does not speak the protocol")
        if not Kind.CONTROL <= kind <= Kind.PING:
            raise FrameError(f"unknown kind of frame: {kind}")
        head = cls(_KINDS[kind], slot, step, exchange, offset, length, tag)
        if length > PIECE_BYTES:
            raise FrameError(f"a frame of {length} bytes: there may be {PIECE_BYTES} at most")
        if bool(length) == (head.kind in _EMPTY):
            raise FrameError(f"a {head.kind.name} frame of {length} bytes")
        if offset and head.kind in (Kind.CONTROL, *_EMPTY):
            raise FrameError(f"a {head.kind.name} frame has only one piece, not one at byte {offset}")
        return head


class Frame(NamedTuple):
    """Frame that has been received.

    Attributes:
        head: its head.
        body: its body.
    """

    head: Head
    body: bytes


def frames(head: Head, content: memoryview, most: int = PIECE_BYTES) -> Iterator[tuple[bytes, memoryview]]:
    """Cut a message into frames.

    Args:
        head: head of the message; offset and length are filled in.
        content: the message, of bytes.
        most: bytes of a frame's body, at most.

    Yields:
        Heads and bodies, which share the message's memory; none for an empty message.
    """
    for offset in range(0, len(content), most):
        body = content[offset : offset + most]
        yield head.pack_piece(offset, len(body)), body


class FrameReader:
    """Reader of a connection's bytes, which arrive in parts of any size. It holds one frame at most.

    Args:
        check: called with each head before room for the body is made; raises `FrameError` to refuse the frame.
    """

    def __init__(self, check: Callable[[Head], None]) -> None:
        self._check = check
        self._buffer = bytearray()
        self._head: Head | None = None
        self._error: FrameError | None = None

    def feed(self, content: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """Take bytes; to be iterated to its end.

        Args:
            content: the bytes.

        Yields:
            The frames that are complete.

        Raises:
            FrameError: if the bytes are not the expected frames; from then on, at every call.
        """
        rest = memoryview(content)
        while True:
            if self._error is not None:
                raise self._error
            wanted = _HEAD.size if self._head is None else self._head.length
            part = rest[: wanted - len(self._buffer)]
            self._buffer += part
            rest = rest[len(part) :]
            if len(self._buffer) < wanted:
                return
            if self._head is None:
                self._head = self._read_head()
                continue
            frame = Frame(self._head, bytes(self._buffer))
            self._head = None
            self._buffer.clear()
            yield frame

    def _read_head(self) -> Head:
        try:
            head = Head.unpack(self._buffer)
            self._check(head)
        except FrameError as error:
            self._error = error
            raise
        self._buffer.clear()
        return head


class Expected:
    """Messages that are expected, with their sizes. Checks that their pieces come in order and fit.

    Args:
        world_size: number of sites.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._left: dict[tuple[Kind, int, int, int, int], tuple[int, int]] = {}  # bytes so far, and in all

    def add(self, head: Head, nbytes: int) -> None:
        """Expect a message.

        Args:
            head: kind, slot, step, exchange and tag of its frames.
            nbytes: its size.
        """
        if nbytes:
            self._left[_key(head)] = 0, nbytes

    def void(self, slot: int, step: int) -> None:
        """Expect a site's messages of a step no longer, or from their beginning once they are added again."""
        self._left = {key: size for key, size in self._left.items() if (key[1], key[2]) != (slot, step)}

    def check(self, head: Head) -> None:
        """Check a head, and count its piece as received; usable as the argument of `FrameReader`.

        Raises:
            FrameError: if it is not expected.
        """
        if head.slot >= self._world_size:
            raise FrameError(f"a frame of slot {head.slot}: there are {self._world_size} sites")
        if head.kind in (Kind.CONTROL, *_EMPTY):
            return
        what = f"a {head.kind.name} frame of slot {head.slot}, step {head.step}, exchange {head.exchange}"
        received, nbytes = self._left.get(_key(head), (0, 0))
        if not nbytes:
            raise FrameError(f"{what} is not expected")
        if head.offset != received:
            raise FrameError(f"{what} begins at byte {head.offset}, and byte {received} comes next")
        if received + head.length > nbytes:
            raise FrameError(f"{what} goes to byte {received + head.length} of a message of {nbytes}")
        self._left[_key(head)] = received + head.length, nbytes
        if received + head.length == nbytes:
            del self._left[_key(head)]


def _key(head: Head) -> tuple[Kind, int, int, int, int]:
    return head.kind, head.slot, head.step, head.exchange, head.tag


class Hello(NamedTuple):
    """First message of a site. Its name is that of its certificate.

    Attributes:
        version: version of the protocol.
        instance: random number of the process.
        position: the last step that it has closed; `FRESH` where it has not, or is to be sent a state.
        channel: "training", "parameters" for the parameter manager's connection, "store" for small values by key, or
            "check", see `dadplug.hub.check`.
        received: number of frames of the hub that it has received before its connection was lost; 0 at first.
        release: version of dadplug at the site.
        mark: result of `dadplug.hub.secure.secure_socket.connection_mark`; empty where the site requires encryption.
        place: name of the Unix socket at which the site waits for a hub in the same machine; empty without one.
        secret: what that hub has to send there first.
        sites: number of sites that the site knows; 0 for all of the hub's roster.
    """

    version: int
    instance: int
    position: Position
    channel: str
    received: int = 0
    release: str = ""
    mark: str = ""
    place: str = ""
    secret: str = ""
    sites: int = 0


class Welcome(NamedTuple):
    """The hub's answer to `Hello`, unless it is `Refuse`. Neither is numbered or sent again.

    Attributes:
        resumed: whether the stream goes on where the last connection was lost; otherwise it begins anew.
        received: number of frames of the site that the hub has received before.
        min_sites: number of sites that must stay.
        timeout_ms: milliseconds of silence after which the hub gives a site up.
        grace_ms: milliseconds for which the hub waits for a site to dial again after its connection was lost.
    """

    resumed: bool
    received: int
    min_sites: int
    timeout_ms: int
    grace_ms: int


class Joined(NamedTuple):
    """Report of a joiner that it has a state.

    Attributes:
        position: position of the state.
    """

    position: Position


class Leave(NamedTuple):
    """Announcement of a site that it leaves.

    Attributes:
        reason: the reason; empty where its training is complete.
    """

    reason: str


_MESSAGES: tuple[Any, ...] = (
    *(Accept, Refuse, Start, Grow, Join, SendState, Replay, Drop, Skip, Redo, Close, Pause, Resume),
    *(Hello, Welcome, Joined, Leave, Requirements, Report, Repeat, Continue),
)
_HINTS: dict[type, dict[str, str]] = {}
_SLOTS = {"slot", "donor", "joiner", "holders", "participants", "contributors"} | {"waiting_for", "joined", "gone"}
_TEXTS = {"names"}
for _class in (Position, *_MESSAGES):
    codec.register(_class)
    _HINTS[_class] = {
        name: hint.__name__ if isinstance(hint, type) else str(hint) for name, hint in get_type_hints(_class).items()
    }


def pack_control(message: Any, slot: int) -> bytes:
    """Return the frame of a control message.

    Args:
        message: an action, or `Hello`, `Joined` or `Leave`.
        slot: slot of the sender; of any site where the hub sends.

    Raises:
        ValueError: if the message is larger than a frame.
    """
    if len(body := codec.encode(message)) > PIECE_BYTES:
        raise ValueError(f"a control message of {len(body)} bytes: there may be {PIECE_BYTES} at most")
    return Head(Kind.CONTROL, slot, length=len(body)).pack() + body


def read_control(body: bytes, world_size: int) -> Any:
    """Return a control message, with types and ranges of its fields checked.

    Args:
        body: body of the frame.
        world_size: number of sites.

    Raises:
        FrameError: if it is none.
    """
    try:
        message = codec.decode(body)
    except DamagedError as error:
        raise FrameError(str(error)) from error
    if type(message) not in _MESSAGES:
        raise FrameError(f"an object of type {type(message).__name__} is no control message")
    for name, hint in _HINTS[type(message)].items():
        value = getattr(message, name)
        if not (_are_texts(value) if name in _TEXTS else _fits(value, hint)) or (
            name in _SLOTS and not _are_slots(value, world_size)
        ):
            raise FrameError(f"field {name} of a control message {type(message).__name__} is out of range")
    return message


def _fits(value: Any, hint: str) -> bool:
    if hint == "int":
        return type(value) is int and 0 <= value < 1 << 63
    if hint in ("bool", "str"):
        return type(value) is bool if hint == "bool" else type(value) is str and len(value) <= _LONGEST_TEXT
    if "Position" in hint:
        return (value is None and "None" in hint) or (
            type(value) is Position and _fits(value.life, "int") and _fits(value.step, "int")
        )
    return type(value) is tuple and all(_fits(each, "int") for each in value)


def _are_texts(value: Any) -> bool:
    return type(value) is tuple and all(_fits(each, "str") for each in value)


def _are_slots(value: Any, world_size: int) -> bool:
    return all(each < world_size for each in (value if isinstance(value, tuple) else (value,)))


CODES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int64: 4,
    torch.int32: 5,
    torch.uint8: 6,
    torch.int8: 7,
    torch.int16: 8,
}
DTYPES = {code: dtype for dtype, code in CODES.items()}
