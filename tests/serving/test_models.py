"""Models from files, each in a process of its own: kinds of files, failures, restarts, reloads."""

import logging
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import support
import torch
from served import patient_predictor
from support import refuses
from torch import nn

from dadplug.adapm import AdaModel, save_shards
from dadplug.adapm.shards import VERSION, shard_name, write_index, write_shard, write_whole
from dadplug.models import MNISTNet
from dadplug.serving import InputError, LoadError, Model, ServingError, UnavailableError
from dadplug.serving.loading import load, map_tables

BUILDERS = '''
import os, time
import torch
from torch import nn

def net(width=5):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))

class Module(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = net(width)
    def forward(self, x):
        return self.net(x)

class Odd(nn.Module):
    """Hangs or ends when it is asked to."""
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
    def forward(self, x):
        if (x == 666).any():
            os._exit(9)
        if (x == 777).any():
            time.sleep(3600)
        return x * self.scale + torch.tensor([0.0, 0.0, 0.0, float(os.getpid())], dtype=x.dtype)
'''
SECONDS = 60.0


@pytest.fixture
def builders(tmp_path) -> Path:
    path = tmp_path / "builders.py"
    path.write_text(BUILDERS)
    return path


def net(width=5):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))


def test_all_kinds_of_files_answer_as_the_model_does(builders, tmp_path):
    module, x = net(7).eval(), torch.randn(4)
    weights = module.state_dict()
    torch.save(weights, tmp_path / "state.pt")
    lightning = {"state_dict": {f"net.{key}": value for key, value in weights.items()}, "epoch": 3}
    torch.save(lightning | {"hyper_parameters": {"width": 7, "_class": "x"}, "loops": {}}, tmp_path / "lightning.ckpt")
    torch.save({"model_state_dict": weights, "optimizer_state_dict": {}, "epoch": 1}, tmp_path / "catalyst.pth")
    batch = torch.export.Dim("batch")
    torch.export.save(
        torch.export.export(module, (torch.randn(2, 4),), dynamic_shapes=({0: batch},)), tmp_path / "a.pt2"
    )
    models = {
        "state": Model(tmp_path / "state.pt", builder=f"{builders}:net", arguments={"width": 7}),
        "lightning": Model(tmp_path / "lightning.ckpt", builder=f"{builders}:Module"),
        "part": Model(tmp_path / "lightning.ckpt", builder=f"{builders}:net"),
        "catalyst": Model(tmp_path / "catalyst.pth", builder=f"{builders}:net", arguments={"width": 7}),
        "exported": str(tmp_path / "a.pt2"),
    }
    with patient_predictor(models, policy="exp4") as predictor:
        assert predictor.schema == ((4,), "float32")  # of the exported file
        answers = []
        for name, model in predictor._models.items():
            model.request(x.numpy(), b"", 0.0, time.monotonic() + SECONDS, answers.append)
            assert model.status()["pid"] not in (None, os.getpid()), name
        support.until(lambda: len(answers) == len(models))
        expected = module(x[None])[0].detach().numpy()
        for answer in answers:
            np.testing.assert_allclose(answer.output, expected, rtol=1e-5, err_msg=f"{answer}")
        assert len({model["pid"] for model in predictor.status()["models"].values()}) == len(models)
        p = predictor.predict(x)
        assert (p.confidence, set(p.models)) == (pytest.approx(1.0), set(models))
        pids = [model["pid"] for model in predictor.status()["models"].values()]
    support.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


CATALYST = """
from catalyst import dl
from dadplug.runners import DistributedRunner
from torch.utils.data import DataLoader, TensorDataset
sys.path.insert(0, ".")
import builders

torch.manual_seed(0)
model, data = builders.net(7), TensorDataset(torch.randn(40, 4), torch.randint(3, (40,)))
keys = {"loader_key": "valid", "metric_key": "loss", "minimize": True}
DistributedRunner(mode="rankdad", rank=2).train(
    model=model, criterion=nn.CrossEntropyLoss(), optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
    loaders={name: DataLoader(data, 8) for name in ("train", "valid")}, num_epochs=2,
    callbacks=[dl.CheckpointCallback(logdir=mode, mode=mode, **keys) for mode in ("runner", "model")]
    + [dl.AccuracyCallback(input_key="logits", target_key="targets")],
)
model.eval()
torch.save(model(torch.linspace(-1, 1, 4)[None])[0].detach(), "expected.pt")
"""


