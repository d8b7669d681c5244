"""Programs of sites with several processes, as launchers start them, and how they end when a process is lost."""

from __future__ import annotations

import json

import pytest
import support
from running_hub import running_hub

NAMES = ("bavaria", "saxony")

LIGHTNING = """
import sys, torch, dadplug
import pytorch_lightning as pl
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(12, 3)
        self.seen = 0

    def training_step(self, batch, batch_idx):
        self.seen += len(batch[0])
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    torch.set_num_threads(1)
    dadplug.connect(kit=sys.argv[1], timeout=200)
    data = TensorDataset(torch.randn(48, 12), torch.randint(0, 3, (48,)))
    for repeat in range(2):
        trainer = pl.Trainer(strategy=dadplug.DADStrategy("rankdad", timeout=200), accelerator="cpu", devices=2,
                             max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                             enable_model_summary=False)
        module = Module()
        trainer.fit(module, DataLoader(data, batch_size=4))
        assert trainer.strategy.reduction.first_difference() is None
    place = [trainer.global_rank, trainer.world_size, trainer.local_rank, trainer.global_step, module.seen]
    sys.stdout.write(f"done {place}\\n")
"""


def local_processes(program: str, kit: str, *arguments: str) -> list[list[str]]:
    """Return commands of two processes of a site, in an environment as torchrun sets it."""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(support.free_port())}
    commands = []
    for index in "01":
        code = "import os, runpy, sys; sys.argv.pop(0); "
        code += f"os.environ.update({json.dumps(place | {'LOCAL_RANK': index, 'RANK': index})}); "
        code += "runpy.run_path(sys.argv[0], run_name='__main__')"
        commands.append(["-c", code, program, kit, *arguments])
    return commands


@pytest.mark.slow
def test_lightning_starts_the_processes_of_a_site(tmp_path):
    """The first site has a second process once the trainer begins, and the other one has had two from the start."""
    support.need("pytorch_lightning")
    program = tmp_path / "train.py"
    program.write_text(LIGHTNING)
    with running_hub(tmp_path / "kits", sites=NAMES) as hub:
        first, second = (str(hub.kits / name) for name in NAMES)
        commands = [[str(program), first], *local_processes(str(program), second)]
        finished = support.run_programs(commands, timeout=160, preload=["pytorch_lightning"])
    for each in finished:
        assert each.status == 0, each.errors
    words = "\n".join(each.output for each in finished).split("done ")[1:]
    places = sorted(json.loads(word.splitlines()[0]) for word in words)
    assert places == [[rank, 4, rank % 2, 3, 12] for rank in range(4)]


PLAIN = """
import os, signal, sys, torch, dadplug
from torch import nn

torch.set_num_threads(1)
dadplug.connect(kit=sys.argv[1], timeout=100)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
reduction = dadplug.GradientReduction(model, mode=sys.argv[2], timeout=100)
for step in range(6):
    if step == 3 and reduction.site_rank == int(sys.argv[3]):
        raise ValueError("bad data")
    if step == 3 and reduction.site_rank == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.randn(8, 6)).square().mean().backward()
    reduction.synchronize()
"""


@pytest.mark.parametrize(
    ("mode", "raises", "killed"),
    [("rankdad", "3", "-1"), ("dsgd", "-1", "2")],
    ids=["a process raises", "the first process is killed"],
)
def test_the_others_learn_which_process_has_ended_and_why(tmp_path, mode, raises, killed):
    program = tmp_path / "plain.py"
    program.write_text(PLAIN)
    with running_hub(tmp_path / "kits", sites=NAMES, grace=0.5) as hub:
        commands = [
            command
            for name in NAMES
            for command in local_processes(str(program), str(hub.kits / name), mode, raises, killed)
        ]
        first, second, third, fourth = support.run_programs(commands, timeout=160, destructors=True)
        hub.await_line("saxony has left")
    assert [each.status for each in (first, second)] == [1, 1]
    if raises == "3":
        lost = "process 1 of site 1 (saxony) is gone: ValueError: bad data"
        assert "ValueError: bad data" in fourth.errors
        assert f"SiteError: {lost}" in third.errors
        assert all(f"SiteError: site 1 (saxony) is gone: {lost}" in each.errors for each in (first, second))
    else:
        assert third.status == -9
        assert "SiteError: process 0 of site 1 (saxony) is gone" in fourth.errors
        assert all("SiteError: site 1 (saxony) is gone" in each.errors for each in (first, second))
