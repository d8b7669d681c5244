"""Link between site and hub: who is lost and why, silence, mismatches, and the end of processes."""

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import support
import torch
from cutting_relay import CuttingRelay
from hub_sites import NAMES, link_all, linked, links, open_link, over_hub, together, train, transports
from running_hub import running_hub, until
from running_hub import together as simple_sites
from sealed_sites import make_kits
from torch import nn

from dadplug.errors import MismatchError, SiteError
from dadplug.hub.server import session
from dadplug.hub.site import connection
from dadplug.hub.site import connection as connection_module
from dadplug.hub.site.inbox import Inbox
from dadplug.hub.site.link import HubLink
from dadplug.hub.wire.messages import PIECE_BYTES, SHORT_PIECE_BYTES, Close, Head, Kind
from dadplug.hub.wire.streams import NumberedFrames


def exchange(transport, value: float = 1.0, size: int = 1000):
    """Gather a payload of this site; return all."""
    gather = transport.gather([size] * transport.world_size, torch.float32)
    gather.payload.fill_(value)
    gather.launch()
    return gather


def test_the_reason_of_a_site_that_leaves_reaches_all_others_after_what_it_has_sent(tmp_path):
    with links(tmp_path, 3) as opened:
        a, b, c = transports(opened)
        lengths, complete = [], opened[2].complete
        opened[2].complete = lambda head, body: (lengths.append(head.length), complete(head, body))
        gathers = [exchange(each, rank, 100_000) for rank, each in enumerate((a, b, c))]
        opened[1].leave("ValueError: no data")
        for gather in (gathers[0], gathers[2]):
            assert [payload[0].item() for payload in gather.wait()] == [0.0, 1.0, 2.0]
        assert max(lengths) == SHORT_PIECE_BYTES  # of three sites, two are away from the hub
        for transport in (a, c):
            with pytest.raises(SiteError, match=r"^site 1 \(b\) is gone: ValueError: no data$"):
                exchange(transport).wait()
            with pytest.raises(SiteError, match="site 1"):
                transport.all_reduce(torch.ones(100_000)).wait()
        assert str(a.sites.found_lost()) == "site 1 (b) is gone: ValueError: no data"
        with pytest.raises(SiteError, match="has closed its connection"):
            opened[1].end_step()


def test_the_site_that_was_lost_first_is_named(tmp_path):
    with links(tmp_path, 3) as opened:
        a, _, _ = transports(opened)
        opened[2].leave("KeyError: 'x'")
        assert opened[1].await_loss(60.0) is not None
        opened[1].leave("SiteError: site 2 (c) is gone: KeyError: 'x'")
        assert opened[0].converse(lambda: len(opened[0].gone) < 2, 60.0)
        with pytest.raises(SiteError, match=r"^site 2 \(c\) is gone: KeyError: 'x'$"):
            exchange(a).wait()


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (HubLink.close, "its program has ended"),
        (HubLink.close_descriptors, "its connection was lost"),  # as if it had been killed
    ],
)
def test_a_site_that_leaves_without_a_reason_is_gone(tmp_path, end, reason):
    with links(tmp_path, grace=0.3) as opened:
        end(opened[1])
        with pytest.raises(SiteError, match=rf"site 1 \(b\) is gone: {reason}"):
            exchange(transports(opened)[0]).wait()


def test_a_slow_site_is_named_after_the_timeout_and_can_be_waited_for_again(tmp_path):
    with links(tmp_path) as opened:
        a, b = transports(opened, timeout=0.3)
        gather = exchange(a, 1.0)
        with pytest.raises(SiteError, match=r"site 1 \(b\) has not answered for 0.3 s"):
            gather.wait()
        a.timeout = 60.0
        exchange(b, 2.0)
        assert [payload[0].item() for payload in gather.wait()] == [1.0, 2.0]


def test_what_takes_longer_than_the_timeout_is_waited_for_while_frames_arrive(tmp_path):
    with links(tmp_path) as opened:
        b = transports(opened)[1]
        a = opened[0]
        sender = threading.Thread(target=lambda: [(time.sleep(0.2), exchange(b, size=1)) for _ in range(15)])
        sender.start()
        assert not a.converse(lambda: int(a.inbox.early_bytes < 60), 0.1)
        assert a.converse(lambda: int(a.inbox.early_bytes < 60), 2.0, any_frame=True)
        sender.join()


