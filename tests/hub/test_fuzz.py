"""Messages of every type, valid ones and altered ones: nothing but the library's errors, and no growth of memory.

`DADPLUG_FUZZ` sets how many of each type are sent; a release is tested with 10,000.
"""

import contextlib
import dataclasses
import enum
import importlib
import os
import pkgutil
import random
import resource
import selectors
import socket
import types
import typing
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import support
import torch
from altered import altered_item
from dadplug.hooks.factor import LINEAR, Form
from msgspec.msgpack import Decoder, encode
from msgspec.structs import replace
from running_hub import TestSite, close_step, running_hub, together
from sealed_sites import make_kits

import dadplug
from dadplug.adapm import messages as adapm
from dadplug.errors import DadplugError, FrameError, MismatchError
from dadplug.exchange import codec
from dadplug.exchange.factor_buckets import FactorBucket, IndexSlot, Slot
from dadplug.exchange.fields import fits
from dadplug.exchange.owned_buckets import ContributionBucket, OwnedSlot
from dadplug.exchange.rounds import Contribution, Outsized, Requirements, Rounds, Spent
from dadplug.exchange.summed_buckets import SparseBucket
from dadplug.exchange.wire import wire_format
from dadplug.hub import check
from dadplug.hub.pki.kits import Kit
from dadplug.hub.secure import epochs
from dadplug.hub.secure.key_agreement import Offers
from dadplug.hub.secure.sealing import Opener, Sealer
from dadplug.hub.server.journal import Journal
from dadplug.hub.server.relay import Relay
from dadplug.hub.server.session import HubStreams
from dadplug.hub.server.store import _REQUESTS as REQUESTS
from dadplug.hub.server.store import REPLIES, Reply, Request, Store
from dadplug.hub.site.inbox import CALLS
from dadplug.hub.site.link import HubLink
from dadplug.hub.site.tunnel import Tunnel
from dadplug.hub.wire import messages
from dadplug.hub.wire.messages import (
    FRESH,
    HEAD_BYTES,
    VERSION,
    Accept,
    Arrived,
    Close,
    Continue,
    Drop,
    Exclude,
    Grow,
    Head,
    Hello,
    Join,
    Joined,
    KeyMessage,
    Kind,
    Leave,
    Pause,
    Position,
    Receiving,
    Refuse,
    Repeat,
    Resume,
    RoundKind,
    RunReport,
    SendState,
    Start,
    StartTerms,
    Welcome,
    pack_control,
    read_control,
)
from dadplug.hub.wire.streams import Tag
from dadplug.local_steps.delta_format import SparseFormat
from dadplug.local_steps.elastic import ElasticAgreement, load_settings, settings_of
from dadplug.local_steps.header import Header
from dadplug.local_steps.options import LocalOptions
from dadplug.parameter_server import service, streams
from dadplug.parameter_server.sequencer import Decision, Entry, Rules
from dadplug.parameter_server.service import SequencerHost, Settings, check_settings
from dadplug.privacy.masks import PairwiseKeys, members_digest
from dadplug.privacy.secure_sum import _ANNOUNCEMENT, SecureSum
from dadplug.step.model_sync import sameness
from dadplug.step.model_sync.buffers import average_packed, pack_buffers
from dadplug.step.model_sync.replicated_model import JoinState, ReplicatedModel, load_joined
from dadplug.step.planning.planner import PlanState
from dadplug.step.reducer.handler import StepHeader
from dadplug.support.structs import decode

COUNT = int(os.environ.get("DADPLUG_FUZZ", "150"))
GROWTH = 32 << 10  # kB
NAMES = ("a", "b", "c")
SITES = [f"site {number} ({name})" for number, name in enumerate(NAMES)]
EXTREMES = (0, 1, 2, 0x7F, 0x80, 0xFF)


def altered(content: bytes, chance: random.Random) -> bytes:
    """Return a message with some bits, bytes or fields changed, cut, or made longer; sometimes as it is."""
    body = bytearray(content)
    match chance.randrange(6):
        case 0 if body:
            for _ in range(chance.randrange(1, 4)):
                body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
        case 1:
            del body[chance.randrange(len(body) + 1) :]
        case 2:
            body += chance.randbytes(chance.choice((1, 8, 300)))
        case 3 if body:
            body[chance.randrange(len(body))] = chance.choice(EXTREMES)
        case 4 if body:
            first = chance.randrange(len(body))
            for place in range(first, min(len(body), first + chance.choice((2, 4, 8)))):
                body[place] = chance.choice((0, 0xFF, 0x7F))
    return bytes(body)


