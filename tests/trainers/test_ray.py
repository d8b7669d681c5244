"""Ray Train: plain loops and Lightning between two workers, restarts after a kill, and what is refused."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
import ray_lightning
import ray_loops
import running_hub
import support
import torch

ray = pytest.importorskip("ray")
pytest.importorskip("ray.train.torch")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_memory_monitor_refresh_ms": "0",  # a busy machine is no reason to end workers
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "tests" / "helpers", ROOT))),
}


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster of this process, which ends with the module."""
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # sockets are in it, whose paths have at most 107 characters
    before = dict(os.environ)
    os.environ.update(SETTINGS)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        start(folder)
        yield
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)


def start(folder: str, attempts: int = 3) -> None:
    """Start Ray on this machine; on a busy one its processes may not come in the 30 s that it allows them."""
    settings = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20, "log_to_driver": False}
    for attempt in range(1, attempts + 1):
        try:
            ray.init(address="local", _temp_dir=folder, **settings)
            return
        except Exception as error:
            ray.shutdown()
            if attempt == attempts or "timed out during startup" not in str(error):
                raise


def fit(function, folder: Path, **settings) -> list:
    """Run a training function on two workers; return what each has returned."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def loop(config):
        rank = ray.train.get_context().get_world_rank()
        torch.save(function(rank, Path(config["folder"])), f"{config['folder']}/result-{rank}.pt")

    run = RunConfig(name="run", storage_path=str(folder), **settings)
    workers = ScalingConfig(num_workers=2)
    TorchTrainer(loop, train_loop_config={"folder": str(folder)}, scaling_config=workers, run_config=run).fit()
    return [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(2)]


def deviation(found: dict, expected: dict) -> float:
    """Return the largest difference of two sets of tensors, relative to the largest entry of each tensor."""
    assert found.keys() == expected.keys()
    return max(float((found[key] - expected[key]).abs().max() / expected[key].abs().max()) for key in expected)


# Plain loops


def plain_loops(rank, folder):
    import dadplug

    dadplug.connect()
    found = [ray_loops.plain(rank, "reduction"), ray_loops.plain(rank, "ddp")]
    connect_to_hub(rank, folder)
    return [*found, ray_loops.plain(rank, "reduction")]


def connect_to_hub(rank, folder):
    """Replace Ray's process group by that of a hub, as if each worker were the only one of a cluster."""
    import dadplug

    torch.distributed.destroy_process_group()
    os.environ.update(WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
    dadplug.connect(kit=folder / "kits" / "ab"[rank], timeout=120)


def test_plain_loops_train_as_one_process_with_all_rows(cluster, tmp_path):
    """By a reduction, by the drop-in for DDP, and over a hub, in the place of Ray's process group."""
    expected = ray_loops.plain(None)
    with running_hub.running_hub(tmp_path / "kits"):
        results = fit(plain_loops, tmp_path)
    for found in results:
        assert [deviation(each, expected) < 1e-10 for each in found] == [True] * 3


# Restarts


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if condition():
                return
        time.sleep(0.1)


def killed_once(rank, folder):
    """Train with a checkpoint every two steps; the second worker is killed before step 5 of 12, once."""
    registered = folder / "run" / "checkpoint_manager_snapshot.json"  # written by Ray's controller

    def load():
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return None
        with checkpoint.as_directory() as place:
            return torch.load(f"{place}/state.pt", weights_only=False)

    def save(state):
        with tempfile.TemporaryDirectory() as place:
            if rank == 0:
                torch.save(state, f"{place}/state.pt")
            own = ray.train.Checkpoint.from_directory(place) if rank == 0 else None
            ray.train.report({"step": state["step"]}, checkpoint=own)

    def at_step(step):
        marker = folder / "killed"
        if rank == 1 and step == 5 and not marker.exists():
            wait_for(lambda: registered.read_text().count("checkpoint_dir_name") == 2)
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return ray_loops.resumable(rank, 12, 2, load, save, at_step)


def test_a_run_with_a_killed_worker_resumes_to_the_bits_of_an_undisturbed_run(cluster, tmp_path, sites):
    from ray.train import FailureConfig

    found = fit(killed_once, tmp_path, failure_config=FailureConfig(max_failures=1))
    assert (tmp_path / "killed").exists()
    assert [int(each.pop("first")) for each in found] == [4, 4]
    expected = sites(2).run(ray_loops.resumable_at_site, 12, 2)
    for own, other in zip(found, expected, strict=True):
        other.pop("first")
        assert all(torch.equal(own[name], other[name]) for name in other), deviation(own, other)


# Lightning


def lightning_loops(rank, folder):
    import lightning.pytorch as pl
    from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer

    import dadplug
    from dadplug.ray import RayDADStrategy

    def in_ray():
        return {"plugins": [RayLightningEnvironment()], "prepare": prepare_trainer}

    found = {}
    for mode, options in ray_lightning.OPTIONS.items():
        reporting = {} if mode == "dad" else {"callbacks": [RayTrainReportCallback()]}
        found[mode] = ray_lightning.train(RayDADStrategy(mode, **options), folder, **in_ray(), **reporting)
    resumed = RayDADStrategy("rankdad", **ray_lightning.OPTIONS["rankdad"])
    found["resumed"] = ray_lightning.train(resumed, folder, str(folder / "middle.ckpt"), **in_ray())
    found["not prepared"] = ray_lightning.train(dadplug.DADStrategy("dad"), folder)
    found["local"] = ray_lightning.train(dadplug.LocalSGDStrategy(every=4), folder)
    found["server"] = ray_lightning.train(dadplug.ParameterServerStrategy("dad"), folder)
    found["messages"] = [
        message_of(lambda: prepare_trainer(pl.Trainer(accelerator="cpu", devices=1, strategy=RayDADStrategy("dad")))),
        message_of(lambda: ray_lightning.train(RayDADStrategy("dad"), folder)),
        message_of(lambda: RayDADStrategy("dad", start_method="spawn")),
        message_of(lambda: RayDADStrategy("dat")),
    ]
    connect_to_hub(rank, folder)
    found["hub"] = ray_lightning.train(dadplug.DADStrategy("dad", min_sites=1), folder)
    found["messages"].append(message_of(lambda: ray_lightning.train(RayDADStrategy("dad"), folder, **in_ray())))
    return found


def message_of(call):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def test_lightning_in_ray_is_lightning_under_torchrun(cluster, tmp_path):
    with running_hub.running_hub(tmp_path / "kits"):
        found = fit(lightning_loops, tmp_path)
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(support.free_port())]
    (program,) = support.run_programs([[*launch, ray_lightning.__file__, str(tmp_path)]])
    assert program.status == 0, program.errors
    expected = ray_lightning.alone([own["dad"]["rows"] for own in found])
    for rank, own in enumerate(found):
        for mode in ray_lightning.OPTIONS:
            other = torch.load(tmp_path / f"torchrun-{mode}-{rank}.pt", weights_only=False)
            parameters = own[mode].pop("parameters")
            assert deviation(parameters, other.pop("parameters")) < 1e-12
            if mode == "dad":
                assert deviation(parameters, expected) < 1e-10
                assert deviation(own["not prepared"]["parameters"], expected) < 1e-10
                assert deviation(own["hub"]["parameters"], expected) < 1e-10
            else:  # also what the compression keeps from step to step is restored
                assert all(torch.equal(own["resumed"]["parameters"][name], parameters[name]) for name in parameters)
            assert own[mode].pop("metrics") == pytest.approx(other.pop("metrics"), rel=1e-12)
            assert own[mode] == other
            assert (other["world_size"], other["rank"]) == (2, rank)
    start = ray_lightning.net().state_dict()
    for way in ("local", "server"):  # also these train one model
        first, second = (own[way]["parameters"] for own in found)
        assert all(torch.equal(first[name], second[name]) for name in start)
        assert deviation(first, start) > 0.01
    checkpoints = sorted((tmp_path / "run").glob("checkpoint_*/checkpoint.ckpt"))
    assert len(checkpoints) == ray_lightning.EPOCHS
    assert len(torch.load(checkpoints[-1], weights_only=False)["dadplug"]) == 2
    unprepared, alone, start, mode, hub = found[1]["messages"]
    assert "RayLightningEnvironment" in unprepared
    assert alone.startswith("RuntimeError: RayDADStrategy has its place from")
    assert "start_method is decided by Ray" in start
    assert "rankdad" in mode
    assert "the process group is not that of Ray" in hub


