"""Data of the parameter server's sites: batches on demand, each used once an epoch, and data of each site's own."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path

import pytest
import support
import torch
import torch.distributed as dist
from local_reference import ends_equal
from server_log import entries, keys, recorded
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import dadplug

SAMPLES = 90


def made(**options) -> tuple[nn.Module, dadplug.ParameterServer]:
    torch.manual_seed(0)
    model = nn.Linear(SAMPLES, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, dadplug.ParameterServer(model, optimizer, mode="dad", timeout=100.0, **options)


def one_hot(count: int = SAMPLES) -> TensorDataset:
    return TensorDataset(torch.eye(SAMPLES, dtype=torch.float64)[:count], torch.arange(count))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def train(server, loader, model, pause: float, accumulate: int = 1) -> list[list[int]]:
    """Train for an epoch; return the samples of each of this site's contributions."""
    contributions, found = [], []
    for number, (inputs, indices) in enumerate(loader):
        model(inputs).mean().backward()
        found += indices.tolist()
        time.sleep(pause)
        if (number + 1) % accumulate == 0:
            contributions.append(found)
            found = []
            server.step()
    return contributions + [found] * bool(found)  # the loader has sent the rest


def each_batch_of_a_shared_data_set_is_used_once_an_epoch(workers: int = 0) -> None:
    rank = dist.get_rank()
    model, server = made(deal="shared", staleness=3)
    with pytest.raises(TypeError, match="batches of a DataLoader can be dealt"):
        server.loader([1, 2])
    for wrong, message in (
        (DataLoader(Stream()), "IterableDataset"),
        (DataLoader(one_hot(), sampler=DistributedSampler(one_hot(), 3, rank)), "since a parameter server deals"),
    ):
        with pytest.raises(ValueError, match=message):
            server.loader(wrong)
    log = recorded(server)
    loader = server.loader(DataLoader(one_hot(), batch_size=4, shuffle=True, num_workers=workers))
    with pytest.raises(TypeError, match="not known"):
        len(loader)
    assert loader.batch_size == 4
    own, orders = [], []
    for epoch in range(4):
        used = train(server, loader, model, 0.002 * rank, 1 + (epoch == 1))
        orders.append(server.gather_objects(used) if epoch == 2 else None)  # a phase has ended before the third epoch
        own += used
        if epoch in (1, 2, 3):
            server.finish()
            assert server.first_difference() is None
    everything = server.gather_objects(own)
    samples = sorted(index for each in everything for found in each for index in found)
    assert samples == sorted(list(range(SAMPLES)) * 4)
    third = sorted(index for each in orders[2] for found in each for index in found)
    assert third == list(range(SAMPLES))
    sizes = {(entry.site, entry.number): entry.samples for entry in entries(log)}
    assert len(sizes) == len(entries(log))
    assert sizes == {(site, n): len(found) for site, each in enumerate(everything) for n, found in enumerate(each)}
    for _ in loader:  # an epoch that all sites end early
        break
    server.finish()
    rest = server.gather_objects(train(server, loader, model, 0))
    assert sorted(index for each in rest for found in each for index in found) == list(range(SAMPLES))
    ends_equal(server)


def batches_may_be_loaded_by_worker_processes() -> None:
    each_batch_of_a_shared_data_set_is_used_once_an_epoch(1)


def needs_few_batches() -> None:
    """Fewer batches than sites; then orders that differ between sites."""
    model, server = made(deal="shared")
    used = server.gather_objects(train(server, server.loader(DataLoader(one_hot(4), batch_size=4)), model, 0))
    assert [found for each in used for found in each] == [[0, 1, 2, 3]]
    server.finish()
    assert server.version == 1
    server.detach()
    model, server = made(deal="shared")
    model(torch.eye(SAMPLES, dtype=torch.float64)[:2]).mean().backward()
    server.step()  # the first step needs all sites
    data = one_hot(40)
    order = [[index, index + 1] for index in range(0, 40, 2)]
    other = order if dist.get_rank() == 0 else order[::-1]
    try:
        train(server, server.loader(DataLoader(data, batch_sampler=other)), model, 0.002)
        server.finish()
        refused = ""
    except dadplug.SiteError as error:
        refused = str(error)
    server.detach()
    return refused


