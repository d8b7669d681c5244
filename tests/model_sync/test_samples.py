"""Weights of sites: equal by default, and by the samples of their batches where that is asked for."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import support
import torch
import torch.distributed as dist
from comparison import off_by
from torch import Tensor, nn

import dadplug
from dadplug.step.model_sync.samples import SampleCounter


class Recurrent(nn.Module):
    """A recurrent layer without ``batch_first``, and outputs for all positions or for the last one."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.whole, self.layer, self.last = whole, nn.LSTM(6, 5), nn.Linear(5, 2)

    def forward(self, x: Any) -> Tensor:
        states, (end, _) = self.layer(x)
        return self.last(states if self.whole else end[-1])


class Bags(nn.Module):
    """Bags of any size in one tensor, which offsets divide."""

    def __init__(self, last: bool = False) -> None:
        super().__init__()
        self.bags, self.last = nn.EmbeddingBag(20, 6, include_last_offset=last), nn.Linear(6, 2)

    def forward(self, *inputs: Tensor) -> Tensor:
        offsets, words = sorted(inputs, key=len)
        return self.last(self.bags(words, offsets))


class Graph:
    """A batch of graphs as one object, as PyTorch Geometric has it: their nodes in one tensor."""

    def __init__(self, x: Tensor, batch: Tensor) -> None:
        self.x, self.batch = x, batch


class Pooled(nn.Module):
    """A model of graphs, with an output for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, data: Any, batch: Tensor | None = None) -> Tensor:
        x, batch = (data.x, data.batch) if batch is None else (data, batch)
        return torch.zeros(int(batch.max()) + 1, 2, dtype=x.dtype).index_add(0, batch, self.layer(x))


class Detector(nn.Module):
    """A model of lists of pictures and labels, which returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, pictures: list[Tensor], labels: list[dict[str, Tensor]]) -> Tensor:
        return torch.stack([self.layer(each).sum() - one["box"] for each, one in zip(pictures, labels)]).square().mean()


class Mixed(nn.Module):
    """A recurrent layer with ``batch_first`` in a model whose inputs begin with the position."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.GRU(6, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x.transpose(0, 1))[0]).transpose(0, 1)


class Scaled(nn.Module):
    """A model with a parameter that it returns, and one that the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.weight = (
            nn.Linear(6, 2),
            nn.Parameter(torch.ones(())),
            nn.Parameter(torch.ones(())),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.scale


class Parts(nn.Module):
    """A container whose parts the program calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 2)

    def train_step(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def sequences(step: int, sites: Sequence[int], length: int = 0) -> list[Tensor]:
    """Return 2 sequences of site 0, and 5 of site 1."""
    made = []
    for number in [number for site in sites for number in ((0, 1), range(2, 7))[site]]:
        generator = torch.Generator().manual_seed(100 * step + number)
        made.append(torch.randn(length or 1 + (number + step) % 4, 6, generator=generator, dtype=torch.float64))
    return made


def rows(step: int, sites: Sequence[int]) -> tuple[Any, ...]:
    return (torch.cat(sequences(step, sites, 1)),)


def in_a_mapping(step: int, sites: Sequence[int]) -> tuple[Any, ...]:
    return ({"scale": torch.ones(()), "x": rows(step, sites)[0]},)


def positions_first(step: int, sites: Sequence[int]) -> tuple[Any, ...]:
    return (torch.stack(sequences(step, sites, 4), 1),)


def packed(step: int, sites: Sequence[int]) -> tuple[Any, ...]:
    return (nn.utils.rnn.pack_sequence(sequences(step, sites), enforce_sorted=False),)


def with_offsets(step: int, sites: Sequence[int]) -> tuple[Any, ...]:
    found = sequences(step, sites)
    ends = torch.tensor([0, *(len(each) + 1 for each in found)]).cumsum(0)
    words = torch.cat([torch.cat([each, each[:1]]) for each in found])
    return (words[:, 0].abs() * 100).long() % 20, ends[:-1]


def with_last_offset(step: int, sites: Sequence[int]) -> tuple[Any, ...]:
    words, offsets = with_offsets(step, sites)
    return torch.cat([offsets, torch.tensor([len(words)])]), words


def graphs(step: int, sites: Sequence[int]) -> tuple[Any, ...]:
    found = sequences(step, sites)
    sizes = torch.tensor([len(each) + 1 for each in found])
    nodes = torch.cat([torch.cat([each, each[:1]]) for each in found])
    return nodes, torch.arange(len(found)).repeat_interleave(sizes)


def graph_object(step: int, sites: Sequence[int]) -> tuple[Any, ...]:
    return (Graph(*graphs(step, sites)),)


def lists(step: int, sites: Sequence[int]) -> tuple[Any, ...]:
    found = sequences(step, sites, 3)
    return found, [{"box": each.mean()} for each in found]


class OfMapping(nn.Module):
    """A model of a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.layer(batch["x"]) * batch["scale"]


Case = tuple[Callable[[], nn.Module], Callable[..., tuple[Any, ...]]]
COUNTED: dict[str, Case] = {
    "rows": (plain, rows),
    "a mapping": (OfMapping, in_a_mapping),
    "packed sequences": (Recurrent, packed),
    "returned and used parameters": (Scaled, rows),
}
STATED: dict[str, Case] = {
    "positions first, last output": (Recurrent, positions_first),
    "positions first, all outputs": (lambda: Recurrent(whole=True), positions_first),
    "positions first, a layer with the batch first": (Mixed, positions_first),
    "attention": (lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0), positions_first),
    "offsets of bags": (Bags, with_offsets),
    "offsets with the last one first": (lambda: Bags(True), with_last_offset),
    "nodes of graphs": (Pooled, graphs),
    "an object": (Pooled, graph_object),
    "lists of pictures": (Detector, lists),
    "parts": (Parts, rows),
}


