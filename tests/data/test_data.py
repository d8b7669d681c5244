"""Data sets: embedded, from files, from the network; and their divisions."""

import gzip
import hashlib
import http.server
import pickle
import threading
import zipfile
from pathlib import Path

import numpy
import numpy as np
import pytest
import torch
from dadplug.examples.zoo import images
from dadplug.examples.zoo.clicks import _hashed
from dadplug.examples.zoo.images import read_idx
from dadplug.examples.zoo.transforms import (
    Compose,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToTensor,
)
from data_files import clicks_sample, idx, photo_files, write_mnist
from hypothesis import given, settings
from hypothesis import strategies as st
from support import refuses

from dadplug import data as data_sets
from dadplug.data import (
    MNIST,
    Clicks,
    DataError,
    DataPair,
    Images,
    fold_indices,
    generated,
    load_dataset,
    read_criteo,
    register_dataset,
    renumbered,
    site_indices,
)
from dadplug.models import build_for, build_model
from dadplug.support.registry import Registry


def test_digits_have_mnists_shape_and_all_classes():
    pair = load_dataset("digits")
    assert pair.train.images.shape == (1437, 1, 28, 28)
    assert pair.test.images.shape == (360, 1, 28, 28)
    assert set(pair.train.labels.tolist()) == set(pair.test.labels.tolist()) == set(range(10))
    assert abs(float(pair.train.images.mean())) < 0.05
    images, labels = next(iter(torch.utils.data.DataLoader(pair.train, batch_size=5)))
    assert images.shape == (5, 1, 28, 28)
    assert labels.dtype == torch.int64


def test_files_are_looked_for_in_the_folder_data_by_default(tmp_path, monkeypatch):
    write_mnist(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    assert len(load_dataset("mnist").train) == 6


@pytest.mark.parametrize("compressed", [True, False])
def test_mnist_reads_its_own_files(tmp_path, compressed):
    write_mnist(tmp_path, compressed=compressed)
    pair = load_dataset("MNIST", tmp_path)
    assert pair.train.images.shape == (6, 1, 28, 28)
    assert pair.train.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert -0.43 < float(pair.train.images.min()) < -0.4


def test_mnist_image_by_image_takes_transforms(tmp_path):
    write_mnist(tmp_path)
    transform = Compose([ToTensor(), Normalize((0.1307,), (0.3081,))])
    image, label = MNIST(tmp_path, train=False, transform=transform)[2]
    assert label == 2
    torch.testing.assert_close(image, load_dataset("mnist", tmp_path).test.images[2])
    assert MNIST(tmp_path)[0][0].dtype == np.uint8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x89PNG....", "is no IDX file"),
        (b"", "is no IDX file"),
        (idx(np.zeros((2, 3), np.uint8)), "another kind of IDX file: it holds 2 dimensions of type 0x08"),
        (bytes([0, 0, 0x0D, 3]) + bytes(12), "type 0x0d"),
        (bytes([0, 0, 8, 3]) + bytes(5), "truncated: it ends within its head"),
        (idx(np.zeros((2, 3, 4), np.uint8))[:-1], "is truncated: its head announces 24 values, there are 23"),
        (idx(np.zeros((2, 3, 4), np.uint8)) + b"x", "longer than it says"),
        (gzip.compress(idx(np.zeros((2, 3, 4), np.uint8)), mtime=0)[:-9], "is damaged"),
        (b"\x1f\x8bnonsense", "is damaged"),
    ],
)
def test_damaged_and_foreign_files_are_told(tmp_path, content, message):
    path = tmp_path / "images"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_idx(path, 3)


def test_labels_out_of_range_and_files_that_do_not_fit_are_told(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.array([0, 1, 10, 3, 4, 5], np.uint8))))
    with pytest.raises(DataError, match=r"label 10 of test sample 2 is out of range: there are 10 classes, 0 to 9"):
        load_dataset("mnist", tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.zeros(5, np.uint8))))
    with pytest.raises(DataError, match=r"holds 6 images, .* 5 labels"):
        load_dataset("mnist", tmp_path)


