"""Wire format between sites and the hub: frames of a fixed head and at most 128 kB, and control messages.

**Pieces.** A message of any size is cut into frames, so that the hub passes its first bytes on before it has the last
ones, holds at most one frame of each connection, and can mix the messages of several sites on one connection: a slow
sender delays no other. The head takes 32 bytes, 0.02% of a full frame, which fills eight records of TLS. The hub passes
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
- all-reduce: each site sends a `SUMMAND`; the hub adds them up in the order of slots and sends the `SUM` to all;
- broadcast: the contributor with the lowest slot sends a `PAYLOAD`, the others none; objects: two gathers, sizes first;
- the reason why a site leaves: `Leave`, which the hub announces as the reason of `Drop`.

Each step ends with `END`; set-up collectives are steps of their own. `STATE` goes from a member to a joiner, `MESSAGE`
(of byte streams) from one site to another, or to the hub. The hub passes both on to one site. In what a site sends, the
slot names the receiver of these two kinds, and the sender in all others; in what the hub sends, always the sender.

A `PAYLOAD` may be for one site alone. The hub sends it to this site, and an empty `ELSEWHERE` to all others: sites
count the frames of a sender, and so learn that none is missing.

**Control messages** are actions of the membership, and all others. The hub puts its announcements into the same
sequence as the frames, and replays them with these. They are MessagePack, which msgspec encodes and decodes: the class
of a message declares its fields with their types and ranges, and nothing else is accepted. `Membership` takes and
returns actions as plain values.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from ...errors import FrameError
from ...exchange import codec
from ...exchange.codec import SITES_VERSION
from ...exchange.rounds import Contribution, Outsized, Requirements, Spent
from ...support.logs import span
from ...support.refusals import refuse
from ...support.structs import LONGEST_TEXT, Count, Counts, Milliseconds, Slot, Slots, Text, Texts, decode

_HEAD = struct.Struct("<HBBHHIQQI")
HEAD_BYTES = _HEAD.size
PIECE_BYTES = (1 << 17) - HEAD_BYTES  # of a frame's body, at most
SHORT_PIECE_BYTES = (1 << 16) - HEAD_BYTES  # the same for payloads that take two lines
_MAGIC = 0xDAD9


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
    ELSEWHERE = 9


_KINDS = (Kind.CONTROL, *Kind)  # by their numbers, from 1
_EMPTY = (Kind.END, Kind.PING, Kind.ELSEWHERE)  # kinds without a body
_ONE_PIECE = (Kind.CONTROL, Kind.END, Kind.PING)


class Head(NamedTuple):
    """Head of a frame.

    Attributes:
        kind: what the frame holds.
        slot: slot of a site, see above.
        step: number of the step.
        exchange: number of the exchange in the step.
        offset: bytes of the message before this piece.
        length: bytes of this piece.
        tag: for `STATE` a number that tells one transfer from another; for `PAYLOAD` a mark of the rounds so far, see
            `dadplug.hub.site.history`.
        to: for `PAYLOAD` and `ELSEWHERE`, 1 more than the slot of the only site that the frame is for; 0 for all.
    """

    kind: Kind
    slot: int
    step: int = 0
    exchange: int = 0
    offset: int = 0
    length: int = 0
    tag: int = 0
    to: int = 0

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
        return _HEAD.pack(_MAGIC, self.kind, self.to, self.slot, self.tag, self.exchange, self.step, offset, length)

    @property
    def elsewhere(self) -> bytes:
        """The frame that all others get in place of one for a single site."""
        return self._replace(kind=Kind.ELSEWHERE, length=0).pack()

    @classmethod
    def unpack(cls, content: bytes | bytearray | memoryview) -> Head:
        """Return the head that `pack` has made bytes of.

        Raises:
            FrameError: if they are no valid head.
        """
        magic, kind, to, slot, tag, exchange, step, offset, length = _HEAD.unpack(content)
        if magic != _MAGIC or (to and kind not in (Kind.PAYLOAD, Kind.ELSEWHERE)):
            raise FrameError("these bytes are not the beginning of a frame: the other end does not speak the protocol")
        if not Kind.CONTROL <= kind <= Kind.ELSEWHERE:
            raise FrameError(f"unknown kind of frame: {kind}")
        head = cls(_KINDS[kind], slot, step, exchange, offset, length, tag, to)
        if length > PIECE_BYTES:
            raise FrameError(f"a frame of {length} bytes: there may be {PIECE_BYTES} at most")
        if bool(length) == (head.kind in _EMPTY):
            raise FrameError(f"a {head.kind.name} frame of {length} bytes")
        if offset and head.kind in _ONE_PIECE:
            raise FrameError(f"a {head.kind.name} frame has only one piece, not one at byte {offset}")
        return head


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


# Codes of element types in the heads of `SUMMAND` frames.
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


def add_up(addends: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors in their order; that of narrow types in single precision, to be rounded once.

    Args:
        addends: the tensors; the first one may be changed.
    """
    first, *others = addends
    total = first.to(torch.promote_types(first.dtype, torch.float32)) if first.is_floating_point() else first
    for each in others:
        total += each
    return total


