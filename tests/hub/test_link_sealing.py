"""Links whose kits require sealed messages, over a hub that reads and alters what passes through it."""

from __future__ import annotations

import json
import os

import hub_kits
import pytest
import torch
from hub_sites import TIMEOUT, link_all, open_link, together, transports
from running_hub import running_hub, until
from sealed_sites import SENTINEL, SITES, flip, make_kits, opened, packed, sealed_hub, sealed_links

from dadplug.errors import SealingError, SiteError
from dadplug.exchange import Traffic
from dadplug.exchange.requirements import Requirements
from dadplug.hub import provision
from dadplug.hub.elastic import ElasticTransport
from dadplug.hub.frames import Frame, Kind
from dadplug.hub.link_sealing import AGREEMENT
from dadplug.hub.relay import Relay
from dadplug.hub.sealing import OPEN_BYTES


class ReadingHub:
    """What a hub reads, and what it does to frames of training.

    Attributes:
        seen: bodies of all frames that have passed through the hub.
        alter: function of a frame that returns those to pass on instead.
    """

    def __init__(self):
        self.seen: list[tuple] = []
        self.alter = lambda frame: [frame]

    def content(self, kind: Kind = Kind.PAYLOAD) -> bytes:
        """Return all that the hub has read of a kind, but for the agreement on keys."""
        return b"".join(body for head, body in self.seen if head.kind is kind and head.exchange < AGREEMENT)


@pytest.fixture
def reader(monkeypatch):
    reader = ReadingHub()
    take = Relay.take

    def take_and_read(relay, session, frame, now):
        frame = opened(frame)
        reader.seen.append(frame)
        for each in reader.alter(frame) if frame.head.kind is Kind.PAYLOAD else [frame]:
            take(relay, session, packed(each), now)

    monkeypatch.setattr(Relay, "take", take_and_read)
    return reader


def gather(link, content: bytes, size: int, exchange: int) -> list[bytes]:
    """Send a message to all other sites, and return theirs, of equal size."""
    found = [bytearray(size) for _ in range(link.world_size - 1)]
    others = [slot for slot in range(link.world_size) if slot != link.rank]
    incoming = [link.expect(slot, exchange, memoryview(each)) for slot, each in zip(others, found, strict=True)]
    link.send(exchange, memoryview(content))
    link.wait(incoming, TIMEOUT)
    return [bytes(each) for each in found]


def outcome(link, content: bytes, exchange: int = 5) -> object:
    return hub_kits.attempt(lambda: gather(link, content, len(content), exchange))


@pytest.mark.parametrize("sealed", [True, False])
def test_a_hub_finds_a_sentinel_only_where_messages_are_not_sealed(tmp_path, reader, sealed):
    """The test without sealing shows that the search finds what it looks for."""
    values = torch.frombuffer(bytearray(SENTINEL * 10000), dtype=torch.uint8)
    with sealed_links(tmp_path, sealed=sealed) as links:

        def exchange(transport):
            one = transport.gather([len(values)] * 3, torch.uint8)
            one.payload.copy_(values)
            one.launch()
            assert all(torch.equal(each, values) for each in one.wait())
            total = torch.frombuffer(bytearray(SENTINEL), dtype=torch.int32).clone()
            transport.all_reduce(total).wait()
            assert torch.equal(total, 3 * torch.frombuffer(bytearray(SENTINEL), dtype=torch.int32))
            copy = values.clone() if transport.rank == 0 else torch.zeros_like(values)
            transport.broadcast(copy)
            assert torch.equal(copy, values)
            assert transport.broadcast_bytes(SENTINEL) == SENTINEL
            found = transport.gather_objects({"text": SENTINEL.decode(), "rank": transport.rank})
            assert [each["rank"] for each in found] == [0, 1, 2]
            transport.end_step()

        made = transports(links)
        together(lambda rank: exchange(made[rank]), 3)
    count = sum(SENTINEL in body for head, body in reader.seen)
    assert not count if sealed else count > 10
    assert not any(head.kind is Kind.SUMMAND for head, _ in reader.seen) or not sealed
    assert len(reader.content()) > 3 * len(values)


@pytest.mark.parametrize("sites", [("a", "b"), SITES])
def test_messages_of_all_sizes_arrive(tmp_path, sites):
    sizes = [0, 1, OPEN_BYTES - 1, OPEN_BYTES, OPEN_BYTES + 1, 1 << 16, (1 << 16) + 1, 1 << 20]
    messages = {(slot, size): os.urandom(size) for slot in range(len(sites)) for size in sizes}
    with sealed_links(tmp_path, sites) as links:

        def exchange(rank):
            for number, size in enumerate(sizes):
                found = gather(links[rank], messages[rank, size], size, 3 + number % 2)
                assert found == [messages[slot, size] for slot in range(len(sites)) if slot != rank]

        together(exchange, len(sites))


