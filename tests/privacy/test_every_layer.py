"""Sums of clipped gradients of every model of the zoo against gradients of single samples by torch.func, in float64."""

import copy
import warnings

import pytest
import torch
from single_samples import by_backward, check_clipped_sums, reduce
from torch import nn
from zoo import ZOO, batch, build
from zoo import loss as loss_of

from dadplug import PrivacyError

SAMPLES = 7  # odd, and no multiple of 3: models whose way depends on the batch go the way that they go for one sample
REFUSED = {
    "mixed": (ValueError, r"batchnorm \(BatchNorm1d\) mixes the samples"),
    "functional": (ValueError, r"is not known for bare: freeze it"),
    "weightnorm": (ValueError, r"is not known for 0\.parametrizations\.weight\.original0"),
    "images": (ValueError, "is not known for token, places: freeze it"),
    "renormed": (ValueError, r"is not known for table\.weight, bags\.weight \(max_norm changes rows while"),
    "waves": (ValueError, "is not known for turn"),
    "shared": (ValueError, r"is not known for recur\.weight_hh_l0, recur\.bias_ih_l0"),
}
NO_VMAP = {"language", "gru", "reentrant", "resumed reentrant", "checkpointed", "resumed", "bags", "sparse"}
"""Models that torch.func cannot map over samples: recurrent layers, checkpoints, offsets of bags, sparse tables."""


def by_vmap(model, inputs, targets):
    """Return the gradients of all samples by name, of shape (samples, …), by `torch.func`."""
    parameters = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}

    def loss(values, one, target):
        outputs = torch.func.functional_call(model, values, (one[None],))
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs
        return nn.functional.cross_entropy(logits, target[None])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators that are mapped slowly
        return torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, inputs, targets)


BIASES = ("mlp", "repeated", "checkpointed", "transformer", "conv1d", "conv2d", "conv3d")
"""Models that are also trained with all weights of linear layers and convolutions frozen."""


@pytest.mark.parametrize("name", [name for name in ZOO if name not in REFUSED])
def test_clipped_sums_of_the_zoo(name):
    torch.manual_seed(3)
    check_zoo(name, build(name))
    if name in BIASES:
        model = build(name)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() < 2)
        assert any(key.endswith("bias") for key, each in model.named_parameters() if each.requires_grad)
        check_zoo(name, model)


def check_zoo(name, model):
    inputs, targets = drawn = batch(name, SAMPLES, 5)
    by_sample = by_backward(model, loss_of, drawn) if name in NO_VMAP else by_vmap(copy.deepcopy(model), *drawn)
    reduction = check_clipped_sums(model, loss_of, drawn, by_sample)
    empty = batch(name, 0, 5)
    if name not in ("gru", "language"):  # torch runs no recurrent layer on an empty batch
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss_of(model, *empty).backward()
        reduction.synchronize()
        assert not any(bool(each.grad.any()) for each in model.parameters() if each.grad is not None)
    reduction.detach()
    loss_of(model, inputs, targets).backward()  # trains alone again
    assert any(each.grad is not None and bool(each.grad.to_dense().any()) for each in model.parameters())


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_by_sample_is_refused(name):
    error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        reduce(Shared() if name == "shared" else build(name))


def test_each_model_is_accepted_or_refused():
    assert set(REFUSED) - set(ZOO) == {"shared"}
    assert len(set(ZOO) - set(REFUSED)) > 25


class Recurrent(nn.Module):
    """Recurrent layers with samples in the second dimension, of two directions and layers, from a given state."""

    def __init__(self):
        super().__init__()
        self.start = nn.Linear(3, 8)
        self.first = nn.LSTM(3, 4, num_layers=2, bidirectional=True)
        self.second = nn.GRU(8, 5, bias=False)
        self.third = nn.RNN(5, 6, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x):  # (samples, 5, 3)
        start = self.start(x[:, 0]).view(-1, 2, 4).transpose(0, 1).repeat(2, 1, 1)
        x, (h, _) = self.first(x.transpose(0, 1), (start, start.tanh()))
        x = self.second(x)[0].transpose(0, 1)
        return self.head(self.third(x)[0][:, -1]) + h.sum((0, 2))[:, None]


class Attending(nn.Module):
    """Attention with masks of each kind, over keys of another width, and with samples in the second dimension."""

    def __init__(self):
        super().__init__()
        self.cross = nn.MultiheadAttention(6, 2, kdim=3, vdim=4, batch_first=True, add_bias_kv=True)
        self.own = nn.MultiheadAttention(6, 3, bias=False)
        self.query, self.value = nn.Linear(3, 6), nn.Linear(3, 4)
        self.slope, self.pair, self.head = nn.PReLU(5), nn.Bilinear(6, 6, 6), nn.Linear(6, 4)

    def forward(self, x):  # (samples, 5, 3)
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, 3] = x[:, 3, 0] > 0
        later = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
        q, weights = self.cross(self.query(x), x, self.value(x), key_padding_mask=padding, attn_mask=later)
        bias = weights[..., :5].detach().repeat_interleave(3, 0)  # another one for each sample and head
        turned = self.slope(q).transpose(0, 1)
        out = self.own(turned, turned, turned, attn_mask=bias, need_weights=False)[0].transpose(0, 1).mean(1)
        return self.head(self.pair(out, out)) + weights.sum((1, 2))[:, None] * 1e-2


