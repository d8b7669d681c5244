"""Optimizer steps on gradients that are not formed."""

import copy

import pytest
import support
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import dadplug
from dadplug import GradientReduction, NonFiniteError
from dadplug.exchange.factor_buckets import FactorPayload
from dadplug.step.fused import steps
from dadplug.step.fused.products import GradientProduct
from dadplug.step.fused.steps import apply_products, reason_against
from dadplug.support.schedules import Decoding

ROWS = (5, 8)


class Net(nn.Module):
    """Layers of all kinds: factored, transposed, convolutional, without factors, one that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.first = nn.Linear(4 * 36, 40)
        self.norm = nn.LayerNorm(40)
        self.second = nn.Linear(40, 30, bias=False)
        self.rare = nn.Linear(30, 30)
        self.last = nn.Linear(30, 3)

    def forward(self, images, rare=False):
        hidden = self.norm(torch.relu(self.first(torch.relu(self.conv(images)).flatten(1))))
        hidden = torch.tanh(self.second(hidden))
        return self.last(self.rare(hidden) if rare else hidden)


OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda weights: torch.optim.AdamW(weights, lr=0.01),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.05),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, lr=0.001),  # no fused step
}


def _batch(step):
    """The rows of a step, those of this site among them."""
    torch.manual_seed(step)
    images, targets = torch.randn(sum(ROWS), 1, 8, 8, dtype=torch.float64), torch.randint(3, (sum(ROWS),))
    rank = dist.get_rank()
    start = sum(ROWS[:rank])
    return images, targets, slice(start, start + ROWS[rank])


def _loss(model, images, targets, step):
    return nn.functional.cross_entropy(model(images, rare=step % 2 == 1), targets)


def train_fused(mode: str, optimizer: str, clip: float | None, options: dict) -> dict[str, float]:
    """Train by `apply`, and by `synchronize` beside it; return what a test compares."""
    torch.manual_seed(0)
    model = Net().double()
    twin, alone = copy.deepcopy(model), copy.deepcopy(model)
    ours, theirs, single = (OPTIMIZERS[optimizer](each.parameters()) for each in (model, twin, alone))
    reduction = GradientReduction(model, mode=mode, **{"weighting": "samples"} | options)
    plain = GradientReduction(twin, mode=mode, **{"weighting": "samples"} | options)
    held, norms = 0, []
    for step in range(6):
        images, targets, own = _batch(step)
        for each in (ours, theirs, single):
            each.zero_grad()
        _loss(model, images[own], targets[own], step).backward()
        _loss(twin, images[own], targets[own], step).backward()
        _loss(alone, images, targets, step).backward()
        plain.synchronize()
        if clip is not None:
            norms.append(float(reduction.clip_grad_norm_(clip)))
            assert abs(norms[-1] - float(nn.utils.clip_grad_norm_(twin.parameters(), clip))) < 1e-9 * norms[-1]
            nn.utils.clip_grad_norm_(alone.parameters(), clip)
        reduction.apply(ours)
        theirs.step()
        single.step()
        held += sum(parameter.grad is None for parameter in model.parameters())
    gap = _distance(model, twin)
    exact = _distance(model, alone)
    assert reduction.first_difference() is None
    assert any(map(bool, norms)) == (clip is not None)
    return {"held": held, "twin": gap, "alone": exact, "moved": _distance(model, Net().double())}


def _distance(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((one - two).detach().abs().max()) for one, two in pairs)


# What is sent depends on the mode, the step on the optimizer: every mode with one optimizer, every optimizer with one
# mode, and each of the lossy and the mixed mode with another one.
@pytest.mark.parametrize(
    ("mode", "optimizer", "clip"),
    [
        *((mode, "sgd", 0.5) for mode in ("dad", "edad", "rankdad", "dsgd", "auto")),
        *(("dad", optimizer, clip) for optimizer, clip in (("adam", None), ("adagrad", 0.5), ("rmsprop", None))),
        *(("rankdad", "adam", None), ("auto", "rmsprop", 0.5)),
    ],
)
def test_apply_equals_synchronize_and_step(sites, mode, optimizer, clip):
    options = {"rank": 4} if mode == "rankdad" else {}
    for found in sites(2).run(train_fused, mode, optimizer, clip, options):
        assert found["twin"] < 1e-9
        assert found["moved"] > 1e-2
        if mode != "rankdad":
            assert found["alone"] < 1e-9
        if optimizer == "rmsprop" and clip is None:
            assert found["held"] <= 6
        elif optimizer != "rmsprop" and mode in ("dad", "edad", "rankdad"):
            assert found["held"] >= 6 * 3  # three weights at least in every step


@support.at_sites(2)
def test_sites_that_differ_form_all_gradients() -> None:
    """Return, by step, whether the gradients of factored weights were formed, in steps that sites take in two ways."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reduction = GradientReduction(model, mode="dad", weighting="samples")
    rank, formed = dist.get_rank(), []
    for step in range(5):
        optimizer.zero_grad()
        data = not (rank == 1 and step in (2, 3))
        if data:
            model(torch.randn(4, 8)).square().sum().backward()
        if step == 1 and rank == 1:  # this site forms its gradients, so all do
            reduction.synchronize()
            optimizer.step()
        elif step == 2 and rank == 1:
            reduction.idle()
            optimizer.step()
        else:
            reduction.apply(optimizer)
        formed.append(model[0].weight.grad is not None)
        assert reduction.first_difference() is None
    assert formed == [False, True, True, False, False]


