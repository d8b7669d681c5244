"""Automatic intent sees every lookup of every kind of model, or says which line keeps it from that."""

import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dadplug.adapm import AdaDataLoader, AdaModel, IntentError
from dadplug.adapm.recorder import count_missing


class Model(nn.Module):
    """Layers, and a function of the model and its inputs as the forward pass."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def tables(*sizes, **options):
    return [nn.Embedding(*size, **options) for size in sizes]


def dlrm(model, batch):
    dense, ids = batch["dense"], batch["ids"]
    rows = torch.stack([model.bottom(dense), *(t(ids[:, n]) for n, t in enumerate(model.tables))], 1)
    products = torch.bmm(rows, rows.transpose(1, 2))
    i, j = torch.triu_indices(4, 4, 1)
    return model.top(products[:, i, j])


def wide_and_deep(model, ids):
    ids = ids + torch.arange(3) * 50  # one table for all fields
    return model.wide(ids).sum(1) + model.layers(model.deep(ids).flatten(1))


def two_towers(model, pair):
    users, items = pair
    return model.users(users) @ model.items(items.unique()).T


def gcn(model, seeds):
    edges = model.edges[:, torch.isin(model.edges[1], seeds)]
    near, place = torch.cat([seeds, edges.flatten()]).unique(return_inverse=True)
    rows = model.weight(model.nodes(near))
    source, target = place[seeds.numel() :].view(2, -1)
    return rows + torch.zeros_like(rows).index_add(0, target, rows[source])


def word2vec(model, words, contexts, negatives):
    w = model.words(words)[:, None]
    return (w * model.contexts(contexts)).sum(-1), (w * model.contexts(negatives)).sum(-1)


def complex_products(model, triples):
    s, r, o = triples.unbind(1)
    first, second = model.relations(r).chunk(2, 1)
    subject = torch.complex(model.real(s), model.imaginary(s))
    object_ = torch.complex(model.real(o), model.imaginary(o))
    return (subject * torch.complex(first, second) * object_.conj()).real.sum(1)


def transformer(model, ids):
    mask = ids == 0
    rows = model.words(ids) + model.places(torch.arange(ids.shape[1]).expand_as(ids))
    return model.head(model.layer(rows, src_key_padding_mask=mask))


def bags(model, lists):
    offsets = torch.tensor([0, *(len(each) for each in lists)]).cumsum(0)
    flat = torch.cat(lists)
    return torch.cat([model.tags(flat, offsets[:-1]), model.other(flat, offsets), model.tags(flat[:6].view(3, 2))], 1)


def nested(model, batch):
    if batch["kind"] > 1:  # control flow on whole numbers is followed
        return model.inner["a"]((batch["u"], batch["i"])), model.shared(batch["x"] % 20)
    return model.inner["b"](batch["x"] % 7)


def masked(model, ids):
    chosen = ids[ids > 5]
    rows = model.words(chosen)
    even = rows[chosen % 2 == 0]
    return torch.softmax(model.gate(rows), 0).sum() + even.sum() + model.words(chosen.flip(0).clamp(max=20)).mean()


def deep_fm(model, ids, values):
    rows = model.second(ids) * values[..., None]
    pairs = (rows.sum(1) ** 2 - (rows**2).sum(1)).sum(1, keepdim=True)
    first = (model.first(ids)[..., 0] * values).sum(1, keepdim=True)
    return torch.sigmoid(first + pairs + model.deep(rows.flatten(1)))


def session(model, ragged):
    padded = nn.utils.rnn.pad_sequence(ragged, batch_first=True)
    out, _ = model.gru(model.items(padded))
    return out[:, -1] @ model.items(torch.arange(1, 10)).T


def tied(layer, other):
    layer.weight = other.weight
    return layer


def make_gcn():
    model = Model(gcn, nodes=nn.Embedding(40, 4), weight=nn.Linear(4, 4))
    model.register_buffer("edges", torch.randint(40, (2, 100)))
    return model


def make_transformer():
    words, places = tables((50, 8), (16, 8))
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    head = tied(nn.Linear(8, 50, bias=False), words)
    return Model(transformer, words=words, places=places, layer=layer, head=head)


def make_nested():
    towers = MAKE["two towers"]()
    inner = nn.ModuleDict({"a": towers, "b": nn.Sequential(nn.Embedding(20, 3), nn.Flatten())})
    return Model(nested, inner=inner, shared=tied(nn.Embedding(20, 3), inner["b"][0]))


def deep_layers():
    return nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Dropout(0.1), nn.BatchNorm1d(8), nn.Linear(8, 1))


def fm_layers():
    return nn.Sequential(nn.Linear(12, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 1))


def ints(high, *shape):
    return torch.randint(high, shape)


def of(function, **layers):
    """Return a function that makes a model, from functions that make its layers."""
    return lambda: Model(function, **{name: make() for name, make in layers.items()})


def table(rows, width, **options):
    return lambda: nn.Embedding(rows, width, **options)


MAKE = {
    "dlrm": of(
        dlrm,
        tables=lambda: nn.ModuleList(tables((50, 4), (50, 4), (50, 4))),
        bottom=lambda: nn.Linear(5, 4),
        top=lambda: nn.Linear(6, 1),
    ),
    "wide and deep": of(wide_and_deep, wide=table(200, 1), deep=table(200, 8), layers=deep_layers),
    "deep fm": of(deep_fm, first=table(80, 1), second=table(80, 4), deep=fm_layers),
    "two towers": of(two_towers, users=table(60, 4), items=table(70, 4)),
    "gcn": make_gcn,
    "word2vec": of(word2vec, words=table(90, 4, sparse=True), contexts=table(90, 4, sparse=True)),
    "complex": of(complex_products, real=table(30, 4), imaginary=table(30, 4), relations=table(5, 8)),
    "transformer": make_transformer,
    "bags": of(
        bags,
        tags=lambda: nn.EmbeddingBag(50, 4),
        other=lambda: nn.EmbeddingBag(50, 4, mode="sum", include_last_offset=True),
    ),
    "nested": make_nested,
    "masked": of(masked, words=table(30, 4), gate=lambda: nn.Linear(4, 1)),
    "session": of(session, items=table(60, 6, padding_idx=0), gru=lambda: nn.GRU(6, 6, batch_first=True)),
}
MODELS = [
    ("dlrm", lambda: ({"dense": torch.randn(6, 5), "ids": ints(50, 6, 3)},)),
    ("wide and deep", lambda: (ints(50, 6, 3),)),
    ("deep fm", lambda: (ints(80, 6, 3), torch.rand(6, 3))),
    ("two towers", lambda: ((ints(60, 6), ints(70, 6)),)),
    ("gcn", lambda: (ints(40, 5),)),
    ("word2vec", lambda: (ints(90, 6), ints(90, 6, 2), ints(90, 6, 5))),
    ("complex", lambda: (torch.stack([ints(30, 6), ints(5, 6), ints(30, 6)], 1),)),
    ("transformer", lambda: (ints(50, 3, 7),)),
    ("bags", lambda: ([ints(50, 4), ints(50, 1), ints(50, 3)],)),
    ("nested", lambda: ({"kind": 2, "u": ints(60, 4), "i": ints(70, 4), "x": ints(99, 4)},)),
    ("nested", lambda: ({"kind": 1, "u": ints(60, 4), "i": ints(70, 4), "x": ints(99, 4)},)),
    ("masked", lambda: (ints(30, 40),)),
    ("session", lambda: ([ints(60, 3), ints(60, 5)],)),
]


@pytest.mark.parametrize(("name", "batch"), MODELS, ids=lambda item: item if isinstance(item, str) else "")
def test_every_lookup_is_seen(name, batch, monkeypatch):
    model = MAKE[name]()
    managed = AdaModel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen: dict[str, list[torch.Tensor]] = {}
    for name, weight in managed.managed.items():
        original = weight.rows_of

        def noting(ids, name=name, original=original):
            seen.setdefault(name, []).append(ids.reshape(-1))
            return original(ids)

        monkeypatch.setattr(weight, "rows_of", noting)
    for _ in range(3):
        inputs = batch()
        recorded = managed.record(lambda model, given: model(*given), inputs)
        assert not seen, "the recording pass has looked something up"
        managed(*inputs)
        assert recorded.keys() == seen.keys()
        for name, ids in seen.items():
            assert torch.equal(recorded[name].sort().values, torch.cat(ids).unique())
        seen.clear()
    assert managed.managed


class OnValues(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.words = nn.Embedding(30, 4)

    def forward(self, ids):
        rows = self.words(ids)
        if self.kind == "branch" and rows.sum() > 0:
            return self.words(ids + 1)
        if self.kind == "ids":
            return self.words(rows.argmax(-1))
        if self.kind == "chance":
            return self.words(torch.randint(30, (3,)))
        if self.kind == "written":
            flags = torch.zeros(ids.shape[0], dtype=torch.int64)
            flags[:] = rows.sum(-1)
            return self.words(flags)
        return rows.tolist()


@pytest.mark.parametrize(
    ("kind", "line", "message"),
    [
        ("branch", 'if self.kind == "branch" and rows.sum() > 0:', "needs the value of a floating-point number"),
        (
            "ids",
            "return self.words(rows.argmax(-1))",
            "for words.weight are computed from floating-point numbers",
        ),
        ("chance", "return self.words(torch.randint(30, (3,)))", "draws random numbers"),
        ("written", "flags[:] = rows.sum(-1)", "writes floating-point results"),
        ("list", "return rows.tolist()", ""),
    ],
)
def test_what_hangs_on_values_is_told_with_its_line(kind, line, message):
    model = OnValues(kind)
    managed = AdaModel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = AdaDataLoader([torch.tensor([1, 2, 3])], managed)
    with pytest.raises(IntentError) as refused:
        list(loader)
    assert line in str(refused.value)
    assert message in str(refused.value)
    assert "Give AdaDataLoader intent=" in str(refused.value)
    by_hand = AdaDataLoader([torch.tensor([1, 2, 3])], managed, intent=lambda ids: {"words.weight": ids})
    assert len(list(by_hand)) == 1


def recommender():
    model = nn.Sequential(nn.Embedding(40, 4), nn.Flatten(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return AdaModel(model, optimizer), optimizer


def test_batches_come_unchanged_and_move_the_clock():
    managed, optimizer = recommender()
    data = TensorDataset(ints(40, 20, 2), torch.randn(20))
    loader = AdaDataLoader(DataLoader(data, batch_size=4), managed, lookahead=2)
    for _ in range(2):
        batches = []
        for inputs, targets in loader:
            optimizer.zero_grad()
            (managed(inputs).squeeze(1) - targets).square().mean().backward()
            managed.synchronize()
            optimizer.step()
            batches.append(inputs)
        assert torch.equal(torch.cat(batches), data.tensors[0])
    assert managed.manager.current_clock == 10
    assert len(loader) == 5
    assert loader.batch_size == 4


def test_a_loader_that_fails_or_is_left_early_leaves_nothing_behind():
    managed, _ = recommender()

    def broken():
        yield ints(40, 4, 2)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(AdaDataLoader(broken(), managed))
    for _ in AdaDataLoader([ints(40, 4, 2)] * 100, managed):
        break
    import threading

    assert not [thread for thread in threading.enumerate() if thread.name == "dadplug-ahead"]


@pytest.mark.parametrize(
    ("options", "message"), [({"lookahead": 0}, "at least 1"), ({"intent": "guess"}, "'auto' or a")]
)
def test_wrong_options_are_told(options, message):
    with pytest.raises(ValueError, match=message):
        AdaDataLoader([], recommender()[0], **options)


def trains_ahead():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(3000, 4), nn.Flatten(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    managed = AdaModel(model, optimizer)
    generator = torch.Generator().manual_seed(managed.manager.rank)
    batches = [torch.randint(3000, (64, 2), generator=generator) for _ in range(60)]
    for inputs in AdaDataLoader(batches, managed, lookahead=30):
        optimizer.zero_grad()
        managed(inputs).square().mean().backward()
        managed.synchronize()
        optimizer.step()
        time.sleep(0.005)  # as if there were work to do
    counts = managed.manager.counts
    managed.manager.barrier()
    managed.close()
    managed.manager.close()
    return counts["pulled_remotely"] / counts["pulled"]


def test_rows_are_here_before_their_batch(sites):
    assert max(sites(2).run(trains_ahead)) < 0.4  # without intent one half


def test_what_was_not_announced_is_counted():
    for _ in range(20):
        keys, announced = ints(50, 30).unique(), ints(50, 20)
        assert count_missing(keys, announced) == int((~torch.isin(keys, announced)).sum())
    assert count_missing(keys, torch.empty(0, dtype=torch.long)) == keys.numel()
    assert count_missing(keys, keys) == 0


class Stateful(nn.Module):
    """Its Python code looks up something else in every second call, and changes ids that it has looked up."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.words = nn.Embedding(40, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))

    def forward(self, ids):
        self.calls += 1
        ids = ids.clone()
        rows = self.words(ids)
        ids += 1 + self.calls % 2
        return self.layers(rows).sum() + self.layers(self.words(ids)).sum()


def test_python_state_and_changed_ids_are_followed_in_every_pass():
    model = Stateful()
    managed = AdaModel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for call in range(1, 5):
        ids = ints(30, 6)
        recorded = managed.record(lambda model, given: model(given), ids)["words.weight"]
        assert torch.equal(recorded.sort().values, torch.cat([ids, ids + 1 + call % 2]).unique())


def test_a_batch_that_the_model_changes_comes_out_unchanged():
    model = nn.Embedding(40, 4)
    managed = AdaModel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = ints(30, 6)
    before = ids.clone()
    managed.record(lambda model, given: model(given.add_(3)), ids)
    assert torch.equal(ids, before)
