"""Synchronised batch normalisations whose classes have forwards of their own, as timm's."""

import copy

import pytest
import support
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dadplug
from dadplug.model_sync.batchnorm import SyncedForward, batch_norms


class Activated(nn.BatchNorm2d):
    """A layer that is followed by an activation in place."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x), inplace=True)


class Own(nn.BatchNorm2d):
    """A layer like timm's BatchNormAct2d, which calls F.batch_norm itself."""

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
        statistics = (self.running_mean, self.running_var)
        x = F.batch_norm(x, *statistics, self.weight, self.bias, self.training, self.momentum, self.eps)
        return F.silu(x)


class Conditioned(nn.BatchNorm2d):
    """A layer with further arguments, and two outputs."""

    def forward(self, x: Tensor, scale: float = 2.0, *, shift: Tensor | None = None) -> Tensor:
        y = super().forward(scale * x)
        return (y if shift is None else y + shift).tanh_()


class Halves(nn.BatchNorm2d):
    """A layer like timm's SplitBatchNorm2d, which gives a half of the rows to another one."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.other = nn.BatchNorm2d(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.split((1, len(x) - 1))
        return torch.cat([super().forward(first), self.other(second)])


class Frozen(nn.BatchNorm2d):
    """A layer that normalises by its running statistics in train mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


class OwnSync(nn.SyncBatchNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Computed(nn.BatchNorm2d):
    """A layer that calls no function of torch's to normalise."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean((0, 2, 3), keepdim=True)


class Kept(nn.BatchNorm2d):
    """A layer that keeps its running statistics itself, and normalises by them."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.running_mean.lerp_(x.detach().mean((0, 2, 3)), 0.1)
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


class OneSite:
    """Sums over the rows of one site."""

    own_row = 0

    def of_forward(self, values: Tensor) -> Tensor:
        return values[None]

    of_backward = of_forward


LAYERS = {
    "plain": nn.BatchNorm2d(4),
    "without a scale": nn.BatchNorm2d(4, affine=False),
    "cumulative": nn.BatchNorm2d(4, momentum=None),
    "without statistics": nn.BatchNorm2d(4, track_running_stats=False),
    "torch's synchronised": nn.SyncBatchNorm(4),
    "lazy": nn.LazyBatchNorm2d(affine=False),
    "activated": Activated(4),
    "activated, without a scale": Activated(4, affine=False),
    "its own": Own(4),
    "conditioned": Conditioned(4),
    "halves": Halves(4),
    "frozen": Frozen(4),
}


def without_bias() -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(4)
    layer.bias = None
    return layer


@pytest.mark.parametrize("name", [*LAYERS, "without a bias"])
def test_the_forward_of_a_layer_is_kept(name):
    plain = (without_bias() if name == "without a bias" else LAYERS[name]).double()
    given = {"scale": 3.0, "shift": torch.ones(4, 1, 1)} if name == "conditioned" else {}
    x = torch.randn(3, 4, 2, 2, dtype=torch.float64)
    plain(x)  # lazy layers have a shape from here on
    layer = copy.deepcopy(plain)
    forwards = [SyncedForward(each, OneSite, None) for each in batch_norms(layer).values()]
    for training in (True, True, False):
        inputs = [(each + x).requires_grad_() for each in (x, x)]
        outputs = [each.train(training)(x, **given) for each, x in zip((layer, plain), inputs, strict=True)]
        torch.testing.assert_close(*outputs)
        outputs[0].square().sum().backward()
        outputs[1].square().sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
        torch.testing.assert_close([p.grad for p in layer.parameters()], [p.grad for p in plain.parameters()])
        torch.testing.assert_close(dict(layer.named_buffers()), dict(plain.named_buffers()))
    for forward in forwards:
        forward.restore()
    assert "forward" not in vars(layer)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.activated, self.own, self.conditioned = Activated(2), Own(2), Conditioned(2, affine=False)
        self.conv = nn.Conv2d(2, 2, 2)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conditioned(self.own(self.activated(self.conv(x))), shift=torch.ones(2, 1, 1))
        return self.out(x.flatten(1))


@support.at_sites(2)
def test_layers_with_forwards_of_their_own_train_as_in_one_process() -> None:
    torch.manual_seed(0)
    reference = Net().double()
    model = copy.deepcopy(reference)
    reduction = dadplug.GradientReduction(model, mode="dad", sync_batchnorm=True, weighting="uniform")
    for step in range(2):
        torch.manual_seed(step)
        inputs, targets = torch.randn(8, 2, 3, 3, dtype=torch.float64), torch.randint(3, (8,))
        mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
        model.zero_grad(), reference.zero_grad()
        F.cross_entropy(model(inputs[mine]), targets[mine]).backward()
        reduction.synchronize()
        F.cross_entropy(reference(inputs), targets).backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
        torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()))


def patched() -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(4)
    layer.forward = layer.forward
    return layer


def reduced(model: nn.Module) -> dadplug.GradientReduction:
    return dadplug.GradientReduction(model, mode="dsgd", sync_batchnorm=True)


def served(model: nn.Module) -> dadplug.ParameterServer:
    return dadplug.ParameterServer(model, torch.optim.SGD(model.parameters(), 0.1), mode="dad", sync_batchnorm=True)


def local(model: nn.Module) -> dadplug.LocalSGD:
    return dadplug.LocalSGD(
        model, torch.optim.SGD(model.parameters(), 0.1), every=2, overlap=False, sync_batchnorm=True
    )


@support.at_sites(2)
def test_forwards_that_cannot_be_synchronised_are_refused() -> None:
    for attach in (reduced, served, local):
        for build, words in ((lambda: OwnSync(4), "layer '1' .OwnSync.*BatchNorm"), (patched, "layer '1'.*set on")):
            model = nn.Sequential(nn.Conv2d(4, 4, 1), build())
            with pytest.raises(ValueError, match=words):
                attach(model)
            dadplug.GradientReduction(model, mode="dsgd").detach()
        for kind in (Computed, Kept):
            model = nn.Sequential(nn.Conv2d(4, 4, 1), kind(4))
            attached = attach(model)
            with pytest.raises(ValueError, match=rf"forward of {kind.__name__} takes statistics without F\.batch_norm"):
                model(torch.randn(2, 4, 2, 2))
            model.eval()(torch.randn(2, 4, 2, 2))
            attached.detach()


@support.at_sites(2)
def test_frozen_layers_exchange_nothing() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.BatchNorm1d(4).eval())
    attached = local(model)
    for _ in range(1 + dist.get_rank()):
        model(torch.randn(3, 4)).square().sum().backward()
        attached.step()
    attached.finish()
    assert not attached.first_difference()
    attached.detach()
