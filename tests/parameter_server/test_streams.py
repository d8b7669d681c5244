"""Frames over sockets: wake-ups of the thread that receives them, and what the kernel holds of those that are sent."""

import random
import select
import socket
import struct
import sys

import pytest

from dadplug.errors import StreamError
from dadplug.exchange import handshake
from dadplug.parameter_server.streams import _HEAD, _UNSENT, _WAKE, Frame, FrameKind, _Stream

fcntl = pytest.importorskip("fcntl")

_SIOCOUTQNSD = 0x894B  # Linux: bytes that have not been sent yet


def read(stream: _Stream) -> list[Frame]:
    messages = []
    stream.read(messages)
    return [frame for _, frame in messages]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems may wake up earlier")
def test_a_body_wakes_the_receiver_in_large_parts_and_arrives_whole():
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver = server.accept()[0]
    stream = _Stream(0, receiver, 1 << 20)
    body = bytes(range(256)) * (5 * _WAKE // 512)  # two and a half parts
    sender.sendall(_HEAD.pack(FrameKind.CONTRIBUTION, 1, 0, 0, 0, 4, 0, len(body)))
    frames, wakes = [], 0
    with sender, receiver:
        for start in range(-1, len(body), 1024):
            sender.sendall(body[max(0, start) : start + 1024])
            while select.select([receiver], [], [], 0.001)[0]:
                wakes += 1
                frames += read(stream)
        while not frames:
            assert select.select([receiver], [], [], 10)[0]
            frames += read(stream)
        assert frames == [Frame(FrameKind.CONTRIBUTION, 1, 0, 0, 0, 4, 0, bytearray(body))]
        assert wakes <= 5
        sender.sendall(_HEAD.pack(FrameKind.REACHED, 1, 0, 0, 7, 0, 0, 0))  # a frame without a body wakes it at once
        assert select.select([receiver], [], [], 10)[0]
        assert read(stream)[0].reached == 7
        sender.sendall(_HEAD.pack(FrameKind.CONTRIBUTION, 1, 0, 0, 0, 4, 0, len(body)) + body[:10])
        assert select.select([receiver], [], [], 10)[0]
        assert not read(stream)
        sender.close()  # so does the end of the connection
        assert select.select([receiver], [], [], 10)[0]
        with pytest.raises(ConnectionError):
            read(stream)


@pytest.mark.parametrize("place", range(2, 7))
def test_a_number_that_cannot_be_counted_on_is_refused(place):
    sender, receiver = socket.socketpair()
    stream = _Stream(0, receiver, 1 << 20)
    with sender, receiver:
        for number in (1 << 62, (1 << 64) - 1):
            fields = [FrameKind.EPOCHS, *(0,) * 7]
            fields[place] = number
            sender.sendall(_HEAD.pack(*fields))
            if number == 1 << 62:
                assert read(stream)[0][place] == number
        with pytest.raises(StreamError, match="a frame of kind 18 with a number above"):
            read(stream)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the number of unsent bytes is known on Linux only")
def test_bytes_on_a_long_link_may_be_many_but_unsent_ones_are_few():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        sender = socket.create_connection(server.getsockname())
        receiver = server.accept()[0]
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    room = sender.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    stream, other = _Stream(0, sender, 1 << 23), _Stream(0, receiver, 1 << 23)
    body = random.Random(0).randbytes(6 << 20)
    frames = []
    with sender, receiver:
        assert sender.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == room  # as much as is on its way
        stream.outgoing.send(Frame(FrameKind.CONTRIBUTION, body=body).encode())
        assert stream.outgoing.blocked
        unsent = struct.unpack("i", fcntl.ioctl(sender, _SIOCOUTQNSD, bytes(4)))[0]
        assert unsent <= 2 * _UNSENT  # the kernel takes whole packets, of 64 KiB here
        while not frames:
            assert select.select([receiver], [], [], 10)[0]
            frames = read(other)
            stream.outgoing.flush()
        assert not stream.outgoing.blocked
        assert frames == [Frame(FrameKind.CONTRIBUTION, body=bytearray(body))]


@pytest.mark.parametrize("grants_less", [True, False])
def test_tcp_buffers_are_large_or_left_to_the_system(grants_less, monkeypatch):
    if grants_less:
        monkeypatch.setattr(handshake, "KERNEL_BYTES", 1 << 40)
    with socket.socket() as usual, handshake.listen(["0.0.0.0"], large=True) as sized:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            found, default = (each.getsockopt(socket.SOL_SOCKET, option) for each in (sized, usual))
            assert found == default if grants_less else found >= default
