"""Lightning programs as users start them: its own processes, torchrun, several machines, the command line, a kill."""

import pytest
import support

pytestmark = pytest.mark.slow


# What sites print to one pipe is written in one piece, or it mixes.
PROGRAM = """
import importlib, os, signal, sys, warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
warnings.filterwarnings("ignore")
package, strategy = sys.argv[1:3]
pl = importlib.import_module(package)
import dadplug

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 3))

    def training_step(self, batch, batch_idx):
        if os.environ.get("KILLED") == str(self.global_rank) and self.global_step == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)

if __name__ == "__main__":
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(90, 12), torch.randint(0, 3, (90,)))
    nodes, epochs = int(os.environ.get("NODES", 1)), int(os.environ.get("EPOCHS", 2))
    folder = os.environ.get("FOLDER")
    callbacks = [pl.callbacks.OnExceptionCheckpoint(folder), pl.callbacks.ModelCheckpoint(folder)] if folder else []
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2 // nodes, num_nodes=nodes, max_epochs=epochs,
                         logger=False, enable_checkpointing=bool(folder), enable_progress_bar=False,
                         enable_model_summary=False, callbacks=callbacks)
    module = Module()
    trainer.fit(module, DataLoader(data, batch_size=9, shuffle=True), ckpt_path=os.environ.get("RESUME"))
    sys.stdout.write(f"done {trainer.global_rank} {trainer.world_size} {trainer.global_step}\\n")
    if trainer.strategy.reduction is not None:
        assert trainer.strategy.reduction.first_difference() is None
"""


@pytest.fixture
def program(tmp_path) -> str:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return str(path)


def done(*finished: support.Finished) -> list[str]:
    for each in finished:
        assert each.status == 0, each.errors
    words = " ".join(each.output for each in finished).split("done")[1:]
    return sorted(" ".join(word.split()[:3]) for word in words)


@pytest.mark.parametrize(("package", "strategy"), [("pytorch_lightning", "rankdad"), ("lightning.pytorch", "dad")])
def test_lightning_starts_the_sites_by_a_strategys_name(program, package, strategy):
    support.need(package.split(".")[0])
    env = {"MASTER_PORT": str(support.free_port())}
    finished = support.run_programs([[program, package, strategy]], env=env, preload=[package])
    assert done(*finished) == ["0 2 10", "1 2 10"]


@pytest.mark.parametrize("start", ["spawn", "notebook"])
def test_sites_can_be_spawned_and_forked(program, start):
    env = {"MASTER_PORT": str(support.free_port())}
    command = [program, "pytorch_lightning", f"rankdad_{start}"]
    (only,) = support.run_programs([command], env=env, preload=["pytorch_lightning"])
    assert only.status == 0, only.errors


def test_under_torchrun(program):
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(support.free_port())]
    finished = support.run_programs([[*launch, program, "pytorch_lightning", "rankdad"]], preload=["pytorch_lightning"])
    assert done(*finished) == ["0 2 10", "1 2 10"]


def machines(program: str, variables: str = "NODE_RANK", **env: str) -> list[support.Finished]:
    """Run the program as on two machines, which differ in environment variables; the command line sets them."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(support.free_port()), **env}
    start = "import os, runpy, sys; rank = sys.argv.pop(1); "
    start += f"os.environ.update(dict.fromkeys({variables!r}.split(), rank)); "
    start += "sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    commands = [["-c", start, rank, program, "pytorch_lightning", "rankdad"] for rank in "01"]
    return support.run_programs(commands, env=env, preload=["pytorch_lightning"])


def test_under_slurms_environment(program):
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    job |= {"SLURM_NODEID": "0", "SLURM_NODELIST": "127.0.0.1"}
    assert done(*machines(program, "SLURM_PROCID SLURM_LOCALID", **job)) == ["0 2 10", "1 2 10"]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_site_killed_in_fit_ends_the_others_which_save_and_can_resume(program, tmp_path, killed):
    folder = tmp_path / "checkpoints"
    finished = machines(program, NODES="2", KILLED=str(killed), FOLDER=str(folder), EPOCHS="4")
    assert finished[killed].status == -9
    assert finished[1 - killed].status == 1
    assert f"SiteError: site {killed}" in finished[1 - killed].errors
    assert "it was killed, or its machine went down" in finished[1 - killed].errors
    saved = sorted(path.name for path in folder.iterdir())
    assert any(name.startswith("epoch=1") for name in saved)
    assert ("on_exception.ckpt" in saved) == (killed == 1)  # site 0 is the one that writes
    last = "on_exception.ckpt" if killed == 1 else next(name for name in saved if name.startswith("epoch=1"))
    resumed = machines(program, NODES="2", RESUME=str(folder / last), EPOCHS="4")
    assert done(*resumed) == ["0 2 20", "1 2 20"]


CLI = """
import sys
import torch
import pytorch_lightning as pl
from pytorch_lightning.cli import LightningCLI
import dadplug