@pytest.fixture
def server(tmp_path):
    """A server of files on loopback; `server.folder` is what it serves."""
    folder = tmp_path / "served"
    write_mnist(folder)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(folder))

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        httpd.folder = folder
        httpd.url = f"http://127.0.0.1:{httpd.server_port}"
        yield httpd
        httpd.shutdown()
        thread.join()


def checksums(folder: Path) -> dict[str, str]:
    return {name: hashlib.md5((folder / name).read_bytes(), usedforsecurity=False).hexdigest() for name in images.FILES}


def test_missing_files_are_downloaded_once(server, tmp_path, monkeypatch):
    monkeypatch.setattr(images, "FILES", checksums(server.folder))
    monkeypatch.setenv("DADPLUG_MNIST_URL", server.url)
    target = tmp_path / "data"
    assert len(load_dataset("mnist", target).train) == 6
    assert sorted(path.name for path in target.iterdir()) == sorted(images.FILES)
    server.shutdown()
    assert len(load_dataset("mnist", target).train) == 6


def test_the_next_mirror_is_tried(server, tmp_path):
    name = "t10k-labels-idx1-ubyte.gz"
    urls = [f"{server.url}/elsewhere/{name}", f"{server.url}/{name}"]
    images.download(urls, tmp_path / name, checksums(server.folder)[name])
    assert (tmp_path / name).read_bytes() == (server.folder / name).read_bytes()


def test_a_wrong_checksum_leaves_no_file(server, tmp_path):
    name = "t10k-labels-idx1-ubyte.gz"
    with pytest.raises(DataError, match=r"the checksum is [0-9a-f]{32}, it should be 0000"):
        images.download([f"{server.url}/{name}"], tmp_path / "to" / name, "0" * 32)
    assert list((tmp_path / "to").iterdir()) == []


def test_without_a_connection_the_message_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("DADPLUG_MNIST_URL", "http://127.0.0.1:9")
    with pytest.raises(
        DataError, match=r"could not be downloaded:(.|\n)*refused(.|\n)*by hand, or use a data set that is"
    ):
        load_dataset("mnist", tmp_path)


def test_what_is_no_data_set_and_cannot_be_divided_is_refused(tmp_path):
    images, pair = Images(torch.zeros(1, 1), torch.tensor([-1])), Images(torch.zeros(1, 1), torch.tensor([0]))
    refuses(
        (lambda: load_dataset("mnst"), "unknown dataset 'mnst'; valid ones are clicks, criteo, digits"),
        (lambda: load_dataset("digits", tmp_path), "the data set 'digits' has no files.*leave data_dir out"),
        (lambda: load_dataset("clicks", tmp_path), "the data set 'clicks' has no files.*leave data_dir out"),
        (lambda: read_idx(tmp_path / "nothing", 1), "nothing is missing", DataError),
        (lambda: MNIST(tmp_path), "pass download=True", DataError),
        (lambda: Images(torch.zeros(3, 1, 2, 2), torch.zeros(2)), "3 images, but 2 labels", DataError),
        (lambda: DataPair(images, pair, 2), "label -1 of training sample 0", DataError),
        (lambda: site_indices(torch.zeros(4), 0, 2, "random"), "unknown split 'random'; valid ones are iid, by-class"),
        (lambda: site_indices(torch.zeros(4), 1, 2, "by-class"), "site 1 of 2 gets no samples"),
        (lambda: fold_indices(10, 1, 0), "num-folds must lie in 2 to 10"),
        (lambda: fold_indices(10, 11, 0), "num-folds"),
        (lambda: fold_indices(10, 5, 5), "k must lie in 0 to 4"),
        (lambda: fold_indices(10, 5, -1), "k must lie"),
    )


@pytest.mark.parametrize("sites", [1, 2, 3])
@pytest.mark.parametrize("split", ["iid", "by-class"])
def test_sites_share_all_samples_without_overlap(sites, split):
    labels = load_dataset("digits").train.labels
    parts = [site_indices(labels, site, sites, split, seed=3) for site in range(sites)]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(len(labels)))
    classes = [set(labels[part].tolist()) for part in parts]
    if split == "iid":
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert all(each == set(range(10)) for each in classes)
    else:
        assert sum(map(len, classes)) == 10


