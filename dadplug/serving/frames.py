"""Messages between the server and a model's process: a JSON head, and the bytes of one array. No pickles."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

import numpy as np

_SIZES = struct.Struct("<IQ")
_LARGEST_HEAD = 1 << 20
_AT_ONCE = 1 << 16


def send(connection: socket.socket, head: dict[str, Any], array: np.ndarray[Any, Any] | None = None) -> None:
    """Send a message.

    Args:
        connection: a stream socket.
        head: values that JSON can hold.
        array: numbers of a plain dtype.

    Raises:
        OSError: if the other end is closed, or does not read in time.
    """
    body = memoryview(b"")
    if array is not None:
        head = {**head, "shape": array.shape, "dtype": array.dtype.str}
        body = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    text = json.dumps(head).encode()
    connection.sendall(b"".join((_SIZES.pack(len(text), len(body)), text, body if len(body) < 65536 else b"")))
    if len(body) >= 65536:
        connection.sendall(body)


def receive(connection: socket.socket) -> tuple[dict[str, Any], np.ndarray[Any, Any] | None]:
    """Receive a message.

    Raises:
        EOFError: if the other end is closed.
        OSError: if the connection fails, or nothing arrives in time.
        ValueError: if this is no message of `send`.
    """
    # One call receives a whole small message: each call lets other threads run, which may keep the interpreter.
    start = bytearray(_part(connection, _AT_ONCE))
    while len(start) < _SIZES.size:
        start += _part(connection, _AT_ONCE)
    size, length = _SIZES.unpack_from(start)
    if size > _LARGEST_HEAD:
        raise ValueError(f"the head of a message has {size} bytes")
    begin = _SIZES.size + size
    while len(start) < begin:
        start += _part(connection, _AT_ONCE)
    head = json.loads(bytes(start[_SIZES.size : begin]))
    received = len(start) - begin
    if received > length:
        raise ValueError("there is more than one message")
    body = bytearray(length)  # of its own, so that the numbers in it are aligned
    body[:received] = start[begin:]
    view = memoryview(body)[received:]
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the connection is closed")
        view = view[count:]
    if "dtype" not in head:
        return head, None
    return head, np.frombuffer(body, np.dtype(head["dtype"])).reshape(head["shape"])


def _part(connection: socket.socket, most: int) -> bytes:
    part = connection.recv(most)
    if not part:
        raise EOFError("the connection is closed")
    return part
