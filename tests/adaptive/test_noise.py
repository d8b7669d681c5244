"""Gradient noise of a reduction, held against the gradients of single samples, which autograd computes; AdaScale."""

import copy
import math
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import pytest
import support
import torch
import torch.distributed as dist
from dadplug.hooks import LINEAR
from support import refuses
from torch import nn
from torch.func import functional_call, grad, vmap

import dadplug
from dadplug.adaptive import noise
from dadplug.adaptive.noise import GradientNoise
from dadplug.adaptive.noise_formulas import NO_ESTIMATE, Call, NoiseEstimate, gain, layout_of, squared_norms
from dadplug.errors import DamagedError


class Transformer(nn.Module):
    """A transformer of one layer, for sequences of tokens; its data come batch first or sequence first."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embedding = nn.Embedding(11, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=batch_first)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        rows = self.embedding(tokens)
        if self.batch_first:
            return self.head(self.encoder(rows).mean(1))
        return self.head(self.encoder(rows.transpose(0, 1)).mean(0))


class Twice(nn.Module):
    """A model that calls one of its layers twice for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, inputs):
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(inputs)))))


def build(name):
    torch.manual_seed(3)
    model = {
        "mlp": lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3, bias=False)),
        "twice": Twice,
        "sequence": lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4), nn.Flatten(), nn.Linear(20, 3)),
        "long": lambda: nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(60, 3)),
        "cnn": lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(4, 6, 3, stride=2, groups=2),
            nn.ReLU(),
            nn.ConvTranspose2d(6, 4, 3, groups=2),
            nn.Flatten(),
            nn.Linear(100, 3),
        ),
        "transformer": lambda: Transformer(True),
        "sequence first": lambda: Transformer(False),
    }[name]()
    return model.double()


SHAPES = {"mlp": (6,), "twice": (6,), "sequence": (5, 6), "long": (20, 6), "cnn": (2, 8, 8)}


def batch(name, samples, seed):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(3, (samples,), generator=generator)
    if name in SHAPES:
        return torch.randn(samples, *SHAPES[name], generator=generator, dtype=torch.float64), targets
    return torch.randint(11, (samples, 5), generator=generator), targets


def sample_gradients(model, inputs, targets):
    """Return the gradients of single samples by parameter, of shape (samples, elements)."""

    def loss(parameters, x, y):
        return nn.functional.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    parameters = {name: each.detach() for name, each in model.named_parameters()}
    found = vmap(grad(loss), (None, 0, 0))(parameters, inputs, targets)
    return {name: each.flatten(1) for name, each in found.items()}


def expected(gradients, shares):
    """Return variance and squared norm by the textbook: deviations from the mean of each share of a batch."""
    count = len(gradients)
    deviations = sum(float((gradients[share] - gradients[share].mean(0)).square().sum()) for share in shares)
    variance = deviations / (count - len(shares))
    return variance, float(gradients.mean(0).square().sum()) - variance / count


def expected_between(gradients, shares):
    """Return variance and squared norm by the differences between the means of shares of a batch."""
    count, norm = len(gradients), float(gradients.mean(0).square().sum())
    norms = sum(float(gradients[share].mean(0).square().sum()) * len(gradients[share]) / count for share in shares)
    variance = count / (len(shares) - 1) * (norms - norm)
    return variance, norm - variance / count


def step(model, reduction, inputs, targets, parts=1):
    model.zero_grad()
    pieces = list(zip(inputs.tensor_split(parts), targets.tensor_split(parts), strict=True))
    for x, y in pieces[:-1]:
        with reduction.no_sync():
            (nn.functional.cross_entropy(model(x), y) * len(y) / len(targets)).backward()
    x, y = pieces[-1]
    (nn.functional.cross_entropy(model(x), y) * len(y) / len(targets)).backward()
    reduction.synchronize()


def has_factors(parameter):
    return not any(part in parameter for part in ("norm", "attn", "embedding"))


def is_near(found, variance, squared_norm):
    near = {"rel_tol": 1e-9, "abs_tol": 1e-9 * variance}
    return math.isclose(found.variance, variance, **near) and math.isclose(found.squared_norm, squared_norm, **near)


