"""The data of Catalyst's runner: split over the sites if it is the same, else each site's own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

pytest.importorskip("catalyst")
from catalyst.core.callback import Callback
from catalyst_training import Losses, data, train

from dadplug import MismatchError


def own_loaders(split_data, samples: list) -> tuple:
    """Each site brings its own data, of its own size."""
    rank = dist.get_rank()
    losses = Losses()
    loaders = {"train": DataLoader(data(samples[rank], seed=rank), batch_size=4, shuffle=True)}
    runner = train("dad", loaders, [losses], epochs=1, runner_options={"split_data": split_data})
    return len(losses.values), sum(size for _, size in losses.values), runner.reduction.first_difference()


@pytest.mark.parametrize("split_data", ["auto", False])
def test_sites_bring_their_own_data(sites, split_data):
    assert sites(2).run(own_loaders, split_data, [20, 9]) == [(5, 20, None), (3, 9, None)]
    assert sites(2).run(own_loaders, split_data, [10, 10]) == [(3, 10, None)] * 2


def refuses_to_split() -> str:
    try:
        own_loaders(True, [20, 9])
    except MismatchError as error:
        return str(error)
    return "nothing"


def test_data_that_differs_cannot_be_split(sites):
    for message in sites(2).run(refuses_to_split):
        assert "pass split_data=False where every site brings its own" in message


class Augmented(Dataset):
    """Random augmentations must not hide that the data is the same."""

    def __len__(self):
        return 21

    def __getitem__(self, index):
        return torch.full((8,), float(index)) + torch.rand(8), index % 4


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.ones(8), 1)] * 10)

    def __len__(self):
        return 10


class OddFirst(torch.utils.data.Sampler):
    def __len__(self):
        return 20

    def __iter__(self):
        return iter([*range(1, 20, 2), *range(0, 20, 2)])


def seen_samples(kind: str) -> list:
    """The samples that this site saw in two epochs."""
    rank = dist.get_rank()
    plain = TensorDataset(torch.arange(20.0)[:, None].expand(20, 8), torch.arange(20) % 4)
    loader = {
        "shuffled": lambda: DataLoader(plain, batch_size=3, shuffle=True),
        "generator": lambda: DataLoader(plain, 3, shuffle=True, generator=torch.Generator().manual_seed(4)),
        "dropped": lambda: DataLoader(plain, batch_size=3, drop_last=True),
        "sampler": lambda: DataLoader(plain, batch_size=3, sampler=OddFirst()),
        "batches": lambda: DataLoader(
            plain, batch_sampler=torch.utils.data.BatchSampler(OddFirst(), batch_size=5, drop_last=False)
        ),
        "distributed": lambda: DataLoader(plain, 3, sampler=DistributedSampler(plain, 2, rank, shuffle=False)),
        "augmented": lambda: DataLoader(Augmented(), batch_size=3, shuffle=True),
        "stream": lambda: DataLoader(Stream(), batch_size=3),
        "workers": lambda: DataLoader(plain, batch_size=3, shuffle=True, num_workers=1),
    }[kind]()

    class Seen(Callback):
        def __init__(self):
            super().__init__(order=100)
            self.epochs = []

        def on_loader_start(self, runner):
            self.epochs.append([])

        def on_batch_end(self, runner):
            self.epochs[-1] += runner.batch["features"][:, 0].int().tolist()

    seen = Seen()
    train("dsgd", {"train": loader}, [seen], lr=1e-6)
    return seen.epochs


@pytest.mark.parametrize("kind", ["shuffled", "generator", "sampler", "batches", "distributed", "augmented", "workers"])
def test_every_sample_goes_to_one_site(sites, kind):
    first, second = sites(2).run(seen_samples, kind)
    for epoch in range(2):
        assert sorted(first[epoch] + second[epoch]) == list(range(21 if kind == "augmented" else 20))
        assert abs(len(first[epoch]) - len(second[epoch])) <= (5 if kind == "batches" else 1)
    shuffled = kind in ("shuffled", "generator", "augmented", "workers")
    assert (first[0] != first[1]) == shuffled  # another order in another epoch


def test_drop_last_and_streams_stay_what_they_are(sites):
    first, second = sites(2).run(seen_samples, "dropped")
    assert len(first[0]) == len(second[0]) == 9
    first, second = sites(2).run(seen_samples, "stream")
    assert len(first[0]) == len(second[0]) == 10


def different_loaders() -> str:
    loaders = {"train": DataLoader(data(8), batch_size=4)}
    if dist.get_rank():
        loaders["valid"] = DataLoader(data(8), batch_size=4)
    try:
        train("dad", loaders)
    except MismatchError as error:
        return str(error)
    return "nothing"


def test_loaders_that_differ_are_told(sites):
    for message in sites(2).run(different_loaders):
        assert "the sites do not have the same loaders: ['train']; ['train', 'valid']" in message