@support.at_sites(2)
def test_wrong_calls() -> None:
    """Return the errors of wrong calls; none of them changes a weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    optimizer = torch.optim.Adam(model.parameters())
    reduction = GradientReduction(model, mode="dad", weighting="samples")
    before = copy.deepcopy(model.state_dict())
    errors = []

    def expect(error, call, *args):
        with pytest.raises(error) as caught:
            call(*args)
        errors.append(str(caught.value))

    def loss(scale=1.0):
        return model(torch.randn(4, 8) * scale).square().sum()

    expect(TypeError, reduction.apply, model)
    loss(float("nan") if dist.get_rank() else 1.0).backward()
    expect(NonFiniteError, reduction.apply, optimizer)
    assert not optimizer.state
    optimizer.zero_grad()
    loss().backward()
    reduction.clip_grad_norm_(0.1)
    expect(RuntimeError, optimizer.step)
    expect(RuntimeError, reduction.synchronize)
    expect(RuntimeError, loss().backward)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert "optimizers" in errors[0]
    assert "NaN or Inf at site 1" in errors[1]
    assert all("apply(optimizer)" in error for error in errors[3:])
    assert "before gradients were synchronized" in errors[2]


@support.at_sites(2)
def test_clipping_that_fails_leaves_gradients_for_the_program() -> None:
    """After the error, gradients are those of `synchronize`, and training goes on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
    reduction = GradientReduction(model, mode="dad", check_finite=False, weighting="samples")
    plain = GradientReduction(twin, mode="dad", check_finite=False, weighting="samples")
    for step in range(3):
        inputs = torch.randn(4, 8)
        for net in (model, twin):
            net.zero_grad()
            (net(inputs) * (float("inf") if step == 1 else 1.0)).square().sum().backward()
        plain.synchronize()
        if step == 1:
            with pytest.raises(RuntimeError, match="cannot be clipped"):
                reduction.clip_grad_norm_(0.1, error_if_nonfinite=True)
            for one, two in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(one.grad, two.grad, equal_nan=True)
            continue
        reduction.clip_grad_norm_(0.1, error_if_nonfinite=True)
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        reduction.apply(optimizer)
        other.step()
    assert reduction.first_difference() is None
    assert 0 <= _distance(model, twin) < 1e-6


