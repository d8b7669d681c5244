"""Privacy in trainers: steps of two micro-batches are those of single samples, and resumed runs go on counting."""

import os
from pathlib import Path

import pytest
import support
import torch
import torch.distributed as dist
from single_samples import by_backward, clipped
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dadplug
from dadplug import DifferentialPrivacy

NORM, EXPECTED, ROWS = 1.2, 6, 8
PRIVACY = DifferentialPrivacy(0.0, NORM, 0.1, EXPECTED)
NOISY = DifferentialPrivacy(1.0, NORM, 0.1, EXPECTED)


def net(dtype=torch.float64):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def rows(site, count=ROWS):
    generator = torch.Generator().manual_seed(50 + site)
    inputs = 2 * torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (count,), generator=generator)


def loss_of(model, inputs, targets):
    return nn.functional.cross_entropy(model(inputs), targets)


def expected_step(sites=2):
    """Return the parameters after a step of rate 1 on all rows of all sites, and the greatest change."""
    batch = [torch.cat(each) for each in zip(*map(rows, range(sites)), strict=True)]
    total, norms = clipped(by_backward(net(), loss_of, batch), NORM)
    assert 0 < int((norms > NORM).sum()) < sites * ROWS  # else a loss that was divided would not be seen
    return [each.detach() - total[name] / (sites * EXPECTED) for name, each in net().named_parameters()]


def check(model, tolerance=1e-10):
    for found, wanted in zip(model.parameters(), expected_step(), strict=True):
        assert float((found.detach().double() - wanted).abs().max()) < tolerance


def steps(reduction):
    return [(each.noise_multiplier, each.steps) for each in reduction._private.ledger.entries]


def lightning():
    import pytorch_lightning as pl
    from dadplug.runners import DADStrategy

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, _):
            return loss_of(self.net, *batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1.0)

    strategy = DADStrategy("dsgd", privacy=PRIVACY)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, num_nodes=2, max_epochs=1, accumulate_grad_batches=2,
        use_distributed_sampler=False, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, DataLoader(TensorDataset(*rows(dist.get_rank())), 4))
    check(module)
    assert steps(strategy.reduction) == [(0.0, 1)]


def catalyst():
    from catalyst import dl
    from dadplug.runners import DistributedRunner

    model, runner = net(), DistributedRunner(mode="dsgd", privacy=PRIVACY)
    runner.train(
        model=model, criterion=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD(model.parameters(), 1.0), num_epochs=1,
        loaders={"train": DataLoader(TensorDataset(*rows(dist.get_rank())), 4)},
        callbacks=[
            dl.CriterionCallback(metric_key="loss", input_key="logits", target_key="targets"),
            dl.BackwardCallback(metric_key="loss"),
            dl.OptimizerCallback(metric_key="loss", accumulation_steps=2),
        ],
    )  # fmt: skip
    check(model)
    assert steps(runner.reduction) == [(0.0, 1)]


@pytest.mark.parametrize("trainer", [lightning, catalyst])
def test_accumulation_in_lightning_and_catalyst(sites, trainer):
    pytest.importorskip({"lightning": "pytorch_lightning"}.get(trainer.__name__, trainer.__name__))
    sites(2).run(trainer)


def accelerator_of(privacy, accumulation=1):
    from dadplug.accelerate import Accelerator

    support.forget_accelerators()
    made = Accelerator(
        cpu=True, mode="dsgd", privacy=privacy, split_data=False, gradient_accumulation_steps=accumulation
    )
    model = net()
    optimizer, loader = torch.optim.SGD(model.parameters(), 1.0), DataLoader(TensorDataset(*rows(dist.get_rank())), 4)
    return made, *made.prepare(model, optimizer, loader)


def in_accelerate(folder):
    accelerator, model, optimizer, loader = accelerator_of(PRIVACY, 2)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, inputs, targets))
            optimizer.step()
            optimizer.zero_grad()
    check(model.module)
    assert steps(model.reduction) == [(0.0, 1)]
    accelerator.free_memory()

    accelerator, model, optimizer, loader = accelerator_of(NOISY)
    for inputs, targets in loader:
        accelerator.backward(loss_of(model, inputs, targets))
        optimizer.step()
        optimizer.zero_grad()
    assert model.reduction.first_difference() is None
    spent = model.reduction.epsilon(1e-5)
    accelerator.save_state(folder)
    accelerator.free_memory()
    accelerator, model, optimizer, loader = accelerator_of(NOISY)
    accelerator.load_state(folder)
    assert steps(model.reduction) == [(1.0, 2)]
    assert model.reduction.epsilon(1e-5) == spent > 0
    for inputs, targets in loader:
        accelerator.backward(loss_of(model, inputs, targets))
        optimizer.step()
        optimizer.zero_grad()
    assert steps(model.reduction) == [(1.0, 4)]
    assert model.reduction.epsilon(1e-5) > spent
    accelerator.free_memory()
    assert all(Path(folder).glob("*"))