def test_sites_at_different_exchanges_are_told_so(tmp_path):
    with links(tmp_path) as opened:
        a, b = transports(opened, timeout=0.5)
        first = b.gather([4, 4], torch.float32)
        exchange(b)
        assert opened[0].converse(lambda: not opened[0].inbox.early_bytes, 60.0)
        with pytest.raises(MismatchError, match="do not make the same calls"):
            exchange(a).wait()
        first.launch()


@pytest.mark.parametrize(
    "calls",
    [
        (lambda each: each.gather_objects(1), lambda each: each.broadcast(torch.zeros(3))),  # which sends nothing
        (lambda each: exchange(each).wait(), lambda each: each.gather_objects(1)),
    ],
)
def test_sites_that_make_different_calls_are_told_both(tmp_path, calls):
    with links(tmp_path) as opened:
        pair = transports(opened)

        def call(rank):
            with pytest.raises(MismatchError, match=r"site 0 \(a\) is in .*, and site 1 \(b\) is in "):
                calls[rank](pair[rank])

        together(call)


def test_a_broadcast_is_not_taken_for_a_part_of_a_sum(tmp_path):
    with links(tmp_path) as opened:
        a, b = transports(opened, timeout=0.5)
        a.broadcast(torch.zeros(3))
        with pytest.raises((MismatchError, SiteError)):
            b.all_reduce(torch.ones(3)).wait()


def test_payloads_of_different_sizes_end_the_link(tmp_path):
    with links(tmp_path) as opened:
        a, b = transports(opened)
        exchange(b, size=1001)
        for _ in range(2):
            with pytest.raises(MismatchError, match=r"site 1 \(b\) sends site 0 \(a\) another message"):
                exchange(a).wait()
        assert opened[0].closed


def test_training_waits_for_all_sites_and_names_those_that_are_missing(tmp_path):
    with running_hub(tmp_path / "kits", NAMES[:3]) as hub:
        with pytest.raises(SiteError, match=r"has not started within 1 s: .*waiting for b, c"):
            open_link(hub.kits, "a", timeout=1)
        for link in link_all(hub, 3):  # the site that has given up can come again
            link.close()


def test_a_hub_may_start_after_its_sites(tmp_path):
    with running_hub(tmp_path / "kits") as hub:
        pass
    with ThreadPoolExecutor(1) as pool:
        dialing = pool.submit(link_all, hub)
        time.sleep(0.2)
        with running_hub(tmp_path / "kits"):
            opened = dialing.result()
            a, b = transports(opened)
            exchange(b)
            exchange(a).wait()
            for link in opened:
                link.close()


def test_a_hub_that_is_not_there_is_named(tmp_path, caplog):
    with running_hub(tmp_path / "kits") as hub:
        pass
    with pytest.raises(SiteError, match=f"the hub at {hub.address[0]}:{hub.address[1]} cannot be reached for 0.3 s"):
        open_link(tmp_path / "kits", "a", timeout=0.3)
    told = [each.getMessage() for each in caplog.records if "cannot be reached: " in each.getMessage()]
    assert len(told) == 1  # at once; reminders come after seconds
    assert f"the hub at {hub.address[0]}:{hub.address[1]}" in told[0]
    assert "connecting again" in told[0]


def test_two_processes_with_one_kit_are_refused(tmp_path):
    with links(tmp_path), pytest.raises(SiteError, match="another process is connected as site 'a'"):
        open_link(tmp_path / "kits", "a")


def test_a_hub_that_has_been_restarted_gets_what_the_old_one_has_lost(tmp_path):
    with running_hub(tmp_path / "kits", NAMES[:3]) as hub, CuttingRelay(hub.address) as relay:
        opened = link_all(hub, 3, [relay.address] * 3)
        every = transports(opened)
        tensors = [torch.arange(100_000.0) * (rank + 1) for rank in range(3)]
        sums, gathers = [every[0].all_reduce(tensors[0])], [exchange(each, rank) for rank, each in enumerate(every)]
        assert [int(each[0]) for each in gathers[0].wait()] == [0, 1, 2]
        relay.cut(refuse=True)
    sums += [each.all_reduce(tensor) for each, tensor in zip(every[1:], tensors[1:], strict=True)]
    with running_hub(tmp_path / "kits", NAMES[:3]):
        for link in opened:
            link.address = hub.address
        for reduction in sums:
            reduction.wait()
        for each in tensors:
            assert torch.equal(each, torch.arange(100_000.0) * 6)
        for gather in gathers:
            assert [int(each[0]) for each in gather.wait()] == [0, 1, 2]
        for link in opened:
            link.end_step()
        opened[1].leave("KeyError: 7")
        with pytest.raises(SiteError, match=r"site 1 \(b\) is gone: KeyError: 7"):
            exchange(every[0]).wait()
    for link in opened:
        link.close(0.1)


