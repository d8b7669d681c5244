"""State of lossy methods between steps: steps that do not count, gradients that are replaced, the loss scale.

Every loop with a surprise is compared with the loop of the same mode in which the surprise does not happen.
"""

import functools
import math
from collections.abc import Callable

import pytest
import support
import torch
import torch.distributed as dist
from comparison import assert_resumes, train
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.checkpoint import checkpoint

import dadplug
from dadplug.errors import NonFiniteError
from dadplug.step.methods import feedback

DENSE = [
    {"mode": "powersgd", "rank": 2},
    {"mode": "powersgd", "rank": 2, "wire": "int8"},
    {"mode": "powersgd", "rank": 2, "error_feedback": False},
    {"mode": "topk", "density": 0.1},
    {"mode": "topk", "density": 0.1, "wire": "bf16"},
    {"mode": "topk", "density": 0.1, "error_feedback": False},
    {"mode": "dsgd", "wire": "int8"},
    {"mode": "dsgd"},
]
FACTORS = [
    {"mode": "rankdad"},
    {"mode": "rankdad", "rank": 2},
    {"mode": "rankdad", "rank": 24, "wire": "int8"},
    {"mode": "rankdad", "rank": 2, "error_feedback": True},
    {"mode": "rankdad", "rank": 2, "merge": "owner"},
    {"mode": "rankdad", "rank": 2, "error_feedback": True, "wire": "bf16"},
    {"mode": "rankdad", "rank": 2, "wire": "int8"},
    {"mode": "rankdad", "rank": 2, "error_feedback": True, "wire": "int8"},
    {"mode": "dad", "wire": "int8"},
]
STEPS = 8
Step = Callable[["Loop", int], None]


def name_of(options: dict) -> str:
    return "-".join(str(value) for value in options.values())


class Loop:
    """A training loop, whose agreed gradients are recorded as the optimizer sees them."""

    def __init__(self, **options) -> None:
        torch.manual_seed(0)
        hidden = (nn.Linear(40, 60), nn.Tanh(), nn.LayerNorm(60), nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 30))
        self.model = nn.Sequential(*hidden).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.reduction = dadplug.GradientReduction(self.model, **{"weighting": "samples"} | options)
        self.rank = dist.get_rank()
        self.seen: list[torch.Tensor] = []

    def loss(self, step: int, poison: float = 1.0) -> torch.Tensor:
        """Return the loss of a step; backward of the layers below the last one is multiplied by `poison`."""
        generator = torch.Generator().manual_seed(10 * step + self.rank)
        inputs = torch.randn(5 + self.rank, 40, generator=generator, dtype=torch.float64)
        hidden = self.model[:5](inputs)
        if poison != 1.0:
            hidden.register_hook(lambda gradient: gradient * poison)
        return self.model[5](hidden).square().mean()

    def forward(self, step: int, poison: float = 1.0) -> torch.Tensor:
        with self.reduction.samples(5 + self.rank):
            return self.loss(step, poison)

    def finish(self) -> None:
        """Synchronize, record the gradients, and step."""
        self.reduction.synchronize()
        self.apply()

    def apply(self, step: Callable[[], object] | None = None) -> None:
        """Record the gradients, and step."""
        self.seen.append(torch.cat([p.grad.reshape(-1).clone() for p in self.model.parameters()]))
        assert self.seen[-1].isfinite().all()
        (step or self.optimizer.step)()
        self.optimizer.zero_grad()

    def plain(self, step: int) -> None:
        self.forward(step).backward()
        self.finish()


@functools.cache
def clean_gradients(world_size: int, **options) -> list[torch.Tensor]:
    """Return the agreed gradients of the loop without special steps."""
    return gradients_of(options, {})


def gradients_of(options: dict, special: dict[int, Step]) -> list[torch.Tensor]:
    """Train, with special steps by number; return the agreed gradients."""
    loop = Loop(**options)
    for step in range(STEPS):
        special.get(step, Loop.plain)(loop, step)
    assert loop.reduction.first_difference() is None
    loop.reduction.detach()
    return loop.seen


