"""Inputs of captured layers that have no factors: sparse and nested ones, and tensors that wrap others."""

import copy

import pytest
import support
import torch
import torch.distributed as dist
from dadplug.hooks import LayerCapture, capturable_layers
from torch import Tensor, nn

import dadplug


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