def loss_of(model: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    outputs = model.train_step(*inputs) if isinstance(model, Parts) else model(*inputs)
    if isinstance(model, Scaled):
        return outputs[0].square().mean() * (outputs[1] + model.weight)
    return outputs.square().mean() if outputs.dim() else outputs


def in_one_process(kind: Callable[[], nn.Module], inputs: Any, mean: bool) -> nn.Module:
    """Train on the rows of both sites: by the mean of their losses, or by the loss of all rows."""
    torch.manual_seed(0)
    model = kind().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        if mean:
            (sum(loss_of(model, inputs(step, [site])) for site in (0, 1)) / 2).backward()
        else:
            loss_of(model, inputs(step, [0, 1])).backward()
        optimizer.step()
    return model


def at_sites(kind: Callable[[], nn.Module], inputs: Any, stated: bool = False, **options: Any) -> nn.Module:
    """Train at this site on its rows; state their number if asked."""
    torch.manual_seed(0)
    model, site = kind().double(), dist.get_rank()
    reduction = dadplug.GradientReduction(model, mode="dsgd", **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        for step in range(3):
            optimizer.zero_grad()
            with reduction.samples((2, 5)[site]) if stated else nullcontext():
                loss_of(model, inputs(step, [site])).backward()
            reduction.synchronize()
            optimizer.step()
        return model
    finally:
        reduction.detach(discard=True)


def assert_equal(found: nn.Module, expected: nn.Module) -> None:
    for (name, one), two in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert off_by(one.detach(), two.detach()) < 1e-10, name


@pytest.mark.parametrize("name", [*COUNTED, *STATED])
@support.at_sites(2)
def test_sites_count_equally_or_by_samples(name: str) -> None:
    kind, inputs = (COUNTED | STATED)[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_equal(at_sites(kind, inputs), in_one_process(kind, inputs, mean=True))
    if name in STATED:
        with pytest.raises(ValueError, match=r"reduction\.samples"):
            at_sites(kind, inputs, weighting="samples")
    found = at_sites(kind, inputs, stated=name in STATED, weighting="samples")
    assert_equal(found, in_one_process(kind, inputs, mean=False))


def by_reduction(model: nn.Module, **options: Any) -> Callable[[], None]:
    return dadplug.GradientReduction(model, mode="dad", **options).synchronize


def by_local_steps(model: nn.Module, **options: Any) -> Callable[[], None]:
    return dadplug.LocalSGD(model, torch.optim.SGD(model.parameters(), 0.1), every=1, **options).step


@pytest.mark.parametrize("way", [by_reduction, by_local_steps])
@support.at_sites(2)
def test_unequal_batches_are_warned_of_once(way: Callable[..., Callable[[], None]]) -> None:
    for size, options, expected in [
        (2 + dist.get_rank(), {}, 1),
        (2, {}, 0),
        (2 + dist.get_rank(), {"weighting": "samples"}, 0),
    ]:
        model = plain()
        agree = way(model, **options)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(3):
                model(torch.ones(size, 6)).sum().backward()
                agree()
        named = [each for each in found if "weighting='samples'" in str(each.message) and "2, 3" in str(each.message)]
        assert len(named) == expected


# Passes that deliver no gradients

INNER: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "input gradients": lambda model, x: torch.autograd.grad(model(x.requires_grad_()).sum(), x),
    "jacobian": lambda model, x: torch.autograd.functional.jacobian(model, x),
    "hessian": lambda model, x: torch.autograd.functional.hessian(lambda each: model(each).sum(), x),
    "func.grad": lambda model, x: torch.func.grad(lambda each: model(each).sum())(x),
    "vmap": lambda model, x: torch.func.vmap(torch.func.grad(lambda each: model(each).sum()))(x),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x),
    "a penalty": lambda model, x: torch.autograd.grad(model(x.requires_grad_()).sum(), x, create_graph=True),
    "forward mode": lambda model, x: torch.autograd.functional.jacobian(
        model, x, strategy="forward-mode", vectorize=True
    ),
    "evaluation": lambda model, x: model(x),
    "parameters": lambda model, x: torch.autograd.grad(model(x).sum(), [*model.parameters()]),
    "an interrupted pass": lambda model, x: interrupted(model, x),
    "a failed pass": lambda model, x: failed(model),
    "an attack by backward": lambda model, x: (model(x.requires_grad_()).sum().backward(), model.zero_grad()),
}


def interrupted(model: nn.Module, x: Tensor) -> None:
    """Interrupt a forward pass in its last layer, as Ctrl-C in a notebook does."""
    inner = model.module if isinstance(model, dadplug.DistributedDataParallel) else model

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = inner[-1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    handle.remove()


def failed(model: nn.Module) -> None:
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 7))