OUTSIDE = """
from dadplug.ray import RayDADStrategy
try:
    RayDADStrategy(mode="dad")
except RuntimeError as error:
    print(error)
"""


def test_outside_of_a_training_function_the_strategy_names_the_remedy():
    (only,) = support.run_programs([["-c", OUTSIDE]], env=SETTINGS)
    assert only.status == 0, only.errors
    assert "use dadplug.DADStrategy outside of Ray" in only.output


# transformers


def transformers_loops(rank, folder):
    from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    attach = importlib.import_module("dadplug.transformers").attach
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 100, (48, 8), generator=generator)
    texts = [{"input_ids": text, "labels": text[0] % 2} for text in words]
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    settings |= {"num_train_epochs": 2, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "use_cpu": True}
    settings |= {"save_strategy": "epoch", "logging_strategy": "epoch", "report_to": [], "disable_tqdm": True}

    def train(name, mode=None):
        torch.manual_seed(0)
        model = BertForSequenceClassification(BertConfig(vocab_size=100, **sizes, **dropouts))
        start = {key: value.detach().clone() for key, value in model.named_parameters()}
        trainer = Trainer(model, TrainingArguments(str(folder / name), **settings), train_dataset=texts)
        if mode is None:
            trainer = prepare_trainer(trainer)
        elif name == "dad":
            trainer.add_callback(RayTrainReportCallback())
            attach(trainer, mode=mode)
            trainer = prepare_trainer(trainer)
        else:
            trainer = prepare_trainer(trainer)
            attach(trainer, mode=mode)
        trainer.train()
        sent = 0 if mode is None else trainer.reduction.traffic.total_bytes_sent
        return {key: value.detach() - start[key] for key, value in model.named_parameters()}, sent

    return train("ddp"), train("dad", "dad"), train("prepared before", "dad")