def test_folds_divide_the_samples():
    folds = [fold_indices(23, 5, fold, seed=1) for fold in range(5)]
    assert torch.equal(torch.cat([valid for _, valid in folds]).sort().values, torch.arange(23))
    for train, valid in folds:
        assert torch.equal(torch.cat([train, valid]).sort().values, torch.arange(23))
    assert not torch.equal(fold_indices(23, 5, 0, seed=2)[1], folds[0][1])


def test_a_registration_says_whether_a_data_set_has_files(monkeypatch, tmp_path):
    """Not the function's arguments, which may have defaults."""
    monkeypatch.setattr(data_sets, "DATASETS", Registry("dataset"))

    @register_dataset("drawn", has_files=False)
    def draw(classes=10):
        return classes

    @register_dataset("filed", has_files=True)
    def read(*place):
        return place

    assert load_dataset("Drawn") == 10
    with pytest.raises(ValueError, match="'drawn' has no files"):
        load_dataset("drawn", tmp_path)
    assert load_dataset("filed") == (Path("data"),)
    assert load_dataset("filed", tmp_path) == (tmp_path,)


# Clicks: generated ones, Criteo's text and samples, damaged files, and the model for them


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
        (gzip.compress((some_line() + "\n").encode() * 500)[:-20], "cannot be read"),  # a cut archive
    ],
)
def test_damaged_text_is_told_with_its_line(tmp_path, content, message):
    if isinstance(content, bytes):
        (tmp_path / "train.txt.gz").write_bytes(content)
    else:
        (tmp_path / "train.txt").write_text(content)
    with pytest.raises(DataError, match=message):
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
    refuses(
        (lambda: load_dataset("criteo", tmp_path / "nowhere"), r"there is no .*give train.txt"),
        (lambda: load_dataset("criteo", tmp_path), r"neither train\.txt nor a \.npz"),
        error=DataError,
    )
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
    refuses(
        (lambda: read_criteo(tmp_path), "several files"),
        (lambda: read_criteo(path, limit=0), "limit and rows must be at least 1", ValueError),
        error=DataError,
    )


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
    refuses(
        (lambda: build_for(load_dataset("clicks"), "MNISTNet"), "not images: they are for the model wide_deep"),
        (
            lambda: build_for(load_dataset("digits"), "wide_deep"),
            "'wide_deep' does not take these arguments",
            ValueError,
        ),
        (
            lambda: Clicks(torch.zeros(2, 13), torch.zeros(3, 26, dtype=torch.long), torch.zeros(2)),
            "a row of ids and a label each",
        ),
        (lambda: Clicks(torch.zeros(1, 13), torch.full((1, 26), 5), torch.zeros(1), rows=5), "ids must lie in 0 to 4"),
        error=DataError,
    )


# Photos of dogs and cats, in the challenge's layout; the data here are drawn, the real ones are a user's own


Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train").mkdir()
    for name, content in photo_files().items():
        (tmp_path / "train" / name).write_bytes(content)
    return tmp_path


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "zipped" / "train.zip"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as target:
        for name, content in photo_files().items():
            target.writestr(f"train/{name}", content)
    return path


def check(data) -> None:
    assert (len(data.train), len(data.test), data.classes) == (16, 4, 2)
    assert data.train.labels.sum() == 8
    assert data.test.labels.sum() == 2
    image, label = data.resized(32).test[0]
    assert image.shape == (3, 32, 32)
    assert label == 0
    for index in range(len(data.test)):  # cats are red here and dogs are blue
        image, label = data.test[index]
        assert (image[2].mean() > image[0].mean()) == bool(label)


def test_a_folder_and_a_zip_file_hold_the_same(folder, archive):
    for place in (folder, folder / "train", archive, archive.parent):
        check(load_dataset("dogsvscats", place))