def test_a_run_ends_if_a_site_has_started_again_with_the_hub(tmp_path):
    with running_hub(tmp_path / "kits", NAMES[:2]) as hub, CuttingRelay(hub.address) as relay:
        opened = link_all(hub, 2, [relay.address] * 2)
        relay.cut(refuse=True)
    opened[1].close_descriptors()
    with running_hub(tmp_path / "kits", NAMES[:2]), ThreadPoolExecutor(1) as pool:
        new = pool.submit(open_link, hub.kits, "b", hub.address)
        opened[0].address = hub.address
        with pytest.raises(SiteError, match="the hub has been restarted, and b has been started again"):
            exchange(transports(opened)[0]).wait()
        again = open_link(hub.kits, "a", hub.address)
        for link in (again, new.result()):
            link.close(0.1)
    opened[0].close(0.1)


def test_a_dead_link_is_left_and_training_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(connection_module, "_SHORTEST_SILENCE", 0.3)
    with (
        running_hub(tmp_path / "kits", site_timeout=3.0, grace=30.0) as hub,
        CuttingRelay(hub.address) as relay,
        linked(hub, 2, [relay.address, hub.address]) as opened,
    ):
        a, b = transports(opened)
        relay.hold = True
        other = exchange(b, 2.0)
        gather = exchange(a, 1.0)
        timer = threading.Timer(1.7, lambda: setattr(relay, "hold", False))
        timer.start()
        for each in (gather, other):
            assert [payload[0].item() for payload in each.wait()] == [1.0, 2.0]
        timer.join()


def test_frames_that_have_arrived_are_not_kept(tmp_path):
    with links(tmp_path) as opened:
        every = transports(opened)

        def use(transport):
            gather, most = transport.gather([250_000] * 2, torch.float32), 0
            for _ in range(60):
                gather.launch()
                gather.wait()
                transport.rounds.end_step()
                most = max(most, transport.link.frames.queue.nbytes)
            return most

        assert all(most < 24 << 20 for most in together(lambda rank: use(every[rank])))  # of 60 MB
        assert all(link.inbox.early_bytes == 0 for link in opened)


def test_a_forked_child_neither_uses_nor_keeps_the_link(tmp_path):
    with links(tmp_path, grace=0.3) as opened:
        descriptor = opened[0]._connection.fileno()
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.fstat(descriptor)
                os.write(write, b"open")
            except OSError:
                os.write(write, b"closed")
            try:
                opened[0].end_step()
            except SiteError:
                os.write(write, b", refused")
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 100) == b"closed, refused"
        every = [exchange(each) for each in transports(opened)]
        assert all(len(gather.wait()) == 2 for gather in every)


# Loss of the TCP connection between site and hub: the link goes on where it was lost, with the same results


SIZES = [120_000, 7, 40_000]  # several frames, a part of one, one in full


class Step:
    """Step with every kind of frame: two gathers, a second round, sums, objects and END."""

    def __init__(self, transport) -> None:
        self.transport = transport
        self.large = transport.gather(SIZES, torch.float32)
        self.small = transport.gather([5] * 3, torch.int64)

    def run(self, number: int) -> list[torch.Tensor]:
        transport, rank = self.transport, self.transport.rank
        self.large.payload.copy_(torch.arange(SIZES[rank]) % 1000 + number + rank)
        self.large.launch()
        self.small.payload.fill_(10 * number + rank)
        self.small.launch()
        total = torch.arange(30_000, dtype=torch.float32) * (rank + 1) + number
        reduction = transport.all_reduce(total)
        found = [payload.clone() for gather in (self.large, self.small) for payload in gather.wait()]
        second = transport.gather([0, 20_000, 3], torch.float32, first=self.large)
        second.payload.fill_(number + rank)
        second.launch()
        found += [payload.clone() for payload in second.wait()]
        reduction.wait()
        found.append(total)
        found.append(torch.tensor(transport.gather_objects([rank, number])))
        transport.rounds.end_step()
        return found