def equal(options: dict, special: dict[int, Step], clean: dict[int, Step] | None = None) -> None:
    """Compare a loop with special steps with a clean one, on this site."""
    tolerance = 1e-5 if options.get("wire") == "int8" else 1e-9  # codes are made in single precision
    ours = gradients_of(options, special)
    always_finite = {name: value for name, value in options.items() if name != "check_finite"}
    theirs = gradients_of(options, clean) if clean else clean_gradients(dist.get_world_size(), **always_finite)
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True)]
    assert max(errors) <= tolerance, errors
    assert min(float(each.norm()) for each in theirs) > 0.01


def overflows(loop: Loop, step: int) -> None:
    """Take a step that a scaler would skip, and then the step as it should be."""
    loop.forward(100 + step, math.inf if loop.rank == 1 else 1.0).backward()
    loop.reduction.synchronize()
    broken = {name for name, p in loop.model.named_parameters() if not p.grad.isfinite().all()}
    assert broken >= {"0.weight", "0.bias", "3.weight", "3.bias"}
    loop.optimizer.zero_grad()
    loop.plain(step)


def is_refused(loop: Loop, step: int) -> None:
    culprit = dist.get_world_size() - 1
    loop.forward(100 + step, math.nan if loop.rank == culprit else 1.0).backward()
    with pytest.raises(NonFiniteError, match=rf"NaN or Inf at site {culprit}\b"):
        loop.reduction.synchronize()
    loop.optimizer.zero_grad()
    loop.plain(step)


def recovers(options: dict) -> None:
    equal({**options, "check_finite": False}, {0: overflows, 3: overflows})
    equal(options, {0: is_refused, 4: is_refused})


@pytest.mark.parametrize("options", DENSE + FACTORS, ids=name_of)
def test_a_step_that_is_not_finite_leaves_no_trace(sites, options):
    sites(2).run(recovers, options)


def discards(loop: Loop, step: int) -> None:
    loop.forward(100 + step).backward()
    loop.optimizer.zero_grad()
    loop.plain(step)


def discards_in_place_at_one_site(loop: Loop, step: int) -> None:
    if loop.rank == 1:
        loop.forward(100 + step, math.inf).backward()
        loop.optimizer.zero_grad(set_to_none=False)
    loop.plain(step)


def discards_one_parameter(loop: Loop, step: int) -> None:
    loop.forward(step).backward()
    if loop.rank == 0:
        loop.model[3].weight.grad = None
    loop.finish()


def never_has_one_parameter(loop: Loop, step: int) -> None:
    with loop.reduction.no_sync():
        loop.forward(step).backward()
    if loop.rank == 0:
        loop.model[3].weight.grad = None
    loop.finish()


def comes_twice(loop: Loop, step: int) -> None:
    loop.forward(100 + step).backward()
    loop.forward(step).backward()
    loop.finish()


def accumulates(loop: Loop, step: int) -> None:
    with loop.reduction.no_sync():
        loop.forward(100 + step).backward()
    loop.forward(step).backward()
    loop.finish()


def comes_twice_at_one_site(loop: Loop, step: int) -> None:
    (comes_twice if loop.rank == 1 else Loop.plain)(loop, step)


def accumulates_at_one_site(loop: Loop, step: int) -> None:
    (accumulates if loop.rank == 1 else Loop.plain)(loop, step)


def is_halved(loop: Loop, step: int) -> None:
    loop.forward(step).backward()
    for parameter in loop.model.parameters():
        parameter.grad.mul_(0.5)
    loop.finish()


def has_half_the_loss(loop: Loop, step: int) -> None:
    (0.5 * loop.forward(step)).backward()
    loop.finish()


def repeats(options: dict) -> None:
    options = {**options, "weighting": "uniform"}
    equal(options, {2: discards, 4: discards_in_place_at_one_site})
    equal(options, {2: discards_one_parameter}, {2: never_has_one_parameter})
    equal(options, {2: is_halved}, {2: has_half_the_loss})
    options["weighting"] = "samples"
    equal(options, {2: comes_twice}, {2: accumulates})
    equal(options, {2: comes_twice_at_one_site}, {2: accumulates_at_one_site})


