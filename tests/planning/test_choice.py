"""The rank that the defaults choose by the link: equal at all sites, kept in checkpoints, and never a given one."""

import copy
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import support
import torch
import torch.distributed as dist
from torch import nn

import dadplug
from dadplug.errors import MismatchError
from dadplug.exchange.rounds import Rounds
from dadplug.options import Options
from dadplug.step.planning import choice, planner
from dadplug.step.planning.choice import RankChoice, best_rank
from dadplug.step.planning.merging import LinkCosts

STEP = 0.03  # seconds


def further(by_component: float, present: int) -> dict[int, float]:
    return {rank: by_component * (rank - present) for rank in (2, 4, 8)}


@pytest.mark.parametrize(
    ("present", "wait", "by_component", "best"),
    [
        (8, 0.0, 0.0, 8),
        (8, 0.0, 0.01, 8),  # all of it is hidden behind computing
        (8, 0.012, 0.003, 4),
        (8, 0.2, 0.03, 2),
        (4, 0.0, 0.03, 4),
        (2, 0.0, 1e-6, 8),  # the link is fast again
        (4, 0.0, 1e-6, 8),
        (2, 0.01, 0.03, 2),
    ],
)
def test_the_best_rank_follows_from_what_sites_wait_for(
    present: int, wait: float, by_component: float, best: int
) -> None:
    assert best_rank(present, STEP + wait, wait, further(by_component, present)) == best


def slow_link(patch: pytest.MonkeyPatch, seconds_a_byte: float, reduction: dadplug.GradientReduction) -> None:
    """Let the choice find this link, and the waiting that follows from the rank of the step before."""
    patch.setattr(RankChoice, "_measure", lambda self, size, rounds=3: seconds_a_byte)
    wait = seconds_a_byte * 400 * reduction.max_rank
    reduction._planner.choice._times.extend([(STEP + wait, wait)] * choice._WINDOW)


def train(reduction: dadplug.GradientReduction, steps: int, link: float | None) -> None:
    model, rank = reduction.model, dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    with pytest.MonkeyPatch.context() as patch:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(100 * reduction.step + rank)
            inputs = torch.randn(24, 64, generator=generator)
            optimizer.zero_grad()
            (model(inputs) - inputs.roll(1, 1)).square().mean().backward()
            if link is not None:
                slow_link(patch, link, reduction)
            reduction.synchronize()
            optimizer.step()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


@support.at_sites(2)
def test_a_slow_link_gets_fewer_components_and_a_fast_one_all_again() -> None:
    reduction = dadplug.GradientReduction(net())
    assert "not measured yet" in str(reduction.plan)
    train(reduction, 8, 1e-4)
    assert reduction.max_rank == reduction.choice.rank == 2
    assert reduction.choice.rate == pytest.approx(8e4)
    assert reduction.choice.reason.startswith("2 sites, 0.08 Mbit/s, ")
    assert reduction.choice.error_feedback is None  # all, or the strongest components
    before = reduction.traffic.bytes_sent
    train(reduction, 2, 1e-4)
    assert reduction.traffic.bytes_sent < 0.4 * before
    train(reduction, 16, 1e-4)  # the time of a step is that of the new rank now
    assert reduction.max_rank == 2
    train(reduction, 32, 1e-9)  # also where steps have become no faster
    assert reduction.max_rank == reduction.choice.rank == 8
    train(reduction, 2, 1e-9)
    assert 0.7 * before < reduction.traffic.bytes_sent <= before
    train(reduction, 14, 1e-9)
    assert reduction.choice.rate is None  # no site waits long: the rate of an earlier choice is not shown
    assert reduction.first_difference() is None
    assert str(reduction.choice) in str(reduction.plan)
    reduction.detach()


@support.at_sites(2)
def test_a_resumed_training_keeps_the_choice() -> None:
    reduction = dadplug.GradientReduction(net())
    train(reduction, 10, 1e-4)
    state, weights = copy.deepcopy(reduction.state_dict()), copy.deepcopy(reduction.model.state_dict())
    train(reduction, 20, 1e-4)
    reduction.detach()
    model = net()
    model.load_state_dict(weights)
    resumed = dadplug.GradientReduction(model)
    resumed.load_state_dict(state)
    assert resumed.max_rank == resumed.choice.rank == 2
    train(resumed, 20, 1e-4)
    for old, new in zip(reduction.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(old, new)
    resumed.detach()


@support.at_sites(3)
def test_a_resumed_training_merges_as_before() -> None:
    near, far = LinkCosts(1e-4, 1e-6, 1e-6, 1e-12), LinkCosts(0.1, 1e-12, 1e-12, 1e-12)
    merged, state = [], None
    for link in (near, far, far):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planner, "measure_link", lambda _, link=link: link)
            reduction = dadplug.GradientReduction(net(), rank=4)
            if state is not None and len(merged) == 1:
                reduction.load_state_dict(state)
            train(reduction, 1, None)
        merged.append(reduction._planner.has_owners)
        state = state or copy.deepcopy(reduction.state_dict())
        reduction.detach()
    assert merged == [True, True, False]