def expected(number: int) -> list[torch.Tensor]:
    found = [(torch.arange(size) % 1000 + number + rank).float() for rank, size in enumerate(SIZES)]
    found += [torch.full((5,), 10 * number + rank) for rank in range(3)]
    found += [torch.full((size,), number + rank + 0.0) for rank, size in enumerate([0, 20_000, 3])]
    found.append(torch.arange(30_000, dtype=torch.float32) * 6 + 3 * number)
    return [*found, torch.tensor([[rank, number] for rank in range(3)])]


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize("direction", [0, 1], ids=["from the site", "from the hub"])
def test_a_step_with_its_connection_cut_anywhere_gives_the_same_results(tmp_path, direction, sealed):
    cuts = 20
    if sealed:
        make_kits(tmp_path / "kits", NAMES[:3])
    with (
        running_hub(tmp_path / "kits", NAMES[:3]) as hub,
        CuttingRelay(hub.address) as relay,
        linked(hub, 3, [relay.address, hub.address, hub.address]) as opened,
    ):
        steps = [Step(transport) for transport in transports(opened)]

        def run(number: int) -> None:
            results = together(lambda rank: steps[rank].run(number), 3)
            for found in results:
                assert all(torch.equal(*pair) for pair in zip(found, expected(number), strict=True))

        run(0)
        before = relay.counts[direction]
        run(1)
        length = relay.counts[direction] - before
        for cut in range(cuts):
            relay.cut_after(direction, cut * length // cuts + cut)
            run(2 + cut)
        assert relay.cuts >= cuts - 1  # the last one may come after the step
        assert [line for line in hub.log if "has left" in line] == []
        for link in opened:
            assert not link.closed
            assert (link._connection._replaced is None) == (link is opened[0])


# Inbox: pieces of messages find their buffers, in whatever order they and their receivers come


KEY = Kind.PAYLOAD, 1, 7, False


def deliver(inbox: Inbox, content: bytes, offset: int = 0, key: tuple[Kind, int, int, bool] = KEY) -> None:
    head = Head(key[0], key[1], 1, key[2], offset, len(content))
    room = inbox.room(head)
    room[:] = content
    inbox.complete(head, room)


def cut(content: bytes) -> list[tuple[int, bytes]]:
    return [(start, content[start : start + 16]) for start in range(0, len(content), 16)]


def test_messages_go_to_buffers_in_the_order_in_which_both_come():
    chance = random.Random(4)
    for _ in range(200):
        inbox = Inbox(["a", "b", "c"], 0)
        sizes = {
            (Kind.PAYLOAD, slot, number, False): [chance.randrange(1, 40) for _ in range(4)]
            for slot in (1, 2)
            for number in (3, 4)
        }
        sizes[Kind.SUM, 0, 5, False] = [chance.randrange(1, 40) for _ in range(4)]
        contents = {key: [chance.randbytes(size) for size in each] for key, each in sizes.items()}
        pieces = {key: [piece for content in each for piece in cut(content)] for key, each in contents.items()}
        wanted = {key: list(each) for key, each in sizes.items()}
        posted = {key: [] for key in sizes}
        while any(pieces.values()) or any(wanted.values()):
            key = chance.choice(list(sizes))
            if chance.random() < 0.5 and wanted[key]:
                posted[key].append(inbox.expect(key, memoryview(bytearray(wanted[key].pop(0)))))
            elif pieces[key]:
                offset, content = pieces[key].pop(0)
                deliver(inbox, content, offset, key)
        for key, messages in posted.items():
            assert all(message.done for message in messages)
            assert [bytes(message.buffer) for message in messages] == contents[key]
        assert inbox.expected_bytes == inbox.early_bytes == 0


def test_a_buffer_that_is_posted_while_a_frame_arrives_gets_it():
    inbox = Inbox(["a", "b"], 0)
    head = Head(Kind.PAYLOAD, 1, 1, 7, 0, 4)
    room = inbox.room(head)
    message = inbox.expect(KEY, memoryview(bytearray(4)))
    room[:] = b"1234"
    inbox.complete(head, room)
    assert message.done
    assert bytes(message.buffer) == b"1234"


def test_a_frame_that_was_lost_before_its_end_counts_once():
    inbox = Inbox(["a", "b"], 0)
    message = inbox.expect(KEY, memoryview(bytearray(4)))
    inbox.room(Head(Kind.PAYLOAD, 1, 1, 7, 0, 4))[:2] = b"12"  # then the connection was lost
    assert message.received == 0
    deliver(inbox, b"1234")
    assert bytes(message.buffer) == b"1234"


@pytest.mark.parametrize(("offset", "size"), [(0, 5), (2, 2), (0, 9)])
@pytest.mark.parametrize("early", [False, True])
def test_a_message_of_another_size_is_an_error_that_names_its_sender(offset, size, early):
    inbox = Inbox(["a", "b"], 0)
    steps = [lambda: inbox.expect(KEY, memoryview(bytearray(4))), lambda: deliver(inbox, bytes(size), offset)]
    first, second = reversed(steps) if early else steps
    first()
    with pytest.raises(MismatchError, match=r"site 1 \(b\) sends site 0 \(a\) another message"):
        second()


def test_early_messages_take_bounded_memory():
    inbox = Inbox(["a", "b"], 0, limit=10 * PIECE_BYTES)
    for number in range(10):
        deliver(inbox, bytes(PIECE_BYTES), 0, (Kind.PAYLOAD, 1, number, False))
    assert inbox.early_bytes == 10 * PIECE_BYTES
    with pytest.raises(MismatchError, match=r"most of them from site 1 \(b\)"):
        inbox.room(Head(Kind.PAYLOAD, 1, 1, 11, 0, 1))
    inbox.expect((Kind.PAYLOAD, 1, 3, False), memoryview(bytearray(PIECE_BYTES)))
    deliver(inbox, bytes(PIECE_BYTES))


# Transport over a real hub: gathers, sums, broadcasts and objects of all sites


def everywhere(folder, world_size, use):
    """Call a function with the transport of each site; return the results."""
    with links(folder, world_size) as opened:
        every = transports(opened)
        return together(lambda rank: use(every[rank]), world_size)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
def test_a_sum_is_that_of_all_sites_in_the_order_of_ranks(tmp_path, world_size, dtype):
    addends = [(torch.randn(50_001, generator=torch.Generator().manual_seed(rank)) * 100) for rank in range(world_size)]
    addends = [addend.to(dtype) for addend in addends]
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = addends[0].to(wide)
    for addend in addends[1:]:
        total = total + addend.to(wide)

    def use(transport):
        own = addends[transport.rank].clone()
        transport.all_reduce(own).wait()
        return own

    results = everywhere(tmp_path, world_size, use)
    assert all(torch.equal(found, total.to(dtype)) for found in results)


def test_broadcasts_and_objects(tmp_path):
    def use(transport):
        tensor = torch.full((2, 3), float(transport.rank + 1), requires_grad=True)
        transport.broadcast(tensor)
        content = transport.broadcast_bytes(bytes(range(256)) * 300 if transport.rank == 0 else b"ignored")
        objects = transport.gather_objects({"rank": transport.rank, "values": torch.ones(transport.rank)})
        return tensor.tolist(), content, [each["values"].tolist() for each in objects], transport.broadcast_bytes(b"")

    assert (
        everywhere(tmp_path, 3, use) == [([[1.0] * 3] * 2, bytes(range(256)) * 300, [[], [1.0], [1.0, 1.0]], b"")] * 3
    )


def test_a_link_knows_for_how_long_nothing_has_arrived_without_reading(tmp_path):
    with (
        running_hub(tmp_path / "kits", encrypt_local=True) as hub,
        CuttingRelay(hub.address) as relay,
        linked(hub, 2, [relay.address, hub.address]) as opened,
    ):
        held, other = transports(opened)
        time.sleep(3.0)
        until(lambda: not (held.rounds.hub_is_away or other.rounds.hub_is_away))  # the hub sends a ping every second
        relay.hold = True
        until(lambda: held.rounds.hub_is_away)
        assert not opened[0].is_away  # the connection is not lost yet
        relay.hold = False
        until(lambda: not held.rounds.hub_is_away)


# Messages that wait for the next one, so that fewer sends wake up the hub and the sites: they are counted


@pytest.fixture
def sends(monkeypatch):
    """Bytes that wait whenever a site sends, by site."""
    found = {0: [], 1: []}
    flush = NumberedFrames.flush

    def counted(frames):
        if frames.queue.unsent_bytes:
            found[frames.slot].append(frames.queue.unsent_bytes)
        flush(frames)

    monkeypatch.setattr(NumberedFrames, "flush", counted)
    return found


def test_small_payloads_leave_with_the_one_that_follows(tmp_path, sends, monkeypatch):
    monkeypatch.setattr(connection, "_PING_SECONDS", 1000.0)
    with links(tmp_path) as opened:
        a, b = transports(opened)
        gathers = [[each.gather([size, size], torch.uint8) for size in (1000, 2000, 100_000, 10)] for each in (a, b)]
        for found in sends.values():
            found.clear()
        for rank, each in enumerate((a, b)):
            each.more_follows = True
            for gather in gathers[rank]:
                gather.payload.fill_(rank + 1)
                each.more_follows = gather is not gathers[rank][-1]
                gather.launch()
        assert [len(sends[rank]) for rank in (0, 1)] == [2, 2]  # what waits stays small
        assert all(found[0] > 103_000 for found in sends.values())
        for found in together(lambda rank: [gather.wait() for gather in gathers[rank]]):
            assert [[set(each.tolist()) for each in payloads] for payloads in found] == [[{1}, {2}]] * 4


def test_a_payload_that_waits_leaves_when_its_site_waits(tmp_path):
    with links(tmp_path) as opened:
        gathers = [each.gather([3, 3], torch.float32) for each in transports(opened)]
        for rank, gather in enumerate(gathers):
            gather._transport.more_follows = True
            gather.payload.fill_(rank)
            gather.launch()
        for found in together(lambda rank: gathers[rank].wait()):
            assert [payload[0].item() for payload in found] == [0.0, 1.0]


def sends_of_steps(kits: str, options: dict[str, int]) -> list[int]:
    """Train by small buckets over a hub; return the number of sends of each step."""
    counts, flush = [0], NumberedFrames.flush

    def counted(frames: NumberedFrames) -> None:
        counts[-1] += frames.queue.unsent_bytes > 0
        flush(frames)

    with over_hub(Path(kits)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(NumberedFrames, "flush", counted)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 40), nn.Tanh(), nn.Linear(40, 4))

        def loss(step: int) -> torch.Tensor:
            counts.append(0)
            return model(torch.randn(8, 60)).square().mean()

        train(model, loss, 9, mode="dad", bucket_mb=1e-6, **options)
    return counts[3:9]