@support.at_sites(2)
def test_two_optimizers() -> None:
    """Train by two optimizers, one call for both, and one weight that none of them has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    twin = copy.deepcopy(model)

    def optimizers(net):
        return torch.optim.SGD(net[0].parameters(), lr=0.1), torch.optim.Adam(net[2].parameters())

    ours, theirs = optimizers(model), optimizers(twin)
    reduction, plain = (
        GradientReduction(model, mode="dad", weighting="samples"),
        GradientReduction(twin, mode="dad", weighting="samples"),
    )
    for _ in range(3):
        inputs = torch.randn(4, 8, dtype=torch.float64)
        for net in (model, twin):
            net.zero_grad()
            net(inputs).square().sum().backward()
        plain.synchronize()
        reduction.apply(*ours)
        for each in theirs:
            each.step()
        assert model[0].weight.grad is None
        torch.testing.assert_close(model[4].weight.grad, twin[4].weight.grad)
    assert _distance(model, twin) < 1e-12


def test_alone():
    model = nn.Linear(5, 4)
    twin = copy.deepcopy(model)
    optimizer, plain = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
    reduction = dadplug.GradientReduction(model, mode="dad", weighting="samples")
    inputs = torch.randn(3, 5)
    model(inputs).sum().backward()
    twin(inputs).sum().backward()
    reduction.apply(optimizer)
    plain.step()
    torch.testing.assert_close(model.weight, twin.weight)
    reduction.detach()


UPDATES = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, weight_decay=0.01),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, dampening=0.3, maximize=True),
    "nesterov": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda weights: torch.optim.Adam(weights, lr=0.01, weight_decay=0.1),
    "adamw": lambda weights: torch.optim.AdamW(
        weights, lr=torch.tensor(0.01, dtype=torch.float64), weight_decay=0.1, maximize=True
    ),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.1, lr_decay=0.1, weight_decay=0.01),
}


def _payloads(rows: int, height: int, width: int, dtype: torch.dtype) -> list[FactorPayload]:
    return [
        FactorPayload(torch.randn(rows + site, height, dtype=dtype), torch.randn(rows + site, width, dtype=dtype))
        for site in range(3)
    ]


def _gradient(payloads, weights):
    return sum(weight * each.left.T @ each.right for each, weight in zip(payloads, weights, strict=True))


@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("portable", [False, True])
def test_steps_equal_those_of_torch_and_leave_the_same_state(name, dtype, portable, monkeypatch):
    if portable:
        monkeypatch.setattr(steps, "_kernels", lambda: None)
    shape, shares = (600, 257), [0.5, 0.2, 0.3]  # several tiles, the last of them smaller
    ours = nn.Parameter(torch.randn(shape, dtype=dtype))
    theirs = nn.Parameter(ours.detach().clone())
    fused, plain = UPDATES[name]([ours]), UPDATES[name]([theirs])
    for step in range(4):
        payloads = _payloads(4, *shape, dtype)
        theirs.grad = _gradient(payloads, shares)
        plain.step()
        version = ours._version
        if step == 2:  # ordinary and fused steps share their state
            ours.grad = theirs.grad
            fused.step()
            ours.grad = None
        else:
            apply_products(fused, {ours: GradientProduct(payloads, shares)})
        assert ours._version > version
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert fused.state[ours].keys() == plain.state[theirs].keys()
    for key, value in plain.state[theirs].items():
        torch.testing.assert_close(fused.state[ours][key], value, rtol=1e-5, atol=10 * tolerance)
    copy.deepcopy(plain).load_state_dict(fused.state_dict())


@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("shape", [(4, 3000), (10, 5), (7, 2049), (3, 40), (40, 3)])
@pytest.mark.parametrize("rows", [0, 1, 5, 30])
def test_products_of_few_rows(name, shape, rows):
    payloads = [FactorPayload(*(torch.randn(rows, n, dtype=torch.float64) for n in shape)) for _ in range(2)]
    results = []
    for narrow in (0, 64):
        weight = nn.Parameter(torch.linspace(-1, 1, shape[0] * shape[1], dtype=torch.float64).view(shape))
        optimizer = UPDATES[name]([weight])
        for _ in range(2):
            product = GradientProduct(payloads, [0.5, 0.5], constants=Decoding(narrow=narrow))
            assert product.is_narrow == (2 * rows <= narrow and min(shape) >= 4)
            apply_products(optimizer, {weight: product})
        results.append(weight.detach())
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)


def test_few_rows_are_not_multiplied_by_blas(monkeypatch):
    product = GradientProduct(_payloads(4, 30, 20, torch.float32), [0.5, 0.25, 0.25])
    monkeypatch.setattr(GradientProduct, "tiles", lambda _: pytest.fail("tiles of BLAS"))
    weight = nn.Parameter(torch.zeros(30, 20))
    apply_products(torch.optim.SGD([weight], lr=1.0), {weight: product})
    torch.testing.assert_close(-weight, product.formed())


@pytest.mark.parametrize("rows", [3, 200])
@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_norms_without_the_gradient(rows, order):
    payloads = _payloads(rows, 160, 150, torch.float64)
    product = GradientProduct(payloads, [0.5, 0.25, 0.25])
    expected = torch.linalg.vector_norm(_gradient(payloads, [0.5, 0.25, 0.25]), order)
    torch.testing.assert_close(product.norm(order), expected, rtol=1e-12, atol=0)


def test_a_norm_whose_terms_cancel():
    row, other = torch.randn(1, 500), torch.randn(1, 500)
    tiny = FactorPayload(torch.cat([row, -row, 1e-4 * row]), torch.cat([other, other, other]))
    norm = GradientProduct([tiny], [1.0]).norm()
    torch.testing.assert_close(norm, 1e-4 * row.norm() * other.norm(), rtol=1e-3, atol=0)


def test_a_transposed_product():
    payloads = _payloads(4, 30, 20, torch.float64)
    product = GradientProduct(payloads, [0.5, 0.25, 0.25], transposed=True)
    torch.testing.assert_close(product.formed(), _gradient(payloads, [0.5, 0.25, 0.25]).T)
    assert product.shape == (20, 30)


@pytest.mark.parametrize(("default", "fused"), [(torch.bfloat16, False), (torch.float64, False), (torch.float64, True)])
def test_steps_are_counted_in_the_type_of_torch(default, fused, monkeypatch):
    ours, theirs = (nn.Parameter(torch.ones(4, 5)) for _ in range(2))
    optimizers = [torch.optim.Adam([weight], fused=fused) for weight in (ours, theirs)]
    theirs.grad = torch.ones(4, 5)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        payload = FactorPayload(torch.ones(1, 4, dtype=torch.float32), torch.ones(1, 5, dtype=torch.float32))
        apply_products(optimizers[0], {ours: GradientProduct([payload], [1.0])})
        optimizers[1].step()
    finally:
        torch.set_default_dtype(before)
    found, expected = (each.state[weight]["step"] for each, weight in zip(optimizers, (ours, theirs), strict=True))
    assert found.dtype == expected.dtype  # bfloat16 would not count beyond 256
    torch.testing.assert_close(ours, theirs)


def test_hooks_of_all_optimizers_see_gradients():
    weight = nn.Parameter(torch.zeros(4, 3))
    optimizer = torch.optim.SGD([weight])
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle = register(lambda *_: None)
        try:
            assert "hooks" in reason_against(optimizer, optimizer.param_groups[0], weight)
        finally:
            handle.remove()


def test_what_has_no_fused_step():
    weight = nn.Parameter(torch.zeros(4, 3))

    class Own(torch.optim.SGD):
        pass

    def reason(optimizer, of=weight):
        return reason_against(optimizer, optimizer.param_groups[0], of)

    assert reason(torch.optim.SGD([weight])) == ""
    assert "Own" in reason(Own([weight]))
    assert "RMSprop" in reason(torch.optim.RMSprop([weight]))
    assert "amsgrad" in reason(torch.optim.Adam([weight], amsgrad=True))
    hooked = torch.optim.SGD([weight])
    hooked.register_step_pre_hook(lambda *_: None)
    assert "hooks" in reason(hooked)
    assert "float32" in reason(torch.optim.SGD([weight]), nn.Parameter(torch.zeros(4, 3, dtype=torch.bfloat16)))
    assert "contiguous" in reason(torch.optim.SGD([weight]), nn.Parameter(torch.zeros(4, 3).T))