def test_messages_may_come_before_they_are_expected(tmp_path):
    with sealed_links(tmp_path, ("a", "b")) as (first, second):
        contents = [os.urandom(100000) for _ in range(3)]
        for exchange, content in enumerate(contents):
            first.send(exchange, memoryview(content))
        first.send(2, memoryview(contents[0]))
        for exchange in (2, 1, 0):
            buffer = bytearray(100000)
            second.wait([second.expect(0, exchange, memoryview(buffer))], TIMEOUT)
            assert buffer == contents[exchange]
        buffer = bytearray(100000)
        second.wait([second.expect(0, 2, memoryview(buffer))], TIMEOUT)
        assert buffer == contents[0]


def test_sites_that_may_leave_are_refused_before_anything_is_sent(tmp_path):
    with sealed_links(tmp_path, ("a", "b")) as links:
        sent = [link._frames.bytes_sent for link in links]
        for link in links:
            with pytest.raises(ValueError, match="min_sites does not go with sealed messages"):
                ElasticTransport(link, Traffic(), TIMEOUT, Requirements(1, 10_000))
        assert [link._frames.bytes_sent for link in links] == sent
        together(lambda rank: gather(links[rank], bytes([rank]), 1, 3), 2)  # all sites have to stay: that works


class Attack:
    """Attack on the messages of one site from the first sealed one on."""

    def __init__(self, kind: str, slot: int = 0):
        self.kind, self.slot = kind, slot
        self.held: list[Frame] = []
        self.count = 0

    def __call__(self, frame):
        if frame.head.slot != self.slot or frame.head.exchange >= AGREEMENT:
            return [frame]
        self.count += 1
        return getattr(self, self.kind)(frame)

    def alter_content(self, frame):
        return [flip(frame)] if self.count == 2 else [frame]

    def alter_number(self, frame):
        return [flip(frame, 7)] if self.count == 2 else [frame]

    def alter_exchange(self, frame):
        return [frame._replace(head=frame.head._replace(exchange=6))]

    def repeat(self, frame):
        return [frame, frame]

    def leave_out(self, frame):
        return [] if self.count == 2 else [frame]

    def reorder(self, frame):
        self.held.append(frame)
        return [] if self.count == 1 else self.held[::-1]

    def splice(self, frame):
        """Put the second piece's content in the place of the first's."""
        self.held.append(frame)
        return [] if self.count == 1 else [self.held[0]._replace(body=frame.body), frame]

    def make_up(self, frame):
        return [frame._replace(body=bytes(len(frame.body)))]

    def cut(self, frame):
        return [Frame(frame.head._replace(length=10), frame.body[:10])]


ATTACKS = [name for name in vars(Attack) if not name.startswith("_")]


@pytest.mark.parametrize("kind", ATTACKS)
def test_a_hub_that_tampers_is_found_out_and_ends_the_link(tmp_path, reader, kind):
    content = os.urandom(4 * OPEN_BYTES)
    reader.alter = Attack(kind)
    with sealed_links(tmp_path, ("a", "b")) as links:
        results = together(lambda rank: outcome(links[rank], content), 2)
        assert isinstance(results[1], SealingError), results[1]
        assert "a sealed message of site 0 (a)" in str(results[1])
        assert "The hub, or who controls it" in str(results[1])
        with pytest.raises(SealingError):
            links[1].send(9, memoryview(b"more"))


def test_a_hub_that_passes_one_site_s_message_off_as_another_s_is_found_out(tmp_path, monkeypatch):
    """The relay checks slots; this hub writes another sender into the frames that it sends."""
    from dadplug.hub.session import Session

    send = Session.send

    def pretend(session, frame, *soon):
        if session.channel == "training" and session.slot == 2 and frame[2] == Kind.PAYLOAD and len(frame) == 32 + 124:
            frame = frame[:4] + bytes([1 - frame[4]]) + frame[5:]
        send(session, frame, *soon)

    with sealed_links(tmp_path) as links:
        monkeypatch.setattr(Session, "send", pretend)
        results = together(lambda rank: outcome(links[rank], bytes([rank]) * 100), 3)
    assert isinstance(results[2], SealingError), results[2]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_hub_that_tampers_with_the_agreement_is_found_out(tmp_path, reader, number):
    def alter(frame):
        return [flip(frame, 40)] if (frame.head.slot, frame.head.exchange) == (1, AGREEMENT | number) else [frame]

    reader.alter = alter if number < 2 else lambda f: [flip(f, 20)] if f.head.exchange == AGREEMENT | 2 else [f]
    with sealed_hub(tmp_path, ("a", "b")) as hub:
        results = together(lambda rank: hub_kits.attempt(lambda: open_link(hub.kits, "ab"[rank], hub.address)), 2)
    assert isinstance(results[0], SealingError), results[0]
    assert "no key can be agreed on with site 1 (b)" in str(results[0])
    assert isinstance(results[1], SiteError)
    assert not reader.content()  # nothing was sent


