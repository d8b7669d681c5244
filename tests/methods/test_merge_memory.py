"""Memory of what sites and merges of rankdad drop, as few rows: nothing is lost where these are enough."""

import math

import pytest
import support
import torch
import torch.distributed as dist
from comparison import assert_resumes, off_by, train
from dadplug.hooks import Factor
from divided_network import backward, divided_layers, fail_to_merge, mean_of, network, reduce

from dadplug.errors import NonFiniteError
from dadplug.exchange.factor_buckets import FactorPayload
from dadplug.options import Options
from dadplug.step.methods.merge_memory import MergeMemory, PartPlace
from dadplug.step.methods.rankdad import RankDAD

SCALES = [1.0, 8.0, 64.0, 64.0, 64.0, 64.0, 8.0, 1.0, 512.0]  # an idle site has the last scale that was stated


def parts_of(reduction) -> dict:
    return reduction.state_dict()["method"]["merger"]["divided"]


def memories(reduction) -> dict[str, torch.Tensor]:
    """Return the whole memory of each divided layer, from the parts of all sites."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, parts_of(reduction))
    return wholes(gathered)


def kept_at_sites(reduction, name: str) -> torch.Tensor | float:
    """Return what all sites keep of a layer's gradients, in units of the mean."""
    state, whole = reduction.state_dict()["method"], 0.0
    if name in state["lost"]:
        left, right = state["lost"][name]
        whole = whole + left.T @ right
    if name in state["errors"]["errors"]:
        whole = whole + state["errors"]["errors"][name]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, state["weights"].get(name, 0.0) * whole)
    return sum(gathered)


def wholes(gathered: list[dict]) -> dict[str, torch.Tensor]:
    found = {}
    for name in gathered[0]:
        parts = sorted(part for each in gathered for part in [(p[0], p[1:]) for p in each[name]])
        out, width = parts[0][0][2:]
        left, right = (torch.cat([rows[side] for _, rows in parts], 1) for side in (0, 1))
        found[name] = left[:, :out].T @ right[:, :width]
    return found


def scaled_backward(reduction, model, step: int, rows: int) -> tuple[int, dict[str, torch.Tensor]]:
    """Run backward under a loss scale of the step; return the gradients without it."""
    scale = SCALES[step]
    with reduction.loss_scale(scale):
        model.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(rows, 401, generator=generator, dtype=torch.float64)
        (scale * model(inputs).square().mean()).backward()
    return rows, {name: p.grad / scale for name, p in model.named_parameters()}


def loses_nothing(options: dict) -> None:
    """Add up what is applied: with the memory it is all that was sent, in steps of several sizes, scales and faults.

    A step's gradients of two rows at each of four sites, plus eight rows of memory, have a rank of r + q = 16 at most.
    In the last steps a site sends one row, and another that it has kept: its weight differs from the expected one.
    """
    rank, model = dist.get_rank(), network()
    reduction = reduce(model, rank=8, **options)
    sent, applied = {}, {}
    for step in range(9):
        reduction.max_rank = 1 if step == 6 else 8  # a site keeps its second row for the next step
        rows = 4 if step == 0 else int(step != 3 or rank != 1) * (2 if step < 7 else 1)
        if step == 4:  # at two sites only, and discarded at one of the others
            model.zero_grad()
            if rank == 3:
                backward(model, rank, step, rows=1)
                model.zero_grad()
        if step == 5 and rank == 2:
            model.zero_grad()
            model(torch.full((1, 401), math.nan, dtype=torch.float64)).square().mean().backward()
        own = (0, {name: torch.zeros_like(p) for name, p in model.named_parameters()})
        if rows and (step != 4 or rank < 2) and (step != 5 or rank != 2):
            own = scaled_backward(reduction, model, step, rows)
        if step == 5:
            before = parts_of(reduction)
            with pytest.raises(NonFiniteError, match="site 2"):
                reduction.synchronize()
            torch.testing.assert_close(parts_of(reduction), before, rtol=0, atol=0)
            continue
        if own[0]:
            reduction.synchronize()
        else:
            model.zero_grad()
            reduction.idle()
        parts = [None] * 4
        dist.all_gather_object(parts, own)
        mean = mean_of(parts)
        for name, p in model.named_parameters():
            sent[name] = sent.get(name, 0.0) + mean[name]
            applied[name] = applied.get(name, 0.0) + p.grad / SCALES[step]
    chosen = divided_layers(reduction)
    assert "3.weight" in chosen
    assert reduction.first_difference() is None
    kept = memories(reduction)
    for name in chosen:
        left = kept[name] + kept_at_sites(reduction, name)
        assert off_by(applied[name] + left, sent[name]) < 1e-9, name
        assert off_by(applied[name], sent[name]) > 0.01
    reduction.detach()


def test_what_is_applied_and_kept_is_all_that_was_sent(sites):
    sites(4).run(loses_nothing, {})
    sites(4).run(loses_nothing, {"bucket_mb": 0.001, "error_feedback": True})


