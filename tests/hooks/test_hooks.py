"""Capture of activations and deltas, by itself."""

import copy
import io

import pytest
import support
import torch
import torch.distributed as dist
import zoo
from dadplug.hooks import Factor, LayerCapture, OwnHook, capturable_layers, overridden
from dadplug.hooks import linear as linear_layers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dadplug


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(inplace=True), nn.LayerNorm(9), nn.Linear(9, 4)).double()


def backward(model, samples=5, seed=0):
    inputs = torch.randn(samples, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    model(inputs).square().mean().backward()


def test_factors_form_the_gradients_that_autograd_computes(model):
    with LayerCapture(model) as capture:
        backward(model)
        assert list(capture.factors) == ["0", "3"]
        for name, factor in capture.factors.items():
            layer = model.get_submodule(name)
            torch.testing.assert_close(factor.gradient(), layer.weight.grad)
            torch.testing.assert_close(factor.bias_gradient(), layer.bias.grad)


@pytest.mark.parametrize("name", [name for name in zoo.ZOO if name not in ("functional", "mixed")])
def test_factors_match_autograd_over_the_zoo(name):
    model = zoo.build(name)
    inputs, targets = zoo.batch(name, 7, seed=1)
    with LayerCapture(model) as capture:
        zoo.loss(model, inputs, targets).backward()
        gradients = {}
        for layer, factor in capture.factors.items():
            weight = model.get_submodule(layer).weight
            gradients[weight] = gradients[weight] + factor.gradient() if weight in gradients else factor.gradient()
        for weight, gradient in gradients.items():
            torch.testing.assert_close(gradient.to_dense(), weight.grad.to_dense())
    assert gradients or not capturable_layers(model)


def test_rows_of_leading_dimensions_and_of_repeated_calls_stack(model):
    with LayerCapture(model, ["0"]) as capture:
        (model[0](torch.randn(2, 3, 6).double()).sum() + model[0](torch.randn(6).double()).sum()).backward()
        assert capture.factors["0"].activations.shape == (7, 6)
        assert capture.factors["0"].deltas.shape == (7, 9)


def test_factors_add_up_until_cleared(model):
    with LayerCapture(model) as capture:
        backward(model, seed=0)
        backward(model, seed=1)
        torch.testing.assert_close(capture.factors["0"].gradient(), model[0].weight.grad)
        capture.clear()
        assert capture.factors == {}


def test_without_weight_gradients_their_product_does_not_run(model):
    with LayerCapture(model, weight_gradients=False) as capture:
        backward(model)
        assert model[0].weight.grad is None
        assert model[0].bias.grad is None
        assert model[2].weight.grad is not None
        factors = capture.factors
    model.zero_grad()
    backward(model)
    torch.testing.assert_close(factors["0"].gradient(), model[0].weight.grad)


def test_gradients_of_inputs_alone_leave_no_factors(model):
    inputs = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    with LayerCapture(model) as capture:
        torch.autograd.grad(model(inputs).sum(), inputs)
        assert capture.factors == {}
        assert all(not layer._pending for layer in capture.layers.values())


def test_no_capture_without_gradients(model):
    with LayerCapture(model) as capture, torch.no_grad():
        model(torch.randn(3, 6).double())
        assert capture.factors == {}


def test_autocast_keeps_deltas_and_gradients_in_their_types():
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4))
    inputs = torch.randn(5, 6, requires_grad=True)
    with LayerCapture(model) as capture:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(inputs).float().square().mean()
        loss.backward()
        assert inputs.grad is not None
        assert inputs.grad.dtype == torch.float32
        assert model[0].weight.grad.dtype == torch.float32
        deltas = capture.factors["0"].deltas.float()
        torch.testing.assert_close(deltas.T @ inputs, model[0].weight.grad, rtol=0.05, atol=0.01)


def test_detach_gives_layers_their_forward_back(model):
    capture = LayerCapture(model)
    assert overridden(model[0])
    capture.detach()
    capture.detach()
    assert not overridden(model[0])
    assert "forward" not in vars(model[0])


def test_copies_and_pickles_of_the_model_are_free_of_the_capture(model):
    with LayerCapture(model) as capture:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
            assert not overridden(other[0])
            backward(other)
            assert capture.factors == {}
            with LayerCapture(other) as again:  # and can be captured in turn
                backward(other)
                assert set(again.factors) == {"0", "3"}


