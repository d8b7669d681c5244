"""Frames arrive whole however the stream is cut, and bytes of unknown senders raise nothing but a FrameError."""

import itertools
import pickle
import random
import re
import tracemalloc

import msgspec
import pytest
from frame_parts import Frame, Parts, Reader, read
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dadplug.errors import FrameError
from dadplug.hub.wire import messages as actions
from dadplug.hub.wire.messages import (
    FRESH,
    HEAD_BYTES,
    PIECE_BYTES,
    SHORT_PIECE_BYTES,
    Head,
    Hello,
    Joined,
    Kind,
    Leave,
    Position,
    frames,
    pack_control,
    read_control,
)
from dadplug.hub.wire.streams import KeptFrames, NumberedFrames

MESSAGES = [
    actions.Accept(1, None, False),
    actions.Accept(1, Position(1 << 62, 5), True),
    actions.Refuse("site b", "in use", True),
    actions.Start(Position(7, 0)),
    actions.Start(Position(7, 0), (1,)),
    actions.Join(2, 6),
    actions.SendState(0, 2, 5, 1),
    actions.Drop(1, 6, "silent for 10 s"),
    actions.Close(6, (0, 2)),
    actions.Pause((1,), "waiting for b"),
    actions.Resume(6),
    Hello(1, 12345, FRESH, "training"),
    Hello(1, 12345, FRESH, "training", start=actions.StartTerms(2, 60_000)),
    Joined(Position(7, 5)),
    actions.Receiving(5, 10, 1000),
    actions.Contribution(1200, 10, 5000, 0.25),
    actions.Contribution(0, 10, 5000),
    Leave(""),
]
_FIELDS = (
    st.integers(0, 3),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, (1 << 63)),
    st.integers(1, 40),
    st.integers(0, (1 << 16) - 1),
)
_FOR_ALL = st.sampled_from([Kind.SUMMAND, Kind.SUM, Kind.STATE, Kind.MESSAGE])
HEADS = st.builds(Head, st.just(Kind.PAYLOAD), *_FIELDS, st.integers(0, 255)) | st.builds(
    Head, _FOR_ALL, *_FIELDS, st.just(0)
)


def attempt(function, *arguments):
    """Return the result, or None where it is a FrameError with a reason."""
    reasons = []
    try:
        return function(*arguments)
    except FrameError as error:
        reasons.append(str(error))
    assert all(reasons)
    return None


def packed(head: Head, content: bytes) -> bytes:
    return b"".join(part for pair in frames(head, memoryview(content)) for part in pair)


@given(st.lists(HEADS, max_size=6), st.lists(st.integers(0, 400), max_size=8), st.integers(0, 99))
@settings(deadline=None)
def test_any_split_of_the_stream_gives_the_same_frames(heads, cuts, seed):
    bodies = [random.Random(seed + number).randbytes(head.length) for number, head in enumerate(heads)]
    stream = b"".join(head.pack() + body for head, body in zip(heads, bodies, strict=True))
    stream += Head(Kind.END, 1, step=3).pack()
    ends = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    parts = [stream[start:end] for start, end in itertools.pairwise(ends)]
    expected = [*map(Frame, heads, bodies), Frame(Head(Kind.END, 1, step=3), b"")]
    assert read(*parts) == expected
    assert read(*(bytes([byte]) for byte in stream)) == expected


def test_pieces_of_payloads_may_be_shorter_than_those_of_summands():
    sent = NumberedFrames(0, lambda head, body: None)
    sent.kept, sent.payload_bytes = KeptFrames(), SHORT_PIECE_BYTES
    for step, (kind, most) in enumerate({Kind.PAYLOAD: SHORT_PIECE_BYTES, Kind.SUMMAND: PIECE_BYTES}.items()):
        for size in (1, most, most + 1, 3 * most):
            sent.send_message(Head(kind, 0, step, size), bytes(size))
        lengths = [len(frame) - HEAD_BYTES for frame in sent.kept.frames(step)]
        assert lengths == [1, most, most, 1, most, most, most]


@given(st.binary(max_size=300))
@example(b"\xd9\xda\x02" + b"\xff" * 29)
@example(pickle.dumps({"a": 1}) * 10)
@example(b"GET / HTTP/1.1\r\nHost: hub.example\r\n\r\n")
@example(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40))
def test_any_bytes_give_frames_or_an_error_that_says_why(content):
    attempt(read, content)


