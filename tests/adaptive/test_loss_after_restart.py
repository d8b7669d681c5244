"""The loss after a restart on another number of sites: that of the training that was not restarted."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import dadplug
from dadplug.adaptive import reset_progress


@pytest.fixture(autouse=True)
def _anew():
    reset_progress()
    yield
    reset_progress()


def learns(path, stop=None, scaled=False):
    """Train a network for an epoch of 20 steps; return the loss on all samples after each step, and the samples used.

    Args:
        path: path of the checkpoint.
        stop: number of steps after which the processes are lost.
        scaled: whether the learning rate is that of a batch of 24 by AdaScale, for a base batch of 8.
    """
    reset_progress()
    torch.manual_seed(0)
    inputs = torch.randn(480, 12, dtype=torch.float64)
    targets = (inputs @ torch.randn(12, 5, dtype=torch.float64)).argmax(1)
    model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    reduction = dadplug.GradientReduction(model, mode="dad", weighting="samples")
    state = {"model": model, "optimizer": optimizer, "reduction": reduction}
    if scaled:
        state["scaler"] = dadplug.AdaScale(optimizer, reduction, base_batch=8)
    data = dadplug.AdaptiveDataLoader(TensorDataset(torch.arange(480), inputs, targets), 24, shuffle=True)
    losses, used = [], []
    for _ in dadplug.remaining_epochs_until(1, checkpoint=path, state=state, every=1, timeout=200):
        for numbers, some, wanted in data:
            if len(losses) == stop:
                return losses, used
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(some), wanted).backward()
            reduction.synchronize()
            optimizer.step()
            used += numbers.tolist()
            with torch.no_grad():
                losses.append(torch.nn.functional.cross_entropy(model(inputs), targets).item())
    return losses, used


def learns_until_restart(folder):
    """Train without a restart, and until one on 1 and on 3 sites; return the results without and with AdaScale."""
    whole = [learns(folder / f"whole {scaled}", None, scaled) for scaled in (False, True)]
    return whole, {count: learns_both(folder / str(count), 8) for count in (1, 3)}


def learns_both(path, stop=None):
    return [learns(path.with_suffix(f".{scaled}"), stop, scaled) for scaled in (False, True)]


def test_the_loss_goes_on_as_without_a_restart_on_another_number_of_sites(sites, tmp_path):
    """To rounding with a given learning rate; within 2 % with AdaScale, which estimates by the sites' batches."""
    first = sites(2).run(learns_until_restart, tmp_path)
    for count in (1, 3):
        after = sites(count).run(learns_both, tmp_path / str(count))
        for number, bound in ((0, 1e-6), (1, 0.02)):
            whole = first[0][0][number][0]
            assert len(whole) == 20
            assert whole[-1] < 0.7 * whole[0]
            assert first[0][1][count][number][0] == pytest.approx(whole[:8], rel=1e-9)
            for site in after:
                assert site[number][0] == pytest.approx(whole[8:], rel=bound)
            used = [site[1][count][number][1] for site in first] + [site[number][1] for site in after]
            assert sorted(sample for each in used for sample in each) == list(range(480))
