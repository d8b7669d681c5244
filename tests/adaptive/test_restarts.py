"""Restarts of several sites: data of each site's own, other numbers of sites, files that differ, torchrun."""

import json
import warnings
from pathlib import Path

import pytest
import support
import torch
import torch.distributed as dist
from running_hub import running_hub
from torch.utils.data import TensorDataset

import dadplug
from dadplug.adaptive import reset_progress


def trains(plan, stop=None, epochs=1):
    """Train, with a checkpoint after every batch.

    Args:
        plan: for each site, the path of its file, the source, length and batch size of its data.
        stop: number of batches after which the process is lost.
        epochs: number of epochs.

    Returns:
        The batches, how often each sample was counted, warnings, and the error.
    """
    reset_progress()
    path, source, length, size = plan[dist.get_rank()]
    data = dadplug.ElasticDataLoader(TensorDataset(torch.arange(length)), size, shuffle=True, source=source)
    seen, counts, error = [], {}, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        warnings.simplefilter("always", UserWarning)
        try:
            for epoch in dadplug.remaining_epochs_until(epochs, checkpoint=path, state={}, every=1, timeout=200):
                stats = dadplug.Accumulator()
                for (samples,) in data:
                    seen.append((epoch, samples.tolist()))
                    for sample in samples.tolist():
                        stats[f"{source} {sample}"] += 1
                    if len(seen) == stop:
                        return seen, counts, [str(each.message) for each in caught], error
                with stats.synchronized():
                    counts[epoch] = dict(stats)
        except (ValueError, RuntimeError, OSError) as raised:
            error = f"{type(raised).__name__}: {raised}"
    return seen, counts, [str(each.message) for each in caught], error


def samples(result, epoch=0):
    return [sample for at, batch in result[0] if at == epoch for sample in batch]


def once(**lengths):
    return {f"{source} {sample}": 1 for source, length in lengths.items() for sample in range(length)}


def test_data_of_each_sites_own_go_on_where_they_were_at_other_ranks(sites, tmp_path):
    first = [(tmp_path / "a", "a", 10, 2), (tmp_path / "b", "b", 7, 3)]
    before = sites(2).run(trains, first, 3)
    then = [(tmp_path / "b", "b", 7, 3), (tmp_path / "a", "a", 10, 2), (tmp_path / "c", "c", 4, 2)]
    after = sites(3).run(trains, then)
    assert [each[3] for each in (*before, *after)] == [None] * 5
    assert sorted(samples(before[0])[:4] + samples(after[1])) == list(range(10))  # two batches are in the checkpoint
    assert sorted(samples(before[1])[:6] + samples(after[0])) == list(range(7))
    assert sorted(samples(after[2])) == list(range(4))
    assert all(each[1] == {0: once(a=10, b=7, c=4)} for each in after)


def test_an_absent_sites_data_wait_for_it(sites, tmp_path):
    plan = [(tmp_path / "a", "a", 9, 2), (tmp_path / "b", "b", 8, 2), (tmp_path / "c", "c", 7, 2)]
    first = sites(3).run(trains, plan, 2)
    second = sites(2).run(trains, plan[:2], 2)
    third = sites(3).run(trains, plan)
    assert len(samples(second[0])) == 4
    assert sorted(samples(first[2])[:2] + samples(third[2])) == list(range(7))
    assert sorted(samples(first[0])[:2] + samples(second[0])[:2] + samples(third[0])) == list(range(9))
    assert all(each[1] == {0: once(a=9, b=8, c=7)} for each in third)


def test_processes_with_one_source_divide_its_data(sites, tmp_path):
    plan = [(tmp_path / "run", "a", 12, 2), (tmp_path / "run", "a", 12, 3), (tmp_path / "run", "b", 5, 1)]
    before = sites(3).run(trains, plan, 2)
    assert [len(batch) for _, batch in before[1][0]] == [3, 3]
    after = sites(2).run(trains, plan[1:])
    kept = [batch for result in before[:2] for batch in result[0][0][1]]
    assert sorted(kept + samples(after[0])) == list(range(12))
    assert sorted(before[2][0][0][1] + samples(after[1])) == list(range(5))
    assert after[0][1] == after[1][1] == {0: once(a=12, b=5)}