@support.at_sites(2)
def test_passes_without_gradients_do_not_count() -> None:
    own = dist.get_rank()
    batch = [torch.randn(size, 6, generator=torch.Generator().manual_seed(size)).double() for size in (4, 6)]
    for way in ("reduction", "drop-in", "dad", "local"):
        for stated in (False, True):
            for name, inner in INNER.items():
                if "backward" in name and (stated or way == "drop-in"):  # the statement is of both; it synchronizes
                    continue
                torch.manual_seed(0)
                model = plain().double()
                reference = copy.deepcopy(model)
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                if way == "drop-in":
                    called = dadplug.DistributedDataParallel(model, mode="dsgd", weighting="samples")
                    reduction: Any = called.reduction
                elif way == "local":
                    called, reduction = (
                        model,
                        dadplug.LocalSGD(model, optimizer, every=1, weighting="samples", wire="fp32", overlap=False),
                    )
                else:
                    called = model
                    reduction = dadplug.GradientReduction(
                        model, mode="dsgd" if way == "reduction" else way, weighting="samples"
                    )
                with reduction.samples(len(batch[own])) if stated else warnings.catch_warnings():
                    if own == 0:
                        inner(called, batch[0][:3].clone())
                    model.zero_grad()
                    loss = called(batch[own]).square().mean()
                    if own == 0 and "backward" not in name:
                        inner(called, batch[0][:3].clone())
                    loss.backward()
                    if own == 0 and "backward" not in name:
                        inner(called, batch[0][:3].clone())
                if way == "local":
                    reduction.step()
                    reduction.finish()
                else:
                    if way != "drop-in":
                        reduction.synchronize()
                    optimizer.step()
                reference(torch.cat(batch)).square().mean().backward()
                torch.optim.SGD(reference.parameters(), 0.1).step()
                for one, two in zip(model.parameters(), reference.parameters(), strict=True):
                    assert torch.allclose(one, two, rtol=0, atol=1e-10), f"{way}, {name}, stated: {stated}"
                reduction.detach()


# What a model does with its outputs, and what is made of it