class Module(pl.LightningModule):
    def __init__(self, width: int = 12):
        super().__init__()
        self.net = torch.nn.Linear(width, 3)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Data(pl.LightningDataModule):
    def train_dataloader(self):
        data = torch.utils.data.TensorDataset(torch.randn(40, 12), torch.randint(0, 3, (40,)))
        return torch.utils.data.DataLoader(data, batch_size=10)

if __name__ == "__main__":
    cli = LightningCLI(Module, Data, save_config_callback=None)
    options = cli.trainer.strategy.options
    sys.stdout.write(f"done {options.mode} {options.rank} {options.wire}\\n")
"""
YAML = """
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  logger: false
  enable_progress_bar: false
  enable_checkpointing: false
  strategy:
    class_path: dadplug.runners.DADStrategy
    init_args: {mode: rankdad, rank: RANK, wire: bf16}
"""


def test_lightnings_command_line_takes_options_and_checks_them(tmp_path):
    pytest.importorskip("jsonargparse")
    (tmp_path / "cli.py").write_text(CLI)
    env = {"MASTER_PORT": str(support.free_port())}
    for rank in ("3", "three"):
        (tmp_path / f"{rank}.yaml").write_text(YAML.replace("RANK", rank))
    cli = str(tmp_path / "cli.py")
    commands = [[cli, "fit", "--config", str(tmp_path / f"{rank}.yaml")] for rank in ("3", "three")]
    right, wrong = support.run_programs(commands, env=env, preload=["pytorch_lightning"])
    assert right.status == 0, right.errors
    assert right.output.count("done rankdad 3 bf16") == 2
    assert wrong.status == 2
    assert "'rank': 'three'" in wrong.errors


NAMES = """
import sys
for name in sys.argv[1].split(","):
    __import__(name)
pl = sys.modules[[name for name in sys.argv[1].split(",") if name != "dadplug"][0]]
from dadplug.step.methods import Method, register_method
later = register_method("later")(type("Later", (Method,), {}))
from dadplug import DADStrategy
for strategy in ("dsgd", "dad", "rankdad", "RankDAD", "later", DADStrategy("dad", rank=3)):
    print(type(pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False).strategy).__module__)
assert "SingleDevice" in type(pl.Trainer(strategy="auto", accelerator="cpu", devices=1, logger=False).strategy).__name__
"""


@pytest.mark.parametrize("order", ["dadplug,{}", "{},dadplug"])
@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning.pytorch"])
def test_modes_are_names_of_strategies_whichever_is_imported_first(package, order):
    support.need(package.split(".")[0])
    (only,) = support.run_programs([["-c", NAMES, order.format(package)]], bare=True)
    assert only.status == 0, only.errors
    assert only.output.split() == ["dadplug.runners." + package.split(".")[0]] * 6


def test_both_packages_at_once_need_a_choice():
    support.need("lightning")
    code = "import lightning.pytorch, pytorch_lightning, dadplug; dadplug.DADStrategy()"
    (only,) = support.run_programs([["-c", code]], bare=True)
    assert "say which one is meant" in only.errors


LATER = """
import pickle
from dadplug import AdaPMStrategy, DADStrategy
import lightning.pytorch as pl
class Mine(DADStrategy):
    def __init__(self):
        super().__init__(rank=5)
assert isinstance(Mine(), DADStrategy) and Mine().options.rank == 5
from dadplug.runners.lightning import DADStrategy as Chosen
assert issubclass(Mine, Chosen) and pickle.loads(pickle.dumps(Chosen)) is Chosen
strategy = DADStrategy(rank=3)
assert isinstance(strategy, DADStrategy) and not isinstance(strategy, AdaPMStrategy)
print(type(pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False).strategy).__module__)
"""


def test_the_package_may_be_imported_after_the_strategy_which_may_be_subclassed():
    support.need("lightning")
    (only,) = support.run_programs([["-c", LATER]], bare=True)
    assert only.status == 0, only.errors
    assert only.output.split() == ["dadplug.runners.lightning"]


def test_wrong_names_list_the_right_ones():
    code = "import pytorch_lightning as pl, dadplug; dadplug.DADStrategy({})"
    commands = [["-c", code.format(wrong)] for wrong in ("'rnkdad'", "'dad', rnk=3")]
    mode, option = support.run_programs(commands, preload=["pytorch_lightning"])
    assert f"unknown mode 'rnkdad'; valid ones are {support.valid_modes()}" in mode.errors
    assert "unknown option 'rnk' (did you mean 'rank'?); valid options are mode, rank" in option.errors