def test_a_site_whose_kit_does_not_require_sealing_is_found_out_at_once(tmp_path, reader):
    kits = make_kits(tmp_path / "kits")
    roster = json.loads((kits / "b" / "roster.json").read_bytes())
    (kits / "b" / "roster.json").write_text(json.dumps(roster | {"sealed": False}))
    with running_hub(kits, SITES) as hub:

        def train(rank):
            link = open_link(kits, SITES[rank], hub.address)
            return gather(link, SENTINEL, len(SENTINEL), 1)

        results = together(lambda rank: hub_kits.attempt(lambda: train(rank)), 3)
    found = ("has a kit that requires sealed messages, and this site's kit does not", "messages that are not sealed")
    assert any(reason in str(each) for each in results for reason in found), results  # by whoever receives first
    assert all(isinstance(each, SiteError) for each in results)
    assert all(SENTINEL not in body for head, body in reader.seen if head.slot != 1)


def test_a_revoked_site_is_refused_by_sites_though_the_hub_accepts_it(tmp_path):
    kits = make_kits(tmp_path / "kits")
    revoked = (kits / "hub" / "revoked.pem").read_bytes()
    provision.revoke(kits, "b")
    (kits / "a" / "revoked.pem").write_bytes((kits / "hub" / "revoked.pem").read_bytes())
    (kits / "hub" / "revoked.pem").write_bytes(revoked)  # a hub that does not know, or does not want to
    with running_hub(kits, SITES) as hub:
        results = together(lambda rank: hub_kits.attempt(lambda: open_link(kits, SITES[rank], hub.address)), 3)
    assert "site 1 (b): its certificate has been revoked" in str(results[0])
    assert all(isinstance(each, SiteError) for each in results)


def test_two_runs_share_nothing(tmp_path, reader):
    content = SENTINEL * 100
    with sealed_hub(tmp_path, ("a", "b")) as hub:
        seen = []
        for _ in range(2):
            links = link_all(hub)
            together(lambda rank: gather(links[rank], content, len(content), 1), 2)  # noqa: B023
            for link in links:
                link.close(0.5)
            seen.append([frame for frame in reader.seen if frame.head.kind is Kind.PAYLOAD])
            reader.seen.clear()
        first, second = seen
        assert len(first) == len(second) == 8  # 3 messages of the agreement and one more, of each site
        assert not {frame.body for frame in first} & {frame.body for frame in second}
        # The hub repeats what it has recorded.
        record = {(frame.head.slot, frame.head.exchange): frame for frame in first}
        reader.alter = lambda frame: [record[frame.head.slot, frame.head.exchange]]
        results = together(lambda rank: hub_kits.attempt(lambda: open_link(hub.kits, "ab"[rank], hub.address)), 2)
    assert any(isinstance(each, SealingError) and "was shown other offers" in str(each) for each in results), results
    assert not any(hasattr(each, "send") for each in results)


def test_large_sums_are_formed_by_the_sites_to_the_same_bits(tmp_path, reader):
    addends = [torch.randn(50_000, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    totals = {}
    for sealed in (True, False):

        def add(transport):
            total = addends[transport.rank].clone()
            transport.all_reduce(total).wait()
            return total

        with sealed_links(tmp_path / str(sealed), sealed=sealed) as links:
            made = transports(links)
            totals[sealed] = together(lambda rank: add(made[rank]), 3)  # noqa: B023
        assert any(head.kind is Kind.SUMMAND for head, _ in reader.seen) is not sealed
    assert all(torch.equal(total, totals[True][0]) for total in totals[True] + totals[False])


def test_a_site_that_is_revoked_during_a_run_is_cut_off_by_sites_though_the_hub_keeps_it(tmp_path, caplog):
    with sealed_links(tmp_path) as links:
        folder = links[0].kit.folder
        (folder / "roster.json").write_bytes(b"damaged")
        provision.revoke(folder.parent, "b")
        (folder / "revoked.pem").write_bytes((folder.parent / "authority" / "revoked.pem").read_bytes())
        until(lambda: links[0].closed)
        with pytest.raises(SealingError, match=r"site 1 \(b\): its certificate has been revoked"):
            links[0].check()
        assert "roster.json is not a roster" in caplog.text