def as_long(content: bytes, size: int) -> bytes:
    """Return a message cut or filled to the size that a receiver has made room for."""
    return content[:size].ljust(size, b"\0")


def fuzz(content: bytes, take, seed: str, valid: bool = True) -> None:
    """Give altered messages to a receiver, which may only raise errors of the library, and takes those as they are."""
    chance, taken, begin = random.Random(seed), 0, 0
    for number in range(COUNT):
        if number == COUNT // 5:
            begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        message = altered(content, chance)
        try:
            take(message)
            taken += 1
        except DadplugError:
            continue
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin < GROWTH
    assert taken or not valid


# What sites send to each other


def integers(content: bytes, count: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(as_long(content, 8 * count)), dtype=torch.int64)


def of_step_header():
    header = StepHeader(5, 0, 8, present=[True] * 3, dense=[False] * 3, void=[False] * 3, extra_rows=[0, 2, 0])
    content = np.array(header.pack(), np.int64).tobytes()
    return content, lambda body: StepHeader.unpack(integers(body, len(content) // 8).tolist(), SITES[2], 1)


def of_local_header():
    content = np.array(Header(5, 8, 77, 0, -1, 0, 9, 8), np.int64).tobytes()
    return content, lambda body: Header.read(integers(body, 7), SITES[2], 4)


def of_object():
    items = {"a": [1, 2.5, None, True], "b": torch.zeros(3), "c": np.ones(2), "d": ("x", {1, 2})}
    return codec.encode(items | {"e": codec.Refusal("x")}), codec.decode


def of_buffers():
    model = torch.nn.BatchNorm1d(3)
    content = pack_buffers(model, 4)
    return content, lambda body: average_packed(model, {0: content, 1: body}, SITES)


def of_announcement():
    keys, members = [PairwiseKeys(rank) for rank in range(3)], (0, 1, 2)
    own, other, third = (_ANNOUNCEMENT.pack(1, each.public, 4, members_digest(members, 4)) for each in keys)

    def take(body):
        secure = object.__new__(SecureSum)
        secure._keys, secure._rank, secure._next = PairwiseKeys(0), 0, 4
        secure._attempt = secure._contributors = None
        secure.hear({0: own, 1: as_long(body, len(other)), 2: third}, dict(enumerate(SITES)))
        secure.announcement(members)  # of the next step

    return other, take


def of_stream_frame(kind):
    content = streams._HEAD.pack(kind, 1, 2, 3, 4, 5, 6, 10) + bytes(10)

    def take(body):
        here, there = socket.socketpair()
        with here, there:
            stream = streams._Stream(0, here, 1 << 16)
            there.sendall(body)
            stream.read([])

    return content, take


def of_adapm(kind):
    shapes = [(4, 4) if each is adapm._VALUES else 4 for each in adapm.ARRAYS[kind]]
    arrays = [np.zeros(shape, dtype) for shape, dtype in zip(shapes, adapm.ARRAYS[kind], strict=True)]
    message = adapm.Message(kind, origin=1, arrays=arrays)
    content = b"".join(bytes(each) for each in message.encode())

    def take(body):
        head = adapm.Head(as_long(body, adapm._HEAD.size), 0, (4,), 3)
        head.message(as_long(body[adapm._HEAD.size :], min(head.nbytes, 1 << 20))) if head.nbytes < 1 << 20 else None

    return content, take


class Received:
    """Gather whose payloads a test has put there."""

    def __init__(self, payloads):
        self.payloads, self.payload = payloads, payloads[0]

    def post(self):
        pass

    def wait(self):
        return self.payloads


class Arrives:
    """Transport of three sites whose gathers hold what a test has put there."""

    sites, world_size, rank, device = SITES, 3, 0, torch.device("cpu")

    rounds = Rounds(3)

    def gather(self, sizes, dtype, **use):
        self.payloads = [torch.zeros(size, dtype=dtype) for size in sizes]
        return Received(self.payloads)

    def all_to_all(self, sizes, dtype, replaced=None):
        found = self.gather([sizes[0]] * 3, dtype)
        found.missing = frozenset()
        return found

    def take(self, body):
        target = self.payloads[1].view(torch.uint8)
        target.copy_(torch.frombuffer(bytearray(as_long(body, len(target))), dtype=torch.uint8))


def of_factors(slot, wire, right):
    transport = Arrives()
    slots = [slot(wire), Slot(4, 6, 4, 3, wire)]
    for each in slots:
        each.capacity = [3] * 3
    bucket = FactorBucket(slots, transport, torch.float32, wire)

    def take(body):
        transport.take(body)
        bucket.inspect()
        for index, shares in enumerate(bucket.receive()[1]):
            for share in shares:
                if index == 0 and right is not None:
                    torch.zeros(right, share.left.shape[1]).index_add_(0, share.right.reshape(-1).long(), share.left)

    return transport.payloads[1].view(torch.uint8).numpy().tobytes(), take


def of_sparse():
    transport = Arrives()
    bucket = SparseBucket([4, 2], transport, wire_format("bf16"))

    def take(body):
        transport.take(body)
        bucket.inspect([100, 10])
        bucket.wait()
        for index, numel in enumerate((100, 10)):
            for indices, values in bucket.received(index, numel):
                torch.zeros(numel).index_add_(0, indices, values.float())

    return transport.payloads[1].numpy().tobytes(), take


def of_contributions(wire):
    """Rows of two layers to their owner, this site; and what an owner sends to all sites in the round after that."""
    transport = Arrives()
    slots = [Slot(4, 6, 4, 1, wire), Slot(3, 5, 0, 1, wire)]
    for slot in slots:
        slot.capacity = [3]
    bucket = ContributionBucket(slots, [0, 0], transport, torch.float32, wire)

    def take(body):
        transport.take(body)
        samples, found = bucket.wait()
        for shares in found.values():
            for count, share in zip(samples, shares, strict=True):
                if share is not None:
                    count * share.left.T @ share.right

    return transport.payloads[1].view(torch.uint8).numpy().tobytes(), take


def of_results(wire):
    transport = Arrives()
    bucket = FactorBucket([OwnedSlot(4, 6, 4, [0, 3, 0], wire)], transport, torch.float32, wire)

    def take(body):
        transport.take(body)
        bucket.inspect()
        complete, payloads = bucket.receive()
        [[bool(complete[1]), share.left.T @ share.right] for share in payloads[0]]

    return transport.payloads[1].view(torch.uint8).numpy().tobytes(), take


def of_sparse_deltas():
    """Deltas of local steps in blocks of bits."""
    deltas = {"weight": torch.randn(40, 30), "bias": torch.randn(7)}
    form = SparseFormat(lambda number: 0.1, 0.5, True, SITES.__getitem__)
    form.begin_round(0)
    payload = torch.zeros(form.layout(deltas)[torch.uint8], dtype=torch.uint8)
    form.encode(deltas, {torch.uint8: payload})

    def take(body):
        other = torch.frombuffer(bytearray(as_long(body, payload.numel())), dtype=torch.uint8)
        form.decode({torch.uint8: [payload, other]}, [0.5, 0.5])

    return payload.numpy().tobytes(), take


def of_sealed():
    head = Head(Kind.PAYLOAD, 1, 4, 3)
    frame = Sealer(bytes(32), 1).frame(head, bytes(100))

    def take(body):
        body = as_long(body, max(len(body), HEAD_BYTES))
        Opener(bytes(32), 1, "b").open(Head.unpack(body[:HEAD_BYTES]), body[HEAD_BYTES:])

    return frame, take


def of_settings():
    settings = Settings((0, 2), Rules(8, 2, "scale", 0.5), "own", True, 1 << 20, 10.0, 60.0)
    return encode(settings), lambda body: check_settings(body, 3)


def of_join_state():
    model = torch.nn.Linear(3, 2)
    state = JoinState({"option mode": "dad"}, dict(model.state_dict()), 4, {}, {"optimizer": {"state": {}}})

    def take(body):
        found = codec.decode(body)
        if isinstance(found, JoinState):
            sameness.load_tensors(sameness.tensors_of(model), found.tensors)

    return codec.encode(state), take


def of_struct(decoder, message):
    return encode(message), lambda body: decode(decoder, body, "message", MismatchError)


MESSAGES = {
    "step header": of_step_header,
    "local header": of_local_header,
    "object": of_object,
    "state for a site that joins": of_join_state,
    "buffers": of_buffers,
    "announcement of secure sums": of_announcement,
    "settings of a parameter server": of_settings,
    "factors": lambda: of_factors(lambda wire: Slot(4, 6, 4, 3, wire), wire_format("fp32"), None),
    "factors in int8": lambda: of_factors(lambda wire: Slot(4, 6, 4, 3, wire), wire_format("int8"), None),
    "rows of a table": lambda: of_factors(lambda wire: IndexSlot(4, 20, wire, 3), wire_format("fp32"), 20),
    "contributions to an owner": lambda: of_contributions(wire_format("fp32")),
    "contributions to an owner in int8": lambda: of_contributions(wire_format("int8")),
    "results of an owner": lambda: of_results(wire_format("fp32")),
    "results of an owner in int8": lambda: of_results(wire_format("int8")),
    "sparse": of_sparse,
    "sparse deltas": of_sparse_deltas,
    "sealed frame": of_sealed,
    **{f"frame {kind.name}": partial(of_stream_frame, kind) for kind in streams.FrameKind},
    **{f"message {kind.name} of the parameter manager": partial(of_adapm, kind) for kind in adapm.MessageKind},
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_of_a_site_is_read_or_refused(name):
    fuzz(*MESSAGES[name](), name)


# Everything that is decoded is in this file

ROOMS = ("adapm", "adaptive", "exchange", "hub", "local_steps", "parameter_server", "privacy", "step")
DECODED = {  # one message of each msgspec decoder, besides control messages
    service._SETTINGS: Settings((0, 2), Rules(8, 2, "scale", 0.5), "own", True, 1 << 20, 10.0, 60.0),
    service._GREETINGS: service.Greeting(2, "k" * 32, b"settings"),
    service.VERDICTS: service.Verdict("", NAMES),
    streams._DECISIONS: Decision(3, (Entry(0, 1, 2, 32, 0.5), Entry(1, 0, 2, 32, 0.5)), ((2, 0),), True),
    streams._AWAITED: (0, 2),
    epochs._REKEYS: (1, bytes(32), {1: bytes(56)}),
    epochs._WELCOMES: (1, {1: bytes(32)}, {1: bytes(32)}),
    REQUESTS: Request(1, "set", ("key",), (b"value",)),
    REPLIES: Reply(1, (b"value",)),
}


def modules():
    """Return all modules of the rooms that decode messages."""
    for room in (importlib.import_module(f"dadplug.{name}") for name in ROOMS):
        yield from (
            importlib.import_module(each.name) for each in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
        )


def example(kind):
    """Return an object of a type."""
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return example(of[0])
    if kind is Form:
        return LINEAR
    if isinstance(kind, enum.EnumMeta):
        return next(iter(kind))
    if hasattr(kind, "_fields"):
        return kind(*(example(each) for each in typing.get_type_hints(kind).values()))
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        made = object.__new__(kind)
        for each in dataclasses.fields(kind):
            defaults = each.default is not dataclasses.MISSING
            object.__setattr__(made, each.name, each.default if defaults else example(hints[each.name]))
        return made
    if origin is tuple:
        return tuple(example(each) for each in of if each is not ...)
    if origin is dict:
        return {example(of[0]): example(of[1])}
    if origin in (list, set):
        return origin([example(of[0])])
    values = {torch.Tensor: torch.zeros(2), typing.Any: None, object: None, np.ndarray: np.zeros(2), bytes: b"x"}
    return values[origin or kind] if (origin or kind) in values else kind(3)


def test_every_decoder_reads_or_refuses():
    found = {each for module in modules() for each in vars(module).values() if isinstance(each, Decoder)}
    assert found - {messages._DECODER} == DECODED.keys(), "add a message of the decoder to DECODED"
    for number, (decoder, message) in enumerate(DECODED.items()):
        fuzz(*of_struct(decoder, message), f"decoder {number}")


def test_every_registered_class_is_read_or_refused():
    list(modules())
    registered = [codec._registered[name] for name in codec._registered if name.startswith("dadplug.")]
    assert {JoinState, PlanState} <= {*registered}
    for kind in registered:
        content = codec.encode(example(kind))
        plain = kind.__name__ != "SiteNorms"  # whose tensors have to belong together
        fuzz(content, lambda body, kind=kind: fits(codec.decode(body), kind), kind.__name__, plain)


def test_every_control_message_and_kind_of_frame_is_sent():
    names = {each.__name__ for each in typing.get_args(messages._DECODER.type)}
    assert names <= {*TO_HUB, *TO_SITE}
    assert {*Kind} == {Head.unpack(each[:HEAD_BYTES]).kind for each in (*TO_HUB.values(), *TO_SITE.values())}


# Between sites and the hub

REPORT = RunReport(
    1, Position(1, 3), Position(1, 2), (0, 1), (), (2,), (4, 4, 0), (1, 0, 0), False, Requirements(1, 60_000)
)
TO_HUB = {
    "PAYLOAD": Head(Kind.PAYLOAD, 2, 1, 4, length=100).pack() + bytes(100),
    "PAYLOAD to a site": Head(Kind.PAYLOAD, 2, 1, 4, length=100, to=1).pack() + bytes(100),
    "SUMMAND": Head(Kind.SUMMAND, 2, 1, 4, length=100).pack() + bytes(100),
    "END": Head(Kind.END, 2, 1, RoundKind.FIRST).pack(),
    "PING": Head(Kind.PING, 2).pack(),
    "STATE": Head(Kind.STATE, 1, 1, 1, length=100, tag=1).pack() + bytes(100),
    "MESSAGE": Head(Kind.MESSAGE, 1, 1, 1, length=100).pack() + bytes(100),
} | {
    type(each).__name__: pack_control(each, 2)
    for each in (
        Joined(Position(1, 0)), Leave("x"), Spent(1.0, 1e-5), REPORT, KeyMessage(1, b"W" + bytes(80)),
        Exclude(1, "x"), Requirements(1, 60_000), Hello(VERSION, 7, FRESH, "training"), Receiving(1, 2, 3),
        Contribution(1, 2, 3, 0.5), Outsized(1, 2, 3.0), Arrived(1, 1, 2),
    )
}  # fmt: skip
TO_SITE = {name: TO_HUB[name] for name in ("PAYLOAD", "STATE")} | {
    "PAYLOAD to this site": Head(Kind.PAYLOAD, 2, 1, 4, length=100, to=1).pack() + bytes(100),
    "ELSEWHERE": Head(Kind.PAYLOAD, 2, 1, 4, length=100, to=2).elsewhere,
    "SUM": Head(Kind.SUM, 0, 1, 4, length=100).pack() + bytes(100),
    "calls": Head(Kind.PAYLOAD, 2, 1, CALLS, length=100).pack() + bytes(100),
} | {
    type(each).__name__: pack_control(each, 0)
    for each in (
        Accept(0, Position(1, 3), True), Refuse("a", "x", False), Start(Position(1, 0), (1,)), Grow(1, (*NAMES, "d")),
        Join(1, 1), SendState(0, 2, 1, 1), Drop(1, 1, "x"), Close(1, (0, 1, 2)), Pause((1,), "x"), Resume(1),
        Repeat(Position(1, 1)), Continue(2, Position(1, 1)), Welcome(False, 0, 1, 1000, 1000), KeyMessage(1, b"W"),
    )
}  # fmt: skip


def relay() -> Relay:
    """Return a relay with three members of an elastic run."""
    made = Relay(NAMES, 60.0, 1, 0.0, Journal(lambda line: None), HubStreams(SELECTOR, SequencerHost(NAMES)))
    for number, name in enumerate(NAMES):
        session, _ = made.greet(name, Hello(VERSION, number, FRESH, "training"), 0, 0.0)
        session.stream = SimpleNamespace(notes=[], detach=lambda: None)
    for session in [*made.sessions.values()]:
        made.take(session, (Head(Kind.CONTROL, 0), control(Requirements(1, 60_000)), b""), 0.0)
    return made


SELECTOR = selectors.DefaultSelector()


def control(message) -> memoryview:
    return memoryview(pack_control(message, 0))[HEAD_BYTES:]


def frame_of(body: bytes) -> tuple[Head, memoryview]:
    """Return a frame as it is received."""
    head = Head.unpack(as_long(body[:HEAD_BYTES], HEAD_BYTES))
    return head, memoryview(as_long(body[HEAD_BYTES:], head.length))


def test_a_first_message_is_taken_or_refused():
    """With when the run may start, and a position of a run that the hub does not have."""
    made = relay()
    made.run.require(Requirements(1, 60_000))

    def take(body):
        nonlocal made
        _, content = frame_of(body)
        found = read_control(content, 3)
        if isinstance(found, Hello):
            if ("training", 2) in made.sessions:
                made.drop(made.sessions["training", 2], "another process", 0.0)
            made._gone.clear()
            session, _ = made.greet("c", found, 0, 0.0)
            made.drop(session, "it has connected", 0.0)
        assert {("training", 0), ("training", 1)} <= made.sessions.keys()

    start = StartTerms(2, 1000)
    fuzz(pack_control(Hello(VERSION, 7, Position(1, 1), "training", sites=3, start=start), 2), take, "first")


@pytest.mark.parametrize("name", TO_HUB)
def test_the_hub_takes_what_a_member_sends_or_ends_it_alone(name):
    made = relay()

    def take(body):
        nonlocal made
        if ("training", 2) not in made.sessions or made.run.membership.step > 20:
            made = relay()
        member = made.sessions["training", 2]
        try:
            head, content = frame_of(body)
            member._check(head)
            made.take(member, (head, content, head.pack() + content), 0.0)
        except FrameError as error:
            if ("training", 2) in made.sessions:
                made.drop(member, str(error), 0.0)
        assert {("training", 0), ("training", 1)} <= made.sessions.keys()
        for session in made.sessions.values():  # what others have received
            session.queue._kept.clear()
        made.run.round.frames.clear()

    fuzz(TO_HUB[name], take, name)


def test_other_requests_at_the_hub_are_answered_or_refused():
    asked = encode(Request(1, "set", ("key",), (b"value",)))
    fuzz(asked, lambda body: Store().handle(2, body), "store")
    head = Head(Kind.MESSAGE, 2, tag=check.CheckRequest.TIME, length=1)
    fuzz(head.pack() + bytes(1), lambda body: check.CheckHandler(2).handle(*frame_of(body), {}), "check")


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("name", TO_SITE)
def test_a_site_takes_what_the_hub_sends_or_ends(tmp_path, name, sealed):
    kit = Kit.load(make_kits(tmp_path / "kits", NAMES, sealed) / "a")
    links = []

    def take(body):
        if not links or links[0].closed or links[0].rounds.refusal is not None or chance.random() < 0.02:
            for link in links:
                link.close_descriptors()
            links[:] = [HubLink(kit)]
            links[0].control(Start(Position(1, 0)))
            links[0].rounds.elastic, links[0].rounds.requirements = True, Requirements(1, 60_000)
            links[0].rounds.history.begin(0, bytes(16))
        head, content = frame_of(body)
        room = links[0]._room(head)
        room[:] = content
        links[0]._complete(head, room)

    chance = random.Random(name)
    fuzz(TO_SITE[name], take, name, valid=False)
    for link in links:
        link.close_descriptors()


def test_a_site_takes_what_others_send_to_its_streams(tmp_path):
    tunnel = Tunnel(Kit.load(make_kits(tmp_path / "kits", NAMES, False) / "a"))
    opened = tunnel.open(lambda item, *_: [item] * 3)
    head = Head(Kind.MESSAGE, 1, exchange=0, tag=Tag.DATA, length=8)

    def take(body):
        found, content = frame_of(body)
        tunnel.room(found)[:] = content
        tunnel.complete(found, content)

    fuzz(head.pack() + bytes(8), take, "streams", valid=False)
    assert len(tunnel._streams) == len(opened) == 2  # no site opens one by itself
    for stream in opened.values():
        stream.close()
    tunnel.close_descriptors()


def test_requests_that_wait_at_the_store_are_bounded():
    store, asked = Store(), encode(Request(1, "wait", ("missing",) * 10_000))
    assert store.handle(2, asked) == []
    ((slot, answer),) = store.handle(2, encode(Request(2, "wait", ("missing",) * 10_000)))
    assert (slot, decode(REPLIES, answer, "reply", MismatchError).error) == (2, "too many requests are waiting")


def test_reasons_fit_into_messages():
    for reason in ("x" * 5000, "cannot read \udcff"):
        found = read_control(pack_control(Drop(1, 1, reason), 0)[HEAD_BYTES:], 3)
        assert found.reason == reason[:2000].replace("\udcff", "?")


@pytest.mark.parametrize("sites", [1, 2, 4, 1 << 62])
def test_a_hub_goes_on_after_a_hello_with_a_wrong_number_of_sites(tmp_path, sites):
    with running_hub(tmp_path / "kits", NAMES) as hub:
        answer = TestSite(hub.kit("c"), hub.address, sites=sites).answer
        assert (type(answer), "roster has" in answer.reason) == (Refuse, True)
        close_step(together(hub, "abc"))
        assert not [line for line in hub.log if "fault" in line]


@pytest.mark.parametrize(
    "message",
    [
        Requirements(1, (1 << 63) - 1),
        Joined(Position(1, (1 << 63) - 1)),
        replace(REPORT, position=Position(1, (1 << 63) - 1)),
        replace(REPORT, return_ms=(1 << 63) - 1),
    ],
    ids=lambda each: type(each).__name__,
)
def test_numbers_that_a_hub_computes_with_stay_in_range(message):
    with pytest.raises(FrameError, match="damaged control message"):
        read_control(control(message), 3)


def test_offers_of_keys_are_checked(tmp_path):
    folder = make_kits(tmp_path / "kits", NAMES)
    ours, theirs = (Offers(Kit.load(folder / name)) for name in "ab")
    _, offer = theirs.make()
    fuzz(offer, lambda body: ours.check(1, body), "offer")


@pytest.mark.parametrize(
    "lie",
    [
        {"weight": torch.ones(1, 3)},
        {"weight": torch.ones(2, 3).double(), "bias": torch.ones(2)},
        {"bias": torch.ones(2)},
        {"weight": torch.full((2, 3), torch.nan), "bias": torch.ones(2)},
        {"weight": "x", "bias": torch.ones(2)},
        None,
    ],
    ids=["broadcasts", "another type", "lacks one", "NaN", "no tensor", "no state"],
)
def test_a_site_that_joins_refuses_what_is_no_state_of_its_model(lie):
    joiner = object.__new__(ReplicatedModel)
    joiner.shared, joiner.site_rank, joiner._describe = torch.nn.Linear(3, 2), 0, dict

    def receive(most):
        return codec.decode(codec.encode([1] if lie is None else replaced(JoinState({}, {}, 4, {}, {}), lie)))

    def replaced(state, tensors):
        object.__setattr__(state, "tensors", tensors)
        return state

    joiner._transport = SimpleNamespace(
        rounds=SimpleNamespace(joins=True, receive_state=receive), sites=SITES, world_size=3
    )
    with pytest.raises(DadplugError, match="another site"):
        joiner._receive_state()


def test_a_site_that_joins_loads_the_state_of_an_optimizer_or_says_that_it_cannot():
    donor, own = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizers = [torch.optim.Adam(each.parameters()) for each in (donor, own)]
    donor(torch.ones(1, 3)).sum().backward()
    optimizers[0].step()
    joiner, chance, errors = object.__new__(ReplicatedModel), random.Random(0), []
    joiner._further = {"optimizer": optimizers[1]}
    joiner._transport = SimpleNamespace(rounds=SimpleNamespace(take_part=lambda: True))
    for _ in range(300):
        state = altered_item(optimizers[0].state_dict(), chance)
        try:
            joiner._join(JoinState({}, {}, 4, {}, {"optimizer": state}))
        except DadplugError as error:
            errors.append(str(error))
    assert 0 < len(errors) < 300
    assert all("another site has sent a state of 'optimizer' that cannot be loaded here" in each for each in errors)


# Plans of other sites


def test_agreements_of_another_site_are_followed_or_refused():
    model, chance, refused, transport = torch.nn.Linear(3, 2).half(), random.Random(0), 0, Arrives()
    transport.inside, transport.rounds = None, Rounds(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    agreement = ElasticAgreement(model, LocalOptions(min_sites=1, outer_lr=0.7, outer_momentum=0.9), transport)
    agreement.begin()
    values = {name: each.float() for name, each in model.named_parameters()}
    agreement.agreed.move(values, dict.fromkeys(values, 1.0))
    plan = agreement.donate()[1] | {"groups": settings_of(optimizer)}
    for number in range(2 * COUNT):
        lie = altered_item(plan, chance) if number else plan | {"groups": [{"params": 1.0}]}
        with contextlib.suppress(MismatchError):
            lie = codec.decode(codec.encode(lie))
            load_joined("local steps", partial(agreement.adopt, step=4), lie)
            load_joined("optimizer", partial(load_settings, optimizer, ()), lie)
            agreement._plan()
            continue
        refused += 1
        assert len(optimizer.param_groups[0]["params"]) == 2
    assert COUNT / 2 < refused < 2 * COUNT


@support.at_sites(2)
def test_a_plan_of_another_site_is_followed_or_refused() -> None:
    for number, options in enumerate(({"mode": "dad"}, {"mode": "rankdad", "rank": 4, "merge": "owner"})):
        model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.LayerNorm(24), torch.nn.Linear(24, 24))
        reduction = dadplug.GradientReduction(model, **options)
        for _ in range(2):
            model(torch.randn(4, 12)).square().mean().backward()
            reduction.synchronize()
        planner, chance = reduction._planner, random.Random(number)
        own = planner.plan_state()
        for _ in range(COUNT):
            with contextlib.suppress(DadplugError):
                planner.adopt(codec.decode(codec.encode(altered_item(own, chance))))
        planner.adopt(own)
        assert planner.plan_state() == own
        reduction.detach()


# Fields that are out of range: the error names the site


@pytest.mark.parametrize(
    "place", [1, 3, 4, 5, pytest.param(0, id="a step"), pytest.param(2, id="a layout"), pytest.param(6, id="a batch")]
)
def test_a_header_of_local_steps_names_the_site(place):
    content, take = of_local_header()
    numbers = np.frombuffer(content, np.int64).copy()
    take(numbers.tobytes())
    for value in (-2, -(1 << 63)):
        numbers[place] = value
        with pytest.raises(MismatchError, match=r"site 2 \(c\) has sent an invalid header"):
            take(numbers.tobytes())


@pytest.mark.parametrize(("others", "most"), [(0, 1 << 24), (1 << 20, 1 << 26)], ids=["others send none", "some"])
def test_a_second_round_is_bounded_by_what_the_other_sites_send(monkeypatch, others, most):
    wire = wire_format("fp32")
    bucket = FactorBucket([Slot(6, 10, 0, 3, wire)], Arrives(), torch.float32, wire)
    monkeypatch.setattr(Arrives, "gather", asked := Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):
        bucket.second_round([[others, most, 0]])
    with pytest.raises(MismatchError, match=r"site 1 \(b\) announces \d+ more values"):
        bucket.second_round([[others, most + 100, 0]])
    assert asked.call_args.args[0] == [16 * others, 16 * most, 0]


@pytest.mark.parametrize("value", [-1, 100, 1 << 30])
@pytest.mark.parametrize("name", ["factors", "rows of a table", "sparse"])
def test_numbers_in_payloads_name_the_site(name, value):
    content, take = MESSAGES[name]()
    numbers = np.frombuffer(content, np.int32).copy()
    numbers[:3] = [value, 3, 3] if name == "factors" and value < 0 else [1, value, 3]
    if name == "rows of a table":  # row numbers follow the header and the deltas, in cache lines of their own
        numbers[:3] = [1, 3, 3]
        numbers[32] = value
    with pytest.raises(MismatchError, match=r"site 1 \(b\) has sent an invalid payload"):
        take(numbers.tobytes())