class Collections(nn.Module):
    """Two bags for each sample, of other lengths, some empty, given by offsets or with weights."""

    def __init__(self, mode):
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 5, mode=mode, padding_idx=0, include_last_offset=True)
        self.last = nn.EmbeddingBag(9, 5, mode="sum")
        self.last.weight = self.bag.weight  # and the table is looked up twice
        self.head = nn.Linear(10, 4)

    def forward(self, x):  # (samples, 5, 3)
        numbers = (x[..., 0].abs() * 8).long() % 9
        kept = [row[: int(row[0]) % 5] for row in numbers]  # 0 to 4 lookups
        bags = [each for row in kept for each in (row[:1], row[1:])]
        bounds = torch.tensor([0, *(len(each) for each in bags)]).cumsum(0)
        found = self.bag(torch.cat(bags), bounds).view(len(x), 10)
        return self.head(found + self.last(numbers, per_sample_weights=x[..., 1]).repeat(1, 2))


def of_sequences(model, inputs, targets):
    return nn.functional.cross_entropy(model(inputs), targets)


CASES = {
    "recurrent": Recurrent,
    "attention": Attending,
    **{f"bags, {mode}": lambda mode=mode: Collections(mode) for mode in ("sum", "mean", "max")},
}


@pytest.mark.parametrize("name", CASES)
def test_layers_that_the_zoo_has_not(name):
    torch.manual_seed(1)
    model = CASES[name]().double()
    drawn = torch.randn(SAMPLES, 5, 3, dtype=torch.float64), torch.randint(0, 4, (SAMPLES,))
    gradients = by_backward(model, of_sequences, drawn)
    assert all(bool(each.any()) for each in gradients.values())
    check_clipped_sums(model, of_sequences, drawn, gradients, parts=2)


def test_dropout_within_a_layer_draws_for_each_sample():
    torch.manual_seed(1)
    model = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.5, batch_first=True).double()
    reduction = reduce(model, 1e9, loss_reduction="sum")
    inputs = torch.randn(1, 3, 8, dtype=torch.float64).expand(64, -1, -1)
    outputs = model.self_attn(inputs, inputs, inputs)[0]
    assert len(outputs.detach().unique(dim=0)) > 32
    plain = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True).double()
    reduction = reduce(plain, 1e9, loss_reduction="sum")
    plain(inputs)[0].sum().backward()
    reduction.synchronize()
    assert bool(plain.weight_ih_l0.grad.any())


class Shared(nn.Module):
    """A recurrent and a linear layer with one weight."""

    def __init__(self):
        super().__init__()
        self.recur, self.out = nn.RNN(4, 4, batch_first=True), nn.Linear(4, 4)
        self.out.weight = self.recur.weight_ih_l0


class Turned(nn.Module):
    def __init__(self, layer, packed=False):
        super().__init__()
        self.layer, self.packed = layer, packed

    def forward(self, x):
        if self.packed:
            x = nn.utils.rnn.pack_padded_sequence(x, torch.full((len(x),), 3), batch_first=True)
            return self.layer(x)[0].data
        return self.layer(x.transpose(0, 1))


@pytest.mark.parametrize(
    ("build_model", "inputs", "message"),
    [
        (lambda: Turned(nn.Embedding(5, 3)), torch.ones(4, 6, dtype=torch.long), "samples along the first dimension"),
        (lambda: Turned(nn.LSTM(3, 3, batch_first=True)), torch.ones(4, 6, 3), "samples along the first dimension"),
        (lambda: nn.LSTM(3, 3), torch.ones(4, 6, 3), "samples along the second dimension: the batch has 4"),
        (lambda: Turned(nn.GRU(3, 3), True), torch.ones(4, 6, 3), "packed sequence has no dimension of samples"),
        (lambda: nn.GRU(3, 3, batch_first=True), torch.ones(4, 3), "where one of 3 holds samples"),
        (lambda: nn.EmbeddingBag(5, 3), torch.ones(4, dtype=torch.long), "as many bags for each sample"),
    ],
)
def test_calls_whose_samples_cannot_be_told_apart(build_model, inputs, message):
    model = build_model()
    _kept = reduce(model)
    arguments = (torch.tensor([0, 2, 3]),) if isinstance(model, nn.EmbeddingBag) else ()
    with pytest.raises(PrivacyError, match=message):
        model(inputs, *arguments)
