"""Neither an import of dadplug nor a training run, however it ends, leaves the process other than it was."""

import pytest
import support

pytestmark = pytest.mark.slow

pytest.importorskip("catalyst")
pytest.importorskip("pytorch_lightning")

# What is compared; the trainers are imported before, so that their own imports are none of the differences.
SNAPSHOT = """
import gc, inspect, logging, os, pickle, signal, sys, threading, warnings
import numpy, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import catalyst.callbacks, catalyst.metrics, catalyst.runners
from catalyst import dl
import pytorch_lightning as pl
import lightning.pytorch  # both packages, since dadplug waits for those that are installed
from torch.optim import optimizer as optim

def attributes():
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] in ("catalyst", "accelerate", "pytorch_lightning", "torchmetrics") and module is not None:
            for key, value in list(vars(module).items()):
                if callable(value):
                    found[name, key] = value
                if inspect.isclass(value) and value.__module__ == name:
                    found |= {(name, key, own): each for own, each in vars(value).items() if callable(each)}
    for kind in (nn.Module, nn.Linear, torch.Tensor, torch.optim.Optimizer, torch.optim.SGD, DataLoader):
        found |= {(kind.__name__, own): each for own, each in vars(kind).items() if callable(each)}
    return found

def snapshot():
    ours = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    hooks = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
    return {
        "excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "unraisablehook": sys.unraisablehook,
        "environment": dict(os.environ),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "threads of torch": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "settings of torch": (
            torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_anomaly_enabled(),
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        ),
        "meta_path": [each for each in sys.meta_path if type(each).__module__ != "dadplug"],
        "path": list(sys.path),
        "warnings": list(warnings.filters),
        "showwarning": warnings.showwarning,
        "logging": {
            name: (list(each.handlers), each.level) for name, each in sorted(logging.root.manager.loggerDict.items())
            if isinstance(each, logging.Logger) and name.split(".")[0] == "dadplug"
        } | {"": list(logging.root.handlers)},
        "hooks": {name: dict(getattr(optim, name)) for name in ours}
        | {name: dict(getattr(nn.modules.module, name)) for name in hooks},
        "attributes": attributes(),
    }

def compare(before, what):
    now = snapshot()
    for key, value in before.items():
        if isinstance(value, dict):
            changed = {k: (v, now[key].get(k)) for k, v in value.items() if k not in now[key] or now[key][k] is not v}
            changed = {k: v for k, v in changed.items() if v[0] != v[1]}
            added = {k: v for k, v in now[key].items() if k not in value and key in ("environment", "hooks")}
            if changed or added:
                problems.append((what, key, changed, added))
        elif now[key] != value:
            problems.append((what, key, value, now[key]))

problems = []

def random_states():
    return torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist()

torch.optim.SGD([torch.zeros(1)], lr=1.0)  # torch patches the step of each kind when it is first built
before, states = snapshot(), random_states()
import dadplug
from dadplug import DistributedRunner
from dadplug.runners.pytorch_lightning import DADStrategy
import dadplug.callbacks
compare(before, "import")
assert random_states() == states
"""