@pytest.mark.parametrize("options", [{}, {"min_sites": 1}], ids=["all sites stay", "elastic"])
def test_the_last_payload_leaves_with_the_header_and_the_end_of_the_round(hub, options):
    for counts in support.sites(2).run(sends_of_steps, str(hub.kits), options):
        # Three layers have buckets of their own, the header is a message, and an elastic round has an end.
        assert sorted(counts)[len(counts) // 2] == 3, counts


def test_the_hub_closes_steps_with_the_frames_that_follow(tmp_path, monkeypatch):
    flushes: dict[int, int] = {0: 0, 1: 0}
    flush = session.Session.flush

    def counted(each):
        flushes[each.slot] += 1
        flush(each)

    monkeypatch.setattr(session.Session, "flush", counted)
    monkeypatch.setattr(session.Session, "tick", lambda each, now: None)
    with running_hub(tmp_path / "kits") as hub:
        a, b = simple_sites(hub)
        before = dict(flushes)
        for site in (a, b):
            site.send(Kind.END)
        a.send(Kind.PAYLOAD, b"next", step=2)
        assert b.action(Close) == Close(1, (0, 1))
        assert b.take(Kind.PAYLOAD).body == b"next"
        assert flushes[0] == before[0]
        assert flushes[1] == before[1] + 1
        for site in (a, b):
            site.send(Kind.END, step=2)
        for step in (1, 2):  # a second one does not wait
            assert a.action(Close) == Close(step, (0, 1))