class Writes(nn.Module):
    """A model that writes into its own output, in several ways."""

    def __init__(self, how: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(6, 4), how

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        self.how(z)
        return z


@pytest.mark.parametrize("by_samples", [False, True])
def test_outputs_are_watched_with_their_samples_where_parts_are_called_alone(by_samples: bool) -> None:
    """Privacy checks by them that a loss does not mix samples."""
    model, seen = nn.Sequential(nn.Linear(6, 4), nn.Tanh()), []
    counter = SampleCounter(model, lambda: None, lambda: None, by_samples)
    counter.on_outputs.append(lambda outputs, samples, inputs: seen.append((len(outputs), samples)))
    model(torch.randn(5, 6)), model[0](torch.randn(3, 6))
    counter.detach()
    assert seen == [(1, 5), (1, 3)]


@pytest.mark.parametrize("mode", ["dsgd", "dad", "edad", "rankdad", "powersgd", "topk"])
@support.at_sites(2)
def test_gradients_are_zeros_where_no_site_states_samples(mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    reduction = dadplug.GradientReduction(model, mode=mode)
    for step in range(4):
        model.zero_grad(set_to_none=step != 3)
        with reduction.samples(0 if step in (1, 3) else 4):
            model(torch.randn(4, 6)).square().mean().backward()  # other data at each site
        reduction.synchronize()
        zeros = [not bool(parameter.grad.any()) for parameter in model.parameters()]
        assert zeros == [step in (1, 3)] * len(zeros), step
        assert reduction.contributors == ([] if step in (1, 3) else [0, 1])


def scaled_slice(z: Tensor) -> None:
    z[..., 0] = 2 * z[..., 0]


@pytest.mark.parametrize("mode", ["dsgd", "rankdad", "powersgd", "topk"])
def test_models_may_write_into_their_outputs(mode: str) -> None:
    for how in (
        scaled_slice,
        lambda z: z.mul_(2),
        lambda z: z.view(-1).mul_(2),
        lambda z: z.T.add_(1) if z.dim() == 2 else z.add_(1),
    ):
        for x in (torch.randn(3, 6), torch.randn(2, 3, 6)):
            model = Writes(how)
            reference = copy.deepcopy(model)
            reduction = dadplug.GradientReduction(model, mode=mode, rank=4)
            for each in (model, reference):
                z = each(x)
                z[..., 1] = 3 * z[..., 1]  # and the program, too
                z.square().sum().backward()
            reduction.synchronize()
            assert torch.isfinite(model.layer.weight.grad).all()
            if mode == "dsgd":
                assert torch.equal(model.layer.weight.grad, reference.layer.weight.grad)
            reduction.detach()


MADE: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "deepcopy": lambda model, x: copy.deepcopy(model),
    "copy": lambda model, x: copy.copy(model),
    "pickle": lambda model, x: pickled(model),
    "script of a copy": lambda model, x: torch.jit.script(copy.deepcopy(model)),
    "script of a pickle": lambda model, x: torch.jit.script(pickled(model)),
    "trace": lambda model, x: torch.jit.trace(model, x),
    "saved trace": lambda model, x: torch.jit.load(saved(torch.jit.trace(model, x))),
    "export": lambda model, x: torch.export.export(model, (x,)).module(),
    "strict export": lambda model, x: torch.export.export(model, (x,), strict=True).module(),
    "quantize_dynamic": lambda model, x: torch.ao.quantization.quantize_dynamic(model, {nn.Linear}),
}


def pickled(model: nn.Module) -> Any:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def saved(module: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.jit.save(module, stream)
    stream.seek(0)
    return stream


@pytest.mark.parametrize("mode", ["dsgd", "dad", "rankdad", "edad"])
@support.at_sites(2)
def test_copies_and_exports_have_no_part_of_the_reduction(mode: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    model = nn.Sequential(plain(), nn.Tanh())
    twin = copy.deepcopy(model)
    reductions = [dadplug.GradientReduction(each, mode=mode) for each in (model, twin)]
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, twin)]

    def step() -> None:
        for each, reduction, optimizer in zip((model, twin), reductions, optimizers, strict=True):
            optimizer.zero_grad()
            each(x + dist.get_rank()).square().mean().backward()
            reduction.synchronize()
            optimizer.step()

    step()
    for name, make in MADE.items():
        if mode != "dsgd" and name == "copy":  # which shares the dictionary of the forward
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = make(model, x)
        with torch.no_grad():
            if name != "quantize_dynamic":
                assert torch.allclose(made(x), model(x)), name
        if isinstance(made, nn.Sequential) and name != "quantize_dynamic":
            made(x).sum().backward()  # trains alone
        step()
        for one, two in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(one, two), name


@support.at_sites(2)
def test_samples_of_gradients_that_were_all_replaced_are_not_guessed() -> None:
    model = nn.Linear(40, 30)
    reduction = dadplug.GradientReduction(model, mode="dad", weighting="samples")
    model(torch.randn(5, 40)).sum().backward()
    others = torch.autograd.grad(model(torch.randn(4, 40)).sum(), list(model.parameters()))
    for parameter, other in zip(model.parameters(), others):
        parameter.grad = other
    with pytest.raises(ValueError, match="have been cleared or replaced; state the number of samples by `with"):
        reduction.synchronize()


def test_a_lightning_module_in_training_can_be_scripted() -> None:
    support.need("pytorch_lightning")
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = plain()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, _: int) -> Tensor:
            return self(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

        def on_train_batch_end(self, *_: Any) -> None:
            x, made = torch.ones(3, 6), copy.deepcopy(self)
            for each in (self.to_torchscript(), self.to_torchscript(method="trace", example_inputs=x), made):
                assert torch.allclose(each(x), self(x))
            scripted.append(self.training)

    scripted: list[bool] = []
    module = Module()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 6)), 4)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy = dadplug.DADStrategy(mode="dad")
    pl.Trainer(max_epochs=1, strategy=strategy, accelerator="cpu", devices=1, **quiet).fit(module, loader)
    assert scripted == [True, True]
    assert not {"to_torchscript", "_compiled_call_impl"} & {*vars(module), *vars(module.net)}
