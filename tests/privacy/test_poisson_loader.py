"""Poisson batches, and those without records: by any collate function, they hold no value of a record."""

import pickle
import struct
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, make_dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import default_collate

import dadplug
from dadplug import DifferentialPrivacy

MARK = 12345.5
Pair = namedtuple("Pair", "inputs targets")


@dataclass
class Batch:
    inputs: torch.Tensor
    names: list


class Plain:
    def __init__(self, rows):
        self.inputs, self.inner = stacked(rows), Pair(stacked(rows), [name for _, name in rows])


class Typed(dict):
    pass


def stacked(rows):
    return torch.stack([inputs for inputs, _ in rows])


def with_attribute(rows):
    batch = Typed(inputs=stacked(rows))
    batch.first = stacked(rows)
    return batch


def encoded(rows):
    from transformers import BatchEncoding

    return BatchEncoding({"inputs": torch.stack([rows.pop()[0] for _ in range(len(rows))])})


def opacus_like(rows):
    return [stacked(rows), {"length": torch.tensor(3)}] if rows else [torch.zeros(0, 3, 2), {}]


DERIVED = {  # of a record and two: what is left of them, as `outline` shows it
    "default": (default_collate, [(0, 3, 2), []]),
    "mapping": (lambda rows: UserDict(inputs=stacked(rows), rest=None), {"inputs": (0, 3, 2), "rest": None}),
    "ordered": (lambda rows: OrderedDict(inputs=stacked(rows)), {"inputs": (0, 3, 2)}),
    "dict with an attribute": (with_attribute, {"inputs": (0, 3, 2)}),
    "encoding": (encoded, {"inputs": (0, 3, 2)}),
    "dataclass": (lambda rows: Batch(stacked(rows), [*rows]), {"inputs": (0, 3, 2), "names": []}),
    "object": (Plain, {"inputs": (0, 3, 2), "inner": [(0, 3, 2), []]}),
    "arrays": (lambda rows: (stacked(rows).numpy(), np.array([name for _, name in rows])), [(0, 3, 2), (0,)]),
    "lists": (lambda rows: rows, []),
    "transposed lists": (lambda rows: tuple(zip(*rows)), [[], []]),
    "nested lists": (lambda rows: {"inputs": [each.tolist() for each, _ in rows]}, {"inputs": []}),
    "steps": (lambda rows: list(stacked(rows).unbind(1)), [(0, 2)] * 3),
    "sequence first": (lambda rows: pad_sequence([each for each, _ in rows]), (3, 0, 2)),
    "last": (lambda rows: torch.stack([each for each, _ in rows], -1), (3, 2, 0)),
    "concatenated": (lambda rows: torch.cat([each for each, _ in rows]), (0, 2)),
    "of an empty list": (opacus_like, [(0, 3, 2), {}]),
}
REFUSED = {  # the part that the message names
    "packed": (lambda rows: pack_sequence([each for each, _ in rows]), "[1]"),
    "mean": (lambda rows: [stacked(rows), stacked(rows).mean(0)], "[1]"),
    "number": (lambda rows: [stacked(rows), len(rows)], "[1]"),
    "first": (lambda rows: {"name": rows[0][1], "inputs": stacked(rows)}, "['name']"),
    "offsets": (lambda rows: torch.arange(0, 3 * len(rows) + 1, 3), "batch"),
    "squares": (lambda rows: stacked(rows)[:, None] - stacked(rows), "batch"),
    "keyed": (lambda rows: {rows[0][1]: stacked(rows).sum(0)}, "batch"),
    "grouped": (lambda rows: {len(rows[0][1]): stacked(rows)}, "batch"),
    "named": (lambda rows: {rows[0][1]: stacked(rows)}, "batch"),
    "slots": (make_dataclass("Slots", ["rows"], slots=True), "batch"),
    "slots and attributes": (type("Both", (make_dataclass("Base", ["rows"], slots=True),), {}), "batch"),
    "bytes": (lambda rows: [pickle.dumps(rows)], "[0]"),
    "jagged": (lambda rows: torch.nested.nested_tensor([each for each, _ in rows], layout=torch.jagged), "batch"),
    "a record for none": (lambda rows: [stacked(rows or DATA), stacked(rows or DATA).sum()], "[1]"),
    "never": (lambda rows: stacked(rows) / len(rows) if len(rows) < 2 else 1 / 0, "zero"),
}
DATA = [(torch.full((3, 2), MARK), f"name {MARK}{end}") for end in ("", 0)]


