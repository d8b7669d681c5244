"""Programs for Lightning's Trainer that do more than forward, backward, step."""

import copy
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

WIDTH, CLASSES = 6, 3
ROWS = (5, 3)  # of each batch, by site
cross_entropy = nn.functional.cross_entropy


def batches(count: int, seed: int = 0) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return each batch as the rows of every site."""
    generator = torch.Generator().manual_seed(seed)
    every = []
    for _ in range(count):
        inputs = torch.randn(sum(ROWS), WIDTH, generator=generator, dtype=torch.float64)
        targets = (inputs[:, :CLASSES] + 0.3 * inputs[:, CLASSES:]).argmax(1)
        every.append(list(zip(inputs.split(ROWS), targets.split(ROWS), strict=True)))
    return every


def loader(count: int, site: int | None, seed: int = 0) -> DataLoader:
    """Build the loader of a site; of one process with all sites' rows, where there is none."""
    every = batches(count, seed)
    if site is None:
        own: list[Any] = [tuple(map(torch.cat, zip(*parts, strict=True))) for parts in every]
    else:
        own = [parts[site] for parts in every]
    return DataLoader(own, batch_size=None)


class Plain(pl.LightningModule):
    """One step after the other.

    Attributes:
        site: the site; None in one process.
        settings: of the Trainer.
        count: number of batches.
    """

    settings: dict[str, Any] = {}
    count = 7

    def __init__(self, site: int | None) -> None:
        super().__init__()
        self.site = site
        self.seen: list[float] = []
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, CLASSES))

    def callbacks(self) -> list[Any]:
        return []

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        return cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("valid", cross_entropy(self(batch[0]), batch[1]), sync_dist=True, batch_size=len(batch[0]))

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


class Accumulation(Plain):
    """Groups of three batches, the last of an epoch incomplete."""

    settings = {"accumulate_grad_batches": 3}


class ClippedNorm(Plain):
    settings = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}


class ClippedValue(Plain):
    settings = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


class Limited(Plain):
    """Fewer batches than there are, and none of them whole epochs."""

    settings = {"limit_train_batches": 4, "max_steps": 6, "max_epochs": -1}


class Skipped(Plain):
    """No loss for a batch: at site 1 only, at all sites, and after the forward pass."""

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        if batch_idx == 1 and self.site is None:
            inputs, targets = inputs[: ROWS[0]], targets[: ROWS[0]]
        if batch_idx == 4 and self.site is None:
            inputs, targets = inputs[ROWS[0] :], targets[ROWS[0] :]
        if batch_idx == 3 or (batch_idx == 1 and self.site == 1):
            return None
        loss = cross_entropy(self(inputs), targets)
        return None if batch_idx == 4 and self.site == 0 else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class SkippedStep(Plain):
    """Every second batch runs the closure without a step."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx % 2:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


class LineSearch(Plain):
    """L-BFGS evaluates the closure several times, and looks at the loss."""

    count = 3

    def training_step(self, batch, batch_idx):
        return cross_entropy(self(batch[0]), batch[1]) + 0.01 * sum(p.square().sum() for p in self.parameters())

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")


class Norms(Plain):
    """Reads gradients wherever Lightning shows them."""

    def _norm(self) -> float:
        return float(torch.cat([p.grad.flatten() for p in self.parameters()]).norm())

    def on_after_backward(self):
        self.seen.append(self._norm())
        self.log("norm", self.seen[-1])

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(self._norm())


class Adversaries(Plain):
    """A GAN: manual optimization of two networks in turns, two backward passes for one step of the first."""

    toggle = True

    def __init__(self, site: int | None) -> None:
        super().__init__(site)
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(CLASSES, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.judge = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        real, noise = batch[0], torch.sin(batch[0][:, :CLASSES])
        loss = nn.functional.binary_cross_entropy_with_logits
        ones, zeros = torch.ones(len(real), 1).to(real), torch.zeros(len(real), 1).to(real)
        makes, judges = self.optimizers()
        if self.toggle:
            self.toggle_optimizer(judges)
        judges.zero_grad()
        self.manual_backward(loss(self.judge(real), ones))
        self.manual_backward(loss(self.judge(self.net(noise).detach()), zeros))
        judges.step()
        if self.toggle:
            self.untoggle_optimizer(judges)
            self.toggle_optimizer(makes)
        makes.zero_grad()
        self.manual_backward(loss(self.judge(self.net(noise)), ones))
        self.clip_gradients(makes, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        makes.step()
        if self.toggle:
            self.untoggle_optimizer(makes)

    def validation_step(self, batch, batch_idx):
        self.log("valid", self.judge(batch[0]).mean(), sync_dist=True, batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=0.02) for part in (self.net, self.judge)]


class AdversariesTogether(Adversaries):
    """Without toggling the generator's backward reaches the judge, too; what is left there is cleared later."""

    toggle = False


class ManualAccumulation(Plain):
    """Manual optimization that steps after every third batch."""

    def __init__(self, site: int | None) -> None:
        super().__init__(site)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(cross_entropy(self(batch[0]), batch[1]) / 3)
        if batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


class ManualClosure(Plain):
    """Manual optimization with a closure that the optimizer calls."""

    count = 3

    def __init__(self, site: int | None) -> None:
        super().__init__(site)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = cross_entropy(self(batch[0]), batch[1])
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4)


class Average(pl.Callback):
    """An exponential moving average of the weights, on which the module is evaluated."""

    def on_fit_start(self, trainer, pl_module):
        self.average = copy.deepcopy(pl_module.net)

    def on_train_batch_end(self, trainer, pl_module, *rest):
        with torch.no_grad():
            for mean, parameter in zip(self.average.parameters(), pl_module.net.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)

    def on_validation_start(self, trainer, pl_module):
        pl_module.net, self.average = self.average, pl_module.net

    def on_validation_end(self, trainer, pl_module):
        pl_module.net, self.average = self.average, pl_module.net


class Averaged(Plain):
    def callbacks(self) -> list[Any]:
        return [Average()]


class StochasticAverage(Plain):
    settings = {"max_epochs": 4}

    def callbacks(self) -> list[Any]:
        return [pl.callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1)]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class StopsEarly(Plain):
    """Stops by a loss that is that of all sites."""

    settings = {"max_epochs": 30}

    def callbacks(self) -> list[Any]:
        return [pl.callbacks.EarlyStopping("valid", patience=1, min_delta=0.05)]


class Stages(Plain):
    """A scheduler by step and by epoch, and layers that are frozen in the second epoch."""

    settings = {"max_epochs": 3}

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.current_epoch != 1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


PROGRAMS = {
    kind.__name__: kind
    for kind in (
        Plain,
        Accumulation,
        ClippedNorm,
        ClippedValue,
        Limited,
        Skipped,
        SkippedStep,
        LineSearch,
        Norms,
        Adversaries,
        AdversariesTogether,
        ManualAccumulation,
        ManualClosure,
        Averaged,
        StochasticAverage,
        StopsEarly,
        Stages,
    )
}


def trainer(strategy: Any, module: Plain, **settings: Any) -> pl.Trainer:
    """Build the Trainer of a program."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "use_distributed_sampler": False, "num_sanity_val_steps": 1}
    own = {"max_epochs": 2, "precision": "64-true", "callbacks": module.callbacks()} | module.settings
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, **(quiet | own | settings))
