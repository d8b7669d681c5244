"""Fingerprints of nnU-Net: those of sites merged into that of all cases, by the command."""

import itertools
import json

import numpy as np
import pytest

from dadplug.tools.cli.commands import main
from dadplug.tools.fingerprints import merge

CHANNELS = "foreground_intensity_properties_per_channel"


def statistics(values):
    """Return what nnU-Net's fingerprint has of a channel."""
    low, median, high = np.percentile(values, (0.5, 50.0, 99.5))
    return {
        "mean": values.mean(),
        "std": values.std(),
        "min": values.min(),
        "max": values.max(),
        "median": median,
        "percentile_00_5": low,
        "percentile_99_5": high,
    }


def site(number, cases):
    """Return values of the foreground, the same number of each case, and the fingerprint of a site."""
    chance = np.random.default_rng(number)
    values = chance.normal(100 + 40 * number, 20 + 5 * number, (cases, 50_000))
    shapes = chance.integers(50, 200, (cases, 3)).tolist()
    return values, {
        "spacings": chance.uniform(0.5, 3.0, (cases, 3)).tolist(),
        "shapes_after_crop": shapes,
        CHANNELS: {"0": statistics(values)},
        "median_relative_size_after_cropping": 0.5 + 0.1 * number,
    }


def test_statistics_are_those_of_all_cases():
    (first, a), (second, b), (third, c) = (site(number, cases) for number, cases in enumerate((4, 8, 12)))
    merged = merge({"a": a, "b": b, "c": c})
    found, expected = merged[CHANNELS]["0"], statistics(np.concatenate([first, second, third]))
    for name in ("mean", "std", "min", "max"):
        assert found[name] == pytest.approx(expected[name], rel=1e-12)
    for name in ("median", "percentile_00_5", "percentile_99_5"):
        assert found[name] == pytest.approx(expected[name], abs=0.02 * expected["std"]), name
    pairs = [pair for each in (a, b, c) for pair in zip(each["spacings"], each["shapes_after_crop"], strict=True)]
    assert list(zip(merged["spacings"], merged["shapes_after_crop"], strict=True)) == sorted(pairs)
    assert merged["median_relative_size_after_cropping"] == pytest.approx((4 * 0.5 + 8 * 0.6 + 12 * 0.7) / 24)


def test_the_order_of_the_sites_does_not_matter_to_the_bit():
    every = {name: site(number, 3 + 7 * number)[1] for number, name in enumerate("abc")}
    merged = [json.dumps(merge({name: every[name] for name in order})) for order in itertools.permutations("abc")]
    assert len(set(merged)) == 1


def test_equal_sites_have_the_fingerprint_of_one():
    own = site(1, 6)[1]
    merged = merge({"a": own, "b": own})[CHANNELS]["0"]
    assert merged == pytest.approx(own[CHANNELS]["0"])


@pytest.fixture
def files(tmp_path):
    """Return the files of two fingerprints."""
    paths = [tmp_path / f"{name}.json" for name in "ab"]
    for number, path in enumerate(paths):
        path.write_text(json.dumps(site(number, 5)[1]))
    return paths


def test_the_command_writes_a_file_for_all_sites(files, tmp_path, capsys):
    out = tmp_path / "new" / "agreed.json"
    assert main(["nnunet", "merge", *map(str, files), "--out", str(out)]) == 0
    assert "10 cases of 2 sites" in capsys.readouterr().out
    assert json.loads(out.read_text())["merged_from"] == 2


def _content(change):
    """Return a function that changes a file's content in place."""

    def damage(path):
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return damage


def _unlink_and_make_folder(path):
    path.unlink()
    path.mkdir()


DAMAGES = {
    "missing": (lambda path: path.unlink(), "cannot read"),
    "a folder": (_unlink_and_make_folder, "cannot read"),
    "empty": (lambda path: path.write_text(""), "no JSON"),
    "cut off": (lambda path: path.write_text(path.read_text()[:-20]), "no JSON"),
    "binary": (lambda path: path.write_bytes(b"\x80\x00"), "no JSON"),
    "a list": (lambda path: path.write_text("[1]"), "no complete fingerprint"),
    "a part": (_content(lambda content: content.pop("shapes_after_crop")), "no complete fingerprint"),
    "no number": (
        _content(lambda content: content[CHANNELS]["0"].update(mean=float("nan"))),
        "no complete fingerprint",
    ),
    "channels": (_content(lambda content: content[CHANNELS].update({"1": content[CHANNELS]["0"]})), "channel_names"),
    "merged": (_content(lambda content: content.update(merged_from=2)), "sites' own"),
}


@pytest.mark.parametrize(("damage", "remedy"), DAMAGES.values(), ids=DAMAGES)
def test_what_cannot_be_merged_is_named_with_its_remedy(files, tmp_path, capsys, damage, remedy):
    damage(files[1])
    out = tmp_path / "agreed.json"
    with pytest.raises(SystemExit) as error:
        main(["nnunet", "merge", *map(str, files), "--out", str(out)])
    assert error.value.code == 1
    text = capsys.readouterr().err
    assert "b.json" in text
    assert remedy in text
    assert "Errno" not in text
    assert not out.exists()


def test_a_file_that_is_named_twice_is_refused(files, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["nnunet", "merge", str(files[0]), str(files[0]), "--out", str(tmp_path / "agreed.json")])
    assert "twice" in capsys.readouterr().err