def test_checkpoints_of_catalysts_runner_answer_as_the_trained_model_does(builders, tmp_path):
    support.need("catalyst")
    commands = support.site_scripts(CATALYST, tmp_path, world_size=1)
    (program,) = support.run_programs(commands, folder=tmp_path, preload=["catalyst"])
    assert program.status == 0, program.errors
    files = [tmp_path / "runner" / "runner.last.pth", tmp_path / "model" / "model.last.pth"]
    models = {path.stem: Model(path, builder=f"{builders}:net", arguments={"width": 7}) for path in files}
    x, expected = torch.linspace(-1, 1, 4), torch.load(tmp_path / "expected.pt").numpy()
    with patient_predictor(models, policy="exp4", task="regression") as predictor:
        p = predictor.predict(x)
        assert (set(p.models), p.confidence) == (set(models), pytest.approx(1.0))
        np.testing.assert_allclose(p.output, expected, rtol=1e-5)


def test_onnx_files(tmp_path):
    pytest.importorskip("onnxruntime")
    # y = x W of an opset 13 graph, as bytes: the onnx package is not needed
    path = tmp_path / "model.onnx"
    path.write_bytes(matmul_graph(np.arange(6, dtype=np.float32).reshape(2, 3)))
    with patient_predictor({"m": path}) as predictor:
        assert predictor.schema == ((2,), "float32")
        np.testing.assert_allclose(predictor.predict([1.0, 2.0]).output, [6.0, 9.0, 12.0])
        with pytest.raises(InputError, match=r"expects \(2\)"):
            predictor.predict([1.0])


def field(number: int, content: bytes | int | str) -> bytes:
    """Return a field of a protocol buffer; all numbers and lengths are below 128."""
    if isinstance(content, int):
        return bytes([number << 3, content])
    content = content.encode() if isinstance(content, str) else content
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def matmul_graph(weight: np.ndarray) -> bytes:
    def value(name, *sizes):
        shape = b"".join(field(1, field(2, s) if isinstance(s, str) else field(1, s)) for s in sizes)
        return field(1, name) + field(2, field(1, field(1, 1) + field(2, shape)))

    initialiser = b"".join(field(1, size) for size in weight.shape) + field(2, 1) + field(8, "w")
    initialiser += field(9, weight.tobytes())
    node = field(1, "x") + field(1, "w") + field(2, "y") + field(4, "MatMul")
    graph = field(1, node) + field(2, "g") + field(5, initialiser)
    graph += field(11, value("x", "n", 2)) + field(12, value("y", "n", 3))
    head, body = field(1, 8), field(8, field(1, "") + field(2, 13))
    return head + bytes([7 << 3 | 2, len(graph) & 127 | 128, len(graph) >> 7]) + graph + body


def description(path, **given):
    return Model(path, **given).description() | {"threads": 1}


def test_models_of_dadplug_need_no_builder(tmp_path):
    torch.manual_seed(0)
    module = MNISTNet().eval()
    torch.save({"state_dict": {f"model.{k}": v for k, v in module.state_dict().items()}}, tmp_path / "best.ckpt")
    loaded = load(description(tmp_path / "best.ckpt"))
    x = torch.randn(2, 784)
    torch.testing.assert_close(loaded.run(x.numpy()), module(x))
    assert loaded.schema == (None, "float32")


