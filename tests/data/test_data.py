"""Data sets: embedded, from files, from the network; and their divisions."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from dadplug.examples.zoo import images
from dadplug.examples.zoo.images import read_idx
from dadplug.examples.zoo.transforms import Compose, Normalize, ToTensor
from data_files import idx, write_mnist

from dadplug import data as data_sets
from dadplug.data import (
    MNIST,
    DataError,
    DataPair,
    Images,
    fold_indices,
    load_dataset,
    register_dataset,
    site_indices,
)
from dadplug.registry import Registry


def test_digits_have_mnists_shape_and_all_classes():
    pair = load_dataset("digits")
    assert pair.train.images.shape == (1437, 1, 28, 28)
    assert pair.test.images.shape == (360, 1, 28, 28)
    assert set(pair.train.labels.tolist()) == set(pair.test.labels.tolist()) == set(range(10))
    assert abs(float(pair.train.images.mean())) < 0.05
    images, labels = next(iter(torch.utils.data.DataLoader(pair.train, batch_size=5)))
    assert images.shape == (5, 1, 28, 28)
    assert labels.dtype == torch.int64


@pytest.mark.parametrize("name", ["digits", "clicks"])
def test_a_folder_for_a_data_set_without_files_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"the data set '{name}' has no files.*leave data_dir out"):
        load_dataset(name, tmp_path)


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


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(DataError, match="nothing is missing"):
        read_idx(tmp_path / "nothing", 1)
    with pytest.raises(DataError, match="pass download=True"):
        MNIST(tmp_path)


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


def test_an_unknown_data_set_is_told():
    with pytest.raises(ValueError, match="unknown dataset 'mnst'; valid ones are clicks, criteo, digits"):
        load_dataset("mnst")


def test_images_and_labels_must_fit():
    with pytest.raises(DataError, match="3 images, but 2 labels"):
        Images(torch.zeros(3, 1, 2, 2), torch.zeros(2))
    with pytest.raises(DataError, match="label -1 of training sample 0"):
        DataPair(Images(torch.zeros(1, 1), torch.tensor([-1])), Images(torch.zeros(1, 1), torch.tensor([0])), 2)


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


def test_splits_that_cannot_be_are_told():
    with pytest.raises(ValueError, match="unknown split 'random'; valid ones are iid, by-class"):
        site_indices(torch.zeros(4), 0, 2, "random")
    with pytest.raises(ValueError, match="site 1 of 2 gets no samples"):
        site_indices(torch.zeros(4), 1, 2, "by-class")


def test_folds_divide_the_samples():
    folds = [fold_indices(23, 5, fold, seed=1) for fold in range(5)]
    assert torch.equal(torch.cat([valid for _, valid in folds]).sort().values, torch.arange(23))
    for train, valid in folds:
        assert torch.equal(torch.cat([train, valid]).sort().values, torch.arange(23))
    assert not torch.equal(fold_indices(23, 5, 0, seed=2)[1], folds[0][1])


@pytest.mark.parametrize(
    ("folds", "fold", "message"),
    [
        (1, 0, "num-folds must lie in 2 to 10"),
        (11, 0, "num-folds"),
        (5, 5, "k must lie in 0 to 4"),
        (5, -1, "k must lie"),
    ],
)
def test_folds_out_of_range_are_told(folds, fold, message):
    with pytest.raises(ValueError, match=message):
        fold_indices(10, folds, fold)


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
