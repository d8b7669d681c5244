"""Operations in place on what a captured layer returns: autograd's results, or its exception."""

import copy
from collections.abc import Iterable

import pytest
import support
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dadplug.hooks import LayerCapture
from torch import Tensor, nn

import dadplug
from dadplug.privacy.layers import AffineBySample

# Operations in place: all that torch has, each with the first arguments that it takes, and those that have a syntax.

_UNFIT = {"share_memory_", "set_", "apply_", "map_", "map2_"}  # they change where or how a tensor is stored
_GIVEN = {
    "relu": lambda y: F.relu(y, inplace=True),
    "dropout": lambda y: F.dropout(y, 0.5, inplace=True),
    "+=": lambda y: y.__iadd__(y.detach().cos()),
    "*= itself": lambda y: y.__imul__(y),
    "last column": lambda y: y[..., 0].mul_(2.0),
    "item": lambda y: y.__setitem__((..., 0), 2 * y[..., 0]),
    "rows": lambda y: y[:1].copy_(y[:1] ** 2),
    "mask": lambda y: y.__setitem__(y > 0, 0.0),
    "transposed": lambda y: y.transpose(0, -1)[0].add_(1.0),
    "flat": lambda y: y.view(-1)[::2].exp_(),
    "chunk": lambda y: y.narrow(-1, 0, 1).zero_(),
    "view, then base": lambda y: (y[..., :1].mul_(3.0), y.tanh_()),
    "out=": lambda y: torch.sin(y.detach(), out=y),
    "detached": lambda y: y.detach().mul_(2.0),
}


def _arguments(y: Tensor) -> list[tuple]:
    like, mask = y.detach().sigmoid() / 2, y.detach() > 0
    matrix = like if like.dim() == 2 else like.new_ones(1, 1)
    first, numbers = y.detach()[:1].cos(), torch.zeros(1, dtype=torch.long)
    everywhere = torch.zeros_like(like, dtype=torch.long)
    return [
        *((), (0.5,), (1,), (like,), (mask,), (like, 0.5), (like, like), (mask, 0.5), (mask, like), (-1,), (0, 1)),
        *((0, numbers, first), (0, numbers, 0.5), (0, everywhere, like), (0, everywhere, like, "sum")),
        *((0, numbers, first, "mean"), ((numbers,), first[0]), (numbers, first.flatten()[:1]), (2, 0, 1.0), (like[0],)),
        *((y.shape, y.stride()), (matrix[:, :1], matrix[:1]), (y.shape,)),
    ]


def operations(y: Tensor, names: Iterable[str] = dir(Tensor)) -> dict:
    """Return operations in place that torch offers on a tensor as `y`, by name, as functions: all, or some of them."""
    found = dict(_GIVEN)
    for name in names:
        if not name.endswith("_") or name.endswith("__") or name.startswith("_") or name in _UNFIT:
            continue

        def call(z: Tensor, name: str = name, place: int = 0) -> object:
            return getattr(z, name)(*_arguments(z)[place])

        for place in range(len(_arguments(y))):
            with torch.no_grad():
                try:
                    call(y.clone(), place=place)
                except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
                    continue
            found[name] = lambda z, call=call, place=place: call(z, place=place)
            break
    return found


# Layers


class Conv1D(nn.Module):
    """A layer that is recognised by its name."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], 4)


LAYERS = {
    "rows": lambda: (nn.Linear(5, 4), torch.randn(6, 5)),
    "a row": lambda: (nn.Linear(5, 4), torch.randn(5)),
    "three dimensions": lambda: (nn.Linear(5, 4), torch.randn(2, 3, 5)),
    "four dimensions": lambda: (nn.Linear(5, 4), torch.randn(2, 3, 2, 5)),
    "without a bias": lambda: (nn.Linear(5, 4, bias=False), torch.randn(2, 3, 5)),
    "not contiguous": lambda: (nn.Linear(5, 4), torch.randn(3, 5, 2).transpose(1, 2)),
    "empty": lambda: (nn.Linear(5, 4), torch.randn(2, 0, 5)),
    "large": lambda: (nn.Linear(512, 512), torch.randn(2, 8, 512)),
    "weight of in by out": lambda: (Conv1D(), torch.randn(2, 3, 5)),
    "convolution 1d": lambda: (nn.Conv1d(2, 3, 3), torch.randn(2, 2, 5)),
    "convolution": lambda: (nn.Conv2d(2, 3, 3), torch.randn(2, 2, 4, 4)),
    "one image": lambda: (nn.Conv2d(2, 3, 3), torch.randn(2, 4, 4)),
    "transposed convolution": lambda: (nn.ConvTranspose2d(2, 3, 3), torch.randn(2, 2, 2, 2)),
    "embedding": lambda: (nn.Embedding(7, 4), torch.randint(7, (2, 3))),
    "sparse embedding": lambda: (nn.Embedding(7, 4, sparse=True), torch.randint(7, (2, 3))),
    "bags": lambda: (nn.EmbeddingBag(7, 4), torch.randint(7, (2, 3))),
}
# One layer for each way in which the output is made, with all operations; others differ from these in shapes.
WITH_ALL = ("rows", "three dimensions", "weight of in by out", "convolution", "embedding")
_SOME = ("relu_", "masked_fill_", "index_add_", "t_", "squeeze_", "unsqueeze_", "transpose_", "as_strided_")


def outcome(layer: nn.Module, x: Tensor, operation: object, capture: LayerCapture | None = None) -> object:
    """Return output and gradients of an operation on a layer's output, or the type of the exception."""
    torch.manual_seed(0)
    layer.zero_grad()
    x = x.clone().requires_grad_(x.is_floating_point())
    try:
        y = layer(x)
        operation(y)
        (y.double().tanh() * torch.arange(1, 1 + y.numel()).view(y.shape).cos()).sum().backward()
    except Exception as error:
        return type(error)
    gradients = [parameter.grad for parameter in layer.parameters()]
    if capture is not None and gradients[0] is None:
        (factor,) = capture.factors.values()
        gradients = [factor.gradient(), factor.bias_gradient()][: len(gradients)]
    return y.detach(), x.grad, *(None if each is None else each.to_dense() for each in gradients)


