"""Data of the parameter server's sites: batches on demand, each used once an epoch, and data of each site's own."""

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
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import dadplug
from dadplug import ProcessFailedError
from dadplug.parameter_server import launch_ps_and_workers

SAMPLES = 90


def made(**options) -> tuple[nn.Module, dadplug.ParameterServer]:
    torch.manual_seed(0)
    model = nn.Linear(SAMPLES, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, dadplug.ParameterServer(
        model, optimizer, mode="dad", timeout=100.0, **{"weighting": "samples"} | options
    )


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


@pytest.mark.parametrize("workers", [0, 1])
@support.at_sites(3)
def test_each_batch_of_a_shared_data_set_is_used_once_an_epoch(workers: int) -> None:
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
    assert sum("its loader has another order of batches than those of other sites" in each for each in found) == 1, (
        found
    )


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


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@support.at_sites(3)
def test_summed_steps_are_proportional_to_each_sites_own_data(weighting: str) -> None:
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


# Training by a server and workers, processes of this machine, by one call; and its example


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "parameter_server.py"


def samples(count: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


class Deadly(Dataset):
    """Data at which some workers are killed; their seeds are those of the training plus their ranks."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.data, self.ranks, self.count = samples(160), ranks, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: int):
        self.count += 1
        if self.count == 50 and torch.initial_seed() - 42 in self.ranks:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.data[place]


def test_workers_train_one_model(capfd):
    model = network()
    before = [parameter.clone() for parameter in model.parameters()]
    loader, test = DataLoader(samples(256), batch_size=8, shuffle=True), DataLoader(samples(100, 1), 50)
    outcome = launch_ps_and_workers(3, 2, 0, loader, test, model=model, lr=0.3, mode="dad", staleness=4)
    assert outcome.model is model
    assert all(not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    right = sum(int((model(inputs).argmax(1) == targets).sum()) for inputs, targets in test)
    assert outcome.accuracy == outcome.accuracies[-1] == right / 100 > 0.8
    assert len(outcome.accuracies) == 2
    output = capfd.readouterr().out
    assert f"epoch 2 of 2 by 2 worker(s): test accuracy {outcome.accuracy:.2%}, elapsed time" in output


class Recorded(Dataset):
    """Data whose samples write their numbers to a file when they are loaded."""

    def __init__(self, path: Path) -> None:
        self.data, self.path = samples(64), path

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: int):
        with self.path.open("a") as file:
            file.write(f"{place}\n")
        return self.data[place]


def test_workers_may_share_the_batches(tmp_path):
    loader, test = DataLoader(Recorded(tmp_path / "loaded"), 8, shuffle=True), DataLoader(samples(9, 1), 9)
    launch_ps_and_workers(3, 2, 0, loader, test, model=network(), mode="dad", deal="shared")
    loaded = [int(line) for line in (tmp_path / "loaded").read_text().split()]
    assert sorted(loaded) == sorted(2 * list(range(64)))


def test_a_killed_worker_is_named_and_the_others_go_on():
    test = DataLoader(samples(100, 1), 50)
    with pytest.warns(UserWarning, match=r"worker 2 .* has failed: it has ended with status -9; the others go on"):
        outcome = launch_ps_and_workers(3, 2, 0, DataLoader(Deadly((2,)), 8), test, model=network(), lr=0.3)
    assert outcome.accuracy > 0.7
    with pytest.raises(ProcessFailedError, match=r"worker 1 .* has ended with status -9"):
        launch_ps_and_workers(2, 1, 0, DataLoader(Deadly((1,)), 8), test, model=network())


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((1, 1, 0), {}, "world_size must be"),
        ((2, 0, 0), {}, "epochs_per_worker must be"),
        ((2, 1, -1), {}, "num_gpus must be"),
        ((2, 1, 999), {}, "num_gpus=999"),
        ((2, 1, 0), {"quorum": 2}, "quorum=2 needs as many workers, and there are 1"),
        ((2, 1, 0), {"mode": "edad"}, "'edad' recomputes"),
    ],
)
def test_arguments_are_checked_before_processes_start(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        launch_ps_and_workers(*arguments, None, None, **options)


def test_the_example_compares_one_worker_with_four(capfd):
    support.load(str(EXAMPLE)).main(["--samples", "64", "--batch-size", "16"])
    output = capfd.readouterr().out
    assert "epoch 4 of 4 by 1 worker(s): test accuracy" in output
    assert "Elapsed time model 1 (1 worker x 4 epochs):" in output
    assert "Elapsed time model 2 (4 workers x 1 epoch):" in output