def test_damaged_photos_are_left_out_and_counted(folder, capsys):
    whole = (folder / "train" / "dog.3.jpg").read_bytes()
    (folder / "train" / "dog.3.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "train" / "cat.1.jpg").write_bytes(b"")
    (folder / "train" / "cat.2.jpg").write_bytes(b"no photo at all")
    (folder / "train" / "readme.txt").write_text("not counted")
    data = load_dataset("dogsvscats", folder)
    assert len(data.train) + len(data.test) == 17
    message = capsys.readouterr().err
    assert message.startswith("3 of 20 photos are damaged and left out")
    assert "dog.3.jpg" in message
    assert all("dog.3" not in name for name in data.train.names + data.test.names)


def test_what_is_missing_is_said(tmp_path, folder):
    with pytest.raises(DataError, match=r"download train\.zip"):
        load_dataset("dogsvscats", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no photos named cat"):
        load_dataset("dogsvscats", tmp_path / "empty")
    (tmp_path / "other.zip").write_bytes(b"PK, or not")
    with pytest.raises(DataError, match="no zip file, or a damaged one"):
        load_dataset("dogsvscats", tmp_path / "other.zip")
    data = load_dataset("dogsvscats", folder)
    (folder / "train" / data.test.names[0]).unlink()
    with pytest.raises(DataError, match="cannot read"):
        data.test[0]


def test_training_photos_vary_and_plain_ones_do_not(archive):
    data = load_dataset("dogsvscats", archive).resized(24)
    assert not torch.equal(data.train[0][0], data.train[0][0])
    plain = data.train.plain()
    assert torch.equal(plain[0][0], plain[0][0])
    part = data.train.subset(torch.tensor([3, 5]))
    assert len(part) == 2
    assert part.augmented
    again = pickle.loads(pickle.dumps(plain))
    assert torch.equal(again[1][0], plain[1][0])


def test_loader_workers_read_the_zip_file(archive):
    data = load_dataset("dogsvscats", archive).resized(16)
    loader = torch.utils.data.DataLoader(data.test, batch_size=2, num_workers=2)
    for (photos, labels), first in zip(loader, (0, 2), strict=True):
        assert torch.equal(photos[0], data.test[first][0])
        assert labels[0] == data.test[first][1]


def test_crops_stay_inside_and_flips_mirror():
    image = Image.fromarray(torch.arange(12, dtype=torch.uint8).view(3, 4).numpy())
    assert Resize(6)(image).size == (8, 6)
    assert Resize((5, 7))(image).size == (7, 5)
    for seed in range(30):
        torch.manual_seed(seed)
        assert RandomResizedCrop(8, scale=(0.01, 1.0), ratio=(0.1, 10.0))(image).size == (8, 8)
    assert numpy.asarray(RandomHorizontalFlip(1.0)(image))[0].tolist() == [3, 2, 1, 0]


def test_the_vit_has_the_seeds_sizes_and_a_small_preset(archive):
    pytest.importorskip("linformer")
    model = build_model("vit")
    assert len(model.blocks.net.layers) == 12
    assert model.positions.shape == (1, 50, 128)
    data = load_dataset("dogsvscats", archive)
    small, resized = build_for(data, "vit-small")
    assert resized.train.shape == (3, 64, 64)
    images = torch.stack([resized.test[index][0] for index in range(2)])
    assert small(images).shape == (2, 2)
    refuses(
        (lambda: small(images[:, :, :32, :32]), "images of 64 pixels, got 32 x 32"),
        (lambda: build_model("vit", patch_size=30), "patches of 30 pixels do not fill"),
    )
    digits, pair = build_for(load_dataset("digits"), "vit-small", image_size=28, patch_size=7)
    assert digits(pair.test.images[:3]).shape == (3, 10)


def test_patches_are_those_of_a_strided_convolution():
    pytest.importorskip("linformer")
    torch.manual_seed(0)
    model = build_model("vit", image_size=12, patch_size=4, dim=16, depth=1, heads=2, k=4)
    seen = []
    model.blocks.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    images = torch.randn(2, 3, 12, 12)
    model(images)
    kernel = model.patches.weight.view(16, 3, 4, 4)
    expected = torch.nn.functional.conv2d(images, kernel, model.patches.bias, stride=4).flatten(2).transpose(1, 2)
    assert torch.allclose(seen[0][:, 1:] - model.positions[:, 1:], expected, atol=1e-5)
