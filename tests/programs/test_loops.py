"""The loop zoo: training loops as users write them, in every mode, at two sites with unequal rows.

Each loop runs with `GradientReduction` and again with gradients averaged by hand, in float64; lossy modes are held
against the published algorithm, see `loops.reference`.
"""

import copy
import functools
from collections.abc import Iterator

import pytest
import support
import torch
import torch.distributed as dist
from loops import LOOPS, compare
from loops.compare import MODES
from loops.site import Site, loss, net, sgd
from torch import nn

import dadplug

pytestmark = pytest.mark.slow


def runs(name: str, modes: list[str], factor: float = 1.0) -> tuple[dict[str, list[str]], bool]:
    return compare.problems(name, modes, factor)


@functools.cache
def outcome(name: str, modes: tuple[str, ...]) -> dict[str, list[str]]:
    """Run a loop in modes; return by mode what is wrong."""
    found: dict[str, list[str]] = {}
    while left := [mode for mode in modes if mode not in found]:
        results, lost = zip(*support.sites(2).run(runs, name, left), strict=True)
        for mode in left:
            if all(mode in result for result in results):
                found[mode] = [f"site {rank}: {each}" for rank, result in enumerate(results) for each in result[mode]]
        if any(lost):
            support.close_all()
    return found


OFTEN = ("edad", "rankdad-feedback")  # modes of each loop in `make test`; it has one of the others, in turn
WHOLE = (
    *("plain", "accumulation_under_no_sync", "layers_added", "several_losses_several_optimizers", "batch_of_no_rows"),
    *("gradients_kept_at_one_site", "idle_without_clearing"),
)


def cases() -> Iterator[object]:
    for place, (name, each) in enumerate(LOOPS.items()):
        often = OFTEN if each.chains else ("dad", *OFTEN)  # layers outside of chains take dad's way in mode edad
        others = [mode for mode in each.modes if mode not in often]
        chosen = each.modes if name in WHOLE else [*often, others[place % len(others)]]
        for mode in each.modes:
            yield pytest.param(name, mode, marks=[] if mode in chosen else pytest.mark.extensive)


@pytest.fixture(scope="module")
def selected(request) -> dict[str, tuple[str, ...]]:
    """Modes in which a loop is to run, by its name."""
    found: dict[str, tuple[str, ...]] = {}
    for item in request.session.items:
        if item.name.startswith("test_a_loop_trains_as_by_hand"):
            name, mode = item.callspec.params["name"], item.callspec.params["mode"]
            found[name] = (*found.get(name, ()), mode)
    return found


@pytest.mark.parametrize(("name", "mode"), cases())
def test_a_loop_trains_as_by_hand(selected, name, mode):
    wrong = outcome(name, selected[name])[mode]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("factor", [0.0, 2.0])
def test_a_wrong_gradient_would_fail(sites, factor):
    for results, lost in sites(2).run(runs, "plain", LOOPS["plain"].modes, factor):
        assert not lost
        assert list(results) == LOOPS["plain"].modes
        for mode, wrong in results.items():
            assert any("is off" in each for each in wrong), mode


def test_there_are_forty_loops():
    assert len(LOOPS) >= 40


# Loops that are refused: an error on all sites, before any parameter has changed


def start(mode: str) -> tuple[Site, nn.Module, dadplug.GradientReduction]:
    """Two steps of a plain loop."""
    site = Site({**MODES[mode], "timeout": 20.0})
    model = net()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        loss(model, cast(site.batch(step))).backward()
        reduction.synchronize()
        optimizer.step()
    optimizer.zero_grad()
    return site, model, reduction


def cast(batch: tuple) -> tuple:
    return batch[0].float(), batch[1]


@pytest.mark.parametrize("mode", list(MODES))
@support.at_sites(2)
def test_layers_added_at_one_site_are_refused(mode: str) -> None:
    """A layer at one site alone, and layers of different widths."""
    for width in (None, 5):
        site, model, reduction = start(mode)
        if site.rank == 0 or width is not None:
            model.append(nn.Linear(4, 4 if site.rank == 0 else int(width)))
        before = copy.deepcopy(model.state_dict())
        loss(model, cast(site.batch(2))).backward()
        with pytest.raises(dadplug.MismatchError):
            reduction.synchronize()
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        site.close()


@pytest.mark.parametrize("mode", list(MODES))
@support.at_sites(2)
def test_detach_after_backward_keeps_the_gradient(mode: str) -> None:
    """Between backward and synchronize: the site's own gradient stays, or there is an error."""
    site, model, reduction = start(mode)
    apart = net()
    apart.load_state_dict(model.state_dict())
    batch = cast(site.batch(2))
    with reduction.no_sync():
        loss(model, batch).backward()
    loss(apart, batch).backward()
    try:
        reduction.detach()
    except RuntimeError:
        return
    for ours, theirs in zip(model.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("mode", list(MODES))
@support.at_sites(2)
def test_a_gradient_read_early_is_right_or_an_error(mode: str) -> None:
    """A gradient that is read before it has been agreed on is the site's own, or an error.

    One that a lossy mode has compressed and sent already is what this site has sent.
    """
    site, model, reduction = start(mode)
    apart = net()
    apart.load_state_dict(model.state_dict())
    batch = cast(site.batch(2))
    loss(model, batch).backward()
    loss(apart, batch).backward()
    for ours, theirs in zip(model.parameters(), apart.parameters(), strict=True):
        try:
            found = ours.grad * 1
        except RuntimeError as error:
            assert "synchronize" in str(error)  # noqa: PT017
        else:
            compressed = mode.startswith("rankdad") and ours.dim() > 1
            assert (found - theirs.grad).norm() < (0.8 if compressed else 1e-5) * theirs.grad.norm()
    reduction.synchronize()
    assert all(p.grad is not None and type(p.grad) is torch.Tensor for p in model.parameters())
    assert reduction.first_difference() is None
    dist.barrier()
    site.close()