@pytest.mark.parametrize("file", ["older", "missing", "damaged"])
@pytest.mark.parametrize("site", [0, 1])
def test_the_newest_file_counts(sites, tmp_path, file, site):
    plan = [(tmp_path / "a", None, 40, 4), (tmp_path / "b", None, 40, 4)]
    first = sites(2).run(trains, plan, 2)
    path = plan[site][0]
    content = path.read_bytes()
    second = sites(2).run(trains, plan, 3)
    if file == "missing":
        path.unlink()
    else:
        path.write_bytes(content if file == "older" else path.read_bytes()[:-1])
    third = sites(2).run(trains, plan)
    kept = [batch for result in first for batch in result[0][0][1]]
    kept += [batch for result in second for _, used in result[0][:2] for batch in used]
    assert sorted(kept + samples(third[0]) + samples(third[1])) == list(range(40))
    assert len(kept) == 24
    assert all(each[1] == {0: once(**{"None": 40})} for each in third)
    assert ["damaged" in " ".join(each[2]) for each in third] == [file == "damaged" and each == site for each in (0, 1)]


def test_files_that_do_not_belong_together_are_refused_at_both_sites(sites, tmp_path):
    plan = [(tmp_path / "a", None, 8, 2), (tmp_path / "b", None, 8, 2)]
    sites(2).run(trains, plan, 2)
    other = [(tmp_path / "c", None, 8, 2), (tmp_path / "d", None, 8, 2)]
    sites(2).run(trains, other, 2)
    mixed = sites(2).run(trains, [plan[0], other[1]])
    assert all("MismatchError" in each[3] and "different runs" in each[3] for each in mixed)
    for path, *_ in plan:
        path.write_bytes(b"zeros")
    assert all("remove the file to begin anew" in each[3] for each in sites(2).run(trains, plan))


def trains_on_full_disks(plan, full):
    """Train where the disks of some sites are full."""

    def fails(*_):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() in full:
            patch.setattr("dadplug.adaptive.epochs.write_file", fails)
        return trains(plan)


def test_training_goes_on_while_one_site_can_write(sites, tmp_path):
    plan = [(tmp_path / "a", None, 8, 2), (tmp_path / "b", None, 8, 2)]
    first, second = sites(2).run(trains_on_full_disks, plan, [1])
    assert first[1] == second[1] == {0: once(**{"None": 8})}
    assert not first[2]
    assert "cannot be written, the last one is left: No space left on device" in second[2][0]
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    both = sites(2).run(trains_on_full_disks, [(tmp_path / "c", None, 8, 2)] * 2, [0, 1])
    assert all("OSError" in each[3] and "No space left on device" in each[3] for each in both)


def test_sites_with_different_data_need_names_for_them(sites, tmp_path):
    results = sites(2).run(trains, [(tmp_path / "a", None, 8, 2), (tmp_path / "a", None, 9, 2)])
    assert all("MismatchError" in each[3] and "source=NAME" in each[3] for each in results)


@support.at_sites(2)
def test_different_arguments_are_refused_at_both_sites() -> None:
    reset_progress()
    with pytest.raises(dadplug.MismatchError, match=r"'until': 2.*'until': 3"):
        list(dadplug.remaining_epochs_until(2 + dist.get_rank(), timeout=200))


def lengths():
    """Return the lengths of a loader before and after its first pass, and the batches that it gave."""
    reset_progress()
    data = dadplug.ElasticDataLoader(TensorDataset(torch.arange(23)), 4)
    before = len(data) if dist.get_rank() == 0 else 2  # a progress bar may be at one site only
    batches = [samples.tolist() for (samples,) in data]
    return before, len(data), batches


def test_a_pass_outside_of_epochs_is_divided(sites):
    first, second, third = sites(3).run(lengths)
    assert [each[:2] for each in (first, second, third)] == [(2, 2)] * 3
    assert sorted(sample for each in (first, second, third) for batch in each[2] for sample in batch) == list(range(23))


def test_over_a_hub(tmp_path):
    names = ("bavaria", "saxony")
    plan = [(tmp_path / "a", "a", 10, 2), (tmp_path / "b", "b", 7, 2)]
    with running_hub(tmp_path / "kits", sites=names) as hub:
        kits = [hub.kits / name for name in names]
        with support.Sites(2, kits=kits) as group:
            before = group.run(trains, plan, 3)
            plan[0][0].unlink()
            after = group.run(trains, plan)
    assert [each[3] for each in after] == [None, None]
    assert sorted(samples(before[0])[:4] + samples(after[0])) == list(range(10))
    assert sorted(samples(before[1])[:4] + samples(after[1])) == list(range(7))
    assert after[0][1] == after[1][1] == {0: once(a=10, b=7)}


# The loss after a restart


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


# Programs under torchrun whose processes are killed and started again


