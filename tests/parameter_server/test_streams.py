"""Frames over sockets: when the thread that receives them wakes up."""

from __future__ import annotations

import select
import socket
import sys

import pytest

from dadplug.parameter_server.streams import _HEAD, _WAKE, Frame, Kind, _Stream


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems may wake up earlier")
def test_a_body_wakes_the_receiver_in_large_parts_and_arrives_whole():
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver = server.accept()[0]
    stream = _Stream(receiver, 1 << 20)
    body = bytes(range(256)) * (5 * _WAKE // 512)  # two and a half parts
    sender.sendall(_HEAD.pack(Kind.CONTRIBUTION, 1, 0, 0, 0, 4, 0, len(body)))
    frames, wakes = [], 0
    try:
        for start in range(-1, len(body), 1024):
            sender.sendall(body[max(0, start) : start + 1024])
            while select.select([receiver], [], [], 0.001)[0]:
                wakes += 1
                frames += stream.read()
        while not frames:
            assert select.select([receiver], [], [], 10)[0]
            frames += stream.read()
        assert frames == [Frame(Kind.CONTRIBUTION, 1, 0, 0, 0, 4, 0, bytearray(body))]
        assert wakes <= 5
        sender.sendall(_HEAD.pack(Kind.REACHED, 1, 0, 0, 7, 0, 0, 0))  # a frame without a body wakes it at once
        assert select.select([receiver], [], [], 10)[0]
        assert stream.read()[0].reached == 7
        sender.sendall(_HEAD.pack(Kind.CONTRIBUTION, 1, 0, 0, 0, 4, 0, len(body)) + body[:10])
        assert select.select([receiver], [], [], 10)[0]
        assert not stream.read()
        sender.close()  # so does the end of the connection
        assert select.select([receiver], [], [], 10)[0]
        with pytest.raises(ConnectionError):
            stream.read()
    finally:
        sender.close()
        receiver.close()
