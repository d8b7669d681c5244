"""Loss of the TCP connection between site and hub: the link goes on where it was lost, with the same results."""

from __future__ import annotations

import pytest
import torch
from cutting_relay import CuttingRelay
from hub_sites import NAMES, open_link, together, transports
from running_hub import running_hub
from sealed_sites import make_kits

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
        second = transport.gather_again(self.large, [0, 20_000, 3], torch.float32)
        second.payload.fill_(number + rank)
        second.launch()
        found += [payload.clone() for payload in second.wait()]
        reduction.wait()
        found.append(total)
        found.append(torch.tensor(transport.gather_objects([rank, number])))
        transport.end_step()
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
    ):
        addresses = [relay.address, hub.address, hub.address]
        opened = together(lambda rank: open_link(hub.kits, NAMES[rank], addresses[rank]), 3)
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
            assert link._connection.encrypts == (link is opened[0])
            link.close()
