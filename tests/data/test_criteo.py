"""Clicks: generated ones, Criteo's text and samples, damaged files, and the model for them."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch
from dadplug.examples.zoo.clicks import _hashed
from data_files import clicks_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from dadplug.data import Clicks, DataError, generated, load_dataset, read_criteo, renumbered
from dadplug.models import build_for, build_model

counts = st.one_of(st.none(), st.integers(-3, 10**6))
categories = st.one_of(st.none(), st.integers(0, 2**32 - 1))
rows = st.tuples(
    st.integers(0, 1), st.lists(counts, min_size=13, max_size=13), st.lists(categories, min_size=26, max_size=26)
)


def line(label, dense, ids) -> str:
    columns = [str(label), *("" if n is None else str(n) for n in dense)]
    return "\t".join([*columns, *("" if n is None else f"{n:08x}" for n in ids)])


def some_line(change: int | None = None, to: str = "") -> str:
    columns = ["1", *map(str, range(13)), *(f"{n:08x}" for n in range(26))]
    if change is not None:
        columns[change] = to
    return "\t".join(columns)


@settings(max_examples=25, deadline=None)
@given(table=st.lists(rows, min_size=1, max_size=6), compressed=st.booleans(), space=st.sampled_from([1, 50, 1 << 20]))
def test_text_is_read_as_it_was_written(tmp_path_factory, table, compressed, space):
    text = "".join(line(*row) + "\n" for row in table).encode()
    path = tmp_path_factory.mktemp("criteo") / "train.txt"
    path.write_bytes(gzip.compress(text) if compressed else text)
    clicks = read_criteo(path, rows=space)
    assert clicks.labels.tolist() == [label for label, _, _ in table]
    assert clicks.rows == space
    for place, (_, dense, ids) in enumerate(table):
        for found, count in zip(clicks.dense[place].tolist(), dense, strict=True):
            assert found == pytest.approx(np.log1p(count) if (count or 0) > 0 else (count or 0), rel=1e-6)
        hashed = _hashed(np.array([[-1 if n is None else n for n in ids]]), space)
        assert clicks.ids[place].tolist() == hashed[0].tolist()
    assert int(clicks.ids.min()) >= 0
    assert int(clicks.ids.max()) < space
    limited = read_criteo(path, limit=1, rows=space)
    assert len(limited) == 1
    assert torch.equal(limited.ids, clicks.ids[:1])


def test_categories_are_spread_and_belong_to_their_field():
    values = np.tile(np.arange(2000)[:, None], (1, 26))
    ids = _hashed(values, 1 << 30)
    assert len(np.unique(ids)) > 0.9999 * ids.size  # equal values of different fields included
    shares = np.bincount(_hashed(values, 16).ravel(), minlength=16) / ids.size
    assert np.abs(shares - 1 / 16).max() < 0.01
    assert np.array_equal(ids, _hashed(values, 1 << 30))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no rows"),
        (some_line()[2:] + "\n", "line 1 .*has 39 columns: that is how test.txt looks, which has no labels"),
        (some_line() + "\n" + "1\t2\n", "line 2 .*has 2 columns; 40 are expected"),
        (some_line() + "\n\n", "line 2 .*has 1 columns"),
        (some_line(0, "2") + "\n", "begins with '2', not with a label"),
        (some_line(0, "") + "\n", "not with a label"),
        (some_line(5, "1.5") + "\n", "'1.5', which is not a whole number"),
        (some_line(20, "wxyz") + "\n", "'wxyz', which is not a category in hexadecimal"),
        (some_line(20, "f" * 40) + "\n", "line 1"),
        ("\x89PNG\r\n\x1a\n", "line 1"),
    ],
)
def test_damaged_text_is_told_with_its_line(tmp_path, content, message):
    (tmp_path / "train.txt").write_text(content)
    with pytest.raises(DataError, match=message):
        read_criteo(tmp_path)


def test_a_cut_archive_is_told(tmp_path):
    (tmp_path / "train.txt.gz").write_bytes(gzip.compress((some_line() + "\n").encode() * 500)[:-20])
    with pytest.raises(DataError, match="cannot be read"):
        read_criteo(tmp_path)


def test_a_sample_is_read_from_its_file_or_folder(tmp_path):
    arrays = clicks_sample()
    (tmp_path / "criteo").mkdir()
    np.savez(tmp_path / "criteo" / "sample.npz", **arrays)
    for place in (tmp_path, tmp_path / "criteo", tmp_path / "criteo" / "sample.npz"):
        pair = load_dataset("criteo", place)
        assert (len(pair.train), len(pair.test)) == (8, 2)
        assert torch.equal(torch.cat([pair.train.ids, pair.test.ids]), torch.from_numpy(arrays["sparse"]).long())
    dense, ids, label = pair.train[3]
    assert (dense.shape, ids.shape, int(label)) == ((13,), (26,), 1)
    assert ids.dtype == torch.int64
    assert len(read_criteo(tmp_path, limit=3)) == 3
    batch = next(iter(torch.utils.data.DataLoader(pair.train, batch_size=4)))
    assert [part.shape for part in batch] == [(4, 13), (4, 26), (4,)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, "lacks the arrays labels; it has dense, sparse"),
        ({"sparse": np.zeros((10, 25), np.int32)}, r"sparse in .* has shape \(10, 25\), it should be \(10, 26\)"),
        ({"labels": np.zeros(9, np.int8)}, r"dense in .* has shape \(10, 13\), it should be \(9, 13\)"),
        ({"labels": np.int8(0)}, r"it should be \(0, 13\)"),
        ({"dense": np.float32(0)}, "dense in .* has shape"),
        ({"dense": np.full((10, 13), np.nan, np.float32)}, "must hold finite numbers"),
        ({"labels": np.full(10, 2, np.int8)}, "label 2 of row 0 .* is neither 0 nor 1"),
        ({"sparse": np.full((10, 26), -1, np.int32)}, "row 0 of sparse in .* has an id below 0"),
        ({"sparse": np.zeros((10, 26), np.float32)}, "must be whole numbers, they are int8 and float32"),
        ({"dense": np.array([object()] * 10)}, "damaged, or no file of NumPy's"),
    ],
)
def test_damaged_samples_are_told(tmp_path, change, message):
    arrays = {name: array for name, array in (clicks_sample() | change).items() if array is not None}
    np.savez(tmp_path / "sample.npz", **arrays)
    with pytest.raises(DataError, match=message):
        read_criteo(tmp_path / "sample.npz")


def test_missing_foreign_and_cut_samples_are_told(tmp_path):
    with pytest.raises(DataError, match=r"there is no .*give train.txt"):
        load_dataset("criteo", tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"neither train\.txt nor a \.npz"):
        load_dataset("criteo", tmp_path)
    path = tmp_path / "a.npz"
    np.savez_compressed(path, **clicks_sample(200))
    whole = path.read_bytes()
    for content in (whole[:-100], whole[: len(whole) // 2], b"", b"nonsense", whole[:300] + b"\0" * 50 + whole[350:]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.npz"):
            read_criteo(path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataError, match="one array"):
        read_criteo(path)
    (tmp_path / "b.npz").write_bytes(whole)
    with pytest.raises(DataError, match="several files"):
        read_criteo(tmp_path)
    with pytest.raises(ValueError, match="limit and rows must be at least 1"):
        read_criteo(path, limit=0)


def test_generated_clicks_are_skewed_seeded_and_can_be_learnt():
    one, two, other = generated(2000, seed=1), generated(2000, seed=1), generated(2000, seed=2)
    assert torch.equal(one.ids, two.ids)
    assert torch.equal(one.labels, two.labels)
    assert not torch.equal(one.ids, other.ids)
    _, times = torch.unique(one.ids, return_counts=True)
    assert times.max() > 50 * times.float().median()
    data = load_dataset("clicks")
    small, old = renumbered(data)
    assert torch.equal(old[small.test.ids], data.test.ids)
    assert small.train.rows == len(old)
    model = build_model("wide_deep", len(old))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    for start in range(0, len(small.train), 250):
        dense, ids, labels = small.train.batch(start, start + 250)
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(model(dense, ids), labels.float()).backward()
        optimizer.step()
    labels = small.test.labels.float()
    rate = small.train.labels.float().mean()
    guess = -(labels * rate.log() + (1 - labels) * (1 - rate).log()).mean()
    with torch.no_grad():
        logits = model(small.test.dense, small.test.ids)
    assert torch.nn.functional.binary_cross_entropy_with_logits(logits, labels) < 0.92 * guess


def test_wide_and_deep_adds_its_two_parts():
    model = build_model("wide_deep", 50, hidden=(8,))
    dense, ids = torch.randn(5, 13), torch.randint(50, (5, 26))
    with torch.no_grad():
        model.wide.weight.normal_()
        deep = model.network(torch.cat([dense, model.deep.weight[ids].view(5, -1)], 1))[:, 0]
        wide = model.wide.weight[ids][..., 0].sum(1) + model.linear(dense)[:, 0]
        torch.testing.assert_close(model(dense, ids), wide + deep)
    assert build_model("wide_deep", 10**12, device="meta").deep.weight.is_meta


def test_clicks_and_models_for_images_do_not_mix():
    with pytest.raises(DataError, match="not images: they are for the model wide_deep"):
        build_for(load_dataset("clicks"), "MNISTNet")
    with pytest.raises(ValueError, match="'wide_deep' does not take these arguments"):
        build_for(load_dataset("digits"), "wide_deep")
    with pytest.raises(DataError, match="a row of ids and a label each"):
        Clicks(torch.zeros(2, 13), torch.zeros(3, 26, dtype=torch.long), torch.zeros(2))
    with pytest.raises(DataError, match="ids must lie in 0 to 4"):
        Clicks(torch.zeros(1, 13), torch.full((1, 26), 5), torch.zeros(1), rows=5)
