"""The command line, as two processes run it."""

import json
from pathlib import Path

import pytest
import support
from forkserver import TRAINERS

pytest.importorskip("catalyst")
from dadplug.experiment import build_parser

pytestmark = pytest.mark.slow

SEED_FLAGS = [
    "rank",
    "num-nodes",
    "backend",
    "dist-url",
    "master-port",
    "master-addr",
    "lr",
    "batch-size",
    "epochs",
    "name",
    "log-dir",
    "distributed-mode",
    "num-folds",
    "model",
    "model-args",
    "model-kwargs",
    "dataset",
    "criterion",
    "optimizer",
    "scheduler",
    "k",
    "N",
]


def commands(tmp_path: Path, *flags: str) -> list[list[str]]:
    port = support.free_port()
    place = ["--num-nodes", "2", "--dist-url", f"tcp://127.0.0.1:{port}", "--log-dir", str(tmp_path / "logs")]
    return [["-m", "dadplug.experiment", "--rank", str(rank), *place, *flags] for rank in range(2)]


def test_every_flag_of_the_seeds_is_there():
    known = {action.option_strings[0].removeprefix("--") for action in build_parser()._actions}
    assert set(SEED_FLAGS) <= known
    assert {"max-rank", "iterations", "tolerance", "warm-start", "sync-batchnorm", "weighting", "seed"} <= known


def test_two_sites_run_an_experiment(tmp_path):
    flags = ["--name", "first", "--dataset", "digits", "--N", "400", "--epochs", "2", "--num-folds", "4", "--k", "1"]
    flags += ["--scheduler", "step", "--scheduler-kwargs", '{"step_size": 1, "gamma": 0.5}', "--max-rank", "4"]
    flags += ["--model", "mnistnet", "--model-args", "[784]", "--model-kwargs", '{"classes": 10}', "--seed", "3"]
    finished = support.run_programs(commands(tmp_path, *flags), timeout=200, preload=TRAINERS)
    for each in finished:
        assert each.status == 0, each.errors
    assert "valid (2/2)" in finished[0].output
    assert finished[1].output == ""
    for rank in range(2):
        folder = tmp_path / "logs" / "first" / f"site_{rank}"
        parameters = json.loads((folder / "parameters.json").read_text())
        assert parameters["rank"] == rank
        assert parameters["options"]["rank"] == 4
        results = json.loads((folder / "results.json").read_text())
        assert results["replicas_equal"]
        assert results["metrics"]["valid"]["accuracy01"] > 0.5
        assert results["metrics"]["_epoch_"]["lr"] == pytest.approx(0.00025)
        assert results["traffic"]["dense_bytes"] > 50 * results["traffic"]["bytes_a_step"]
    assert (tmp_path / "logs/first/site_0/checkpoints/runner.last.pth").exists()
    more = ["--resume", str(tmp_path / "logs/first/site_0/checkpoints/runner.last.pth")]
    flags[flags.index("--epochs") + 1] = "3"
    for each in support.run_programs(commands(tmp_path, *flags, *more), timeout=200, preload=TRAINERS):
        assert each.status == 0, each.errors
    first_table = (tmp_path / "logs/first/site_0/csv_logger/train.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in first_table if line[0].isdigit()] == ["1", "2", "3"]


def test_under_torchrun_the_environment_says_rank_and_world(tmp_path):
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(support.free_port())]
    flags = ["--name", "torchrun", "--N", "200", "--epochs", "1", "--log-dir", str(tmp_path / "logs")]
    command = [*launch, "-m", "dadplug.experiment", *flags]
    (only,) = support.run_programs([command], timeout=200, preload=TRAINERS)
    assert only.status == 0, only.errors
    for rank in range(2):
        parameters = json.loads((tmp_path / f"logs/torchrun/site_{rank}/parameters.json").read_text())
        assert (parameters["rank"], parameters["num_nodes"]) == (rank, 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--distributed-mode", "foo"], f"unknown mode 'foo'; valid ones are {support.valid_modes()}"),
        (["--dataset", "foo"], "unknown dataset 'foo'; valid ones are clicks, criteo, digits, dogsvscats, mnist"),
        (["--model", "foo"], "unknown model 'foo'; valid ones are GCN, MNISTNet, vit, vit-small, wide_deep"),
        (["--optimizer", "foo"], "unknown optimizer 'foo'; valid ones are adam"),
        (["--criterion", "foo"], "unknown criterion 'foo'; valid ones are crossentropyloss"),
        (["--scheduler", "foo"], "unknown scheduler 'foo'; valid ones are none, step"),
        (["--scheduler", "step", "--scheduler-kwargs", '{"a": 1}'], "does not take scheduler-kwargs"),
        (["--max-rank", "0"], "rank must be a whole number of at least 1"),
        (["--rank", "2"], "rank must lie in 0 to 1 for 2 sites"),
        (["--rank", "-1"], "rank must lie in 0 to 1"),
        (["--k", "5"], "k must lie in 0 to 4 for 5 folds"),
        (["--model-args", "__import__('os')"], "model-args is not JSON"),
        (["--model-kwargs", "[1]"], "model-kwargs must be a JSON object"),
        (["--model-kwargs", '{"depth": 3}'], "does not take these arguments"),
        (["--split", "foo"], "unknown split 'foo'"),
        (["--epochs", "0"], "epochs must be at least 1"),
        (["--batch-size", "0"], "batch-size must be at least 1"),
        (["--N", "0"], "N must be a number of samples"),
        (["--dataset", "mnist", "--data-dir", "/nowhere/at/all"], "could not be downloaded"),
        (["--data-dir", "photos"], "the data set 'digits' has no files"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, capsys, monkeypatch, flags, message):
    from dadplug import experiment

    monkeypatch.setenv("DADPLUG_MNIST_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(Path, "mkdir", lambda *args, **kwargs: None)
    if "/nowhere/at/all" in flags:
        flags[flags.index("/nowhere/at/all")] = str(tmp_path)
    with pytest.raises(SystemExit) as ended:
        experiment.main(["--num-nodes", "2", *flags])
    assert ended.value.code == 1
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert message in errors


def test_a_site_with_bad_input_does_not_keep_the_other_waiting(tmp_path):
    first, second = commands(tmp_path, "--timeout", "4", "--N", "100")
    finished = support.run_programs([first, [*second, "--model", "foo"]], timeout=200, preload=TRAINERS)
    assert "error: unknown model 'foo'" in finished[1].errors
    assert "error: waited 4 s for 2 sites: site 1 did not come" in finished[0].errors


def test_the_vision_transformer_on_photos(tmp_path):
    pytest.importorskip("linformer")
    from data_files import photo_files

    (tmp_path / "train").mkdir()
    for name, content in photo_files(12).items():
        (tmp_path / "train" / name).write_bytes(content)
    small = '{"image_size": 32, "patch_size": 8, "depth": 1, "dim": 32, "heads": 2, "k": 4}'
    data = ["--model", "vit", "--model-kwargs", small, "--dataset", "dogsvscats", "--data-dir", str(tmp_path)]
    flags = [*data, "--epochs", "2", "--name", "rankdad_vit", "--max-rank", "2", "--num-folds", "2"]
    for each in support.run_programs(commands(tmp_path, *flags), preload=TRAINERS):
        assert each.status == 0, each.errors
    results = json.loads((tmp_path / "logs" / "rankdad_vit" / "site_1" / "results.json").read_text())
    assert results["replicas_equal"] is True
    assert results["traffic"]["bytes_a_step"] < results["traffic"]["dense_bytes"]
