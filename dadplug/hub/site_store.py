"""Store of small values by key at the hub, as torch.distributed uses it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import DamagedError, FrameError
from ..exchange import codec
from .connection import HubConnection
from .frames import PIECE_BYTES, Head, Kind
from .kits import Kit
from .store import Reply, Request

_POLL_SECONDS = 0.02  # the thread of the connection may read what another one waits for


class StoreConnection(HubConnection):
    """Connection of the channel "store"."""

    def __init__(self, kit: Kit, address: tuple[str, int] | None = None) -> None:
        super().__init__(kit, "store", address)
        self._numbers = itertools.count(1)
        self._replies: dict[int, Reply | None] = {}  # None where none has arrived

    def room(self, head: Head) -> memoryview:
        if head.kind is not Kind.MESSAGE:
            raise FrameError(f"a {head.kind.name} frame is not expected")
        return memoryview(bytearray(head.length))

    def complete(self, head: Head, body: memoryview) -> None:
        try:
            reply = codec.decode(body)
        except DamagedError as error:
            raise FrameError(str(error)) from error
        if not isinstance(reply, Reply):
            raise FrameError(f"an object of type {type(reply).__name__} is no reply of the store")
        if reply.number in self._replies:  # otherwise it has been given up
            self._replies[reply.number] = reply

    def ask(
        self,
        operation: str,
        timeout: float,
        keys: Sequence[str] = (),
        values: Sequence[bytes] = (),
        amount: int = 0,
    ) -> Reply:
        """Send a request, and wait for the reply.

        Args:
            operation: the operation, see `dadplug.hub.store`.
            timeout: seconds to wait.
            keys: the keys.
            values: the values.
            amount: a number.

        Raises:
            dist.DistStoreError: if there is no reply in time, or it is an error.
            SiteError: if the hub is lost.
        """
        number = next(self._numbers)
        body = codec.encode(Request(number, operation, tuple(keys), tuple(values), amount))
        if len(body) > PIECE_BYTES:
            raise dist.DistStoreError(f"{operation} of {len(body)} bytes: the hub's store takes {PIECE_BYTES} at most")
        with self.lock:
            self._replies[number] = None
            self._waiting += 1
        try:
            self.post(Head(Kind.MESSAGE, self.rank), body)
            reply = self._wait(number, timeout)
        finally:
            with self.lock:
                del self._replies[number]
                self._waiting -= 1
            self._wake()
        if reply is None:
            self.post(Head(Kind.MESSAGE, self.rank), codec.encode(Request(0, "cancel", amount=number)))
            waited = f"{operation} of {', '.join(keys)}" if keys else operation
            raise dist.DistStoreError(f"{waited} at the store of {self.hub} has timed out after {timeout:g} s")
        if reply.error:
            raise dist.DistStoreError(reply.error)
        return reply

    def _wait(self, number: int, timeout: float) -> Reply | None:
        deadline = time.monotonic() + timeout
        while True:
            with self.lock:
                self.transfer()
                reply = self._replies[number]
            if reply is not None or time.monotonic() > deadline:
                return reply
            self.attend(_POLL_SECONDS)


class HubStore(dist.Store):
    """Store at the hub. Connects when it is first used: few programs use it.

    Args:
        kit: kit of this site.
        timeout: seconds for which `get` and `wait` wait, unless `set_timeout` changes it.
        address: host and port of the hub; None for those of the kit.

    Attributes:
        timeout: the timeout.
    """

    timeout: timedelta

    def __init__(self, kit: Kit, timeout: float, address: tuple[str, int] | None = None) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout))
        self._place = kit, address
        self._lock = threading.Lock()
        self._connection: StoreConnection | None = None

    def _ask(self, operation: str, keys: Sequence[str] = (), *values: Any, **settings: Any) -> Reply:
        encoded = [value.encode() if isinstance(value, str) else bytes(value) for value in values]
        settings.setdefault("timeout", self.timeout.total_seconds())
        with self._lock:
            if self._connection is None:
                connection = StoreConnection(*self._place)
                connection.start(self.timeout.total_seconds())
                connection.ask("hello", self.timeout.total_seconds())
                self._connection = connection
        return self._connection.ask(operation, keys=keys, values=encoded, **settings)

    def close(self) -> None:
        """Close the connection, if there is one. May be called twice."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()

    # What torch.distributed calls, from Python or, by way of PrefixStore, from C++

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], value)

    def get(self, key: str) -> bytes:
        return self._ask("get", [key]).values[0]

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", [key], amount=amount).amount

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", [key], value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask("compare_set", [key], expected, desired).values[0]

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys).amount)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = (self.timeout if timeout is None else timeout).total_seconds()
        self._ask("wait", keys, timeout=seconds)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key]).amount)

    def num_keys(self) -> int:
        return self._ask("num_keys").amount

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return list(self._ask("get", keys).values)

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        self._ask("set", keys, *values)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> HubStore:
        return self

    deleteKey, getNumKeys = delete_key, num_keys  # the names that C++ calls
