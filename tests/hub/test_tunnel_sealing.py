"""Sealed streams of the parameter manager, over a hub that reads and alters what passes through it."""

from __future__ import annotations

import select
from contextlib import contextmanager

import hub_kits
import pytest
from hub_sites import TIMEOUT, link_all, together, transports
from running_hub import running_hub
from sealed_sites import SENTINEL, SITES, flip, make_kits, opened, packed

from dadplug.hub.frames import Kind
from dadplug.hub.kits import Kit
from dadplug.hub.peer_stream import Tag
from dadplug.hub.relay import Relay
from dadplug.hub.tunnel import Tunnel
from dadplug.hub.tunnels import tunnel_of


@contextmanager
def streams(folder, sealed=True):
    """Run a hub and three sites; yield the sockets and tunnels of each."""
    with running_hub(make_kits(folder / "kits", sealed=sealed), SITES) as hub:
        links = link_all(hub, 3)
        made = transports(links)

        def open_all(rank):
            tunnel = tunnel_of(links[rank], TIMEOUT)
            sockets = tunnel.open(made[rank].gather_objects)
            made[rank].gather_objects(None)
            return sockets, tunnel

        found = together(open_all, 3)
        try:
            yield [sockets for sockets, _ in found], [tunnel for _, tunnel in found]
        finally:
            for _, tunnel in found:
                tunnel.close(0.2)
            for link in links:
                link.close(0.1)


@pytest.fixture
def seen(monkeypatch):
    """Frames of the parameters' channel that pass through the hub; a function in `seen.alter` may change them."""

    class Seen(list):
        alter = staticmethod(lambda frame: [frame])

    found = Seen()
    take = Relay.take

    def take_and_read(relay, session, frame, now):
        if session.channel == "parameters" and frame.head.kind is Kind.MESSAGE:
            frame = opened(frame)
            found.append(frame)
            for each in found.alter(frame):
                take(relay, session, packed(each), now)
        else:
            take(relay, session, frame, now)

    monkeypatch.setattr(Relay, "take", take_and_read)
    return found


def receive(of, size: int) -> bytes:
    content = b""
    while len(content) < size:
        assert select.select([of], [], [], TIMEOUT)[0], f"{len(content)} of {size} bytes"
        part = of.recv(1 << 16)
        if not part:
            break
        content += part
    return content


def send(to, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        select.select([], [to], [], TIMEOUT)
        try:
            rest = rest[to.send(rest) :]
        except BlockingIOError:
            continue


@pytest.mark.parametrize("sealed", [True, False])
def test_a_hub_finds_a_sentinel_only_in_streams_that_are_not_sealed(tmp_path, seen, sealed):
    content = SENTINEL * 8000  # several frames, more than the local buffers hold at times
    with streams(tmp_path, sealed) as (sockets, _):

        def exchange(rank):
            for peer in range(3):
                if peer != rank:
                    send(sockets[rank][peer], b"%d to %d" % (rank, peer) + content)
            return {peer: receive(sockets[rank][peer], len(content) + 6) for peer in range(3) if peer != rank}

        results = together(exchange, 3)
    for rank, found in enumerate(results):
        assert found == {peer: b"%d to %d" % (peer, rank) + content for peer in range(3) if peer != rank}
    count = sum(SENTINEL in frame.body for frame in seen)
    assert not count if sealed else count > 6
    assert sum(len(frame.body) for frame in seen) > 6 * len(content)


class Attack:
    """Attack on the data of site 0 to site 1, each message of which is one frame."""

    def __init__(self, kind: str):
        self.kind = kind
        self.held = []

    def __call__(self, frame):
        if frame.head.tag != Tag.DATA or frame.head.slot != 1:
            return [frame]
        self.held.append(frame)
        return getattr(self, self.kind)(frame)

    def alter(self, frame):
        return [flip(frame)]

    def repeat(self, frame):
        return [frame, frame._replace(head=frame.head._replace(offset=5))]

    def leave_out(self, frame):
        if len(self.held) == 1:
            return []
        return [frame._replace(head=frame.head._replace(offset=0))]

    def replace(self, frame):
        return [frame] if len(self.held) == 1 else [frame._replace(body=self.held[0].body)]

    def grant(self, frame):
        """Make the data a grant of room."""
        return [frame._replace(head=frame.head._replace(tag=Tag.ROOM, offset=0))]


@pytest.mark.parametrize("kind", [name for name in vars(Attack) if not name.startswith("_")])
def test_a_hub_that_tampers_with_a_stream_is_found_out(tmp_path, seen, kind):
    seen.alter = Attack(kind)
    with streams(tmp_path) as (sockets, tunnels):
        for content in (b"first", b"after"):
            sockets[0][1].send(content)
        assert receive(sockets[1][0], 11) in (b"", b"first", b"firstafter")
        error = hub_kits.attempt(tunnels[1].check)
        assert "a sealed message of site 0 (a)" in str(error)
        assert type(error).__name__ == "SealingError"


def test_a_stream_is_not_readable_to_the_third_site(tmp_path, seen):
    """The hub sends site 2 what is meant for site 1."""
    seen.alter = lambda frame: [frame._replace(head=frame.head._replace(slot=2))] if frame.head.slot == 1 else [frame]
    with streams(tmp_path) as (sockets, tunnels):
        sockets[0][1].send(SENTINEL)
        assert receive(sockets[2][0], 1) == b""
        assert "a sealed message of site 0 (a)" in str(hub_kits.attempt(tunnels[2].check))


def test_a_tunnel_without_keys_is_refused_where_the_kit_requires_sealing(tmp_path):
    kit = Kit.load(make_kits(tmp_path / "kits") / "a")
    with pytest.raises(ValueError, match="keys are needed"):
        Tunnel(kit)