def test_what_cannot_be_loaded_is_named(builders, tmp_path):
    torch.save(net().state_dict(), tmp_path / "state.pt")
    torch.save(net(), tmp_path / "pickled.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"epoch": 1}, tmp_path / "none.pt")
    (tmp_path / "text.ckpt").write_text("hello")
    (tmp_path / "text.pt2").write_text("hello")
    (tmp_path / "folder").mkdir()
    for name, given, message in (
        ("state.pt", {}, "weights and no code"),
        ("state.pt", {"builder": f"{builders}:nothing"}, "has no nothing"),
        ("state.pt", {"builder": f"{builders}:Odd"}, "do not fit the builder's model"),
        ("state.pt", {"builder": "nowhere_to_be_found:net"}, "No module named"),
        ("state.pt", {"builder": "builtins:dict"}, "returns dict"),
        ("state.pt", {"builder": "torch.nn:Linear"}, "name a function without arguments"),
        ("pickled.pt", {}, "objects besides tensors"),
        ("list.pt", {}, "holds list"),
        ("none.pt", {}, "no state dict"),
        ("text.ckpt", {}, "damaged"),
        ("text.pt2", {}, "no file of torch.export.save"),
        ("folder", {}, "no sharded checkpoint"),
    ):
        with pytest.raises(LoadError, match=message):
            load(description(tmp_path / name, **given))
    for wrong in ("net", ":net", lambda: net()):
        with pytest.raises(LoadError, match=r"does not read like|cannot be imported"):
            description(tmp_path / "state.pt", builder=wrong)
    with pytest.raises(LoadError, match="weights and no code"):  # in the process, reported at the start
        patient_predictor({"m": tmp_path / "state.pt"})


def odd(builders, path, scale=1.0):
    torch.save({"scale": torch.tensor([scale])}, path)
    return Model(path, builder=f"{builders}:Odd", input_shape=(4,))


def ask(predictor, x):
    """Return the answer once there is one; failures in the meantime have status 503."""
    end = time.monotonic() + SECONDS
    while True:
        try:
            return predictor.predict(x, timeout=SECONDS)
        except UnavailableError:
            assert time.monotonic() < end


def test_a_process_that_ends_or_hangs_is_restarted_and_others_go_on(builders, tmp_path, caplog):
    models = {"odd": odd(builders, tmp_path / "odd.pt"), "fine": lambda batch: batch}
    with (
        caplog.at_level(logging.WARNING, "dadplug.serving"),
        patient_predictor(models, hang_seconds=1.0, cache_bytes=0) as predictor,
    ):
        first = int(predictor.predict([0.0, 0, 0, 0], timeout=SECONDS).output[3])
        assert first == predictor.status()["models"]["odd"]["pid"]
        os.kill(first, signal.SIGKILL)
        wrong = []
        for number in range(50):
            try:
                p = predictor.predict([float(number), 1, 2, 0], timeout=SECONDS)
                wrong += [] if list(p.output[:3]) == [number, 1, 2] else [p]
            except ServingError as error:
                wrong += [] if error.status == 503 else [error]
        assert wrong == []
        second = int(ask(predictor, [0.0, 0, 0, 0]).output[3])
        assert second != first
        for trouble in (666.0, 777.0):
            answers = []
            predictor._models["fine"].request(np.ones(4), b"", 0.0, time.monotonic() + SECONDS, answers.append)
            with pytest.raises(UnavailableError, match="model 'odd' failed"):
                predictor.predict([trouble, 0, 0, 0], timeout=SECONDS)
            assert list(ask(predictor, [5.0, 0, 0, 0]).output[:3]) == [5, 0, 0]
            assert answers[0].output is not None
        assert predictor.status()["models"]["odd"]["restarts"] == 3
        assert predictor.status()["models"]["fine"]["restarts"] == 0
    assert [r for r in caplog.messages if "model 'odd' failed and is restarted" in r and "no answer for 1 s" in r]
    assert not [r for r in caplog.messages if "fine" in r]


def test_a_changed_file_is_loaded_and_its_former_answers_are_void(builders, tmp_path, caplog):
    path = tmp_path / "odd.pt"
    with (
        caplog.at_level(logging.ERROR, "dadplug.serving"),
        patient_predictor({"m": odd(builders, path)}, reload=True) as predictor,
    ):
        watcher = predictor._watcher
        watcher.close()  # the test looks by itself
        x = [1.0, 2, 3, 0]
        old = predictor.predict(x)
        assert list(old.output[:3]) == [1, 2, 3]
        watcher.look()
        assert predictor.predict(x).output is old.output  # from the cache
        odd(builders, tmp_path / "new.pt", scale=10.0)
        os.replace(tmp_path / "new.pt", path)
        watcher.look()
        assert predictor.predict(x).output is old.output  # the file may be in the middle of a write
        watcher.look()
        support.until(lambda: predictor.status()["models"]["m"]["version"] == 2)
        assert list(predictor.predict(x).output[:3]) == [10, 20, 30]
        path.write_text("garbage")
        watcher.look()
        watcher.look()
        assert list(predictor.predict([2.0, 2, 3, 0]).output[:3]) == [20, 20, 30]
    assert [message for message in caplog.messages if "still serving the previous version" in message]


def test_a_process_that_ends_while_its_file_is_damaged_serves_the_last_good_version(builders, tmp_path, caplog):
    path = tmp_path / "odd.pt"
    with (
        caplog.at_level(logging.ERROR, "dadplug.serving"),
        patient_predictor({"m": odd(builders, path, scale=3.0)}, reload=True, cache_bytes=0) as predictor,
    ):
        watcher, copy = predictor._watcher, predictor._models["m"].backend._kept.copy
        watcher.close()  # the test looks by itself
        assert (copy.parent.stat().st_mode & 0o777) == 0o700
        for content in (b"garbage", b"", None):
            path.unlink() if content is None else path.write_bytes(content)
            watcher.look()
            watcher.look()
            pid = int(predictor.predict([1.0, 2, 3, 0]).output[3])
            assert pid == predictor.status()["models"]["m"]["pid"]
            os.kill(pid, signal.SIGKILL)
            assert list(ask(predictor, [1.0, 2, 3, 0]).output[:3]) == [3, 6, 9]
            assert predictor.status()["models"]["m"]["last_good"]
            assert 'dadplug_model_last_good{model="m"} 1.0' in predictor.prometheus()
        assert [message for message in caplog.messages if "its last good version is served" in message]
        odd(builders, path, scale=10.0)
        watcher.look()
        watcher.look()
        support.until(lambda: list(ask(predictor, [1.0, 2, 3, 0]).output[:3]) == [10, 20, 30])
        assert not predictor.status()["models"]["m"]["last_good"]
        assert not copy.exists()
        copy = predictor._models["m"].backend._kept.copy
        assert copy.exists()
    assert not copy.exists()


# Models with tables in a folder of shards, whose rows are mapped


BUILDER = """
import torch
from torch import nn

class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 4)
        self.bags = nn.EmbeddingBag(30, 4, mode="sum")
        self.head = nn.Linear(4, 2)
    def forward(self, keys):
        return self.head(self.table(keys).mean(1) + self.bags(keys))
"""


@pytest.fixture
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_a_model_with_mapped_tables_answers_as_the_trained_one(tmp_path, alone):
    (tmp_path / "clicks.py").write_text(BUILDER)
    scope: dict = {}
    exec(BUILDER, scope)
    model = scope["Clicks"]()
    keys = torch.randint(0, 30, (6, 3))
    expected = model(keys).detach()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    managed = AdaModel(model, optimizer)
    save_shards(managed, tmp_path / "shards", optimizer)
    managed.manager.close()
    loaded = load(description(tmp_path / "shards", builder=f"{tmp_path / 'clicks.py'}:Clicks"))
    torch.testing.assert_close(loaded.run(keys.numpy()), expected)
    refuses(
        (lambda: loaded.run(np.full((1, 3), 40)), "the table has 30 rows"),
        (lambda: load(description(tmp_path / "shards")), "2 tables and other weights", LoadError),
        error=InputError,
    )


def shards(folder, rows, width, sites=2):
    """Write a folder of one table, as sites that own rows at random would; row i holds i, i + 0.5, ..."""
    folder.mkdir()
    order = torch.randperm(rows)
    files = {}
    for site, keys in enumerate(order.chunk(sites)):
        values = torch.cat([keys[:, None] + torch.arange(width) / 2, torch.zeros(len(keys), width)], 1).float()
        name = shard_name("0123abcd", site, sites)
        files[name] = write_shard(folder / name, {"t": {"keys": keys, "values": values}})
    table = {"rows": rows, "width": width, "columns": 2 * width, "names": ["weight"], "place": 0}
    table |= {"parts": ["sum"], "counts_steps": True, "steps": 1}
    rest = {"0123abcd-rest.pt": write_whole(folder / "0123abcd-rest.pt", {"model": {}, "optimizer": {"state": {}}})}
    write_index(folder / "index.json", {"version": VERSION, "tables": {"t": table}, "files": files, "rest": rest})
    return folder


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_rows_are_mapped_and_not_loaded(tmp_path):
    rows, width = 400_000, 16
    folder = shards(tmp_path / "table", rows, width)
    described = description(folder)
    load(description(shards(tmp_path / "small", 10, 4)))  # what is imported at the first load
    torch.randperm(rows)
    before = resident()
    loaded = load(described)
    rng = np.random.default_rng(0)
    keys = np.minimum(rng.zipf(1.3, 10_000), rows) - 1
    for part in keys.reshape(100, 100):
        found = loaded.run(part[:, None])
        assert found.shape == (100, 1, width)
        np.testing.assert_array_equal(found[:, 0], part[:, None] + np.arange(width) / 2)
    grown = resident() - before
    assert grown < 0.25 * rows * width * 4 + (4 << 20), grown


def test_damaged_folders_are_errors(tmp_path):
    folder = shards(tmp_path / "table", 100, 4)
    path = folder / shard_name("0123abcd", 1, 2)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"x")
    with pytest.raises(LoadError, match="is damaged"):
        load(description(folder))
    path.unlink()
    with pytest.raises(LoadError, match="is missing"):
        load(description(folder))


def test_a_layer_with_max_norm_is_refused(tmp_path):
    model = nn.Sequential(nn.Embedding(5, 2, max_norm=1.0))
    with pytest.raises(LoadError, match="max_norm"):
        map_tables(model, {"tables": {"t": {"names": ["0.weight"]}}}, {})