@support.at_sites(2)
def test_a_site_without_a_state_gets_the_choice_of_the_others() -> None:
    reduction = dadplug.GradientReduction(net())
    train(reduction, 4, 1e-4)
    early = copy.deepcopy(reduction.state_dict())
    train(reduction, 6, 1e-4)
    states = [copy.deepcopy(reduction.state_dict()), None]
    reduction.load_state_dict(early)
    assert reduction.max_rank == reduction.choice.rank == 8
    assert "not measured yet" in str(reduction.choice)
    reduction.detach()
    resumed = dadplug.GradientReduction(net())
    resumed.load_states(reduction.gather_objects(states)[0])
    train(resumed, 2, 1e-4)
    assert resumed.max_rank == resumed.choice.rank == 2
    train(resumed, 20, 1e-4)
    assert resumed.max_rank == 2
    assert resumed.first_difference() is None
    resumed.detach()


@support.at_sites(2)
def test_a_given_rank_is_kept() -> None:
    for options in ({"rank": 8}, {"budget": 4000}, {"mode": "powersgd"}):
        reduction = dadplug.GradientReduction(net(), **options)
        assert reduction.choice is None
        reduction.detach()
    reduction = dadplug.GradientReduction(net())
    if dist.get_rank() == 1:  # one site sets it, and no site chooses any more
        reduction.max_rank = 6
    train(reduction, 8, 1e-4)
    assert reduction.max_rank == (8, 6)[dist.get_rank()]
    train(reduction, 17, 1e-4)
    assert reduction.max_rank == (8, 6)[dist.get_rank()]
    assert reduction.first_difference() is None
    reduction.detach()


@support.at_sites(3)
def test_from_three_sites_on_owners_merge_and_have_room_for_the_chosen_rank() -> None:
    sent = {}
    for merge in ("all", "auto"):
        reduction = dadplug.GradientReduction(net(), merge=merge)
        train(reduction, 3, None)
        numbers = reduction.gather_objects(reduction.traffic.bytes_sent)
        sent[merge] = sum(numbers)
        if merge == "all":
            reduction.detach()
    assert sent["auto"] < 0.8 * sent["all"]
    train(reduction, 8, 1e-4)
    assert reduction.max_rank == 4  # not 2: the sum of several sites has more directions
    train(reduction, 2, 1e-4)
    numbers = reduction.gather_objects(reduction.traffic.bytes_sent)
    assert sum(numbers) < 0.65 * sent["auto"]
    assert reduction.first_difference() is None
    with pytest.raises(ValueError, match="at most 8, got 16: pass merge='all'"):
        reduction.max_rank = 16
    reduction.detach()


@support.at_sites(3)
def test_the_link_of_the_busiest_owner_counts() -> None:
    """An owner sends its result to all others: a layer with an owner takes as long as if all had merged it."""
    reduction = dadplug.GradientReduction(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)))
    train(reduction, 3, None)
    larger = smaller = 8 * (64 + 256)
    larger += 256  # its bias
    smaller += 64
    assert reduction._planner.busiest_share == pytest.approx(2 * larger / (larger + smaller))
    reduction.detach()


@support.at_sites(3)
def test_a_program_can_raise_the_rank_again_at_one_site_where_owners_merge() -> None:
    reduction = dadplug.GradientReduction(net())
    train(reduction, 10, 1e-4)
    before = reduction.traffic.bytes_sent
    if dist.get_rank() == 1:
        reduction.max_rank = 8
    train(reduction, 16, 1e-4)  # until the next review owners have room for 4
    assert reduction.max_rank == (4, 8, 4)[dist.get_rank()]
    assert (reduction.choice is None) == (dist.get_rank() == 1)
    assert reduction.traffic.bytes_sent > 1.2 * before
    assert reduction.first_difference() is None
    state = copy.deepcopy(reduction.state_dict())
    reduction.detach()
    resumed = dadplug.GradientReduction(net())
    resumed.load_state_dict(state)
    train(resumed, 16, 1e-4)
    assert resumed.max_rank == (4, 8, 4)[dist.get_rank()]  # still no choice
    resumed.detach()


