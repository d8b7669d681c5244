"""Streams of sites to the hub itself."""

from __future__ import annotations

import select
import selectors
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace

from running_hub import TestSite, running_hub, together, until

from dadplug.hub.actions import Drop
from dadplug.hub.frames import Head, Kind
from dadplug.hub.hub_streams import HubStreams
from dadplug.hub.peer_stream import HUB_SLOT, Tag
from dadplug.hub.tunnel import Tunnel
from dadplug.hub.tunnels import stream_to_hub

SECONDS = 60.0


class Echo:
    """Service that sends back what arrives, in a thread for each stream, and counts the ends."""

    def __init__(self) -> None:
        self.ended: list[int] = []

    def accept(self, slot: int, connected: socket.socket) -> None:
        threading.Thread(target=self._serve, args=(slot, connected), daemon=True).start()

    def _serve(self, slot: int, connected: socket.socket) -> None:
        with connected:
            connected.settimeout(SECONDS)
            while content := connected.recv(1 << 16):
                connected.sendall(content)
        self.ended.append(slot)

    def events(self) -> Iterator[str]:
        yield from ()

    def close(self) -> None:
        pass


def write(site: TestSite, content: bytes, channel: int = 1 << 31, **fields) -> None:
    site.send(Kind.MESSAGE, content, slot=HUB_SLOT, exchange=channel, step=0, **fields)


def test_a_stream_carries_more_than_its_window_in_both_directions(tmp_path):
    echo = Echo()
    with running_hub(tmp_path / "kits", service=echo) as hub:
        tunnels = [Tunnel(hub.kit(name)) for name in "ab"]
        for tunnel in tunnels:
            tunnel.start(SECONDS)
        contents = [bytes([number + 1]) * (9 << 20) for number in range(2)]
        found: list[bytes] = [b"", b""]

        def send(number: int) -> None:
            stream = stream_to_hub(tunnels[number])
            assert stream.hub == f"the hub at 127.0.0.1:{hub.address[1]}"

            def read() -> None:
                parts = []
                while sum(map(len, parts)) < len(contents[number]):
                    select.select([stream.connected], [], [], SECONDS)
                    parts.append(stream.connected.recv(1 << 20))
                found[number] = b"".join(parts)

            reader = threading.Thread(target=read)
            reader.start()
            rest = memoryview(contents[number])
            while rest:
                try:
                    rest = rest[stream.connected.send(rest[: 1 << 18]) :]
                except BlockingIOError:
                    select.select([], [stream.connected], [], SECONDS)
            reader.join(SECONDS)
            stream.connected.close()

        threads = [threading.Thread(target=send, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert found == contents
        until(lambda: sorted(echo.ended) == [0, 1])
        for tunnel in tunnels:
            tunnel.close()


def test_the_service_reads_the_end_when_a_site_is_lost(tmp_path):
    echo = Echo()
    with running_hub(tmp_path / "kits", service=echo, grace=0.2) as hub:
        first, second = together(hub, "ab", "parameters")
        write(first, b"hello")
        assert first.take(Kind.MESSAGE).body == b"hello"
        first.cut()
        until(lambda: second.pump() or echo.ended == [0])


def test_damaged_messages_and_too_many_streams_are_refused(tmp_path):
    with running_hub(tmp_path / "kits") as hub:
        first, second = together(hub, "ab", "parameters")
        write(first, b"no message of a service")
        answer = first.take(Kind.MESSAGE)
        assert (answer.head.slot, answer.head.tag) == (HUB_SLOT, Tag.DATA)
        assert b"is no message of a sequencer's service" in answer.body
        assert first.take(Kind.MESSAGE).head.tag == Tag.END
        for channel in range(40):
            write(first, b"x", (1 << 31) + channel, wait=False)
        assert "more than 32 streams to the hub" in first.action(Drop).reason
        write(second, b"x", 1 << 31, tag=9)  # of a stream that has not begun
        write(second, b"x", 1 << 31)
        write(second, b"x", 1 << 31, tag=9)
        assert "unknown message 9 of a stream" in [second.action(Drop) for _ in range(2)][-1].reason


class Deaf:
    """Service that neither reads nor closes its streams before it is closed."""

    def __init__(self) -> None:
        self.streams: list[socket.socket] = []

    def accept(self, slot: int, connected: socket.socket) -> None:
        self.streams.append(connected)

    def events(self) -> Iterator[str]:
        yield from ()

    def close(self) -> None:
        for each in self.streams:
            each.close()


def test_streams_of_lost_sessions_are_closed_though_they_had_one_number():
    service = Deaf()
    with selectors.DefaultSelector() as selector:
        streams = HubStreams(selector, service)
        for session in (SimpleNamespace(slot=0, queue=SimpleNamespace(unsent_bytes=0, nbytes=0)) for _ in range(3)):
            streams.take(session, Head(Kind.MESSAGE, HUB_SLOT, 0, 1 << 31, 0, 5, Tag.DATA), memoryview(b"hello"))
            streams.update()
            streams.end(session)
            streams.serve({}, _fail)
        assert len(selector.get_map()) == 3
        service.close()
        streams.serve({key.data: events for key, events in selector.select(SECONDS)}, _fail)
        assert not selector.get_map()
        streams.close()


def test_a_hub_without_a_service_ends_each_stream(tmp_path):
    with running_hub(tmp_path / "kits", service=None) as hub:
        first, _ = together(hub, "ab", "parameters")
        write(first, b"hello")
        assert first.take(Kind.MESSAGE).head.tag == Tag.END


def _fail(session, error):
    raise error