@pytest.mark.parametrize("options", DENSE, ids=name_of)
def test_gradients_that_change_after_they_were_sent_are_sent_again(sites, options):
    sites(2).run(repeats, options)


def test_three_sites_repeat_together(sites):
    sites(3).run(repeats, {"mode": "powersgd", "rank": 2, "bucket_mb": 0.002})


def test_nodes_with_several_processes_recover_and_repeat(sites):
    sites(4).run(repeats, {"mode": "topk", "density": 0.1, "hierarchy": 2})
    for options in ({"mode": "rankdad", "rank": 2, "error_feedback": True}, {"mode": "dsgd"}, {"mode": "dad"}):
        sites(4).run(recovers, options | {"hierarchy": 2})


def scaled(scale: Callable[[int], float], idle: int | None = None) -> dict[int, Step]:
    """Make steps under a scaler that has another scale in every step."""
    scaler = GradScaler("cpu", init_scale=scale(0))

    def take(loop: Loop, step: int) -> None:
        if step != idle or loop.rank == 0:
            scaler.scale(loop.forward(step)).backward()
        loop.reduction.synchronize()
        scaler.unscale_(loop.optimizer)
        loop.apply(lambda: scaler.step(loop.optimizer))
        scaler.update(scale(step + 1))

    return dict.fromkeys(range(STEPS), take)


def under_scale(loop: Loop, step: int, told: float, scale: float) -> None:
    """Take a step whose loss has a scale, of which the reduction has been told."""
    with loop.reduction.loss_scale(told):
        (scale * loop.forward(step)).backward()
    loop.reduction.synchronize()
    for parameter in loop.model.parameters():
        parameter.grad /= scale
    loop.apply()


def stated(loop: Loop, step: int) -> None:
    under_scale(loop, step, 3.0 ** (step % 4), 3.0 ** (step % 4))


def idles(loop: Loop, step: int) -> None:
    if loop.rank == 0:
        loop.forward(step).backward()
    loop.finish()


def unseen(loop: Loop, step: int) -> None:
    under_scale(loop, step, 1.0, 1024.0 if step < 3 else 1.0)


KEEPERS = [o for o in DENSE + FACTORS if (o.get("error_feedback") is True or o["mode"] in ("powersgd", "topk"))]
KEEPERS = [o for o in KEEPERS if o.get("error_feedback") is not False] + [{"mode": "dsgd", "wire": "int8"}, FACTORS[5]]


@pytest.mark.parametrize("options", KEEPERS, ids=name_of)
@support.at_sites(2)
def test_memories_follow_the_loss_scale(options: dict) -> None:
    scale = GradScaler.scale
    equal(options, scaled(lambda step: 1024.0 if step < 3 else 1.0))
    equal(options, scaled(lambda step: 2.0**step, idle=5), {5: idles})
    if "wire" not in options:  # rounding does not commute with a scale that is no power of two
        equal(options, dict.fromkeys(range(STEPS), stated))
    assert GradScaler.scale is scale
    with pytest.raises(AssertionError):  # the comparison would show a scale that nobody follows
        equal(options, dict.fromkeys(range(STEPS), unseen))