def test_an_overridden_forward_or_a_parametrized_weight_is_not_captured():
    class Scaled(nn.Linear):
        def forward(self, inputs):
            return 2 * super().forward(inputs)

    class Named(nn.Linear):
        pass

    model = nn.Sequential(Scaled(3, 3), Named(3, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    assert list(capturable_layers(model)) == ["1"]


def test_layers_inside_packed_attention_are_not_captured():
    model = nn.TransformerEncoderLayer(6, 2, 12)
    assert list(capturable_layers(model)) == ["linear1", "linear2"]


def test_an_unknown_layer_is_an_error_that_lists_the_known(model):
    with pytest.raises(ValueError, match=r"no layer named 'fc' can be captured; those that can: 0, 3"):
        LayerCapture(model, ["fc"])


def test_stacked_factors_add_their_gradients():
    parts = [Factor(torch.randn(n, 3), torch.randn(n, 2)) for n in (2, 1, 4)]
    stacked = Factor.stack(parts)
    assert stacked.rows == 7
    torch.testing.assert_close(stacked.gradient(), sum(part.gradient() for part in parts))


# Factors of large layers are handed over before the gradient of the layer's input is computed


WIDTHS = (512, 1024)  # 8 rows make a large layer


class _Products(TorchDispatchMode):
    """Record of matrix products."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.events.append("product")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("traced", "rows"), [(False, 8), (True, 8), (False, 2)])
def test_factors_before_the_gradient_of_the_input(traced, rows, monkeypatch):
    monkeypatch.setattr(linear_layers, "_LARGE", 8 * WIDTHS[0] * WIDTHS[1])
    layer = nn.Linear(*WIDTHS)
    events: list[str] = []
    with LayerCapture(layer, weight_gradients=False, trace_chains=traced) as capture:
        inputs = torch.randn(rows, WIDTHS[0], requires_grad=True)
        outputs = layer(inputs)
        layer.weight.register_post_accumulate_grad_hook(OwnHook(lambda _: events.append("factors")))
        with _Products(events):
            outputs.sum().backward()
        assert capture.factors[""].deltas.shape == (rows, WIDTHS[1])
    early = rows == 8 and not traced
    assert events == (["factors", "product"] if early else ["product", "factors"])


@pytest.mark.parametrize("leading", [(8,), (2, 3, 4)])
def test_gradients_of_large_layers(leading, monkeypatch):
    monkeypatch.setattr(linear_layers, "_LARGE", 8 * WIDTHS[0] * WIDTHS[1])
    plain = nn.Sequential(nn.Linear(*WIDTHS), nn.Tanh(), nn.Linear(*WIDTHS[::-1], bias=False)).double()
    model = copy.deepcopy(plain)
    inputs = torch.randn(*leading, WIDTHS[0], dtype=torch.float64)
    found = []
    with LayerCapture(model, weight_gradients=False) as capture:
        for each in (plain, model):
            leaf = inputs.clone().requires_grad_()
            (penalised,) = torch.autograd.grad(each(leaf).square().sum(), leaf, create_graph=True)
            (each(leaf).square().sum() + 1e-3 * penalised.square().sum()).backward()
            found.append(leaf.grad)
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
        for name, factor in capture.factors.items():
            layer, expected = model.get_submodule(name), plain.get_submodule(name)
            dense = 0.0 if layer.weight.grad is None else layer.weight.grad
            gradient = factor.deltas.T @ factor.activations + dense
            torch.testing.assert_close(gradient, expected.weight.grad, rtol=1e-12, atol=1e-9)


def test_a_weight_changed_before_backward_is_found():
    layer = nn.Linear(*WIDTHS)
    with LayerCapture(layer, weight_gradients=False):
        outputs = layer(torch.randn(8, WIDTHS[0], requires_grad=True))
        with torch.no_grad():
            layer.weight.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            outputs.sum().backward()


# Inputs of captured layers that have no factors: sparse and nested ones, and tensors that wrap others


class Image(Tensor):
    """A tensor with a class of its own, which has factors."""


KINDS = {
    "image": lambda x: x.as_subclass(Image),
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "nested": lambda x: torch.nested.nested_tensor([*x.view(3, 2, 20).unbind()]),
    "jagged": lambda x: torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged),
}


def dense(y: Tensor) -> Tensor:
    return torch.cat([*y.unbind()]) if y.is_nested else y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(20, 40), nn.Linear(40, 40), nn.Linear(40, 3)

    def forward(self, x: Tensor, kind: str = "") -> Tensor:
        x = KINDS[kind](x) if kind else x
        return self.last(torch.tanh(self.second(torch.tanh(dense(self.first(x))))))


@pytest.mark.filterwarnings("ignore:.*(prototype|beta)")
@pytest.mark.parametrize(("mode", "options"), [("dad", {}), ("edad", {}), ("rankdad", {"rank": 6, "wire": "fp32"})])
@support.at_sites(2)
def test_layers_train_with_inputs_of_all_kinds(mode: str, options: dict) -> None:
    """The kind is there from the first step on, or from the third one, or at one site alone."""
    rank = dist.get_rank()
    for kind in KINDS:
        for kinds in ((kind,) * 3, ("", "", kind), (kind, "", "" if rank else kind)):
            torch.manual_seed(0)
            model = Model().double()
            plain = copy.deepcopy(model)
            reduction = dadplug.GradientReduction(model, mode=mode, weighting="uniform", **options)
            for step, each in enumerate(kinds):
                batches = torch.randn(2, 6, 20, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
                model.zero_grad(), plain.zero_grad()
                model(batches[rank], each).square().sum().backward()
                reduction.synchronize()
                plain(batches.flatten(0, 1)).square().sum().div(2).backward()
                found, expected = ([p.grad for p in each.parameters()] for each in (model, plain))
                torch.testing.assert_close(found, expected, msg=f"{kinds}, step {step}")
            row = next(row for row in reduction.plan if row.parameter == "first.weight")
            assert (row.path == "allreduce") == (kind != "image" and kinds[0] != ""), kinds
            seen = kind != "image" and kind in kinds
            assert ("not a dense tensor" in row.reason) == seen, (kinds, row)
            reduction.detach()


@pytest.mark.filterwarnings("ignore:.*(prototype|beta)")
def test_embeddings_of_jagged_numbers_and_sparse_weights_are_left_to_autograd():
    table = nn.Embedding(7, 4)
    numbers = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged)
    with LayerCapture(table, weight_gradients=False) as capture:
        dense(table(numbers)).sum().backward()
        assert not capture.factors
        assert capture.layers[""].left_out
    assert int(table.weight.grad.sum()) == 12
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(torch.eye(4).to_sparse_csr())
    assert not capturable_layers(layer)