@pytest.mark.parametrize(("samples", "parts"), [(7, 1), (24, 3), (40, 4)])
def test_some_samples_of_a_large_batch_stand_for_all(samples, parts):
    torch.manual_seed(5)
    deltas, activations = (torch.randn(samples, 3, width, dtype=torch.float64) for width in (4, 5))
    gradients = deltas.mT @ activations
    call = Call(activations.flatten(0, 1), deltas.flatten(0, 1), LINEAR, (1, samples, 3), 1)
    found = [squared_norms([call], torch.float64, seed) for seed in range(40)]
    weights = {round(float(each.weight), 9) for each in found}
    assert {each.samples for each in found} == {samples}
    assert len(weights) == parts
    assert math.isclose(sum(weights) / parts, float(gradients.square().sum()), rel_tol=1e-9)
    biases = deltas.sum(1).square().sum()
    assert all(math.isclose(float(each.bias), float(biases), rel_tol=1e-9) for each in found)
    for each in found:
        assert each.total is None or math.isclose(float(each.total), float(gradients.sum(0).square().sum()))


@pytest.mark.parametrize("name", ["mlp", "twice", "sequence", "long", "cnn", "transformer", "sequence first"])
def test_layers_with_factors_match_the_gradients_of_samples(name):
    model = build(name)
    inputs, targets = batch(name, 7, 1)
    gradients = sample_gradients(model, inputs, targets)
    for mode in ("dad", "dsgd", "rankdad", "powersgd"):
        reduction = dadplug.GradientReduction(model, mode=mode, rank=2, weighting="samples")
        assert math.isnan(reduction.noise.scale)
        step(model, reduction, *batch(name, 5, 0))
        step(model, reduction, inputs, targets)
        layers = reduction.noise.layers
        factored = [each for each in gradients if has_factors(each)]
        assert set(factored) == set(layers)
        for parameter in factored:
            assert is_near(layers[parameter], *expected(gradients[parameter], [slice(0, 7)])), (mode, parameter)
        if len(factored) == len(gradients):
            totals = [sum(each[place] for each in layers.values()) for place in (0, 1)]
            assert is_near(reduction.noise, *totals)
        reduction.detach()


def matches_at_sites(name: str, modes: list[str]) -> list[tuple[float, ...]]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results = []
    model = build(name)
    inputs, targets = batch(name, 19, 1)
    bounds = [0, 4, 13, 19] if world_size == 3 else [0, 7, 19]
    shares = [slice(*pair) for pair in pairwise(bounds)]
    gradients = sample_gradients(model, inputs, targets)
    for mode in modes:
        reduction = dadplug.GradientReduction(model, mode=mode, rank=2, weighting="samples")
        if rank == 0:  # the others are asked by its header
            reduction.noise.every = 1
        step(model, reduction, *batch(name, 4, rank))
        step(model, reduction, inputs[shares[rank]], targets[shares[rank]])
        for parameter in filter(has_factors, gradients):
            found, (variance, squared_norm) = reduction.noise.layers[parameter], expected(gradients[parameter], shares)
            if mode in ("dad", "dsgd", "edad"):
                assert is_near(found, variance, squared_norm), (mode, parameter)
            else:  # the squared norm comes from sketches
                assert math.isclose(found.variance, variance, rel_tol=1e-9), (mode, parameter)
        for parameter in gradients:
            if mode in ("dad", "dsgd", "edad") and not has_factors(parameter):
                means = expected_between(gradients[parameter], shares)
                assert is_near(reduction.noise.layers[parameter], *means), (mode, parameter)
        assert set(reduction.noise.layers) == set(gradients)
        assert reduction.noise.batch == 19
        results.append((reduction.noise.variance, reduction.noise.squared_norm, reduction.noise.scale))
        step(model, reduction, inputs[shares[rank]], targets[shares[rank]], parts=2)
        results.append((reduction.noise.variance, reduction.noise.squared_norm, reduction.noise.scale))
        reduction.detach()
    return results


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_sites_with_unequal_batches_have_the_same_estimates_to_the_bit(sites, name):
    first, *others = sites(3).run(matches_at_sites, name, ["dad", "dsgd", "edad", "rankdad", "powersgd"])
    assert all(other == first for other in others)
    assert not any(math.isnan(number) for numbers in first for number in numbers)