@given(HEADS, st.integers(0, 31), st.integers(1, 255))
def test_a_damaged_head_gives_frames_or_an_error(head, place, mask):
    content = bytearray(head.pack() + bytes(head.length))
    content[place] ^= mask
    received = attempt(read, bytes(content))
    assert all(frame.head != head for frame in received or ())


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"\0" * 32, "not the beginning of a frame"),
        (Head(Kind.PAYLOAD, 0, length=PIECE_BYTES + 1).pack(), "a frame of 131041 bytes: there may be 131040"),
        (Head(Kind.PAYLOAD, 0, length=(1 << 32) - 1).pack(), "a frame of 4294967295 bytes"),
        (Head(Kind.PAYLOAD, 0).pack(), "a PAYLOAD frame of 0 bytes"),
        (Head(Kind.END, 0, length=1).pack(), "an? END frame of 1 bytes"),
        (Head(Kind.CONTROL, 0, offset=5, length=1).pack(), "a CONTROL frame has only one piece"),
        (Head(Kind.PAYLOAD, 0, length=1).pack().replace(b"\x02", b"\x0a", 1), "unknown kind of frame: 10"),
    ],
)
def test_a_head_is_refused_before_there_is_room_for_its_body(head, message):
    def room(head):
        raise AssertionError("there is room for a frame that is refused")

    with pytest.raises(FrameError, match=message):
        Reader(Parts(head), room).next()


def test_a_reader_holds_one_frame_at_most():
    content = packed(Head(Kind.PAYLOAD, 0), bytes(100 * PIECE_BYTES))
    reader = Reader(Parts(*(memoryview(content)[start : start + 10_000] for start in range(0, len(content), 10_000))))
    tracemalloc.start()
    while reader.next() is not None:
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * PIECE_BYTES


# Control messages.


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_control_messages_come_through(message):
    (frame,) = read(pack_control(message, 2))
    received = read_control(frame.body, 3)
    assert received == message
    assert type(received) is type(message)


@given(st.binary(max_size=200), st.booleans())
@settings(deadline=None)
def test_any_body_gives_a_control_message_or_an_error(content, with_head):
    message = attempt(read_control, b"\x84\xa4type\xa5Hello" + content if with_head else content, 3)
    assert type(message) in {type(None), *(type(each) for each in MESSAGES)}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"slot": 1}, "Object missing required field `type`"),
        ({"type": "Skip", "slot": 1, "step": 2}, "Invalid value 'Skip'"),
        ({"type": "Resume", "step": 2, "more": 1}, "unknown field `more`"),
        (Position(1, 2), "Expected `object`, got `array`"),
        (actions.Close(6, (0, 3)), "field contributors of a control message Close is out of range"),
        (actions.Close(6, (0, 1 << 16)), "`$.contributors[1]`"),
        (actions.Close(6, (0,) * ((1 << 16) + 1)), "Expected `array` of length <= 65536 - at `$.contributors`"),
        (actions.Close(6, 1), "`$.contributors`"),
        (actions.Close("6", (0, 1)), "`$.step`"),
        (actions.Join(3, 6), "field slot"),
        (actions.Join(-1, 6), "`$.slot`"),
        (actions.Join(True, 6), "Expected `int`, got `bool` - at `$.slot`"),
        (actions.Join(1, 1 << 63), "`$.step`"),
        (Joined((7, -5)), "`$.position[1]`"),
        (Joined((7, 5, 3)), "`$.position`"),
        (Joined(None), "`$.position`"),
        (Hello(1, 2, Position(0, "0"), "training"), "`$.position[1]`"),
        (Leave("x" * 2001), "`$.reason`"),
        (Leave(b"x"), "`$.reason`"),
    ],
)
def test_control_messages_out_of_range_are_refused(message, reason):
    with pytest.raises(FrameError, match=re.escape(reason)):
        read_control(msgspec.msgpack.encode(message), 3)


@pytest.mark.parametrize("start", [b"\x82\xa4type\xa5Close\xaccontributors", b"\x82\xa4type\xa5Hello\xa4more"])
def test_sizes_in_a_control_message_are_checked_before_anything_is_allocated(start):
    tracemalloc.start()
    for content in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        assert attempt(read_control, start + content, 3) is None
    assert attempt(read_control, start + b"\x91" * PIECE_BYTES, 3) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_later_versions_may_add_fields_to_the_first_messages():
    for message in (Hello(99, 1, FRESH, "training"), MESSAGES[2]):
        fields = {"type": type(message).__name__, "more": [1, {"a": 2}], **msgspec.structs.asdict(message)}
        assert read_control(msgspec.msgpack.encode(fields), 3) == message


def test_a_control_message_fits_into_a_frame():
    assert len(pack_control(Leave("x" * PIECE_BYTES), 0)) < PIECE_BYTES  # the reason is cut
    with pytest.raises(ValueError, match="there may be 131040 at most"):
        pack_control(actions.Grow(0, ("x" * 2000,) * 100), 0)
