"""Programs at sites with kits: exit reasons, commands, and arguments that do not go together."""

from __future__ import annotations

import re

import hub_kits
import pytest
import support
import torch.distributed as dist
from running_hub import running_hub

import dadplug
from dadplug import SiteError
from dadplug.errors import KitError

NAMES = ("bavaria", "saxony")

HEAD = """
import sys, torch, dadplug, torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
dadplug.connect(kit=sys.argv[1], timeout=200)
rank = dist.get_rank()
"""
ENDS = {
    "plain loop": """
reduction = dadplug.GradientReduction(model := nn.Linear(4, 4), mode="dad")
for step in range(100):
    if step == 3 and rank == 1:
        raise ValueError("the scanner is broken")
    model(torch.ones(2, 4)).sum().backward()
    reduction.synchronize()
""",
    "collectives": """
for step in range(100):
    if step == 3 and rank == 1:
        raise ValueError("the scanner is broken")
    dist.all_reduce(torch.ones(3))
""",
    "Catalyst": """
from catalyst import dl
from catalyst_training import train
class Breaks(dl.Callback):
    def __init__(self): super().__init__(order=1)
    def on_batch_end(self, runner):
        if rank == 1: raise ValueError("the scanner is broken")
train("dad", callbacks=[Breaks()])
""",
    "Lightning": """
import pytorch_lightning as pl
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)
    def training_step(self, batch, batch_idx):
        if rank == 1 and batch_idx == 3: raise ValueError("the scanner is broken")
        return self.net(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
from dadplug.runners.pytorch_lightning import DADStrategy
trainer = pl.Trainer(strategy=DADStrategy("dad"), accelerator="cpu", devices=1, max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(40, 4), batch_size=2))
""",
}


@pytest.mark.parametrize("program", ENDS)
def test_the_reason_of_an_exit_reaches_the_other_site(tmp_path, program):
    for package in {"Catalyst": ["catalyst"], "Lightning": ["pytorch_lightning"]}.get(program, []):
        support.need(package)
    script = tmp_path / "site.py"
    script.write_text(f"import sys; sys.path[:] = {support.sys.path!r}\n" + HEAD + ENDS[program])
    with running_hub(tmp_path / "kits", sites=NAMES) as hub:
        commands = [[str(script), str(hub.kits / name)] for name in NAMES]
        preload = ["pytorch_lightning"] if program == "Lightning" else ["catalyst"] if program == "Catalyst" else []
        first, second = support.run_programs(commands, preload=preload)
        assert (first.status, second.status) == (1, 1)
        assert "ValueError: the scanner is broken" in second.errors
        last = first.errors.strip().splitlines()[-1]
        assert re.search(r"SiteError: site 1 \(saxony\) is gone: ValueError: the scanner is broken", last), first.errors
        hub.await_line("saxony has left: ValueError: the scanner is broken")


def test_sites_leave_without_a_reason_where_their_programs_end(tmp_path):
    script = tmp_path / "site.py"
    script.write_text(HEAD + "dadplug.GradientReduction(nn.Linear(2, 2), mode='dsgd').first_difference()\n")
    with running_hub(tmp_path / "kits", sites=NAMES) as hub:
        for _ in range(2):  # the same hub serves the next run
            for each in support.run_programs([[str(script), str(hub.kits / name)] for name in NAMES]):
                assert each.status == 0, each.errors
        for name in NAMES:
            hub.await_line(f"{name} has left: its training is complete")


def test_sites_connect_again_after_an_error(tmp_path):
    code = """
reduction = dadplug.GradientReduction(model := nn.Linear(4, 4), mode="dad")
try:
    if rank == 1:
        raise ValueError("no data today")
    model(torch.ones(2, 4)).sum().backward()
    reduction.synchronize()
except Exception as error:
    reduction.abort(f"{type(error).__name__}: {error}")
    print(error)
reduction.detach(discard=True)
dadplug.connect(kit=sys.argv[1], timeout=200)
reduction = dadplug.GradientReduction(model, mode="dad")
model(torch.ones(2, 4)).sum().backward()
reduction.synchronize()
assert reduction.first_difference() is None
objects = [None, None]
dist.all_gather_object(objects, rank)
assert objects == [0, 1]
"""
    script = tmp_path / "site.py"
    script.write_text(HEAD + code)
    with running_hub(tmp_path / "kits", sites=NAMES) as hub:
        first, second = support.run_programs([[str(script), str(hub.kits / name)] for name in NAMES])
    assert first.status == 0, first.errors
    assert second.status == 0, second.errors
    assert "site 1 (saxony) is gone: ValueError: no data today" in first.output


def test_sites_with_different_versions_say_so(tmp_path):
    script = tmp_path / "site.py"
    script.write_text(
        "import sys, dadplug\nif 'saxony' in sys.argv[1]: dadplug.__version__ = '0.0.9'\n"
        "dadplug.connect(kit=sys.argv[1], timeout=200)\n"
    )
    with running_hub(tmp_path / "kits", sites=NAMES) as hub:
        finished = support.run_programs([[str(script), str(hub.kits / name)] for name in NAMES])
    for each in finished:
        assert each.status == 1
        assert "MismatchError: the sites run different versions of dadplug: site 0 (bavaria) 0." in each.errors
        assert "site 1 (saxony) 0.0.9" in each.errors


# Arguments


@pytest.mark.parametrize(
    "place", [{"rank": 0}, {"num_nodes": 2}, {"dist_url": "tcp://127.0.0.1:1"}, {"backend": "gloo"}]
)
def test_a_kit_and_a_place_do_not_go_together(place):
    with pytest.raises(ValueError, match=f"leave out {next(iter(place))}"):
        dadplug.connect(kit="kits/a", **place)


def test_processes_of_a_site_on_several_machines_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"4 processes here \(LOCAL_WORLD_SIZE\), and its variables WORLD_SIZE"):
        dadplug.connect(kit="kits/a")
    for name, value in {"WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"8 processes \(WORLD_SIZE\), of which 4 are here: .* torchrun --standalone"):
        dadplug.connect(kit="kits/a")


def test_the_kit_of_the_hub_connects_no_site(tmp_path):
    hub_kits.make(tmp_path / "kits")
    with pytest.raises(KitError, match="is the kit of the hub"):
        dadplug.connect(kit=tmp_path / "kits" / "hub")


def test_a_hub_that_does_not_run_is_named(tmp_path):
    with running_hub(tmp_path / "kits") as hub:
        port = hub.address[1]
    with pytest.raises(SiteError, match=f"the hub at 127.0.0.1:{port} cannot be reached"):
        dadplug.connect(kit=tmp_path / "kits" / "a", timeout=0.3)
    assert not dist.is_initialized()