@pytest.mark.parametrize("name", ["cnn", "transformer"])
@pytest.mark.parametrize("mode", ["dad", "rankdad"])
def test_estimates_have_no_bias(name, mode, monkeypatch):
    model = build(name)
    if name == "cnn":
        model.insert(1, nn.GroupNorm(2, 4).double())
    inputs, targets = batch(name, 64, 5)
    gradients = sample_gradients(model, inputs, targets)
    truth = {
        parameter: (float(each.var(0, correction=0).sum()), float(each.mean(0).square().sum()))
        for parameter, each in gradients.items()
    }
    found: list[dict] = []
    add = GradientNoise._add
    monkeypatch.setattr(GradientNoise, "_add", lambda self, at, each: (found.append(each), add(self, at, each)))
    reduction = dadplug.GradientReduction(model, mode=mode, rank=2, weighting="samples")
    reduction.noise.every = 1
    generator = torch.Generator().manual_seed(1)
    for _ in range(61):
        chosen = torch.randint(64, (11,), generator=generator)
        step(model, reduction, inputs[chosen], targets[chosen], parts=3)
    reduction.detach()
    assert len(found) == 60
    for place in (0, 1):
        for parameter in truth:
            check([each[parameter][place] for each in found], truth[parameter][place], 4.5)
        totals = [math.fsum(each[place] for each in one.values()) for one in found]
        check(totals, sum(each[place] for each in truth.values()), 3.0)


def check(values, truth, errors):
    values = torch.tensor(values, dtype=torch.float64)
    assert abs(float(values.mean()) - truth) <= errors * float(values.std()) / math.sqrt(len(values))


def test_one_site_without_factors_compares_successive_steps():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 2)).double()
    inputs, targets = batch("mlp", 64, 5)
    targets = targets % 2
    truth = sample_gradients(model, inputs, targets)["0.weight"]
    reduction = dadplug.GradientReduction(model, mode="dad", weighting="samples")
    reduction.noise.every = 2
    generator = torch.Generator().manual_seed(1)
    for each in range(800):
        chosen = torch.randint(64, (5 + each % 3,), generator=generator)
        step(model, reduction, inputs[chosen], targets[chosen])
        assert math.isnan(reduction.noise.variance) == (each < 2)
    found = reduction.noise.layers["0.weight"]
    reduction.detach()
    assert found.variance == pytest.approx(float(truth.var(0).sum()), rel=0.2)
    assert found.squared_norm == pytest.approx(float(truth.mean(0).square().sum()), rel=0.5, abs=0.02 * found.variance)


def test_cleared_gradients_do_not_count_and_loss_scales_are_taken_out():
    model = build("mlp")
    inputs, targets = batch("mlp", 7, 1)
    gradients = sample_gradients(model, inputs, targets)
    for mode in ("dad", "dsgd"):
        reduction = dadplug.GradientReduction(model, mode=mode, weighting="samples")
        reduction.noise.every = 1
        step(model, reduction, *batch("mlp", 5, 0))
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs[:3]), targets[:3]).backward()
        model.zero_grad()
        with reduction.loss_scale(1024.0):
            (1024.0 * nn.functional.cross_entropy(model(inputs), targets)).backward()
        reduction.synchronize()
        for parameter, each in gradients.items():
            assert is_near(reduction.noise.layers[parameter], *expected(each, [slice(0, 7)])), (mode, parameter)
        reduction.detach()


def test_the_first_estimate_counts_no_more_than_those_after_it():
    average = None
    for number, variance in enumerate((9.0, 0.0, 0.0)):
        average = noise._Average.after(average, 100 + 32 * number, NoiseEstimate(variance, 1.0), 32)
    keep = 300 / 332
    assert average.value.variance == pytest.approx(9.0 * keep**2 / (keep**2 + keep + 1))
    assert average.value.squared_norm == pytest.approx(1.0)


def test_state_goes_on_where_it_was_saved():
    model = build("mlp")
    for mode in ("dad", "dsgd"):
        reduction = dadplug.GradientReduction(model, mode=mode, weighting="samples")
        reduction.noise.every = 2
        reduction.noise.base_batch = 3
        for seed in range(4):
            step(model, reduction, *batch("mlp", 7, seed))
        state, expected_next = reduction.state_dict(), []
        for seed in range(4, 8):
            step(model, reduction, *batch("mlp", 7, seed))
            expected_next.append((reduction.noise.variance, reduction.gain))
        reduction.detach()
        assert len(set(expected_next)) > 1
        reduction = dadplug.GradientReduction(model, mode=mode, weighting="samples")
        reduction.load_state_dict(state)
        found = []
        for seed in range(4, 8):
            step(model, reduction, *batch("mlp", 7, seed))
            found.append((reduction.noise.variance, reduction.gain))
        reduction.detach()
        assert found == expected_next