TRAINERS = """
rank, port = int(sys.argv[1]), sys.argv[2]
dadplug.connect(rank, 2, f"tcp://127.0.0.1:{port}", timeout=200)
assert sys.excepthook.__module__.startswith("torch.")  # which torch sets with each process group
before["excepthook"] = sys.excepthook
compare(before, "connect")

class Own(dl.OptimizerCallback):  # of the user's
    steps = 0

    def on_batch_end(self, runner):
        self.steps += 1
        super().on_batch_end(runner)

class Ends(dl.Callback):
    def __init__(self, error):
        super().__init__(order=100)
        self.error = error

    def on_batch_end(self, runner):
        if self.error is not None and runner.is_train_loader and runner.batch_step > 4:
            raise self.error

def own_state(model, optimizer):
    parts = [model, *model.modules(), optimizer, *model.parameters()]
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_post_accumulate_grad_hooks",
             "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    counts = [[len(getattr(part, name, None) or {}) for name in names] for part in parts]
    return [[type(part), sorted(vars(part)), *count] for part, count in zip(parts, counts)]

def compare_own(before, now, what):
    for was, each in zip(before, now):
        if was != each:
            problems.append((what, was, each))

def catalyst_run(error, runner=None):
    model = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = own_state(model, optimizer)
    data = TensorDataset(torch.randn(48, 8), torch.randint(0, 4, (48,)))
    loaders = {"train": DataLoader(data, batch_size=4), "valid": DataLoader(data, batch_size=4)}
    runner = runner or DistributedRunner(mode="dad", split_data=False)
    keys = {"input_key": "logits", "target_key": "targets"}
    callbacks = [dl.AccuracyCallback(**keys, topk_args=(1, 3)), dl.AUCCallback(**keys),
                 dl.BackwardCallback(metric_key="loss"), Own(metric_key="loss"),
                 dl.CheckpointCallback(logdir=sys.argv[3]), Ends(error)]
    kinds = [type(callback) for callback in callbacks]
    try:
        runner.train(model=model, criterion=nn.CrossEntropyLoss(), optimizer=optimizer, loaders=loaders,
                     callbacks=callbacks, num_epochs=2)
    except BaseException as caught:
        assert type(caught) is type(error), caught
    else:
        assert error is None
        assert callbacks[3].steps == 48, callbacks[3].steps
    assert [type(callback) for callback in callbacks] == kinds
    for callback in callbacks[:5]:
        pickle.loads(pickle.dumps(callback))
    compare_own(plain, own_state(model, optimizer), f"train, {error!r}")

for error in (None, ValueError("broken"), KeyboardInterrupt(), SystemExit(3), None):
    catalyst_run(error)
    compare(before, f"train, {error!r}")
first, second = DistributedRunner(mode="dad", split_data=False), DistributedRunner(mode="rankdad", split_data=False)
catalyst_run(None, first)
catalyst_run(None, second)
compare(before, "two runners")
DistributedRunner()  # and never trains
gc.collect()
compare(before, "no run")

class Module(pl.LightningModule):
    def __init__(self, error):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 4))
        self.error = error

    def training_step(self, batch, batch_idx):
        if self.error is not None and batch_idx == 3:
            raise self.error
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return self.optimizer

def lightning_run(error):
    module = Module(error)
    data = TensorDataset(torch.randn(48, 8), torch.randint(0, 4, (48,)))
    trainer = pl.Trainer(strategy=DADStrategy("dad", timeout=200), accelerator="cpu", devices=1, max_epochs=1,
                         logger=False, enable_checkpointing=False, enable_progress_bar=False,
                         enable_model_summary=False)
    plain = own_state(module.net, torch.optim.SGD(module.parameters(), lr=0.1))
    kinds = vars(Module).copy()
    try:
        trainer.fit(module, DataLoader(data, batch_size=4))
    except BaseException as caught:
        assert type(caught) is type(error) or isinstance(error, KeyboardInterrupt), caught
    else:
        assert error is None
    compare_own(plain, own_state(module.net, torch.optim.SGD(module.parameters(), lr=0.1)), f"fit, {error!r}")
    assert vars(Module) == kinds

warnings.simplefilter("ignore")
before["warnings"] = list(warnings.filters)
for error in (None, ValueError("broken"), SystemExit(3), KeyboardInterrupt(), None):
    interrupt = signal.getsignal(signal.SIGINT)
    lightning_run(error)
    signal.signal(signal.SIGINT, interrupt)  # Lightning ignores it from the first one on
    compare(before, f"fit, {error!r}")
for problem in problems:
    print("changed by", *problem)
print("done")
"""


def test_an_import_and_training_runs_leave_the_process_as_it_was(tmp_path):
    script = tmp_path / "site.py"
    script.write_text(SNAPSHOT + TRAINERS)
    port = str(support.free_port())
    commands = [[str(script), rank, port, str(tmp_path)] for rank in "01"]
    trainers = ["catalyst.dl", "pytorch_lightning", "lightning.pytorch"]
    finished = support.run_programs(commands, preload=trainers, bare=True)
    for each in finished:
        assert each.status == 0, each.errors
        assert each.output.splitlines()[-1] == "done"
        assert "changed by" not in each.output, each.output


WAITS = """
import sys
before = list(sys.meta_path)
import dadplug
assert len(sys.meta_path) > len(before)  # waits for Lightning
import pytorch_lightning
import lightning.pytorch
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("dadplug.")], sys.meta_path
for package in (pytorch_lightning, lightning.pytorch):
    assert "exec_module" not in vars(package.strategies.__loader__)
    assert "rankdad" in package.strategies.StrategyRegistry
"""


def test_what_waits_for_lightning_leaves_once_it_is_there():
    support.need("lightning")
    (only,) = support.run_programs([["-c", WAITS]], bare=True)
    assert only.status == 0, only.errors