def test_accelerate(sites, tmp_path):
    pytest.importorskip("accelerate")
    pytest.importorskip("opacus")
    sites(2).run(in_accelerate, str(tmp_path))


class Rows(Dataset):
    def __init__(self, site):
        self.inputs, self.labels = rows(site)

    def __len__(self):
        return ROWS

    def __getitem__(self, number):
        return {"inputs": self.inputs[number], "labels": self.labels[number]}


class Classifier(nn.Module):
    """A model as those of transformers are: it has a loss, which is divided by the number that it is given."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, inputs, labels=None, num_items_in_batch=None, **kwargs):
        logits = self.net(inputs)
        if num_items_in_batch is None:
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch
        return {"loss": loss, "logits": logits}


def trainer_of(folder, privacy, launched, poisson=False, **settings):
    from transformers import Trainer, TrainingArguments

    from dadplug.transformers import attach

    rank = dist.get_rank()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if not launched else ():
        os.environ.pop(name, None)
    if launched:
        os.environ["LOCAL_RANK"] = os.environ["RANK"]
    usual = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    usual |= {"per_device_train_batch_size": 4, "num_train_epochs": 1, "learning_rate": 1.0, "max_grad_norm": 0}
    usual |= {"optim": "sgd", "lr_scheduler_type": "constant"}
    data = torch.utils.data.ConcatDataset([Rows(0), Rows(1)]) if launched else Rows(rank)

    class Poisson(Trainer):
        def get_train_dataloader(self):
            return dadplug.PoissonLoader(self.train_dataset, 0.1, steps=12)

    kind = Poisson if poisson else Trainer
    trainer = kind(Classifier(), TrainingArguments(folder, **(usual | settings)), train_dataset=data)
    attach(trainer, mode="dsgd", privacy=privacy, timeout=30, **({} if launched else {"split_data": False}))
    return trainer


def in_transformers(folder, launched):
    from dadplug.callbacks.transformers import PrivacyMonitor

    folder = folder if launched else f"{folder}/{dist.get_rank()}"
    trainer = trainer_of(folder, PRIVACY, launched, gradient_accumulation_steps=2)
    trainer.train()
    check(trainer.model, 1e-6)  # a Trainer's loss is of single precision
    assert steps(trainer.reduction) == [(0.0, 1)]
    first = trainer.state.log_history[0]["loss"]
    assert 0.3 < first < 3  # a mean over micro-batches, and not their sum
    trainer.reduction.detach(discard=True)
    saves = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2}
    trainer = trainer_of(folder, NOISY, launched, **saves)
    trainer.add_callback(PrivacyMonitor(delta=1e-5, every=1))
    trainer.train()
    assert trainer.reduction.first_difference() is None
    assert steps(trainer.reduction) == [(1.0, 4)]
    logged = [each["privacy/epsilon"] for each in trainer.state.log_history if "privacy/epsilon" in each]
    assert logged[-1] == pytest.approx(trainer.reduction.epsilon(1e-5), rel=1e-4)
    assert logged == sorted(logged)
    trainer.reduction.detach(discard=True)
    again = trainer_of(folder, NOISY, launched, **saves)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert steps(again.reduction) == [(1.0, 4)]  # two of which the checkpoint has counted
    again.reduction.detach(discard=True)
    drawn = trainer_of(folder, NOISY, launched, poisson=True)  # some batches are empty
    drawn.train()
    assert steps(drawn.reduction) == [(1.0, 12)]
    assert drawn.reduction.first_difference() is None
    drawn.reduction.detach(discard=True)


@pytest.mark.parametrize("launched", [True, False])
def test_transformers(sites, tmp_path, launched):
    support.need("transformers")
    pytest.importorskip("opacus")
    sites(2).run(in_transformers, str(tmp_path), launched)