def test_the_trainer_of_transformers_trains_in_ray_as_by_its_own_ddp(cluster, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("dadplug.transformers")
    for (expected, _), *others in fit(transformers_loops, tmp_path):
        for found, sent in others:
            assert sent > 0
            change = torch.cat([each.flatten() for each in expected.values()])
            own = torch.cat([found[name].flatten() for name in expected])
            assert float((own - change).norm() / change.norm()) < 1e-3
    assert list((tmp_path / "run").glob("checkpoint_*/checkpoint/dadplug_0.bin"))


# The documentation


@pytest.mark.parametrize("number", range(2))
def test_blocks_of_the_guide_run(cluster, tmp_path, monkeypatch, number):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray writes to ~/ray_results by default
    blocks = re.findall(r"```(?:python|diff)\n(.*?)```", (ROOT / "docs" / "guides" / "ray.md").read_text(), re.S)
    assert len(blocks) == 2
    lines = blocks[number].splitlines(keepends=True)
    if any(line.startswith("+") for line in lines):
        lines = [line[1:] for line in lines if not line.startswith("-")]
    exec(compile("".join(lines), f"block {number} of ray.md", "exec"), {"__name__": "guide"})
    if number:
        assert list(tmp_path.glob("runs/*/checkpoint_*/*"))


def test_the_example_trains(cluster, tmp_path):
    address = ray.get_runtime_context().gcs_address
    script = [str(ROOT / "examples" / "ray_train.py"), "--address", address, "--log-dir", str(tmp_path)]
    (only,) = support.run_programs([[*script, "--rank", "4"]], env=SETTINGS, timeout=590)
    assert only.status == 0, only.errors
    accuracy, fewer = re.search(r"accuracy (0\.\d+); .*, ([\d.]+) times fewer", only.output).groups()
    assert float(accuracy) > 0.9
    assert float(fewer) > 10