@pytest.mark.parametrize("name", LAYERS)
def test_all_operations_in_place_on_the_output_of_a_layer(name):
    layer, x = LAYERS[name]()
    layer.double()
    x = x.double() if x.is_floating_point() else x
    found = operations(layer(x)) if name in WITH_ALL else operations(layer(x), _SOME)
    expected = {each: outcome(layer, x, operation) for each, operation in found.items()}
    for traced in (True, False):
        with LayerCapture(layer, weight_gradients=traced, trace_chains=traced) as capture:
            for each, operation in found.items():
                capture.clear()
                result = outcome(layer, x, operation, capture)
                where = f"{each}, {traced=}"
                if isinstance(expected[each], type):
                    assert result is expected[each], where
                else:
                    torch.testing.assert_close(result, expected[each], equal_nan=True, msg=where)


@pytest.mark.parametrize("layer", [nn.RMSNorm(4), nn.LayerNorm(4, bias=False), nn.LayerNorm(4)])
def test_all_operations_in_place_on_the_output_of_a_layer_with_gradients_by_sample(layer):
    layer.double()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    found = operations(layer(x))
    expected = {each: outcome(layer, x, operation) for each, operation in found.items()}
    by_sample = AffineBySample(layer, lambda inputs: lambda gradients: None)
    for each, operation in found.items():
        result = outcome(layer, x, operation)
        assert isinstance(result, type) == isinstance(expected[each], type), each
        if not isinstance(result, type):
            torch.testing.assert_close(result[:2], expected[each][:2], equal_nan=True, msg=each)
    by_sample.restore()


# All modes


class Model(nn.Module):
    """A chain of two layers, between which and behind which something happens in place."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.first, self.between, self.second, self.last = nn.Linear(5, 6), between, nn.Linear(6, 4), nn.Linear(4, 3)
        self.operation: object = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.between(self.first(x)))
        self.operation(y)
        return self.last(y)


MODES = {
    "dsgd": {},
    "dad": {},
    "edad": {},
    "auto": {},
    "rankdad": {"rank": 8, "wire": "fp32"},
    "powersgd": {"rank": 8},
    "topk": {"density": 1.0},
}


@pytest.mark.parametrize("mode", MODES)
@support.at_sites(2)
def test_all_operations_in_place_in_all_modes(mode: str) -> None:
    torch.manual_seed(0)
    batches, found = torch.randn(2, 2, 3, 5, dtype=torch.float64), operations(torch.rand(2, 3, 4, dtype=torch.float64))
    model = Model(nn.LeakyReLU(inplace=True)).double()
    plain = copy.deepcopy(model)

    def gradients(of: Model, batch: Tensor) -> list[Tensor]:
        torch.manual_seed(0)
        of.zero_grad()
        of(batch).square().sum().backward()
        return [parameter.grad for parameter in of.parameters()]

    expected = {}
    for name, operation in found.items():
        plain.operation = operation
        try:
            both = [gradients(plain, batch) for batch in batches]
        except RuntimeError:
            continue
        means = [sum(pair) / 2 for pair in zip(*both, strict=True) if None not in pair]
        if len(means) == 6 and all(bool(each.isfinite().all()) for each in means):
            expected[name] = means
    assert len(expected) > 80
    reduction = dadplug.GradientReduction(model, mode=mode, weighting="uniform", **MODES[mode])
    for name in expected:
        model.operation = found[name]
        gradients(model, batches[dist.get_rank()])
        reduction.synchronize()
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected[name], msg=name)
