"""Several sites: data of each site's own, sites that come and go between restarts, files that differ."""

from __future__ import annotations

import warnings

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


def different_epochs():
    """Ask for another number of epochs at each site; return the error."""
    reset_progress()
    try:
        list(dadplug.remaining_epochs_until(2 + dist.get_rank(), timeout=200))
    except dadplug.MismatchError as error:
        return str(error)


def test_different_arguments_are_refused_at_both_sites(sites):
    messages = sites(2).run(different_epochs)
    assert all("'until': 2" in each and "'until': 3" in each for each in messages)


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
