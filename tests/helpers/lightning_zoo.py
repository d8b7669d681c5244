"""Lightning modules of several kinds, for tests that train each in every mode."""

import os
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

WIDTH, CLASSES = 12, 3
cross_entropy = nn.functional.cross_entropy


class Plain(pl.LightningModule):
    """A network in a child, called through forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.LayerNorm(24), nn.Linear(24, CLASSES))

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("valid", cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Children(Plain):
    """Several children, none called through forward, and a bare parameter; a scheduler by step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, 20)
        self.head = nn.Linear(20, CLASSES)
        self.scale = nn.Parameter(torch.ones(20))

    def forward(self, inputs):
        return self.head(torch.tanh(self.net(inputs)) * self.scale)

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.head(torch.tanh(self.net(batch[0])) * self.scale), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Functional(Plain):
    """Calls no module at all."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch, batch_idx):
        return cross_entropy(nn.functional.linear(batch[0], self.net.weight, self.net.bias), batch[1])


class Metrics(Plain):
    """torchmetrics beside the network, and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.valid_accuracy = MulticlassAccuracy(CLASSES)

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_epoch=True)
        return cross_entropy(logits, batch[1])

    def validation_step(self, batch, batch_idx):
        self.valid_accuracy.update(self(batch[0]), batch[1])
        self.log("valid_accuracy", self.valid_accuracy)


class Tied(Plain):
    """A pair of layers with one weight, and a head that shares it with an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.words = nn.Embedding(CLASSES, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.words.weight

    def forward(self, inputs):
        start = self.words(torch.zeros(len(inputs), dtype=torch.long))
        return self.head(torch.tanh(self.second(torch.tanh(self.first(inputs) + start))))


class Frozen(Plain):
    """A backbone that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh()).requires_grad_(False)
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def forward(self, inputs):
        return self.net(self.backbone(inputs))


class TwoOptimizers(Plain):
    """Manual optimization of two parts in turns, as an adversarial pair is trained."""

    toggle = True

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.coder = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, inputs):
        return self.head(self.coder(inputs))

    def training_step(self, batch, batch_idx):
        for optimizer, sign in zip(self.optimizers(), (1.0, 0.5), strict=True):
            if self.toggle:
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(sign * cross_entropy(self(batch[0]), batch[1]))
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            if self.toggle:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.coder, self.head)]


class TwoOptimizersAtOnce(TwoOptimizers):
    """Two optimizers without toggling: each backward reaches all parameters."""

    toggle = False


class Recurrent(Plain):
    """A recurrent layer and attention, whose weights have no factors here."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Linear(WIDTH, 3 * 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs):
        states, _ = self.lstm(self.words(inputs).view(len(inputs), 3, 8))
        return self.head(self.attention(states, states, states, need_weights=False)[0].mean(1))


ZOO = {
    kind.__name__: kind
    for kind in (Plain, Children, Functional, Metrics, Tied, Frozen, TwoOptimizers, TwoOptimizersAtOnce, Recurrent)
}

AUTOMATIC = [name for name in ZOO if not name.startswith("Two")]


def loader(rows: int = 64, batch_size: int = 8, seed: int = 0, dtype=torch.float64, shuffle: bool = True) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    targets = (inputs[:, :CLASSES] + 0.3 * torch.randn(rows, CLASSES, generator=generator)).argmax(1)
    return DataLoader(TensorDataset(inputs, targets), batch_size=batch_size, shuffle=shuffle)


def trainer(strategy: Any, **settings: Any) -> pl.Trainer:
    """Build a quiet Trainer; ``"ddp"`` is Lightning's own strategy, for two processes that others have started."""
    warnings.filterwarnings("ignore")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "max_epochs": 2, "precision": "64-true", "devices": 1}
    if strategy == "ddp":
        os.environ.update(NODE_RANK=os.environ["RANK"], LOCAL_RANK="0")
        strategy, quiet["num_nodes"] = "ddp_find_unused_parameters_true", 2
    return pl.Trainer(strategy=strategy, accelerator="cpu", **quiet | settings)


def fit(kind: str | type[Plain], strategy: Any, data: DataLoader | None = None, resume=None, **settings: Any) -> tuple:
    """Train and validate a module of the zoo or another one; return it and the Trainer."""
    current = trainer(strategy, **settings)
    torch.manual_seed(0)
    dtype = torch.float64 if current.precision == "64-true" else torch.float32
    module = (ZOO[kind] if isinstance(kind, str) else kind)().to(dtype)
    held_out = loader(24, seed=1, dtype=dtype, shuffle=False)
    current.fit(module, data or loader(dtype=dtype), held_out, ckpt_path=resume)
    return module, current


def assert_close(module: nn.Module, expected: nn.Module, tolerance: float) -> None:
    for (name, value), other in zip(module.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(value, other, rtol=tolerance, atol=tolerance), name


class Losses(pl.Callback):
    """Remembers the loss of every batch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.values.append(float(outputs["loss"]))


class Seen(Plain):
    """A module that remembers the numbers of its training samples, which are a third entry of its batches."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.seen = net, []
        self.accuracy = MulticlassAccuracy(4, average="micro")

    def training_step(self, batch, batch_idx):
        self.seen += batch[2].tolist()
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.accuracy.update(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)