def encoded(method: RankDAD, deltas, activations) -> torch.Tensor:
    payload = method.encode("w", Factor(activations, deltas), False)
    method.commit("w")
    return payload.left.T @ payload.right


def test_sites_keep_as_many_rows_as_they_send():
    torch.manual_seed(0)
    deltas, activations = torch.randn(6, 30, dtype=torch.float64), torch.randn(6, 20, dtype=torch.float64)
    options = {"mode": "rankdad", "merge": "owner", "rank": 3, "tolerance": 0.0}
    method, without = RankDAD(Options(**options)), RankDAD(Options(**options, error_feedback=False))
    first, second = (encoded(method, deltas * scale, activations) for scale in (1.0, 0.0))
    assert torch.linalg.matrix_rank(first) == 3
    assert off_by(first + second, deltas.T @ activations) < 1e-9
    assert off_by(sum(encoded(without, deltas * scale, activations) for scale in (1.0, 0.0)), first) < 1e-9
    method.encode("w", Factor(activations, deltas), False)
    method.rollback("w")
    assert float(encoded(method, 0.0 * deltas, activations).norm()) < 1e-12  # nothing is left of what did not count


def differs(parameters) -> float:
    """Residual of the agreed gradient of a step over the best of rank 8 of the sum with the memory, the largest."""
    model, rank = network(), dist.get_rank()
    reduction = reduce(model, rank=8, **parameters)
    worst = 0.0
    for step in range(4):
        before = memories(reduction) if step else {}
        _, own = backward(model, rank, step, rows=4)
        reduction.synchronize()
        for name in divided_layers(reduction):
            whole = own[name].clone()
            dist.all_reduce(whole)
            whole = whole / 4 + before.get(name, 0.0)
            grad = dict(model.named_parameters())[name].grad
            worst = max(worst, float((grad - whole).norm() / torch.linalg.svdvals(whole)[8:].norm()))
    return worst


def test_the_residual_is_that_of_the_best_approximation_of_sum_and_memory(sites):
    assert 0.99 < max(sites(4).run(differs, {})) < 1.05


def trains(steps: int, state: list | None, options: dict) -> tuple:
    model = network()
    return train(
        model, reduce(model, rank=4, **options), lambda n: backward(model, dist.get_rank(), n, 10), steps, state
    )


@pytest.mark.parametrize("options", [{}, {"error_feedback": True}], ids=str)
def test_checkpoints_hold_each_sites_part(sites, options):
    states = assert_resumes(sites(4), trains, 5, 3, options, exact=True)
    parts = [state["method"]["merger"]["divided"] for state in states[1]]
    assert all(each.keys() == parts[0].keys() != set() for each in parts)
    assert any(rows.any() for _, rows, _ in parts[0]["3.weight"])
    sites(5).run(trains, 4, states, options)


def test_parts_are_divided_anew_among_other_sites():
    torch.manual_seed(0)
    left, right = torch.randn(2, 10, dtype=torch.float64), torch.randn(2, 7, dtype=torch.float64)
    padded = [torch.nn.functional.pad(left, (0, 2)), torch.nn.functional.pad(right, (0, 1))]
    states = []
    for site in range(4):
        memory = MergeMemory()
        rows = FactorPayload(padded[0][:, 3 * site : 3 * site + 3], padded[1][:, 2 * site : 2 * site + 2])
        memory.prepare("w", PartPlace(site, 4, 10, 7), rows)
        memory.commit("w")
        states.append(memory.state_dict())
    found = []
    for site in range(3):
        memory = MergeMemory()
        for state in states:
            memory.add(state)
        found.append(memory.find("w", PartPlace(site, 3, 10, 7)))
        assert len(memory.state_dict()["w"]) == 1
    assert torch.equal(torch.cat([each.left for each in found], 1)[:, :10], left)
    assert torch.equal(torch.cat([each.right for each in found], 1)[:, :7], right)
    for missing in range(4):
        memory = MergeMemory()
        for state in states[:missing] + states[missing + 1 :]:
            memory.add(state)
        assert memory.find("w", PartPlace(0, 3, 10, 7)) is None
        assert not memory.state_dict()["w"]


@support.at_sites(4)
def test_a_merge_that_fails_leaves_the_memory() -> None:
    """A merge that fails, though no site's gradient is at fault, leaves the memory as it was."""
    model = network(torch.float32)
    reduction = reduce(model, rank=8)
    for step in range(3):
        before = parts_of(reduction)
        backward(model, dist.get_rank(), step, rows=12)
        if step == 1:
            with fail_to_merge(reduction), pytest.raises(NonFiniteError):
                reduction.synchronize()
            torch.testing.assert_close(parts_of(reduction), before, rtol=0, atol=0)
        else:
            reduction.synchronize()
            assert all(p.grad.isfinite().all() for p in model.parameters())
    assert before