VERSION = 11
OLDEST_VERSION = 11
"""Oldest version of sites that this hub serves. Since 9 control messages are MessagePack; since 10 a payload may be for
one site alone; since 11 a state travels in parts, while training goes on without the site that it is for."""
# What the codec encoded in earlier versions: the beginning of control messages, and of the fields of `Refuse`.
_BEFORE_9, _REFUSE_BEFORE_9 = b"dadplug1", b"R\x1a\0\0\0\0\0\0\0dadplug.hub.actions.Refuse"


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Control message. Names of its class and fields are part of the protocol."""


# What others compute with may be added to without leaving the range of `Count`.
_Step = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Position(NamedTuple):
    """The last step that a site or the hub has closed.

    Attributes:
        life: number of the history that the step belongs to; each start from the sites' positions begins a new one.
        step: number of the step; 0 where none has been closed.
    """

    life: Count
    step: _Step


FRESH = Position(0, 0)


class StartTerms(NamedTuple):
    """When a run may start without all sites, the same at all of them.

    Attributes:
        sites: number of sites with which it may start; 0: only with all.
        after_ms: milliseconds for which so many sites wait for the others.
    """

    sites: Count = 0
    after_ms: Milliseconds = 0

    @property
    def seconds(self) -> float:
        """Seconds for which so many sites wait for the others."""
        return self.after_ms / 1e3

    def in_words(self, enough: bool) -> str:
        """Return when training starts without the sites that are waited for; empty if only with all.

        Args:
            enough: whether enough sites are connected.
        """
        if not self.sites:
            return ""
        if not enough:
            return f"; {self.sites} sites are enough to start"
        return f"; training starts without them {self.seconds:g} s after {self.sites} sites were connected"

    def __str__(self) -> str:
        return f"start_sites={self.sites}, start_after={self.seconds:g}" if self.sites else "no start_sites"


ALL_SITES = StartTerms()


class RoundKind(IntEnum):
    """Kind of a step of the hub, which is one round of exchanges.

    Attributes:
        COLLECTIVE: a round of its own, beside training steps. All members are waited for, and it closes with any number
            of them, since others have begun it.
        FIRST: the first round of a training step. Sites may join in it, late ones may miss it; it needs `min_sites`.
        FURTHER: another round of a training step. It closes with any number of sites, and those that have missed the
            first round are not waited for.
    """

    COLLECTIVE = 0
    FIRST = 1
    FURTHER = 2


IDLE = 4
"""Bit beside the `RoundKind` in the number of an END: the site contributes nothing to the step."""


@dataclass(frozen=True)
class Rules:
    """Rules of membership.

    Attributes:
        min_sites: number of sites below which no step closes.
        late: "wait": every member's END is waited for; "skip": a late member misses the step and stays a member.
        patience: with "skip", how many times the median step a member may take; 0: until `site_timeout` after the first
            one.
        site_timeout: seconds without any bytes after which a site counts as lost.
        progress_timeout: seconds for which others wait for a site that is alive and does not get on.
        max_lag: with "skip", number of steps by which a member may be behind.

    Raises:
        ValueError: if a rule is out of range.
    """

    min_sites: int
    late: Literal["wait", "skip"] = "wait"
    patience: float = 3.0
    site_timeout: float = 10.0
    progress_timeout: float = 300.0
    max_lag: int = 256

    def __post_init__(self) -> None:
        refuse(
            (self.min_sites < 1, f"min_sites={self.min_sites}: at least one site has to stay"),
            (self.late not in ("wait", "skip"), f"late={self.late!r}: choose 'wait' or 'skip'"),
            (
                self.patience and not self.patience > 1,
                f"patience={self.patience}: it has to exceed 1, the median step, or be 0",
            ),
            *(
                (not getattr(self, name) > 0, f"{name}={getattr(self, name)}: it has to be positive")
                for name in ("site_timeout", "progress_timeout", "max_lag")
            ),
        )


class Accept(Message, frozen=True):
    """Attach the connection that has connected to its slot.

    Attributes:
        slot: the site.
        position: the hub's position; None where the site does not take part yet.
        needs_state: whether the site will be sent parameters and progress.
    """

    slot: Slot
    position: Position | None
    needs_state: bool


class Refuse(Message, frozen=True, forbid_unknown_fields=False):
    """Send the reason to the connection that has connected, and close it.

    Attributes:
        name: the name it has given.
        reason: the reason.
        retry: whether it may be accepted later.
    """

    name: Text
    reason: Text
    retry: bool


class Start(Message, frozen=True):
    """Announce that training starts.

    Every start begins a new life, with a number never used before: steps with equal numbers in different lives are
    different steps.

    Attributes:
        position: the position that training starts from.
        absent: slots of the sites that it starts without.
    """

    position: Position
    absent: Slots = ()


class Join(Message, frozen=True):
    """Announce a participant.

    Attributes:
        slot: the site.
        step: the first step that it takes part in. What it has sent for this step before is void.
    """

    slot: Slot
    step: Count


class Grow(Message, frozen=True):
    """Announce the names of all sites, since a site that is new in the roster has connected: an elastic run grows.

    Attributes:
        step: the open step. Sites take the new ones into their exchanges at the end of the first training step that
            begins with this one or a later one, so that all do so in the same place.
        names: names of all sites, by slot; those that are known keep theirs.
    """

    step: Count
    names: Texts


class SendState(Message, frozen=True):
    """Ask a member for its state at the beginning of a training step, while it ends the first round of this step.

    Attributes:
        donor: the member.
        joiner: the site that needs the state; what it has received from other donors is void.
        step: the last closed step; the state is of this one or a later one.
        number: number of the request and tag of the frames of the state, by which they are told apart from those that
            another donor was asked for, or for another process of the joiner.
    """

    donor: Slot
    joiner: Slot
    step: Count
    number: Count


class Drop(Message, frozen=True):
    """Announce that a site has gone, and close its connection.

    Attributes:
        slot: the site.
        step: the open step, in which it counts as a site with 0 samples; what it has sent for this step is void.
        reason: the reason.
    """

    slot: Slot
    step: Count
    reason: Text


@dataclass(frozen=True)
class Skip:
    """Record that a step closes without a site: it counts as a site with 0 samples in this step, and stays.

    Not announced: a site is skipped where it is no contributor of a `Close`.

    Attributes:
        slot: the site.
        step: the step.
        late: whether it is a late member; otherwise it joins, and waits for its state, or catches up.
    """

    slot: int
    step: int
    late: bool = True


class Close(Message, frozen=True):
    """Announce that a step is closed: all apply it.

    Attributes:
        step: the step.
        contributors: slots whose frames count, in ascending order.
    """

    step: Count
    contributors: Slots


class Pause(Message, frozen=True):
    """Announce that the open step cannot close, or training not start, until a site connects.

    Attributes:
        waiting_for: slots of the sites that are waited for.
        reason: the reason, with their names.
    """

    waiting_for: Slots
    reason: Text


class Resume(Message, frozen=True):
    """Announce that training goes on.

    Attributes:
        step: the open step.
    """

    step: Count


Action = Accept | Start | Join | SendState | Drop | Skip | Close | Pause | Resume


class RunReport(Message, frozen=True):
    """Report of a site on a run that the hub does not know.

    Attributes:
        run: number of the run, the life of the hub at which it has started.
        position: the last round that has been closed for this site.
        before: the round before it.
        contributors: slots of the contributors of the last closed round.
        joined: slots of those of them that had joined in it, and do not count.
        gone: slots of the sites that take no part in the open round, as far as this site knows.
        received: number of frames in the last closed round, by slot of their sender.
        arrived: the same for the open round.
        listens: whether this site has joined in the open round.
        required: what the run requires; with `min_sites` 0 all sites have to stay.
        return_ms: milliseconds within which the other sites connect again, if they can.
    """

    run: Count
    position: Position
    before: Position
    contributors: Slots
    joined: Slots
    gone: Slots
    received: Counts
    arrived: Counts
    listens: bool
    required: Requirements
    return_ms: Milliseconds = 0


class Repeat(Message, frozen=True):
    """Request to send the frames of the last closed round again, for sites that the close has not reached.

    Attributes:
        position: the round.
    """

    position: Position


class Continue(Message, frozen=True):
    """Announcement that the run goes on: all send the frames of the open round again.

    Attributes:
        life: number of this life of the hub, which closes the rounds from now on.
        position: the last closed round.
    """

    life: Count
    position: Position


class Hello(Message, frozen=True, forbid_unknown_fields=False):
    """First message of a site. Its name is that of its certificate.

    Attributes:
        version: version of the protocol.
        instance: random number of the process.
        position: the last step that it has closed; `FRESH` where it has not, or is to be sent a state.
        channel: "training", "parameters" for the parameter manager's connection, "store" for small values by key, or
            "check", see `dadplug.hub.check`.
        received: number of frames of the hub that it has received before its connection was lost; 0 at first.
        release: `own_release` of the site.
        mark: result of `dadplug.hub.secure.secure_socket.connection_mark`; empty where the site requires encryption.
        place: name of the Unix socket at which the site waits for a hub in the same machine; empty without one.
        secret: what that hub has to send there first.
        sites: number of sites that the site knows; 0 for all of the hub's roster.
        start: when the run may start without all sites.
    """

    version: Count
    instance: Count
    position: Position
    channel: Text
    received: Count = 0
    release: Text = ""
    mark: Text = ""
    place: Text = ""
    secret: Text = ""
    sites: Count = 0
    start: StartTerms = ALL_SITES


class Welcome(Message, frozen=True):
    """The hub's answer to `Hello`, unless it is `Refuse`. Neither is numbered or sent again.

    Attributes:
        resumed: whether the stream goes on where the last connection was lost; otherwise it begins anew.
        received: number of frames of the site that the hub has received before.
        min_sites: number of sites that must stay.
        timeout_ms: milliseconds of silence after which the hub gives a site up.
        grace_ms: milliseconds for which the hub waits for a site to connect again after its connection was lost.
    """

    resumed: bool
    received: Count
    min_sites: Count
    timeout_ms: Count
    grace_ms: Count


class Joined(Message, frozen=True):
    """Report of a joiner that it has a state.

    Attributes:
        position: position of the state.
    """

    position: Position


class Arrived(Message, frozen=True):
    """Report of a joiner to its donor that a part of the state has arrived, which the hub passes on.

    Attributes:
        slot: in what a site sends, the donor; in what the hub sends, the joiner.
        number: number of the request for the state.
        part: number of the part.
    """

    slot: Slot
    number: Count
    part: Count


class Receiving(Message, frozen=True):
    """Report of a joiner on the state that it receives, for the status; once it is complete, no other donor is asked.

    Attributes:
        received: bytes that have arrived.
        nbytes: bytes of the state.
        left_ms: milliseconds until it is complete, at the rate so far.
    """

    received: Count
    nbytes: Count
    left_ms: Milliseconds

    def __str__(self) -> str:
        amount = f"{self.received / 1e6:.0f} of {self.nbytes / 1e6:.0f} MB"
        return f"receives the state: {amount}, {span(self.left_ms / 1e3)} left"


class Leave(Message, frozen=True):
    """Announcement of a site that it leaves.

    Attributes:
        reason: the reason; empty where its training is complete.
    """

    reason: Text


class KeyMessage(Message, frozen=True):
    """Message about keys, which the hub passes on; see `dadplug.hub.secure.epochs`.

    Attributes:
        slot: in what a site sends, the receiver, or the site itself in an offer to all members, which the hub announces
            before the `Join` of the site. In what the hub sends, the sender.
        content: the message.
    """

    slot: Slot
    content: bytes


class Exclude(Message, frozen=True):
    """Request of a site to end another one, which it refuses.

    Attributes:
        slot: the other site.
        reason: the reason.
    """

    slot: Slot
    reason: Text


_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    Accept
    | Refuse
    | Start
    | Join
    | Grow
    | SendState
    | Drop
    | Close
    | Pause
    | Resume
    | RunReport
    | Repeat
    | Continue
    | Hello
    | Welcome
    | Joined
    | Arrived
    | Receiving
    | Leave
    | KeyMessage
    | Exclude
    | Spent
    | Contribution
    | Outsized
    | Requirements
)
_SLOTS = {  # fields with numbers of sites
    *("slot", "donor", "joiner", "contributors", "waiting_for", "joined", "gone", "absent"),
}


def own_release() -> str:
    """Return the version of dadplug in this process, and after a slash `SITES_VERSION`."""
    return f"{sys.modules[__name__.partition('.')[0]].__version__}/{SITES_VERSION}"


def wire_of(release: str) -> str:
    """Return the part of a site's `own_release` that is equal at sites which can train together.

    Earlier releases do not state it: they train with their own kind.
    """
    return release.partition("/")[2] or release


def pack_control(message: Any, slot: int) -> bytes:
    """Return the frame of a control message; a reason that is too long for a message is cut.

    Args:
        message: an action, or `Hello`, `Joined`, `Leave` or `Spent`.
        slot: slot of the sender; of any site where the hub sends.

    Raises:
        ValueError: if the message is larger than a frame.
    """
    if reason := getattr(message, "reason", ""):  # of any length, and with whatever an exception of a site has stated
        reason = reason[:LONGEST_TEXT].encode(errors="replace").decode()
        message = msgspec.structs.replace(message, reason=reason)
    if len(body := msgspec.msgpack.encode(message)) > PIECE_BYTES:
        raise ValueError(f"a control message of {len(body)} bytes: there may be {PIECE_BYTES} at most")
    return Head(Kind.CONTROL, slot, length=len(body)).pack() + body


def pack_refusal_before_9(refusal: Refuse) -> bytes:
    """Return the frame of a `Refuse` for a site of an earlier version of the protocol, in its encoding."""
    body = codec.encode(msgspec.structs.astuple(refusal)).replace(b"U", _REFUSE_BEFORE_9, 1)
    return Head(Kind.CONTROL, 0, length=len(body)).pack() + body


def read_control(body: bytes | memoryview, world_size: int) -> Any:
    """Return a control message, with types and ranges of its fields checked.

    What an earlier version of the protocol has sent is returned as a `Hello` of version 8.

    Args:
        body: body of the frame.
        world_size: number of sites.

    Raises:
        FrameError: if it is none.
    """
    if body[: len(_BEFORE_9)] == _BEFORE_9:
        return Hello(8, 0, FRESH, "training")
    message = decode(_DECODER, body, "control message", FrameError)
    for name in _SLOTS.intersection(message.__struct_fields__):
        value = getattr(message, name)
        if max(value if isinstance(value, tuple) else (value,), default=0) >= world_size:
            raise FrameError(f"field {name} of a control message {type(message).__name__} is out of range")
    return message
