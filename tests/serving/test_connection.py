"""Clients that hold connections, send slow heads or large bodies: others are served, and each learns why it is not."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from functools import partial

import pytest
from dadplug.runners.serving.connection import Connection, Limits
from dadplug.runners.serving.http_app import HttpApp
from http_server import served
from patient import patient_predictor

SECONDS = 60.0
BODY = json.dumps({"input": [1.0, 2.0]}).encode()
HEAD = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
MEGABYTE = 1 << 20


def identity(batch):
    return batch


@pytest.fixture
def open_server():
    with contextlib.ExitStack() as stack:

        def start(most, seconds, api_key=None):
            predictor = stack.enter_context(patient_predictor({"m": identity}, input_shape=(2,)))
            app = HttpApp(predictor, 10_000, seconds, api_key)
            port = stack.enter_context(served(app, partial(Connection, app, Limits(most, seconds))))
            return lambda: stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=SECONDS))

        yield start


def received(connection):
    """Return all that the server sends until it ends the connection."""
    found = b""
    while part := connection.recv(1 << 16):
        found += part
    return found


def ended(connection):
    """Return whether the server has ended a connection, with or without a reset, before the time limit."""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        return not received(connection).startswith(b"HTTP/1.1 200")
    return True


def send_until_ended(connection, part):
    end = time.monotonic() + SECONDS
    with contextlib.suppress(OSError):
        while time.monotonic() < end:
            connection.sendall(part)
            time.sleep(0.02)
        pytest.fail("the connection was not ended")


def predict(connection):
    connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
    answer = b""
    while not answer.endswith(b"}"):
        part = connection.recv(1 << 16)
        assert part, answer
        answer += part
    return answer.startswith(b"HTTP/1.1 200")


def test_connections_that_wait_make_room_for_others(open_server):
    connect = open_server(most=5, seconds=SECONDS * 10)
    kept = connect()
    assert predict(kept)
    idle = [connect() for _ in range(6)]
    slow = [connect() for _ in range(6)]
    for each in slow:
        with contextlib.suppress(OSError):  # perhaps it is ended already
            each.sendall(HEAD)
    assert predict(connect())
    assert all(ended(each) for each in idle)
    assert predict(kept)  # those that never sent a request are ended before it


def test_slow_heads_have_a_time_limit(open_server):
    connect = open_server(most=100, seconds=0.2)
    slow, silent, lines, kept = connect(), connect(), connect(), connect()
    assert predict(kept)
    slow.sendall(HEAD)
    lines.sendall(b"\r\n")
    send_until_ended(slow, b"X-A: b\r\n")  # bytes of a head give it no more time
    assert ended(silent)
    assert ended(lines)
    assert predict(kept)  # the time between two requests is not that of a head


def test_a_long_head_is_refused(open_server):
    connect = open_server(most=100, seconds=SECONDS)
    client = connect()
    client.sendall(HEAD + b"X-A: " + b"b" * (1 << 18))
    client.shutdown(socket.SHUT_WR)
    assert received(client).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("announced", [True, False])
def test_a_client_that_sends_too_large_a_body_reads_the_reason(open_server, announced):
    client = open_server(most=100, seconds=SECONDS)()
    if announced:
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (100 * MEGABYTE))
        part = b"x" * MEGABYTE
    else:
        client.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        part = b"%x\r\n" % MEGABYTE + b"x" * MEGABYTE + b"\r\n"
    for _ in range(100):  # all of it, before anything is read
        client.sendall(part)
    answer = b""
    while not answer.endswith(b"}"):
        answer += client.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in answer
    assert answer.endswith(b'{"error": "the body is larger than 10000 bytes"}')


def test_a_client_without_the_key_reads_so_after_its_body(open_server):
    client = open_server(most=100, seconds=SECONDS, api_key="secret")()
    client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (10 * MEGABYTE))
    for _ in range(10):
        client.sendall(b"x" * MEGABYTE)
    assert received(client).startswith(b"HTTP/1.1 401")


def test_what_follows_a_refusal_is_read_for_a_limited_time(open_server):
    client = open_server(most=100, seconds=0.2)()
    client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (100 * MEGABYTE))
    send_until_ended(client, b"x")


def test_refused_bodies_and_heads_do_not_keep_others_out(open_server):
    connect = open_server(most=5, seconds=SECONDS, api_key="secret")
    refused = [connect() for _ in range(8)]
    for number, each in enumerate(refused):
        with contextlib.suppress(OSError):  # perhaps it is ended already
            each.sendall(HEAD + b"Content-Length: 100\r\n\r\n" if number % 2 else b"X: y\r\n" * 20_000)
    client = connect()
    client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-API-Key: secret\r\nConnection: close\r\n\r\n")
    assert received(client).startswith(b"HTTP/1.1 200")