PROGRAM = """
import json, os, signal, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
import dadplug

torch.set_num_threads(1)
folder, killed = Path(sys.argv[1]), json.loads(sys.argv[2])
dadplug.connect(timeout=200)
torch.manual_seed(0)
model, data = nn.Linear(4, 2), TensorDataset(torch.arange(41), torch.randn(41, 4), torch.randn(41, 2))
reduction = dadplug.GradientReduction(model, mode="dsgd", timeout=200)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = dadplug.ElasticDataLoader(data, batch_size=4, shuffle=True)
state = {"model": model, "optimizer": optimizer, "reduction": reduction}
rank, first = reduction.site_rank, os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
log = open(folder / f"batches-{os.environ['RUN']}{'' if first else '-again'}-{rank}", "w")
for epoch in dadplug.remaining_epochs_until(3, checkpoint=folder / "run.ckpt", state=state, every=2, timeout=200):
    stats = dadplug.Accumulator()
    for batch, (numbers, inputs, targets) in enumerate(loader):
        if [epoch, batch, rank] == killed and first:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        reduction.synchronize()
        optimizer.step()
        print(json.dumps([epoch, numbers.tolist()]), file=log, flush=True)
        for number in numbers.tolist():
            stats[number] += 1
    reduction.join(optimizer.step)
    with stats.synchronized():
        (folder / f"counts-{epoch}-{rank}").write_text(json.dumps(sorted(stats.items())))
assert reduction.first_difference() is None
torch.save(model.state_dict(), folder / f"model-{rank}.pt")
"""
ONCE = [[number, 1] for number in range(41)]


def torchrun(folder: Path, processes: int, *options: str, killed: list[int] | None = None, name: str = "one") -> int:
    """Run the program under torchrun; return the exit status."""
    folder.mkdir(exist_ok=True)
    program = folder / "train.py"
    program.write_text(PROGRAM)
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--master-port", str(support.free_port()), *options, str(program), str(folder), json.dumps(killed)]
    (finished,) = support.run_programs([command], folder=folder, env={"RUN": name})
    assert finished.status == 0 or killed is not None, finished.errors
    return finished.status


def batches(folder: Path, name: str, processes: int, epoch: int) -> list[list[list[int]]]:
    """Return the batches that each process has trained on in an epoch."""
    found = []
    for rank in range(processes):
        lines = map(json.loads, (folder / f"batches-{name}-{rank}").read_text().splitlines())
        found.append([numbers for each, numbers in lines if each == epoch])
    return found


def all_of(sites: list[list[list[int]]]) -> list[int]:
    return [number for site in sites for batch in site for number in batch]


def counts(folder: Path, epoch: int, rank: int) -> list[list[int]]:
    return json.loads((folder / f"counts-{epoch}-{rank}").read_text())


@pytest.mark.slow
def test_torchrun_restarts_a_killed_process_and_the_model_ends_equal_to_the_bit(tmp_path):
    torchrun(tmp_path / "whole", 2)
    folder = tmp_path / "killed"
    assert torchrun(folder, 2, "--max-restarts", "1", killed=[1, 3, 1]) == 0
    one, other = (torch.load(each / "model-0.pt") for each in (tmp_path / "whole", folder))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert one["weight"].abs().sum() > 0
    for epoch in range(3):
        assert counts(folder, epoch, 0) == counts(folder, epoch, 1) == ONCE
    before, after = (batches(folder, name, 2, 1) for name in ("one", "one-again"))
    assert [len(site) for site in before] == [3, 3]
    kept = [site[:2] for site in before]  # the checkpoint was written after two batches
    assert sorted(all_of(kept) + all_of(after)) == list(range(41))
    assert all_of(batches(folder, "one-again", 2, 0)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(3, 2), (1, 3)])
def test_another_number_of_processes_goes_on(tmp_path, first, second):
    assert torchrun(tmp_path, first, killed=[1, 3, 0], name="one") != 0
    assert not (tmp_path / "model-0.pt").exists()
    torchrun(tmp_path, second, name="two")
    for epoch in (1, 2):
        assert all(counts(tmp_path, epoch, rank) == ONCE for rank in range(second))
    assert sorted(all_of(batches(tmp_path, "one", first, 0))) == list(range(41))
    before, after = batches(tmp_path, "one", first, 1), batches(tmp_path, "two", second, 1)
    kept = [site[:2] for site in before]
    assert len(all_of(kept)) == first * 8
    assert sorted(all_of(kept) + all_of(after)) == list(range(41))
    assert all_of(batches(tmp_path, "two", second, 0)) == []
    assert sorted(all_of(batches(tmp_path, "two", second, 2))) == list(range(41))
