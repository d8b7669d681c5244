"""The delay of sparse deltas, which sites choose by the time in which they arrive."""

from types import SimpleNamespace

import pytest
import support
import torch
import torch.distributed as dist
from local_reference import ends_equal, local_steps, train
from running_hub import running_hub

from dadplug import LocalSGD
from dadplug.local_steps import delay
from dadplug.local_steps.agreement import Agreement
from dadplug.local_steps.delay import DelayChoice, next_delay
from dadplug.local_steps.options import LocalOptions

SPARSE = {"every": 32, "density": 0.1, "wire": "int2"}


@pytest.mark.parametrize(
    ("before", "travels", "after"),
    [
        (8, [], 8),
        (8, [800, 0], 8),  # one site has not measured
        (8, [825, 2000], 8),  # a quarter of a step late is none
        (8, [840, 2000], 11),
        (8, [3000, 4000], 16),  # at most twice as long
        (8, [500, 800], 8),
        (8, [400, 3200], 5),
        (8, [100, 100], 4),  # at least half as long
        (3, [100, 100], 2),
        (2, [100, 150], 1),
        (2, [101, 150], 2),
        (1, [125, 150], 1),
        (1, [150, 150], 2),
    ],
)
def test_the_delay_follows_the_least_time_when_it_is_clearly_wrong(before: int, travels: list[int], after: int) -> None:
    assert next_delay(before, travels) == after


class SlowLink:
    """Clock of one tick a step, on which deltas travel for some ticks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ticks: int) -> None:
        self.ticks, self.now, self.sent, self.waited = ticks, 0, 0, 0
        launch, receive = DelayChoice.launch, Agreement._receive_headers

        def launched(choice: DelayChoice) -> None:
            self.sent = self.now
            launch(choice)

        def received(agreement: Agreement) -> list:
            self.waited = max(0, self.sent + self.ticks - self.now)
            self.now += self.waited
            return receive(agreement)

        monkeypatch.setattr(delay, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(DelayChoice, "launch", launched)
        monkeypatch.setattr(Agreement, "_receive_headers", received)
        monkeypatch.setattr(Agreement, "has_arrived", lambda _: self.now >= self.sent + self.ticks)

    def train(self, local: LocalSGD, rounds: int, site: int) -> list[int | None]:
        """Train for some rounds; return the delay after each."""
        found = []
        for number in range(32 * rounds):
            self.now += 1
            train(local, [number], site)
            if number % 32 == 31:
                found.append(local.delay)
        return found


@support.at_sites(2)
def test_a_slow_link_makes_it_longer_and_a_fast_one_shorter() -> None:
    """Site 1 finds that deltas arrive later, as it does where steps of site 0 take longer."""
    site = dist.get_rank()
    with pytest.MonkeyPatch.context() as monkeypatch:
        link = SlowLink(monkeypatch, 20 + 8 * site)
        local = local_steps(site, **SPARSE)
        assert link.train(local, 6, site) == [8, 8, 8, 16, 25, 25]
        assert link.waited == 3 * site  # site 0 does not wait any more
        state = local.state_dict()
        link.ticks = 1
        assert link.train(local, 9, site) == [25, 25, 25, 13, 7, 4, 2, 1, 1]
        again = local_steps(site, **SPARSE)
        again.load_state_dict(state)
        assert again.delay == 25
        ends_equal(again)
        given = local_steps(site, **SPARSE, delay=3)
        given.load_state_dict(state)
        given.finish()
        assert given.delay == 3
        given.detach()
        ends_equal(local)


def test_a_state_of_an_older_version_begins_with_a_quarter_of_the_round() -> None:
    local = local_steps(0, **SPARSE)
    train(local, range(33), 0)
    state = local.state_dict()
    del state["agreement"]["chosen"]
    arrived = state["agreement"]["arrived"]
    arrived["headers"] = [row[:-1] for row in arrived["headers"]]
    local.load_state_dict(state)
    assert local.delay == 8
    state["agreement"]["chosen"] = 0
    with pytest.raises(ValueError, match="the chosen delay must be a whole number of at least 1 or None, got 0"):
        local.load_state_dict(state)
    local.detach()


def test_the_delay_is_chosen_for_sparse_deltas_unless_it_is_given() -> None:
    dense, rounds = {"every": 32}, {"min_sites": 1, "round_seconds": 5.0}
    for options in (dense, SPARSE | {"overlap": False}, SPARSE | {"delay": 3}, SPARSE | rounds):
        choice = DelayChoice(LocalOptions.create(**options))
        choice.load(5)
        assert choice.at(0) == options.get("delay")
    choice = DelayChoice(LocalOptions.create(**SPARSE | {"every": lambda step: 32 if step < 64 else 4}))
    choice.load(5)
    assert (choice.at(0), choice.at(64)) == (5, 3)


def arrives() -> None:
    """A gather has arrived once all sites have sent, as far as that is known, without a wait."""
    site, local = dist.get_rank(), local_steps(0)
    gather = local._transport.gather([1 << 10] * 2, torch.float32)
    gather.payload.fill_(site)
    if site == 0:
        gather.launch()
        assert not gather.has_arrived()
    dist.barrier()
    if site == 1:
        gather.launch()
    support.until(gather.has_arrived)
    assert [float(each[-1]) for each in gather.wait()] == [0.0, 1.0]
    assert gather.has_arrived()
    local.detach()


def test_an_arrival_is_noticed_without_waiting(sites, tmp_path) -> None:
    sites(2).run(arrives)
    names = ("a", "b")
    with (
        running_hub(tmp_path / "kits", sites=names) as hub,
        support.Sites(2, kits=[hub.kits / name for name in names]) as group,
    ):
        group.run(arrives)
