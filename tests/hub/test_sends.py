"""Messages that wait for the next one, so that fewer sends wake up the hub and the sites: they are counted."""

from pathlib import Path

import pytest
import support
import torch
from hub_sites import links, over_hub, together, train, transports
from running_hub import running_hub
from running_hub import together as simple_sites
from torch import nn

from dadplug.hub.server import session
from dadplug.hub.site import connection
from dadplug.hub.wire.messages import Close, Kind
from dadplug.hub.wire.streams import NumberedFrames


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
def test_the_last_payload_leaves_with_the_header_and_the_end_of_the_round(tmp_path, options):
    with running_hub(tmp_path / "kits") as hub:
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
