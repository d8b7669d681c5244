"""Loops that use more of PyTorch: hooks, checkpoints, compilation, loaders, partial backward passes, sequences."""

import functools
from collections import UserDict

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from .compare import loop
from .site import CLASSES, STEPS, WIDTH, Site, Training, loss, net, trains

CHANGED = "a gradient that the program has changed is sent as it is"


class _Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.body, self.reentrant = nn.Linear(WIDTH, WIDTH), net(out=WIDTH), reentrant
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.body, self.first(x), use_reentrant=self.reentrant)
        return self.last(torch.tanh(x))


@loop()
def checkpointing(site: Site) -> None:
    trains(site, site.model(lambda: _Checkpointed(False)))


@loop()
def reentrant_checkpointing(site: Site) -> None:
    trains(site, site.model(lambda: _Checkpointed(True)))


@loop(tolerance=0.05)
def checkpointing_under_autocast(site: Site) -> None:
    """In bf16, whose rounding is all that may differ."""
    training = Training(site, site.model(lambda: _Checkpointed(False).float()))
    for step in training.steps():
        inputs, targets = site.batch(step)
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(training.model, (inputs.float(), targets))
        value.backward()
        training.agree(len(inputs))


@loop(chains=False)
def compiled(site: Site) -> None:
    training = Training(site)
    fast = training.model if site.by_hand else torch.compile(training.model, backend="eager")
    rows = (4, 7)[site.rank]  # in all steps, since every other number is compiled anew
    for step in training.steps(3):
        loss(fast, site.batch(step, rows)).backward()
        training.agree(rows)


@functools.cache
def _loader(rank: int, rows: int) -> DataLoader:
    """A loader whose workers live on, since this process starts them for one mode after the other."""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(3 * rows, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, CLASSES, (3 * rows,), generator=generator)
    workers = {"num_workers": 1, "persistent_workers": True} if rank else {}
    return DataLoader(TensorDataset(inputs, targets), batch_size=rows, **workers)  # type: ignore[arg-type]


@loop()
def loader_with_workers(site: Site) -> None:
    training = Training(site)
    rows = (4, 7)[site.rank]
    for _ in range(2):
        for _, batch in zip(training.steps(3), _loader(site.rank, rows), strict=True):
            loss(training.model, batch).backward()
            training.agree(rows)


@loop()
def backward_with_inputs(site: Site) -> None:
    """``backward(inputs=...)``: gradients for some parameters, other ones each step but for the first."""
    training = Training(site)
    for step in training.steps(5):
        part = training.model[2 * (step % 3)] if step else training.model
        training.loss(step).backward(inputs=list(part.parameters()))
        training.agree(site.rows(step))


@loop(late=CHANGED)
def autograd_grad_written_by_hand(site: Site) -> None:
    training = Training(site)
    for step in training.steps():
        parameters = list(training.model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(training.loss(step), parameters), strict=True):
            parameter.grad = gradient
        training.agree(site.rows(step))


@loop(late=CHANGED)
def weight_hooks(site: Site) -> None:
    """Hooks on tensors that scale a gradient and mask another, one from the start and one later."""
    model = site.model()
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    mask = torch.arange(9.0) > 2
    training = Training(site, model)
    for step in training.steps(5):
        if step == 2:
            model[2].weight.register_hook(lambda gradient: gradient * mask)
        training.trains(step)


@loop(chains=False, late=CHANGED)
def post_accumulate_hooks(site: Site) -> None:
    """A hook that looks at a gradient once it has been accumulated, and one that scales it."""
    model = site.model()
    seen: list[float] = []
    model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm())))

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    model[4].bias.register_post_accumulate_grad_hook(halve)
    trains(site, model)
    assert len(seen) == STEPS
    assert all(norm > 0 for norm in seen)


@loop(chains=False, late=CHANGED)
def clipping_before_synchronize(site: Site) -> None:
    """Each site clips its own gradient, of a backward pass under `no_sync`."""
    training = Training(site)
    for step in training.steps():
        with training.reduction.no_sync():
            training.loss(step).backward()
        nn.utils.clip_grad_norm_(training.model.parameters(), 0.05)
        training.agree(site.rows(step))


class _Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop, self.head = net(out=8), nn.Dropout(0.4), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.body(x)))


@loop()
def dropout_with_unequal_seeds(site: Site) -> None:
    trains(site, site.model(_Dropped))


@loop()
def dropout_with_equal_seeds(site: Site) -> None:
    torch.manual_seed(11)
    trains(site, site.model(_Dropped))


class _Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(13, WIDTH, sparse=sparse), net()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(self.table(tokens).mean(1))


def _reads(site: Site, sparse: bool) -> None:
    training = Training(site, site.model(lambda: _Words(sparse)))
    for step in training.steps():
        tokens = torch.randint(0, 13, (site.rows(step), 3))
        loss(training.model, (tokens, site.batch(step)[1])).backward()
        training.agree(len(tokens))


@loop()
def embeddings(site: Site) -> None:
    _reads(site, False)


@loop()
def sparse_embeddings(site: Site) -> None:
    _reads(site, True)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.gru, self.head = nn.Linear(2 * WIDTH, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True), net()

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        for position in range(x.shape[1]):
            state = torch.tanh(self.cell(torch.cat([x[:, position], state], 1)))
        return self.head(self.gru(x)[0][:, -1] + state), state


@loop()
def truncated_backpropagation(site: Site) -> None:
    """Windows of a sequence, the hidden state detached between them."""
    training = Training(site, site.model(_Recurrent))
    rows = site.rows(0)
    state = torch.zeros(rows, WIDTH)
    for step in training.steps():
        outputs, state = training.model(torch.randn(rows, 3, WIDTH), state.detach())
        nn.functional.cross_entropy(outputs, site.batch(step, rows)[1]).backward()
        training.agree(rows)


class _Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = net(out=8), nn.Linear(8, CLASSES), nn.Linear(8, 3)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        features = self.body(batch["inputs"])
        return {"left": self.left(features), "right": self.right(features), "features": features}


@loop(chains=False)
def dict_of_outputs(site: Site) -> None:
    training = Training(site, site.model(_Outputs))
    for step in training.steps():
        inputs, targets = site.batch(step)
        outputs = training.model({"inputs": inputs})
        (nn.functional.cross_entropy(outputs["left"], targets) + outputs["right"].square().mean()).backward()
        training.agree(len(inputs))


class _Batch:
    """A batch that pytree does not open."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs


class _Opens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, batch: object) -> Tensor:
        return self.body(batch.inputs if isinstance(batch, _Batch) else batch["inputs"])  # type: ignore[index]


@loop(late="the rows of such batches are counted when they have been sent, so that sites expect those of the last step")
def batch_object(site: Site) -> None:
    training = Training(site, site.model(_Opens))
    for step in training.steps():
        inputs, targets = site.batch(step)
        batch = _Batch(inputs) if step % 2 else UserDict(inputs=inputs)
        loss(training.model, (batch, targets)).backward()
        training.agree(len(inputs))
