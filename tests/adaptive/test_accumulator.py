"""Accumulators: sums over sites, and what can be done with them outside of a synchronized block."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dadplug
from dadplug.adaptive import reset_progress


@pytest.fixture(autouse=True)
def _anew():
    reset_progress()
    yield
    reset_progress()


def test_a_site_alone_adds_up():
    stats = dadplug.Accumulator({"start": 5}, also=1)
    stats["loss"] += 1.5
    stats["loss"] += 2
    stats["loss"] -= 0.5
    stats["start"] += 1
    stats.update({"many": 3}, few=1)
    stats.subtract(few=2)
    stats += {"many": 4}
    stats -= {("a", 1): 1}
    with stats.synchronized() as same:
        assert same is stats
        assert dict(stats) == {"start": 6, "also": 1, "loss": 3.0, "many": 7, "few": -1, ("a", 1): -1}
        assert stats.get("nothing", 0) == 0
        assert stats.pop("also") == 1
        assert len(stats) == 5
        assert "loss" in stats
        del stats["loss"]
        stats["start"] = 10
        stats.update(start=1, new=2)
        with stats.synchronized():
            assert stats["start"] == 11
    stats["start"] += 1
    with stats.synchronized():
        assert dict(stats) == {"start": 12, "many": 7, "few": -1, ("a", 1): -1, "new": 2}
        stats.clear()
    with stats.synchronized():
        assert not stats


def test_tensors_and_arrays_are_added_and_not_kept():
    stats, loss = dadplug.Accumulator(), torch.tensor([1.0, 2.0], requires_grad=True)
    counts = np.array([1, 2])
    for _ in range(2):
        stats["loss"] += loss * 2
        stats["counts"] += counts
    with torch.no_grad():
        loss.zero_()
    counts[:] = 0
    with stats.synchronized():
        assert not stats["loss"].requires_grad
        assert stats["loss"].tolist() == [4.0, 8.0]
        assert stats["counts"].tolist() == [2, 4]


@pytest.mark.parametrize(
    "read",
    [
        lambda stats: len(stats),
        lambda stats: list(stats),
        lambda stats: "loss" in stats,
        lambda stats: stats.get("loss"),
        lambda stats: list(stats.items()),
        lambda stats: stats.clear(),
        lambda stats: stats.pop("loss"),
        lambda stats: stats.__delitem__("loss"),
        lambda stats: bool(stats["loss"]),
        lambda stats: stats.__setitem__("loss", 1),
        lambda stats: stats.__setitem__("loss", stats["other"] + 1),
        lambda stats: stats.__setitem__("loss", dadplug.Accumulator()["loss"] + 1),
    ],
)
def test_values_are_read_and_set_in_synchronized_blocks_only(read):
    stats = dadplug.Accumulator(loss=1)
    stats["loss"] += 1
    with pytest.raises(RuntimeError, match=r"with stats\.synchronized\(\)"):
        read(stats)
    with pytest.raises(TypeError, match="UnsynchronizedSum"):
        stats["loss"] / 2
    assert str(stats) == "Accumulator(not synchronized)"
    with stats.synchronized():
        assert dict(stats) == {"loss": 2}
        assert str(stats) == "Accumulator({'loss': 2})"


def test_an_accumulator_is_not_created_within_a_loop_over_data():
    for _ in dadplug.remaining_epochs_until(1):
        for _ in dadplug.ElasticDataLoader(list(range(3))):
            with pytest.raises(RuntimeError, match="before the loop"):
                dadplug.Accumulator()


def test_one_in_an_epoch_begins_anew_and_one_outside_goes_on():
    total, found = dadplug.Accumulator(), []
    for epoch in dadplug.remaining_epochs_until(3):
        stats = dadplug.Accumulator()
        for each in (stats, total):
            each["epochs"] += epoch
        with stats.synchronized(), total.synchronized():
            found.append((stats["epochs"], total["epochs"]))
    assert found == [(0, 0), (1, 1), (2, 3)]


def adds(site_sums):
    """Add different keys and kinds at each site; return what each site reads."""
    import torch.distributed as dist

    reset_progress()
    rank = dist.get_rank()
    stats = dadplug.Accumulator(start=100)
    for _ in range(rank + 1):
        stats["steps"] += 1
        stats["values"] += torch.full((2,), 0.1 * (rank + 1))
    stats[f"only {rank}"] += rank
    with stats.synchronized():
        first = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in stats.items()}
        stats["steps"] *= 2
    stats["steps"] += 1
    with stats.synchronized():
        second = stats["steps"]
    try:
        stats["bad"] += np.timedelta64(1)
        with stats.synchronized():
            pass
    except TypeError as error:
        refused = "cannot be" in str(error)
    return first, second, refused


def test_sums_over_three_sites_are_the_same_at_each(sites):
    first, *others = sites(3).run(adds, None)
    assert all(other == first for other in others)
    sums, second, refused = first
    values = sums.pop("values")
    assert sums == {"start": 100, "steps": 6, "only 0": 0, "only 1": 1, "only 2": 2}
    assert values == pytest.approx([0.1 + 2 * 0.2 + 3 * 0.3] * 2)
    assert second == 15
    assert refused
