"""Private layers in trainers, which clip gradients, and evaluate and save models: shared layers stay equal."""

import os
from functools import partial

import pytest
import support
import torch
import torch.distributed as dist
from torch import nn

import dadplug

NAMES = ("net.1.*", "net.3.*")
CLIP = 0.01


def network() -> nn.Module:
    """A model of the site's own first values; those of rank 0 replace the shared ones."""
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, inputs):
        return self.net(inputs)


def data(count: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = [torch.randn(5, 6, generator=generator) for _ in range(count)]
    return [(each, each[:, :3].argmax(1)) for each in inputs]


def in_lightning(folder: str, strategy: str, **options: object) -> nn.Module:
    import pytorch_lightning as pl
    from trainer_loops import Plain, trainer

    from dadplug import runners

    class Module(Plain):
        def __init__(self) -> None:
            super().__init__(None)
            self.net = network()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    module = Module()
    settings = {"gradient_clip_val": CLIP, "precision": "32-true"}
    current = trainer(getattr(runners, strategy)(private=NAMES, **options), module, **settings)
    loader = torch.utils.data.DataLoader(data(), batch_size=None)
    current.fit(module, loader, loader)
    assert isinstance(current, pl.Trainer)
    return module, current.strategy._exchange


def in_catalyst(folder: str, runner: str, **options: object) -> nn.Module:
    import catalyst_training
    from catalyst import dl

    from dadplug import runners

    class Loader(list):
        batch_size = 5

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = getattr(runners, runner)(private=NAMES, split_data=False, **options)
    clip = {"grad_clip_fn": nn.utils.clip_grad_norm_, "grad_clip_params": {"max_norm": CLIP}}
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*(torch.cat(each) for each in zip(*data(), strict=True))), batch_size=5
    )
    made.train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        loaders={"train": loader, "valid": loader},
        callbacks=[dl.BackwardCallback("loss", **clip), dl.OptimizerCallback("loss")],
        num_epochs=2,
        cpu=True,
    )
    assert catalyst_training
    return model, made.reduction


def in_accelerate(folder: str, mode: str, **options: object) -> nn.Module:
    from dadplug.accelerate import Accelerator

    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    accelerator = Accelerator(cpu=True, mode=mode, private=NAMES, split_data=False, **options)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    for step, (inputs, targets) in enumerate(data()):
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(wrapped(inputs), targets))
        accelerator.clip_grad_norm_(wrapped.parameters(), CLIP)
        optimizer.step()
        if step == 3:
            wrapped.make_equal()
            accelerator.save_state(folder)
            saved = {name: each.clone() for name, each in model.state_dict().items()}
    wrapped.make_equal()
    trained = {name: each.clone() for name, each in model.state_dict().items()}
    accelerator.load_state(folder)
    for name, value in model.state_dict().items():  # of private layers, this site's
        if name.startswith(("net.3.", "net.1.w")):
            assert torch.equal(value, saved[name])
            assert not torch.equal(value, trained[name])
    model.load_state_dict(trained)
    return model, wrapped.reduction


def in_transformers(folder: str, mode: str, **options: object) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    from dadplug.transformers import attach

    class Classifier(Net):
        def forward(self, inputs, labels):
            logits = self.net(inputs)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    rows = [{"inputs": each, "labels": label} for batch in data() for each, label in zip(*batch, strict=True)]
    args = TrainingArguments(
        folder, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", max_grad_norm=CLIP,
        per_device_train_batch_size=5, num_train_epochs=1, learning_rate=0.01,
    )  # fmt: skip
    trainer = Trainer(Classifier(), args, train_dataset=rows)
    attach(trainer, mode=mode, private=NAMES, **options)
    trainer.train()
    return trainer.model, trainer.reduction


LOCAL = {"every": 2, "overlap": False}
SERVER = {"mode": "dad", "staleness": 2}
TRAINERS = {
    "lightning": ("pytorch_lightning", partial(in_lightning, strategy="DADStrategy", mode="dad", compare_every=1)),
    "lightning fused": ("pytorch_lightning", partial(in_lightning, strategy="DADStrategy", mode="dad", fused=True)),
    "lightning local": ("pytorch_lightning", partial(in_lightning, strategy="LocalSGDStrategy", **LOCAL)),
    "lightning server": ("pytorch_lightning", partial(in_lightning, strategy="ParameterServerStrategy", **SERVER)),
    "catalyst server": ("catalyst", partial(in_catalyst, runner="ParameterServerRunner", **SERVER)),
    "catalyst": ("catalyst", partial(in_catalyst, runner="DistributedRunner", mode="dad", compare_every=1)),
    "catalyst local": ("catalyst", partial(in_catalyst, runner="LocalSGDRunner", **LOCAL)),
    "accelerate": ("accelerate", partial(in_accelerate, mode="dsgd", compare_every=1)),
    "accelerate local": ("accelerate", partial(in_accelerate, mode="localsgd", **LOCAL)),
    "transformers": ("transformers", partial(in_transformers, mode="rankdad", compare_every=1)),
    "transformers local": ("transformers", partial(in_transformers, mode="localsgd", **LOCAL)),
}


def trains(name: str, folder: str) -> None:
    model, exchange = TRAINERS[name][1](folder)
    start = Net()
    assert exchange.first_difference() is None
    own = {path: each for path, each in model.state_dict().items() if path.startswith(("net.1.", "net.3."))}
    others = exchange.gather_objects(own)
    for path in own:
        if path != "net.1.num_batches_tracked":
            assert not torch.equal(others[0][path], others[1][path]), path
    moved = (model.net[3].weight - start.net[3].weight).norm()
    assert 0 < moved < (0.5 if "transformers" in name or "local" in name else 0.1)  # clipped, and begun as at the site
    exchange.detach(discard=True)


@pytest.mark.parametrize("name", TRAINERS)
def test_shared_layers_stay_equal_and_private_ones_at_home(name, tmp_path):
    support.need(TRAINERS[name][0])
    assert dadplug
    support.sites(2).run(trains, name, str(tmp_path))