@support.at_sites(3)
def test_what_owners_do_not_send_after_a_choice_is_kept() -> None:
    model = nn.ParameterList([torch.zeros(150, 200)])
    reduction = dadplug.GradientReduction(model, error_feedback=True)
    applied, true = torch.zeros(150, 200), torch.zeros(150, 200)
    with pytest.MonkeyPatch.context() as patch:
        for step in range(70):
            generators = [torch.Generator().manual_seed(10 * step + site) for site in range(3)]
            gradients = [float(step < 14) * torch.randn(150, 200, generator=generator) for generator in generators]
            true += sum(gradients) / 3
            model.zero_grad()
            (model[0] * gradients[dist.get_rank()]).sum().backward()
            slow_link(patch, 1e-4, reduction)
            reduction.synchronize()
            applied += model[0].grad
    assert reduction.max_rank == 4
    assert float((applied - true).norm() / true.norm()) < 0.1
    reduction.detach()


@support.at_sites(2)
def test_layers_fed_by_data_send_a_component_for_four_samples() -> None:
    """Also if the plan is printed before the first step, and if the first input needs a gradient."""
    for rank, components in (("auto", 4), (8, 8)):
        reduction = dadplug.GradientReduction(net(), rank=rank, wire="int8")
        str(reduction.plan)
        for step in range(3):
            inputs = torch.randn(16, 64, requires_grad=step == 0)
            reduction.model.zero_grad()
            (reduction.model(inputs) - inputs.detach().roll(1, 1)).square().mean().backward()
            reduction.synchronize()
        assert reduction.quality["0.weight"].effective_rank == components
        assert reduction.quality["2.weight"].effective_rank == 8
        reduction.detach()


def choice_of(rank: int) -> tuple[RankChoice, SimpleNamespace]:
    """Return a choice with this rank, and the transport between the two sites."""
    method = SimpleNamespace(max_rank=rank, largest_rank=rank)
    planner = SimpleNamespace(has_owners=False, units=(), busiest_share=1.0)
    rounds = SimpleNamespace(elastic=True, leave_out=Rounds(2).leave_out)
    sites = SimpleNamespace(
        world_size=2, sites=["site 0 (a)", "site 1 (b)"], traffic=SimpleNamespace(bytes_sent=1), rounds=rounds
    )
    return RankChoice(method, Options(), sites, planner), sites


def test_a_rank_that_a_program_has_set_is_kept_where_its_report_is_not_there() -> None:
    """The site was absent in the review, and the others have chosen another rank."""
    plans = []
    planner = SimpleNamespace(has_owners=False, units=(), plan_anew=lambda: plans.append(method.max_rank))
    method = SimpleNamespace(max_rank=16, largest_rank=16)
    sites = SimpleNamespace(world_size=3, traffic=SimpleNamespace(wait_seconds=0.0))
    chosen = RankChoice(method, Options(), sites, planner)
    for given in (True, False):
        chosen.given, chosen._next = given, 4
        chosen.end_step()
    assert plans == [16, 4]


def test_reports_out_of_range_name_their_site() -> None:
    chosen, sites = choice_of(8)
    for place, value in ((0, math.nan), (1, -1.0), (5, 0.0), (5, 1e9), (5, math.inf), (3, "no"), (10, None)):

        def gather(numbers, place=place, value=value):
            others = [*numbers]
            others[place : place + 1] = [] if value is None else [value]
            return {0: numbers, 1: tuple(others)}

        sites.gather_present = gather
        with pytest.raises(MismatchError, match=r"site 1 \(b\) has sent an invalid report on its steps"):
            chosen._compare()
    sites.rounds.elastic = False  # the reports are a message of numbers then
    for place, value in ((0, math.nan), (1, -1.0), (5, 0.0), (5, 1e9), (5, math.inf)):
        own = torch.zeros(12, dtype=torch.float64)

        def wait(own=own, place=place, value=value):
            return [own, own.index_fill(0, torch.tensor(place), value)]

        sites.gather = lambda *_, own=own, wait=wait, **__: SimpleNamespace(payload=own, launch=list, wait=wait)
        with pytest.raises(MismatchError, match=r"site 1 \(b\) has sent an invalid report on its steps"):
            chosen._compare()


@pytest.mark.parametrize("by_byte", [1e-6, math.inf])
def test_no_times_of_the_first_site_end_the_others(monkeypatch: pytest.MonkeyPatch, by_byte: float) -> None:
    monkeypatch.setattr(RankChoice, "_measure", lambda *_, **__: by_byte)
    for lie in itertools.product((0.0, 1e-300, 1e308, math.inf), repeat=5):
        chosen, sites = choice_of(4)
        chosen._choice = replace(chosen._choice, rank=4)
        chosen._times.extend([(STEP, STEP / 2)] * choice._WINDOW)
        sites.gather_present = lambda own, lie=lie: {0: (*own[:6], lie[0], *lie[:4], np.float64(lie[4])), 1: own}
        chosen._compare()
        str(chosen.choice)
    assert {type(each) for each in chosen.state_dict()["times"]} == {float}  # which checkpoints can hold