def made_up(report, **values):
    """Return a report with other values, which are not checked."""
    found = copy.copy(report)
    for name, value in values.items():
        object.__setattr__(found, name, value)
    return found


@support.at_sites(2)
def test_norms_that_a_site_has_made_up_end_no_step_or_name_it():
    report = noise._report
    zeros = torch.zeros(1, 2, dtype=torch.float64)
    lies = {
        "no samples": lambda found: {"samples": 0},
        "no part": lambda found: {"parts": [0.0]},
        "infinite": lambda found: {"norms": found.norms * 1e308, "squares": found.squares * -1e308 * 10},
        "rows": lambda found: {"parts": [1.0] * 3},
        "many": lambda found: {"parts": [1.0] * 10**4, "norms": found.norms.repeat(10**4, 1)},
        "columns": lambda found: {"squares": zeros},
        "type": lambda found: {"norms": found.norms.long()},
    }
    for place, (name, lie) in enumerate(lies.items()):
        model = build("mlp")
        reduction = dadplug.GradientReduction(model, mode="rankdad", rank=2)
        reduction.noise.every = 1
        step(model, reduction, *batch("mlp", 7, 0))
        if dist.get_rank():
            noise._report = lambda *given, lie=lie: made_up(report(*given), **lie(report(*given)))
        try:
            with pytest.raises(DamagedError, match="1") if place > 2 else nullcontext():
                step(model, reduction, *batch("mlp", 7, 1))
        finally:
            noise._report = report
        assert math.isnan(reduction.noise.variance), name
        reduction.detach()


def test_rows_divide_into_samples_by_the_size_of_the_batch():
    assert layout_of((7, 5), 7) == (1, 7, 5)
    assert layout_of((5, 7), 7) == (5, 7, 1)
    assert layout_of((5, 7, 3), 7) == (5, 7, 3)
    assert layout_of((14, 3), 7) == (1, 7, 6)
    assert layout_of((5, 3), 7) is None
    assert layout_of((5, 3), 0) is None
    assert layout_of((5, 3), 1) == (1, 1, 15)


def test_every_has_to_be_a_number_of_steps():
    reduction = dadplug.GradientReduction(build("mlp"), mode="dad", weighting="samples")
    message = r"noise\.every must be a whole number"
    refuses(*((partial(setattr, reduction.noise, "every", wrong), message) for wrong in (0, 1.5, "2")))
    reduction.detach()


# AdaScale


def train(optimizer, reduction, model, steps, batch=8):
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(batch, 4, dtype=torch.float64)
        (model(inputs) - inputs[:, :1]).square().mean().backward()
        reduction.synchronize()
        optimizer.step()


@pytest.fixture
def model():
    return nn.Linear(4, 1).double()


@pytest.fixture
def reduction(model):
    made = dadplug.GradientReduction(model, mode="dad", weighting="samples")
    made.noise.every = 1
    yield made
    made.detach()


def test_the_gain_lies_between_one_and_the_ratio_of_the_batches():
    assert gain(NoiseEstimate(5.0, 0.0), 64, 8) == pytest.approx(8.0)  # nothing but noise
    assert gain(NoiseEstimate(0.0, 5.0), 64, 8) == 1.0
    assert gain(NoiseEstimate(8.0, 1.0), 64, 8) == pytest.approx(2.0 / (1.0 / 8 + 1.0))
    assert gain(NoiseEstimate(8.0, -1.0), 64, 8) == pytest.approx(8.0)
    assert gain(NoiseEstimate(8.0, 1.0), 8, 8) == 1.0
    assert gain(NoiseEstimate(8.0, 1.0), 4, 8) == pytest.approx(2.0 / 3.0)
    assert gain(NO_ESTIMATE, 64, 8) == gain(NoiseEstimate(0.0, 0.0), 64, 8) == 1.0


