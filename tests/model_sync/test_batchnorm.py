"""Synchronised batch normalisations whose classes have forwards of their own, as timm's."""

import copy
from itertools import pairwise
from types import SimpleNamespace

import pytest
import support
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dadplug
from dadplug.step.model_sync.batchnorm import SyncedBatchNorms, SyncedForward, batch_norms, merge_statistics


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

    def of_forward(self, values: Tensor) -> Tensor:
        return merge_statistics([values])

    def of_backward(self, values: Tensor, weight: float) -> Tensor:
        return values * weight


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


def far_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return 9 rows whose means are 10,000 times as large as their spread."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    return inputs + 1e4, torch.randn(9, 2, generator=generator, dtype=torch.float64)


def normalised() -> nn.Sequential:
    """Return a model with fewer channels than sites in its last layer."""
    torch.manual_seed(0)
    sizes, layers = (5, 6, 400, 2), list[nn.Module]()
    for width, after in pairwise(sizes):
        layers += [nn.Linear(width, after), nn.BatchNorm1d(after)]
    return nn.Sequential(*layers)


def trains(at_owners: bool | None, dtype: torch.dtype) -> tuple[list[Tensor], int]:
    """Train at sites with 4, 3 and 2 rows, of which the last one is idle at last.

    Args:
        at_owners: whether owners merge; None to let the sites measure.
        dtype: type of the model; gradients in double precision are compared with those of one process.

    Returns:
        Gradients and statistics, and the bytes sent.
    """
    site, reference = dist.get_rank(), normalised().double()
    model, found = normalised().to(dtype), list[Tensor]()
    with pytest.MonkeyPatch.context() as monkeypatch:
        if at_owners is not None:
            monkeypatch.setattr(SyncedBatchNorms, "_owners_are_sooner", lambda *_: at_owners)
        reduction = dadplug.GradientReduction(model, mode="dsgd", sync_batchnorm=True, weighting="samples")
        for step in range(3):
            inputs, targets = (each[: 7 if step == 2 else 9] for each in far_batch(step))
            mine = slice(*((0, 4), (4, 7), (7, 9))[site])
            model.zero_grad(), reference.zero_grad()
            if len(inputs[mine]):
                F.mse_loss(model(inputs[mine].to(dtype)), targets[mine].to(dtype)).backward()
                reduction.synchronize()
            else:
                reduction.idle()
            F.mse_loss(reference(inputs), targets).backward()
            found += [each.grad.clone() for each in model.parameters()]
            for one, other in zip(model.parameters(), reference.parameters()):
                assert dtype == torch.float32 or torch.allclose(one.grad, other.grad, rtol=1e-6, atol=1e-6), step
            if step < 2:
                found += [each.clone() for each in model.buffers()]
                near = 5e-3 if dtype == torch.float32 else 1e-9
                for one, other in zip(model.buffers(), reference.buffers()):
                    torch.testing.assert_close(one.double(), other.double(), rtol=near, atol=near)
        reduction.detach()
    return found, reduction.traffic.bytes_in_steps


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@support.at_sites(3)
def test_owners_of_channels_merge_to_the_same_bits_with_fewer_bytes(dtype: torch.dtype) -> None:
    (every, most), (owned, least), (measured, _) = (trains(way, dtype) for way in (False, True, None))
    for one, two, three in zip(every, owned, measured, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    own = (2 + 134 + 1, 2 + 133 + 1, 2 + 133 + 0)[dist.get_rank()]  # channels of all layers
    assert most - least == 3 * dtype.itemsize * (4 * (6 + 400 + 2 - own) - 3 * 2)


def test_owners_merge_where_the_bytes_that_they_save_take_longer_than_a_message() -> None:
    direct = SimpleNamespace(has_all_to_all=True, copies=7, ring=1.75, rank=0)
    norms = SyncedBatchNorms(nn.BatchNorm1d(4), direct, None)
    norms._link = 1e-3, 1e-6
    assert [norms._owners_are_sooner(nbytes) for nbytes in (520, 4104)] == [False, True]
    for other in ({"has_all_to_all": False}, {"copies": 1, "ring": 1.0}):
        norms._transport = SimpleNamespace(**vars(direct) | other)
        assert not norms._owners_are_sooner(4104)
    norms.detach()


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
