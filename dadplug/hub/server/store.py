"""Store of small values by key, which torch.distributed needs: requests of the channel "store" and the hub's replies.

Semantics are those of torch's TCPStore. A request that waits for keys has no time limit at the hub: the site that gives
up cancels it. Everything that a site can fill is bounded.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta
from msgspec.msgpack import Decoder, encode

from ...errors import FrameError, StoreError
from ...support.structs import Count, decode
from ..wire.messages import PIECE_BYTES, Message

MAX_BYTES = 1 << 26  # of all keys and values
MAX_WAITING, MAX_WAITING_KEYS = 256, 1 << 14  # requests of one site, and their keys: all are looked up at each request
_ENTRY_BYTES = 100  # of a key and its value, besides their characters

Operation = Literal[
    "hello", "cancel", "set", "get", "wait", "add", "append", "compare_set", "delete", "check", "num_keys"
]


class Request(Message, frozen=True):
    """Request of a site.

    Attributes:
        number: number that its reply has, too.
        operation: what the store is to do.
        keys: the keys.
        values: values for the keys, or for one of them.
        amount: number to add, or that of the request to cancel.
    """

    number: Count
    operation: Operation
    keys: Annotated[tuple[str, ...], Meta(max_length=1 << 16)] = ()
    values: Annotated[tuple[bytes, ...], Meta(max_length=1 << 16)] = ()
    amount: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] = 0


class Reply(Message, frozen=True):
    """Reply to a request.

    Attributes:
        number: number of the request.
        values: values, by key.
        amount: a number or a truth value.
        error: reason why the request has failed; empty if it has not.
    """

    number: Count
    values: Annotated[tuple[bytes, ...], Meta(max_length=1 << 16)] = ()
    amount: int = 0
    error: str = ""


class Store:
    """Hub's part of the store.

    Args:
        limit: bytes of all keys and values.
    """

    def __init__(self, limit: int = MAX_BYTES) -> None:
        self._limit = limit
        self._values: dict[str, bytes] = {}
        self._nbytes = 0
        self._waiting: dict[tuple[int, int], Request] = {}  # by slot and number

    def handle(self, slot: int, body: bytes) -> list[tuple[int, bytes]]:
        """Take a request.

        Args:
            slot: the site.
            body: the request, encoded.

        Returns:
            Replies, encoded, with the slots of the sites that they go to; those to other sites' requests included.

        Raises:
            FrameError: if it is no request.
        """
        request = _read(body)
        match request.operation:
            case "hello":  # a new process, or one that has lost its requests
                self._waiting = {key: each for key, each in self._waiting.items() if key[0] != slot}
                return [(slot, encode(Reply(request.number)))]
            case "cancel":
                self._waiting.pop((slot, request.amount), None)
                return []
            case "get" | "wait" if not self._has(request):
                keys = [len(each.keys) for key, each in self._waiting.items() if key[0] == slot]
                if len(keys) >= MAX_WAITING or sum(keys) + len(request.keys) > MAX_WAITING_KEYS:
                    return [(slot, encode(Reply(request.number, error="too many requests are waiting")))]
                self._waiting[slot, request.number] = request
                return []
        answers = [(slot, self._answer(request))]
        ready = [key for key, each in self._waiting.items() if self._has(each)]
        return answers + [(key[0], self._answer(self._waiting.pop(key))) for key in ready]

    def _answer(self, request: Request) -> bytes:
        try:
            reply = encode(self._carry_out(request))
            if len(reply) > PIECE_BYTES:
                raise StoreError(f"the values of {len(request.keys)} keys are too large for one reply")
        except (StoreError, OverflowError) as error:  # a sum of more than 64 bits
            reply = encode(Reply(request.number, error=str(error)))
        return reply

    # Operations

    def _has(self, request: Request) -> bool:
        return all(key in self._values for key in request.keys)

    def _put(self, key: str, value: bytes) -> None:
        """Set a value.

        Raises:
            StoreError: if there is no room for it.
        """
        before = self._values.get(key)
        nbytes = self._nbytes + len(value)
        nbytes += len(key) + _ENTRY_BYTES if before is None else -len(before)
        if nbytes > self._limit:
            raise StoreError(f"the hub's store is full: it holds {self._limit} bytes at most")
        if len(value) > PIECE_BYTES // 2:
            raise StoreError(f"a value of {len(value)} bytes: the hub's store takes {PIECE_BYTES // 2} at most")
        self._values[key] = value
        self._nbytes = nbytes

    def _carry_out(self, request: Request) -> Reply:
        key = request.keys[0] if request.keys else ""
        values: tuple[bytes, ...] = ()
        amount = 0
        match request.operation:
            case "set":
                for each, value in zip(request.keys, request.values, strict=True):
                    self._put(each, value)
            case "get":
                values = tuple(self._values[each] for each in request.keys)
            case "add":
                try:
                    amount = int(self._values.get(key, b"0")) + request.amount
                except ValueError as error:
                    raise StoreError(f"the value of {key!r} is no number") from error
                self._put(key, str(amount).encode())
            case "append":
                self._put(key, self._values.get(key, b"") + request.values[0])
            case "compare_set":
                expected, desired = request.values
                if self._values.get(key, b"") == expected:
                    self._put(key, desired)
                values = (self._values.get(key, expected),)
            case "delete" if key in self._values:
                self._nbytes -= len(key) + len(self._values.pop(key)) + _ENTRY_BYTES
                amount = 1
            case "check":
                amount = int(self._has(request))
            case "num_keys":
                amount = len(self._values)
        return Reply(request.number, values, amount)


_VALUES = {"set": None, "append": 1, "compare_set": 2}  # number of values; None for as many as keys
_SINGLE = ("add", "append", "compare_set", "delete")  # operations on one key
_REQUESTS, REPLIES = Decoder(Request), Decoder(Reply)


def _read(body: bytes) -> Request:
    """Return a request, with its fields checked.

    Raises:
        FrameError: if it is none.
    """
    request = decode(_REQUESTS, body, "request of the store", FrameError)
    if request.operation in _SINGLE and len(request.keys) != 1:
        raise FrameError(f"a request {request.operation} of the store with {len(request.keys)} keys")
    wanted = _VALUES.get(request.operation, 0)
    if len(request.values) != (len(request.keys) if wanted is None else wanted):
        raise FrameError(f"a request {request.operation} of the store with {len(request.values)} values")
    return request