def test_few_batches_and_orders_that_differ():
    with support.Sites(2) as group:
        found = group.run(needs_few_batches)
    assert sum("its loader has another order of batches than those of other sites" in each for each in found) == 1


def loses_a_site(folder: str, staleness: int) -> tuple:
    rank = dist.get_rank()
    model, server = made(deal="shared", staleness=staleness)
    log = recorded(server)
    loader = server.loader(DataLoader(one_hot(), batch_size=3, shuffle=True))
    with warnings.catch_warnings(record=True) as caught, Path(folder, str(rank)).open("a", buffering=1) as file:
        warnings.simplefilter("always")
        for number, (inputs, indices) in enumerate(loader):
            file.write(" ".join(map(str, indices.tolist())) + "\n")  # before the contribution
            model(inputs).mean().backward()
            time.sleep(0.005)
            if rank == 2 and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            server.step()
        server.finish()
    server.detach()
    return keys(log), [str(each.message) for each in caught], model.weight.tolist()


def test_batches_of_a_killed_site_are_dealt_again(tmp_path):
    for staleness in (0, 4):
        folder = tmp_path / str(staleness)
        folder.mkdir()
        with support.Sites(3) as group:
            group.start(loses_a_site, str(folder), staleness)
            first, second, third = group.outcomes()
        assert third.kind == "ended"
        assert first.kind == second.kind == "ok", f"{first.value} {second.value}"
        assert first.value[0] == second.value[0]
        assert first.value[2] == second.value[2]
        assert any("site 2" in each and "has left, and the others go on" in each for each in first.value[1])
        batches = [
            [[int(each) for each in line.split()] for line in (folder / str(n)).read_text().splitlines()]
            for n in range(3)
        ]
        used = sorted(index for site, number in first.value[0] for index in batches[site][number])
        assert used == list(range(SAMPLES))


def summed_steps_are_proportional_to_each_sites_own_data(weighting: str = "samples") -> None:
    rank = dist.get_rank()
    counts = (12, 60, 24)
    model, server = made(deal="own", weighting=weighting, staleness=3)
    log = recorded(server)
    if weighting == "samples":
        with pytest.raises(ValueError, match="number of samples of this site is not known"):
            server.loader([1, 2])
    loader = server.loader(DataLoader(one_hot(counts[rank]), batch_size=4, shuffle=True))
    assert loader.batch_size == 4
    for _ in range(2):
        used = train(server, loader, model, 0.004 * rank)
        assert {index for found in used for index in found} == set(range(counts[rank]))
        server.finish()
        assert server.first_difference() is None
    logs = server.gather_objects([tuple(entry) for entry in entries(log)])
    assert logs[0] == logs[1] == logs[2]
    assert sum(entry.site == 0 for entry in entries(log)) > 2 * 3  # it is fast, and has few: it has made further passes
    shares = (1, 5, 2) if weighting == "samples" else (1, 1, 1)
    spent, total, left = [0.0] * 3, 0.0, [count // 4 for count in counts]
    commits = [decision.entries for decision in log if decision.entries]
    for version, commit in enumerate(commits):
        samples = sum(entry.samples for entry in commit)
        total += sum(entry.samples / (1 + version - entry.base) for entry in commit) / samples
        for entry in commit:
            spent[entry.site] += entry.samples * entry.scale / samples
            left[entry.site] -= 1
        if max(left) <= 4:  # some may have finished, and earn no more; up to 4 contributions wait
            break
        for site in {entry.site for entry in commit}:
            assert spent[site] == pytest.approx(total * shares[site] / sum(shares))
    assert version > 4  # several contributions may be committed together
    server.detach()


def summed_steps_are_equal_by_option() -> None:
    summed_steps_are_proportional_to_each_sites_own_data("uniform")


@pytest.mark.parametrize(
    "program",
    [
        each_batch_of_a_shared_data_set_is_used_once_an_epoch,
        batches_may_be_loaded_by_worker_processes,
        summed_steps_are_proportional_to_each_sites_own_data,
        summed_steps_are_equal_by_option,
    ],
)
def test_three_sites(sites, program):
    sites(3).run(program)
