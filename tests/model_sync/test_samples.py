"""Samples of a site's batch where they are not the first dimension of the first input: held against one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import support
import torch
import torch.distributed as dist
from comparison import off_by
from torch import Tensor, nn

import dadplug


class Recurrent(nn.Module):
    """A recurrent layer without ``batch_first``, and outputs for all positions or for the last one."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.whole, self.layer, self.last = whole, nn.LSTM(6, 5), nn.Linear(5, 2)

    def forward(self, x: Any) -> Tensor:
        states, (end, _) = self.layer(x)
        return self.last(states if self.whole else end[-1])


class Words(nn.Module):
    """Cells in a loop over positions, after a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell = nn.Embedding(9, 6), nn.GRUCell(6, 6)

    def forward(self, words: Tensor) -> Tensor:
        state = None
        for each in self.table(words):
            state = self.cell(each, state)
        assert state is not None
        return state


class Bags(nn.Module):
    """Bags of any size in one tensor, which offsets divide."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.last = nn.EmbeddingBag(20, 6), nn.Linear(6, 2)

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.last(self.bags(words, offsets))


class Positioned(nn.Module):
    """An input that all samples share before the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.place = nn.Linear(6, 4), nn.Linear(3, 4)

    def forward(self, places: Tensor, x: Tensor) -> Tensor:
        return self.first(x) + self.place(places).sum(0)


class Detector(nn.Module):
    """A model of lists of pictures and labels, with an output for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, pictures: list[Tensor], labels: list[dict[str, Tensor]]) -> Tensor:
        return torch.stack([self.layer(each).sum() - one["box"] for each, one in zip(pictures, labels)])


def sequences(step: int, sites: Sequence[int], length: int = 0) -> list[Tensor]:
    """Return 2 sequences of site 0, and 5 of site 1."""
    made = []
    for number in [number for site in sites for number in ((0, 1), range(2, 7))[site]]:
        generator = torch.Generator().manual_seed(100 * step + number)
        made.append(torch.randn(length or 1 + (number + step) % 4, 6, generator=generator, dtype=torch.float64))
    return made


def positions_first(step: int, sites: Sequence[int]) -> tuple[Any, ...]:
    return (torch.stack(sequences(step, sites, 4), 1),)


def words_first(step: int, sites: Sequence[int]) -> tuple[Any, ...]:
    return ((positions_first(step, sites)[0][..., 0].abs() * 100).long() % 9,)


def packed(step: int, sites: Sequence[int]) -> tuple[Any, ...]:
    return (nn.utils.rnn.pack_sequence(sequences(step, sites), enforce_sorted=False),)


def with_offsets(step: int, sites: Sequence[int]) -> tuple[Any, ...]:
    found = sequences(step, sites)
    ends = torch.tensor([0, *(len(each) for each in found)]).cumsum(0)
    return (torch.cat(found)[:, 0].abs() * 100).long() % 20, ends[:-1]


def shared_first(step: int, sites: Sequence[int]) -> tuple[Any, ...]:
    return torch.ones(4, 3, dtype=torch.float64), torch.cat(sequences(step, sites, 1))


def lists(step: int, sites: Sequence[int]) -> tuple[Any, ...]:
    found = sequences(step, sites, 3)
    return found, [{"box": each.mean()} for each in found]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., tuple[Any, ...]]]] = {
    "positions first, last output": (Recurrent, positions_first),
    "positions first, all outputs": (lambda: Recurrent(whole=True), positions_first),
    "attention": (lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0), positions_first),
    "cells": (Words, words_first),
    "packed sequences": (Recurrent, packed),
    "offsets of bags": (Bags, with_offsets),
    "a shared input first": (Positioned, shared_first),
    "lists of pictures": (Detector, lists),
}


def trained(model: nn.Module, inputs: Callable[..., tuple[Any, ...]], sites: Sequence[int]) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(*inputs(step, sites)).square().mean().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("name", CASES)
@support.at_sites(2)
def test_samples_that_the_first_input_does_not_begin_with(name: str) -> None:
    kind, inputs = CASES[name]
    models = []
    for sites in ([dist.get_rank()], range(2)):
        torch.manual_seed(0)
        model = kind().double()
        wrapped = dadplug.DistributedDataParallel(model, mode="dsgd") if len(sites) == 1 else model
        trained(wrapped, inputs, sites)
        models.append(model)
    for (parameter, one), two in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert off_by(one.detach(), two.detach()) < 1e-10, parameter
