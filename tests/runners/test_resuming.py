"""A training that was halted goes on from its checkpoint along the same curve, to the bit, in both trainers."""

import pytest
import support
import torch
from torch import nn

MODE = {"rank": 2, "iterations": 1}
LOCAL = {"every": 3, "rank": 2, "wire": "int8", "outer_lr": 0.7, "outer_momentum": 0.9}
SERVER = {"mode": "rankdad", "staleness": 0, "rank": 2, "wire": "int8", "error_feedback": True}
LIGHTNING = {
    "dsgd": ("DADStrategy", {"mode": "dsgd"} | MODE),
    "dad": ("DADStrategy", {"mode": "dad"} | MODE),
    "rankdad": ("DADStrategy", {"mode": "rankdad"} | MODE),
    "local": ("LocalSGDStrategy", LOCAL),
    "server": ("ParameterServerStrategy", SERVER),
    "private": ("DADStrategy", {"mode": "dsgd", "private": ("net.1.*", "net.3.*")}),
    "private local": ("LocalSGDStrategy", LOCAL | {"private": "net.3.*"}),
}
CATALYST = {  # with the attribute that counts steps
    "dsgd": ("DistributedRunner", {"mode": "dsgd"} | MODE, "step"),
    "rankdad": ("DistributedRunner", {"mode": "rankdad"} | MODE, "step"),
    "local": ("LocalSGDRunner", LOCAL, "steps"),
    "server": ("ParameterServerRunner", SERVER, "version"),
    "private": ("DistributedRunner", {"mode": "dsgd", "private": ("4.*", "5.*")}, "step"),
    "private local": ("LocalSGDRunner", LOCAL | {"private": "5.*"}, "steps"),
}


def check(whole: tuple, half: tuple, rest: tuple) -> None:
    """Compare losses and models of a whole training with those of its halves."""
    assert half[0] + rest[0] == whole[0]
    for name, value in whole[1].state_dict().items():
        assert torch.equal(value, rest[1].state_dict()[name]), name


def in_lightning(folder: str, way: str) -> None:
    import lightning_zoo as zoo
    import pytorch_lightning as pl

    from dadplug import runners

    name, options = LIGHTNING[way]

    def run(epochs: int, resume: str | None = None) -> tuple:
        pl.seed_everything(0)
        losses = zoo.Losses()
        saver = pl.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        settings = {"callbacks": [losses, saver], "enable_checkpointing": True, "accumulate_grad_batches": 2}
        strategy = getattr(runners, name)(**options)
        module, current = zoo.fit(
            "Metrics", strategy, zoo.loader(60, shuffle=False), resume, max_epochs=epochs, **settings
        )
        if way == "server":
            assert strategy.server.version == current.global_step
        return losses.values, module

    check(run(4), run(2), run(4, f"{folder}/epoch=1.ckpt"))


@pytest.mark.parametrize("way", LIGHTNING)
def test_lightning_goes_on_along_the_same_curve(sites, tmp_path, way):
    support.need("pytorch_lightning")
    sites(2).run(in_lightning, str(tmp_path), way)


def in_catalyst(folder: str, way: str, by_argument: bool) -> None:
    """Train with dropout, a schedule and a compressor that has a state."""
    import catalyst_training
    from catalyst import dl

    from dadplug import runners

    name, options, counter = CATALYST[way]

    def run(place: str, epochs: int, resume: str | None = None) -> tuple:
        torch.manual_seed(0)
        layers = [nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Linear(24, 4)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        losses = catalyst_training.Losses()
        given = {"loader_key": "valid", "metric_key": "loss", "minimize": True}
        by_callback = None if by_argument else resume
        saver = dl.CheckpointCallback(f"{folder}/{place}", mode="runner", resume_runner=by_callback, **given)
        settings = {"valid_loader": "valid", "valid_metric": "loss", "minimize_valid_metric": True}
        settings |= {"epochs": epochs, "scheduler": scheduler, "resume": resume if by_argument else None}
        runner = getattr(runners, name)(**options)
        catalyst_training.run(runner, model, optimizer, [losses, saver], **settings)
        assert getattr(runner.reduction, counter) == 5 * epochs
        optimizer.step()  # the program's again
        return losses.values, model

    check(run("whole", 4), run("half", 2), run("rest", 4, f"{folder}/half/runner.last.pth"))


@pytest.mark.parametrize(
    ("way", "by_argument"),
    [
        *(("dsgd", False), ("rankdad", True), ("rankdad", False), ("local", True), ("server", True)),
        *(("private", True), ("private local", False)),
    ],
)
def test_catalyst_goes_on_along_the_same_curve(sites, tmp_path, way, by_argument):
    support.need("catalyst")
    sites(2).run(in_catalyst, str(tmp_path), way, by_argument)
