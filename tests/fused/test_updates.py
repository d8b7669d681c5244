from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dadplug.exchange.factor_buckets import FactorPayload
from dadplug.fused import GradientProduct, updates
from dadplug.fused.updates import apply_products, reason_against
from dadplug.schedules import Decoding

OPTIMIZERS = {
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


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("portable", [False, True])
def test_steps_equal_those_of_torch_and_leave_the_same_state(name, dtype, portable, monkeypatch):
    if portable:
        monkeypatch.setattr(updates, "_kernels", lambda: None)
    shape, shares = (600, 257), [0.5, 0.2, 0.3]  # several tiles, the last of them smaller
    ours = nn.Parameter(torch.randn(shape, dtype=dtype))
    theirs = nn.Parameter(ours.detach().clone())
    fused, plain = OPTIMIZERS[name]([ours]), OPTIMIZERS[name]([theirs])
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


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shape", [(4, 3000), (10, 5), (7, 2049), (3, 40), (40, 3)])
@pytest.mark.parametrize("rows", [0, 1, 5, 30])
def test_products_of_few_rows(name, shape, rows):
    payloads = [FactorPayload(*(torch.randn(rows, n, dtype=torch.float64) for n in shape)) for _ in range(2)]
    results = []
    for narrow in (0, 64):
        weight = nn.Parameter(torch.linspace(-1, 1, shape[0] * shape[1], dtype=torch.float64).view(shape))
        optimizer = OPTIMIZERS[name]([weight])
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