def outline(item):
    if item is None:
        return item
    if hasattr(item, "shape"):
        return tuple(item.shape)
    if isinstance(item, (list, tuple)):
        return [outline(each) for each in item]
    return {name: outline(each) for name, each in (item if hasattr(item, "items") else vars(item)).items()}


@pytest.mark.parametrize(("collate", "expected"), DERIVED.values(), ids=DERIVED)
def test_a_batch_without_records_holds_none(collate, expected):
    if collate is encoded:
        pytest.importorskip("transformers")
    loader = dadplug.PoissonLoader(DATA, 1e-9, steps=2, collate_fn=collate)
    for batch in loader:
        assert type(batch) is type(collate(DATA[:]))
        assert outline(batch) == expected
        held = pickle.dumps(batch)
        for mark in (str(MARK).encode(), struct.pack("<f", MARK), struct.pack(">d", MARK)):
            assert mark not in held
        if hasattr(batch, "clear"):  # as a program may change it
            batch.clear()


@pytest.mark.parametrize(("collate", "part"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("rate", [1e-9, 1.0])
def test_what_is_not_understood_is_refused_before_the_first_batch(collate, part, rate):
    loader = dadplug.PoissonLoader(DATA, rate, collate_fn=collate)
    with pytest.raises(dadplug.PrivacyError, match="empty=") as raised:
        next(iter(loader))
    assert part in str(raised.value)
    given = dadplug.PoissonLoader(DATA, 1e-9, steps=1, collate_fn=collate, empty=torch.zeros(0, 3))
    assert [tuple(each.shape) for each in given] == [(0, 3)]


def test_workers_make_it_too():
    loader = dadplug.PoissonLoader(DATA, 1e-9, steps=2, num_workers=1)
    assert [outline(each) for each in loader] == [[(0, 3, 2), []]] * 2


def test_poisson_batches():
    rows = torch.utils.data.TensorDataset(torch.arange(1000).float()[:, None], torch.arange(1000))
    loader = dadplug.PoissonLoader(rows, 0.02)
    assert len(loader) == 50
    batches = [inputs[:, 0].long().tolist() for inputs, _ in loader]
    sizes = torch.tensor([float(len(each)) for each in batches])
    assert 12 < float(sizes.mean()) < 28
    assert 2 < float(sizes.std()) < 7
    assert batches != [inputs[:, 0].long().tolist() for inputs, _ in loader]
    empty = dadplug.PoissonLoader(rows, 1e-9, steps=2)
    assert [tuple(each.shape) for inputs in empty for each in inputs] == [(0, 1), (0,)] * 2
    for wrong, message in (
        ({"sample_rate": 0.0}, "sample_rate must be"),
        ({"sample_rate": 0.1, "shuffle": True}, "shuffle= does not go with Poisson sampling"),
        ({"sample_rate": 0.1, "steps": 0}, "steps must be"),
    ):
        with pytest.raises(ValueError, match=message):
            dadplug.PoissonLoader(rows, **wrong)
    model = nn.Linear(1, 2)
    reduction = dadplug.GradientReduction(model, mode="dsgd", privacy=DifferentialPrivacy())
    for inputs, targets in empty:  # a loss of no rows is NaN
        nn.functional.cross_entropy(model(inputs), targets % 2).backward()
        reduction.synchronize()
        assert bool(torch.isfinite(model.weight.grad).all())
        assert model.weight.grad.any()
    wrapped = dadplug.DistributedDataParallel(nn.Linear(1, 2), mode="dsgd", privacy=DifferentialPrivacy())
    for inputs, targets in empty:  # the other sites wait for this one, which has no data
        wrapped.zero_grad()
        nn.functional.cross_entropy(wrapped(inputs), targets % 2).backward()
        assert wrapped.module.weight.grad.any()
    assert [each.steps for each in wrapped.reduction._private.ledger.entries] == [2]