def test_learning_rates_are_scaled_inside_of_the_step_only(model, reduction):
    for kind, power in ((torch.optim.SGD, 1.0), (torch.optim.AdamW, 0.5), (torch.optim.RMSprop, 0.5)):
        optimizer = kind(model.parameters(), lr=0.01)
        scaler = dadplug.AdaScale(optimizer, reduction, base_batch=2)
        seen = []
        optimizer.register_step_pre_hook(lambda each, *_, seen=seen: seen.append(each.param_groups[0]["lr"]))
        train(optimizer, reduction, model, 4)
        assert optimizer.param_groups[0]["lr"] == 0.01
        assert 1.0 < scaler.gain < 4.0
        assert scaler.gain == reduction.gain
        assert seen[-1] == pytest.approx(0.01 * scaler.gain**power)
        before = model.weight.detach().clone()
        scaler.detach()
        train(optimizer, reduction, model, 1)
        assert seen[-1] == 0.01
        assert not torch.equal(before, model.weight)


class Wrapper(torch.optim.Optimizer):
    """An optimizer that calls another one, as those of trainers do."""

    def __init__(self, optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure=None):
        return self.optimizer.step(closure)


def test_the_optimizer_in_a_wrapper_is_scaled(model, reduction):
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = dadplug.AdaScale(Wrapper(Wrapper(inner)), reduction, base_batch=4)
    assert scaler.optimizer is inner
    with pytest.raises(ValueError, match="scale the learning rate of Adagrad"):
        dadplug.AdaScale(Wrapper(torch.optim.Adagrad(model.parameters())), reduction)


def test_a_closure_is_scaled_by_the_gain_of_its_own_batch(model, reduction):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = dadplug.AdaScale(optimizer, reduction, base_batch=4)
    for batch in (4, 4, 16, 64):
        inputs = torch.randn(batch, 4, dtype=torch.float64)

        def closure(inputs=inputs):
            optimizer.zero_grad()
            loss = (model(inputs) - 1.0).square().mean()
            loss.backward()
            reduction.synchronize()
            return loss

        before = model.weight.detach().clone()
        optimizer.step(closure)
        assert scaler.gain == reduction.noise.gain(batch)
        torch.testing.assert_close(model.weight, before - scaler.gain * model.weight.grad)
    assert scaler.gain > 1.0


def test_progress_is_the_sum_of_gains_and_moves_the_scheduler(model, reduction):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    scaler = dadplug.AdaScale(optimizer, reduction, scheduler, base_batch=2, scheduler_every=2.0)
    gains = []
    for _ in range(20):
        train(optimizer, reduction, model, 1)
        scaler.step()
        gains.append(scaler.gain)
    assert scaler.progress == pytest.approx(math.fsum(gains))
    assert scaler.progress > 20.0
    assert scheduler.last_epoch == int(scaler.progress / 2.0)
    assert scaler.get_last_lr() == scheduler.get_last_lr() == [0.01 * 0.5 ** (scheduler.last_epoch // 3)]

    other = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(other, step_size=3, gamma=0.5)
    restored = dadplug.AdaScale(other, reduction, schedule, scheduler_every=2.0)
    restored.load_state_dict(scaler.state_dict())
    assert (restored.progress, schedule.last_epoch) == (scaler.progress, scheduler.last_epoch)


def test_the_first_batch_is_the_base_where_none_is_stated(model, reduction):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = dadplug.AdaScale(optimizer, reduction)
    train(optimizer, reduction, model, 3)
    assert (scaler.gain, scaler.progress, reduction.noise.base_batch) == (1.0, 3.0, 8)
    train(optimizer, reduction, model, 1, batch=32)
    assert 1.0 < scaler.gain < 4.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Adadelta: it knows SGD, Adam, AdamW, RMSprop"),
        ({"optimizer": nn.Linear(1, 1)}, "got Linear"),
        ({"rule": "cubic"}, "rule must be"),
        ({"rule": "sqrt", "base_batch": 0}, "base_batch"),
        ({"rule": "sqrt", "scheduler_every": 0}, "scheduler_every"),
    ],
)
def test_what_cannot_be_scaled_is_refused(model, reduction, options, message):
    with pytest.raises(ValueError, match=message):
        dadplug.AdaScale(**{"optimizer": torch.optim.Adadelta(model.parameters()), "reduction": reduction} | options)


def test_an_optimizer_that_is_not_known_is_scaled_by_a_stated_rule(model, reduction):
    optimizer = torch.optim.Adadelta(model.parameters())
    scaler = dadplug.AdaScale(optimizer, reduction, rule="sqrt", base_batch=2)
    train(optimizer, reduction, model, 3)
    assert scaler.factor == pytest.approx(math.sqrt(scaler.gain))
