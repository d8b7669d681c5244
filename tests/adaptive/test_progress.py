"""Restarts in one process: a program that is interrupted anywhere ends as one that never was; accumulators."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import refuses
from torch.utils.data import ChainDataset, DataLoader, TensorDataset

import dadplug
from dadplug.adaptive import reset_progress
from dadplug.adaptive.progress import ProgramProgress
from dadplug.errors import MismatchError
from dadplug.exchange.fields import checked
from dadplug.exchange.rounds import Rounds


class Crash(Exception):
    """The end of a process in mid-run."""


class Crashes:
    """Counter of events, at one of which the process ends."""

    def __init__(self, at: int | None) -> None:
        self.left = at

    def __call__(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Crash


class Model:
    """Model that remembers its training; its state is saved as those of models are."""

    def __init__(self) -> None:
        self.trained: list[tuple[int, list[int]]] = []

    def state_dict(self):
        return {"trained": list(self.trained)}

    def load_state_dict(self, state):
        self.trained = list(state["trained"])


def loader(length=10, size=3, **options):
    return dadplug.ElasticDataLoader(TensorDataset(torch.arange(length)), size, **options)


def evaluate(data, crash, stats):
    for (samples,) in data:
        crash()
        stats["evaluated"] += len(samples)


def train(path, every, crash):
    """Run a program with two epoch loops, two loaders, accumulators of all kinds, and code between the loops."""
    reset_progress()
    model, report = Model(), {}
    training, validation = loader(shuffle=True), loader(5, 2)
    total = dadplug.Accumulator(runs=1)
    total["before"] += 1
    options = {"checkpoint": path, "state": {"model": model}, "every": every}
    for first in (True, False):
        for epoch in dadplug.remaining_epochs_until(2 if first else 4, **options):
            stats = dadplug.Accumulator()
            stats["begun"] += 1
            crash()
            for (samples,) in training:
                crash()
                model.trained.append((epoch, samples.tolist()))
                stats["samples"] += len(samples)
                total["sum"] += samples.sum()
                for (inner,) in validation if len(model.trained) % 4 == 2 else ():
                    stats["inner"] += len(inner)
                crash()
            total["between"] += 1
            with stats.synchronized():
                halfway = stats["samples"]
                stats["samples"] += 100
            evaluate(validation, crash, stats)
            stats["after"] += 1
            crash()
            with stats.synchronized(), total.synchronized():
                report[epoch] = (halfway, dict(stats), {**total, "sum": int(total["sum"])})
                total["epochs"] = total.get("epochs", 0) + 1
            crash()
        if first:
            total["middle"] += 1
            with total.synchronized():
                report["middle"] = dict(total)["middle"]
    return model.trained, report


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(crashes=st.lists(st.integers(0, 70), max_size=4), every=st.sampled_from([None, 1, 2, 3, 5]))
def test_a_program_that_is_interrupted_ends_like_one_that_is_not(tmp_path_factory, crashes, every):
    folder = tmp_path_factory.mktemp("run")
    trained, report = train(None, None, Crashes(None))
    orders = [[sample for at, batch in trained if at == epoch for sample in batch] for epoch in range(4)]
    assert [sorted(order) for order in orders] == [list(range(10))] * 4
    assert len(set(map(tuple, orders))) == 4
    path = folder / "run.ckpt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)  # the machine does not crash, and waiting for disks takes most time
        for at in [*crashes, None]:
            try:
                found, last = train(path, every, Crashes(at))
            except Crash:
                continue
            break
    assert found == trained
    # The last process reports the epochs that it has ended, and they are those of the uninterrupted run.
    assert {key: last[key] for key in last} == {key: report[key] for key in last}
    assert not crashes or path.exists()


def test_the_uninterrupted_report_is_what_the_program_adds_up():
    _, report = train(None, None, Crashes(None))
    assert report[0] == (
        10,
        {"begun": 1, "samples": 110, "inner": 5, "evaluated": 5, "after": 1},
        {"runs": 1, "before": 1, "sum": 45, "between": 1},
    )
    assert report[3][2] == {"runs": 1, "before": 1, "sum": 180, "between": 4, "epochs": 3, "middle": 1}
    assert report["middle"] == 1


def test_a_restart_repeats_no_batch_before_the_checkpoint(tmp_path):
    crash = Crashes(2 * 3 + 1)  # the first call, and two a batch: in the fourth batch
    with pytest.raises(Crash):
        train(tmp_path / "run", 2, crash)
    reset_progress()
    model, seen = Model(), []
    for epoch in dadplug.remaining_epochs_until(1, checkpoint=tmp_path / "run", state={"model": model}):
        before = [batch for _, batch in model.trained]
        seen += [samples.tolist() for (samples,) in loader(shuffle=True)]
        assert epoch == 0
    assert len(before) == 2
    assert len(seen) == 2
    assert sorted(sample for batch in before + seen for sample in batch) == list(range(10))


def test_epochs_go_on_where_the_last_loop_ended():
    assert list(dadplug.remaining_epochs_until(3)) == [0, 1, 2]
    assert list(dadplug.remaining_epochs_until(3)) == []
    for epoch in dadplug.remaining_epochs_until(10):
        if epoch == 4:
            break
    assert list(dadplug.remaining_epochs_until(6)) == [5]
    reset_progress()
    assert list(dadplug.remaining_epochs_until(1)) == [0]


def test_loops_over_epochs_are_not_nested():
    for _ in dadplug.remaining_epochs_until(1):
        with pytest.raises(RuntimeError, match="cannot be nested"):
            list(dadplug.remaining_epochs_until(1))


def test_loaders_side_by_side_are_refused():
    one, other = loader(), loader()
    for _ in dadplug.remaining_epochs_until(1):
        with pytest.raises(RuntimeError, match="StackDataset"):
            zip(one, other)


def test_a_break_out_of_a_loader_ends_its_pass(tmp_path):
    options = {"checkpoint": tmp_path / "run", "state": {}, "every": 1}
    passes = []
    for _ in dadplug.remaining_epochs_until(1, **options):
        for number, (samples,) in enumerate(loader(), 1):
            passes.append(samples.tolist())
            if number == 2:
                break
        passes += [samples.tolist() for (samples,) in loader(4, 2)]
    assert passes == [[0, 1, 2], [3, 4, 5], [0, 1], [2, 3]]


def test_save_counts_the_batch_at_hand(tmp_path):
    epochs = dadplug.remaining_epochs_until(1, checkpoint=tmp_path / "run", state={})
    for _ in epochs:
        for samples in loader():
            if samples[0][0] == 3:
                epochs.save()
                break
        break
    reset_progress()
    options = {"checkpoint": tmp_path / "run", "state": {}}
    left = [samples.tolist() for _ in dadplug.remaining_epochs_until(1, **options) for (samples,) in loader()]
    assert left == [[6, 7, 8], [9]]


def test_outside_of_epochs_each_pass_gives_all_in_another_order():
    data = loader(20, 20, shuffle=True)
    first, second = (next(iter(data))[0].tolist() for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def test_workers_and_options_of_data_loader():
    data = loader(num_workers=1, persistent_workers=True, collate_fn=lambda batch: [int(sample) for (sample,) in batch])
    for _ in range(2):
        assert list(data) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert len(data) == 4
    assert data.local_batch_size == 3
    assert len(loader(drop_last=True)) == 3


def test_resumes_with_workers_that_prefetch(tmp_path):
    options = {"checkpoint": tmp_path / "run", "state": {}, "every": 1}
    for _ in dadplug.remaining_epochs_until(1, **options):
        for (samples,) in loader(num_workers=1):
            if samples[0] == 6:
                break
        break
    reset_progress()
    epochs = dadplug.remaining_epochs_until(1, **options)
    assert [samples.tolist() for _ in epochs for (samples,) in loader(num_workers=1)] == [[6, 7, 8], [9]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "at least 1, got 0"),
        ({"sampler": [0]}, "leave out sampler"),
        ({"dataset": ChainDataset([])}, "needs a length"),
    ],
)
def test_a_loader_refuses_what_it_cannot_resume(arguments, message):
    with pytest.raises(ValueError, match=message):
        dadplug.ElasticDataLoader(**{"dataset": TensorDataset(torch.arange(3))} | arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"until": -1}, "number of epochs"),
        ({"every": 0}, "every must be"),
        ({"checkpoint": "run"}, "needs state="),
        ({}, "no checkpoint to write"),
    ],
)
def test_arguments_of_epochs_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        dadplug.remaining_epochs_until(**{"until": 1} | arguments).save()


def run_once(path, state=None, length=4, epochs=1):
    reset_progress()
    found = []
    for epoch in dadplug.remaining_epochs_until(epochs, checkpoint=path, state=state or {}, every=1):
        found += [(epoch, samples.tolist()) for (samples,) in loader(length, 2)]
        if len(found) == 1:
            break
    return found


def test_the_environment_names_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("DADPLUG_CHECKPOINT", str(tmp_path / "folder" / "run"))
    assert run_once(None) == [(0, [0, 1]), (0, [2, 3])]
    assert (tmp_path / "folder" / "run").exists()
    assert run_once(None) == []


def test_a_damaged_checkpoint_is_an_error(tmp_path):
    path = tmp_path / "run"
    run_once(path)
    whole = path.read_bytes()
    for place in (0, 25, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="remove the file to begin anew"):
            run_once(path)
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="damaged"):
        run_once(path)
    path.write_bytes(whole)
    assert run_once(path, epochs=2) == [(1, [0, 1]), (1, [2, 3])]


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "run"
    run_once(path)
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="cannot be written, the last one is left: No space left on device"):
        run_once(path, epochs=2)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_other_states_or_data_than_those_of_the_checkpoint_are_refused(tmp_path):
    run_once(tmp_path / "run")
    with pytest.raises(ValueError, match=r"has the states \[\], and state= has \['model'\]"):
        run_once(tmp_path / "run", {"model": Model()}, epochs=2)
    reset_progress()
    for _ in dadplug.remaining_epochs_until(1, checkpoint=tmp_path / "other", state={}, every=1):
        for _ in loader(4, 2):
            pass
        break
    reset_progress()
    with pytest.raises(ValueError, match="had 4 samples when the checkpoint was written, and has 5 now"):
        run_once(tmp_path / "other", length=5)


def test_a_program_with_fewer_loops_than_that_of_the_checkpoint_is_refused(tmp_path):
    for _ in dadplug.remaining_epochs_until(1, checkpoint=tmp_path / "run", state={}, every=1):
        for data in (loader(), loader()):
            for _ in data:
                pass
        break
    reset_progress()
    with pytest.raises(RuntimeError, match="written in pass 2 over data of epoch 0, and the program has made 1"):
        run_once(tmp_path / "run", length=10)


def test_a_plain_loader_is_not_needed_to_be_elastic(tmp_path):
    stats, seen = dadplug.Accumulator(), 0
    for _ in dadplug.remaining_epochs_until(2, checkpoint=tmp_path / "run", state={}):
        for (samples,) in DataLoader(TensorDataset(torch.arange(6)), 2):
            seen += len(samples)
            stats["samples"] += len(samples)
    with stats.synchronized():
        assert stats["samples"] == seen == 12


# Accumulators


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
    refuses(
        (lambda: read(stats), r"with stats\.synchronized\(\)"),
        (lambda: stats["loss"] / 2, "UnsynchronizedSum", TypeError),
        error=RuntimeError,
    )
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
        refused = str(error).startswith("site 0 (") and "cannot be" in str(error)
    return first, second, refused


@pytest.mark.parametrize(
    "bad",
    ["text", True, [1], 1 << 70, torch.ones(3), torch.ones(2, 1), np.array(["x"])],
    ids=lambda each: type(each).__name__,
)
def test_a_value_that_is_no_summand_names_its_site(monkeypatch, bad):
    reset_progress()
    stats = dadplug.Accumulator(values=torch.zeros(2))
    sent = [{"values": torch.ones(2)}, {"values": bad}]
    transport = SimpleNamespace(
        sites=["site 0 (a)", "site 1 (b)"],
        gather_objects=lambda own, kind, what: [*checked(dict(enumerate(sent)), kind, what, transport).values()],
        rounds=Rounds(2),
    )
    monkeypatch.setattr(ProgramProgress, "transport", transport)
    with pytest.raises(MismatchError, match=r"^site 1 \(b\) has sent an invalid list of sums"), stats.synchronized():
        pass
    sent[1] = {"values": 1.0}
    with stats.synchronized():
        assert stats["values"].tolist() == [2.0, 2.0]


def test_sums_over_three_sites_are_the_same_at_each(sites):
    first, *others = sites(3).run(adds, None)
    assert all(other == first for other in others)
    sums, second, refused = first
    values = sums.pop("values")
    assert sums == {"start": 100, "steps": 6, "only 0": 0, "only 1": 1, "only 2": 2}
    assert values == pytest.approx([0.1 + 2 * 0.2 + 3 * 0.3] * 2)
    assert second == 15
    assert refused