@support.at_sites(2)
def test_every_network_has_the_scale_of_its_own_scaler() -> None:
    """Two networks in one reduction, each with a scaler of its own whose scale goes its own way."""

    def train(with_scalers: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        networks = nn.ModuleList(nn.Linear(40, 60) for _ in range(2)).double()
        reduction = dadplug.GradientReduction(networks, mode="topk", density=0.05, weighting="samples")
        scalers = [GradScaler("cpu", init_scale=scale, enabled=with_scalers) for scale in (4096.0, 2.0)]
        optimizers = [torch.optim.SGD(network.parameters(), lr=0.05) for network in networks]
        seen = []
        for step in range(5):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            inputs = torch.randn(6, 40, generator=generator, dtype=torch.float64)
            for network, scaler in zip(networks, scalers, strict=True):
                with reduction.samples(6):
                    scaler.scale(network(inputs).square().mean()).backward()
            reduction.synchronize()
            for scaler, optimizer in zip(scalers, optimizers, strict=True):
                scaler.unscale_(optimizer)
            seen += [p.grad.clone() for p in networks.parameters()]
            for scaler, optimizer, scale in zip(scalers, optimizers, (1.0, 512.0), strict=True):
                scaler.step(optimizer)
                scaler.update(scale if step == 2 else None)
                optimizer.zero_grad()
        reduction.detach()
        return seen

    for ours, theirs in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_the_scale_of_a_backward_pass_ends_with_it():
    layer, found, scale = nn.Linear(3, 3), [], GradScaler.scale
    layer.weight.register_post_accumulate_grad_hook(lambda _: found.append(feedback.running()))
    scaler, inputs = GradScaler("cpu", init_scale=8.0), torch.ones(2, 3, requires_grad=True)
    feedback.watch()
    feedback.watch()
    try:
        scaler.scale(layer(inputs).sum()).backward()
        layer(inputs).sum().backward()
        scaler.scale(checkpoint(layer, inputs, use_reentrant=True).sum()).backward()
        outputs = layer(inputs)
        outputs.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scaler.scale([outputs.sum()])[0].backward()
        layer(inputs).sum().backward()
        GradScaler("cpu", enabled=False).scale(layer(inputs).sum()).backward()
        feedback.unwatch()
        scaler.scale(layer(inputs).sum()).backward()
    finally:
        feedback.unwatch()
    assert [each.value for each in found] == [8.0, 1.0, 8.0, 1.0, 1.0, 8.0]
    assert GradScaler.scale is scale


# Lossy methods and what they keep back: PowerSGD, top-k, error feedback in rankdad, int8 on the wire


LOSSY = [
    {"mode": "powersgd", "rank": 2},
    {"mode": "powersgd", "rank": 2, "wire": "bf16"},
    {"mode": "powersgd", "rank": 2, "wire": "int8"},
    {"mode": "topk", "density": 0.1},
    {"mode": "topk", "density": 0.1, "wire": "bf16"},
    {"mode": "rankdad", "rank": 2, "error_feedback": True},
    {"mode": "rankdad", "rank": 2, "error_feedback": True, "wire": "int8"},
    {"mode": "rankdad", "rank": 24, "wire": "int8"},
    {"mode": "rankdad", "rank": 3},
    {"mode": "rankdad"},
    {"mode": "dsgd", "wire": "int8"},
]


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.LayerNorm(60), nn.Linear(60, 50), nn.Linear(50, 30)).to(dtype)


def batch(rank, seed=0, samples=None):
    generator = torch.Generator().manual_seed(seed * 10 + rank)
    return torch.randn(6 + rank if samples is None else samples, 40, generator=generator)


