"""Photos of dogs and cats, in the challenge's layout; the data here are drawn, the real ones are a user's own."""

from __future__ import annotations

import pickle
import zipfile

import numpy
import pytest
import torch
from data_files import photo_files

Image = pytest.importorskip("PIL.Image")

from dadplug.examples.zoo.transforms import RandomHorizontalFlip, RandomResizedCrop, Resize  # noqa: E402

from dadplug.data import DataError, load_dataset  # noqa: E402
from dadplug.models import build_for, build_model  # noqa: E402


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
    for (images, labels), first in zip(loader, (0, 2), strict=True):
        assert torch.equal(images[0], data.test[first][0])
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
    with pytest.raises(ValueError, match="images of 64 pixels, got 32 x 32"):
        small(images[:, :, :32, :32])
    with pytest.raises(ValueError, match="patches of 30 pixels do not fill"):
        build_model("vit", patch_size=30)
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