def gradients(model, rank, seed=0, samples=None):
    model.zero_grad()
    inputs = batch(rank, seed, samples).to(next(model.parameters()).dtype)
    model(inputs).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def follows_the_paper() -> None:
    """Beside PowerSGD as its paper writes it, in one process that sees all sites' gradients."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, apart = network(torch.float64), network(torch.float64)
    reduction = dadplug.GradientReduction(model, mode="powersgd", rank=3, bucket_mb=0.001, weighting="samples")
    assert {row.path for row in reduction.plan if len(row.shape) == 2} == {"powersgd"}
    samples = [6 + each for each in range(world_size)]
    weights = {name: p for name, p in model.named_parameters() if p.dim() == 2}
    bases = {name: reduction._method.basis(name, tuple(p.shape), p).clone().T for name, p in weights.items()}
    errors = {name: [torch.zeros_like(p) for _ in samples] for name, p in weights.items()}
    for step in range(4):
        all_gradients = [gradients(apart, each, step) for each in range(world_size)]
        gradients(model, rank, step)
        reduction.synchronize()
        for name, p in weights.items():
            # The step's scale of a site's share is that of the first step, whose samples all steps have here.
            matrices = [n / sum(samples) * g[name] + e for n, g, e in zip(samples, all_gradients, errors[name])]
            left = torch.linalg.qr(sum(m @ bases[name] for m in matrices)).Q
            right = sum(m.T @ left for m in matrices)
            torch.testing.assert_close(p.grad, left @ right.T, rtol=1e-8, atol=1e-12)
            errors[name] = [m - left @ right.T / world_size for m in matrices]
            bases[name] = right


@pytest.mark.parametrize("count", [2, 3])
def test_powersgd_follows_its_paper_over_several_buckets(sites, count):
    sites(count).run(follows_the_paper)


@support.at_sites(2)
def test_topk_sends_the_largest_and_keeps_the_rest() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, apart = network(torch.float64), network(torch.float64)
    reduction = dadplug.GradientReduction(model, mode="topk", density=0.05, weighting="samples")
    samples = [6 + each for each in range(world_size)]
    weights = {name: p for name, p in model.named_parameters() if p.numel() >= 1024}
    errors = {name: [torch.zeros(p.numel(), dtype=p.dtype) for _ in samples] for name, p in weights.items()}
    for step in range(3):
        all_gradients = [gradients(apart, each, step) for each in range(world_size)]
        gradients(model, rank, step)
        reduction.synchronize()
        for name, p in weights.items():
            agreed = torch.zeros(p.numel(), dtype=p.dtype)
            for site, n in enumerate(samples):
                errors[name][site] += n / sum(samples) * all_gradients[site][name].view(-1)
                chosen = errors[name][site].abs().topk(math.ceil(0.05 * p.numel())).indices
                agreed[chosen] += errors[name][site][chosen]
                errors[name][site][chosen] = 0
            torch.testing.assert_close(p.grad.view(-1), agreed, rtol=1e-9, atol=1e-12)
    assert reduction.traffic.bytes_sent < 0.1 * reduction.traffic.dense_bytes + 3000


def trains(steps: int, state: list | None, options: dict) -> tuple:
    model, rank = network(), dist.get_rank()
    reduction = dadplug.GradientReduction(model, **{"weighting": "samples"} | options)
    return train(model, reduction, lambda step: gradients(model, rank, step, 4 + (step + rank) % 3), steps, state)


@pytest.mark.parametrize("options", LOSSY, ids=name_of)
def test_replicas_stay_equal_and_resume_on_the_same_curve(sites, options):
    state = assert_resumes(sites(2), trains, 8, 5, options)
    if options in LOSSY[::3]:  # with one site more
        sites(3).run(trains, 8, state, options)


@pytest.mark.parametrize("mode", ["powersgd", "topk", "rankdad"])
@support.at_sites(2)
def test_a_state_may_be_loaded_in_mid_training(mode: str) -> None:
    model = network()
    reduction = dadplug.GradientReduction(model, mode=mode, weighting="samples")
    for step in range(3):
        gradients(model, dist.get_rank(), step)
        reduction.synchronize()
    state = reduction.state_dict()
    for step in range(2):
        gradients(model, dist.get_rank(), step)
        reduction.synchronize()
    reduction.load_state_dict(state)
    gradients(model, dist.get_rank(), 3)
    reduction.synchronize()
    assert reduction.first_difference() is None


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@support.at_sites(2)
def test_nan_in_rows_of_a_table_is_an_error_at_all_sites(wire: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(200, 16), nn.Linear(16, 4))
    reduction = dadplug.GradientReduction(model, mode="rankdad", wire=wire)

    def step(scale: float) -> None:
        model.zero_grad()
        (scale * model(torch.arange(4)).square().mean()).backward()
        reduction.synchronize()

    for _ in range(2):
        step(1.0)
    with pytest.raises(NonFiniteError, match="site 1"):
        step(torch.nan if dist.get_rank() == 1 else 1.0)
    step(1.0)
    assert reduction.first_difference() is None
    reduction.detach()
