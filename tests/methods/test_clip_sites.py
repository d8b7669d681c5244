"""Gradients of sites that are clipped to a multiple of the median of the sites' norms, held against one process."""

import logging
import math
from functools import partial
from statistics import median_low

import pytest
import support
import torch
import torch.distributed as dist
from comparison import descend, off_by
from dadplug.hooks.factor import LINEAR
from divided_network import SMALL, network
from support import refuses

import dadplug
from dadplug.exchange.factor_buckets import FactorBucket, FactorPayload
from dadplug.exchange.owned_buckets import ContributionBucket
from dadplug.exchange.rounds import Outsized
from dadplug.exchange.summed_buckets import SparseBucket, SummedBucket
from dadplug.step.reducer.clipping import MEASURED_EVERY, OUTSIZED, OutsizedGradients, square_of
from dadplug.step.reducer.handler import StepHeader

LOUD, TIMES, MULTIPLE = 1, 1e4, 3.0
FROM = 2  # first step in which a site is loud
EXACT = {
    "dsgd": {"mode": "dsgd"},
    "in one sum": {"mode": "dsgd", "bucket_mb": 100.0},
    "dad": {"mode": "dad"},
    "edad": {"mode": "edad"},
    "rankdad": {"mode": "rankdad", "rank": 30, "tolerance": 0.0, "merge": "all"},
    "by owners": {"mode": "rankdad", "rank": 30, "tolerance": 0.0, "merge": "owner"},
}
LOSSY = {  # and how far the sum of all that is applied may be from that of the clipped gradients
    "powersgd": ({"mode": "powersgd", "rank": 8}, 1e-3),
    "topk": ({"mode": "topk", "density": 0.2}, 1e-3),
    "rankdad": ({"mode": "rankdad", "rank": 8, "error_feedback": True, "merge": "all"}, 1e-3),
    "by owners": ({"mode": "rankdad", "rank": 8, "error_feedback": True, "merge": "owner"}, 1e-3),
    "int8": ({"mode": "dsgd", "wire": "int8"}, 3e-2),
}


def clipped(parts: list, multiple: float | None) -> tuple[dict, list[float]]:
    """Return the mean of the sites' gradients by one process, each clipped to a multiple of the median norm.

    Args:
        parts: number of rows and gradients by name of each site.
        multiple: the multiple; None for no clipping.
    """
    norms = [math.sqrt(sum(float(each.square().sum()) for each in own.values())) for _, own in parts]
    limit = math.inf if multiple is None else multiple * median_low(norms)
    rows = sum(count for count, _ in parts)
    shares = [count / rows * min(1.0, limit / norm) for (count, _), norm in zip(parts, norms, strict=True)]
    return {name: sum(share * own[name] for share, (_, own) in zip(shares, parts)) for name in parts[0][1]}, norms


def run_backward(model, rank: int, step: int, loud: int = LOUD):
    """Run backward on a site's batch; the loss of one site is much larger from a step on."""
    model.zero_grad()
    rows = 1 + rank % 2 + step % 2
    inputs = torch.randn(rows, model[0].in_features, generator=torch.Generator().manual_seed(10 * step + rank)).double()
    factor = TIMES if rank == loud and step >= FROM else 1.0
    (factor * model(inputs).square().mean()).backward()
    return rows, {name: p.grad.clone() for name, p in model.named_parameters()}


def is_exact(options: dict, multiple: float | None, steps: int = 4) -> None:
    model, apart = network(widths=SMALL), network(widths=SMALL)
    reduction = dadplug.GradientReduction(model, weighting="samples", clip_sites=multiple, **options)
    world_size = dist.get_world_size()
    for step in range(steps):
        apart.load_state_dict(model.state_dict())
        expected, _ = clipped([run_backward(apart, rank, step) for rank in range(world_size)], multiple)
        run_backward(model, dist.get_rank(), step)
        reduction.synchronize()
        for name, p in model.named_parameters():
            error = off_by(p.grad, expected[name])
            assert error < 1e-9, (step, name, error)
        descend(model)
    assert reduction.first_difference() is None
    reduction.detach()


@pytest.mark.parametrize("multiple", [MULTIPLE, 1.0, None])
@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("count", [2, 3])
def test_it_is_the_mean_of_clipped_gradients(sites, count, kind, multiple):
    if kind != "by owners" or count == 3:
        sites(count).run(is_exact, EXACT[kind], multiple)


def sums_of(options: dict) -> tuple[float, float]:
    """Return how far all that is applied is from the sum of the clipped gradients, and that over the unclipped ones.

    After steps with gradients there are some without, in which the sites send what they have kept.
    """
    model, apart = (network(widths=(32, 32, 32, 32)) for _ in range(2))
    reduction = dadplug.GradientReduction(model, clip_sites=MULTIPLE, **options)
    norms: list[list[float]] = []
    reduction._planner._outsized.follow = lambda found, step: norms.append(found)
    sites, totals = range(dist.get_world_size()), [[0.0] * len([*model.parameters()]) for _ in range(3)]
    for step in range(32):
        parts = [run_backward(apart, rank, step)[1] for rank in sites] if step < 7 else []
        model.zero_grad()
        if step < 7:
            run_backward(model, dist.get_rank(), step)
        else:
            (0.0 * model(torch.ones(2, 32).double()).sum()).backward()
        reduction.synchronize()
        limit = MULTIPLE * median_low([norm for norm in norms[-1] if norm] or [math.inf])
        for place, (name, p) in enumerate(model.named_parameters()):
            totals[0][place] += p.grad
            for rank, own in enumerate(parts):
                totals[1][place] += min(1.0, limit / norms[-1][rank]) * own[name] / len(sites)
                totals[2][place] += own[name] / len(sites)
    assert reduction.first_difference() is None
    reduction.detach()
    clipped, whole = (math.hypot(*(float(each.norm()) for each in total)) for total in totals[1:])
    return max(off_by(one, other) for one, other in zip(*totals[:2], strict=True)), clipped / whole


@pytest.mark.parametrize("kind", LOSSY)
def test_what_is_clipped_is_not_sent_later(sites, kind):
    """All that is applied is the sum of the clipped gradients, so that the rest of a clipped one is not kept."""
    options, most = LOSSY[kind]
    for error, share in sites(3).run(sums_of, options):
        assert error < most
        assert share < 0.01


class Hub:
    """Transport that records what it shows."""

    rank, sites = 0, ("site 0", "site 1", "site 2")

    def __init__(self) -> None:
        self.shown: list[tuple[int, int]] = []
        self.rounds = self

    def show(self, shown: Outsized) -> None:
        self.shown.append((shown.slot, shown.training_step))
        assert shown.times > OUTSIZED


def test_a_site_is_named_once_for_each_occurrence(caplog):
    hub = Hub()
    outsized = OutsizedGradients(hub, None)
    caplog.set_level(logging.WARNING, "dadplug")
    for step in range(60):
        loud = 5000.0 if 3 <= step < 20 or step == 45 else 1.0
        outsized.follow([1.0, loud, 0.0 if step % 2 else 2.0], step)
    assert hub.shown == [(1, 3), (1, 45)]
    steps = [record.getMessage().partition(": the norm of the gradient of site 1")[0] for record in caplog.records]
    assert steps == ["step 3", "step 45"]


@support.at_sites(2)
def test_a_loud_site_is_named_without_clipping() -> None:
    model, found = network(widths=SMALL), []
    reduction = dadplug.GradientReduction(model, mode="dad")
    reduction._transport.rounds.show = lambda shown: found.append((shown.slot, shown.training_step))
    for step in range(2 * MEASURED_EVERY + 1):
        run_backward(model, dist.get_rank(), step)
        reduction.synchronize()
    assert found == ([(LOUD, MEASURED_EVERY)] if dist.get_rank() == 0 else [])  # once
    reduction.detach()


def enlarge(bucket, factor: float) -> None:
    """Multiply what a bucket is about to send; only the left factors of rows, but for a negative number."""
    if isinstance(bucket, FactorBucket | ContributionBucket):
        own = bucket._own if isinstance(bucket, FactorBucket) else bucket._own.values()
        parts = [part for payload in own for part in payload[: 1 if factor > 0 else 2]]
    elif isinstance(bucket, SparseBucket):
        parts = [bucket._views(bucket._gather.payload, slot)[1] for slot in range(len(bucket._counts))]
    else:
        parts = [bucket._flat]
    for part in parts:
        if part.dtype == torch.int8:  # the scales are behind the rows
            part[:, -4:] = (part[:, -4:].contiguous().view(torch.float32) * abs(factor)).view(torch.int8)
        else:
            part *= abs(factor)


def lie(reduction, factor: float):
    """Let this site send other values than its step header is about; return what ends that."""
    kinds = (FactorBucket,) if factor == OF_OWNERS else (FactorBucket, ContributionBucket, SparseBucket, SummedBucket)
    handlers = reduction._planner._reducer._handlers
    buckets = [each for handler in handlers for each in vars(handler).values() if isinstance(each, kinds)]
    for bucket in buckets:
        bucket.launch = lambda *samples, to=bucket: enlarge(to, factor) or type(to).launch(to, *samples)
    return lambda: [vars(bucket).pop("launch") for bucket in buckets]


EXPLAINED = r"norm of the gradient of site 2 .* times the median of all sites, which explains this: NaN or Inf"
OVERFLOWS = -1e30  # products of factors, in the step itself
OF_OWNERS = 1e14  # what an owner has merged alone
TOLD_LIES = [
    ({"mode": "dad"}, 1e30),
    ({"mode": "dad"}, OVERFLOWS),
    ({"mode": "dad", "wire": "int8"}, OVERFLOWS),
    ({"mode": "edad"}, 1e30),
    ({"mode": "rankdad", "rank": 4, "wire": "fp32", "merge": "all"}, 1e30),
    ({"mode": "rankdad", "rank": 4, "wire": "fp32", "merge": "all"}, OVERFLOWS),
    ({"mode": "rankdad", "rank": 4, "wire": "int8", "merge": "all"}, OVERFLOWS),
    ({"mode": "rankdad", "rank": 4, "wire": "fp32", "merge": "owner"}, 1e15),
    ({"mode": "rankdad", "rank": 4, "wire": "int8", "merge": "owner"}, OVERFLOWS),
    ({"mode": "rankdad", "rank": 4, "wire": "fp32", "merge": "owner"}, OF_OWNERS),
    ({"mode": "dsgd", "wire": "int8"}, 1e30),
    ({"mode": "topk"}, 1e30),
    ({"mode": "powersgd", "rank": 2}, 1e20),
    ({"mode": "dsgd"}, None),  # only sums arrive: the site states its norm
    ({"mode": "rankdad", "rank": 4, "merge": "owner"}, None),
]


def train(model, reduction, factor: float | None) -> bool:
    """Train, with a lie of site 2 in a step without stated norms, None for a loss that is too large; return False."""
    optimizer, rank = torch.optim.SGD(model.parameters(), 0.1), dist.get_rank()
    for step in range(2 * MEASURED_EVERY - 1):
        optimizer.zero_grad()
        lies = rank == 2 and step == MEASURED_EVERY + 1
        end = lie(reduction, factor) if lies and factor else list
        inputs = torch.randn(16, 40, generator=torch.Generator().manual_seed(10 * step + rank))
        ((1e30 if lies and not factor else 1.0) * model(inputs).square().mean()).backward()
        try:
            reduction.synchronize()
        finally:
            end()
        optimizer.step()
    return False


@support.at_sites(3)
def test_a_site_out_of_all_proportion_is_named_where_nan_follows() -> None:
    for options, factor in TOLD_LIES:
        model = network(torch.float32, (40, 48, 56, 32))
        reduction = dadplug.GradientReduction(model, **options)
        honest = dist.get_rank() != 2 or factor != OF_OWNERS  # a site does not measure what it has merged itself
        with pytest.raises(dadplug.NonFiniteError, match=EXPLAINED if honest else "NaN or Inf"):
            assert train(model, reduction, factor), options
        assert all(bool(each.isfinite().all()) for each in model.parameters()), options
        reduction.detach()


GROWING = [30.0**step for step in range(12)] + [2e17 * 1.3**step for step in range(20)]


def grow(model, reduction) -> bool:
    """Train on rows whose sizes grow; return whether all agreed gradients were finite."""
    for size in GROWING:
        model.zero_grad()
        outputs = model(torch.full((4, 24), size))
        outputs.backward(torch.full_like(outputs, size))
        reduction.synchronize()
        if not bool(model.weight.grad.isfinite().all()):
            return False
    return True


@support.at_sites(2)
def test_products_that_leave_their_range_by_small_steps_end_the_step() -> None:
    for options in ({"mode": "dad"}, {"mode": "dad", "wire": "int8"}, {"mode": "dad", "wire": "bf16"}):
        model = torch.nn.Linear(24, 24, bias=False)
        reduction = dadplug.GradientReduction(model, **options)
        with pytest.raises(dadplug.NonFiniteError, match="although all step headers state that these are finite"):
            assert grow(model, reduction), options
        reduction.detach()


def test_other_multiples_and_what_shows_no_norm_of_a_site_are_refused():
    reduce = partial(dadplug.GradientReduction, network(widths=SMALL))
    secure = dadplug.DifferentialPrivacy(1.0, 1.0, 0.1, 8, secure_sum=True)
    multiples = (0.5, -1, math.inf, math.nan, True, "10")
    refuses(
        *((partial(reduce, clip_sites=value), "a number of 1 or more") for value in multiples),
        (lambda: reduce(clip_sites=10.0, hierarchy="auto"), "clip_sites"),
        (lambda: reduce(clip_sites=10.0, mode="dsgd", privacy=secure), "clip_sites"),
    )


def beside(model) -> None:
    """Give a weight a gradient beside its layer, which is summed at the end of the step."""
    (1e6 * model[0].weight).sum().backward()


def repeated(reduction):
    """Send one element of each gradient many times; return what ends that."""

    def launched(bucket: SparseBucket) -> None:
        for slot, count in enumerate(bucket._counts):
            indices, values = bucket._views(bucket._gather.payload, slot)
            indices.zero_()
            values.fill_(values.norm() / count**0.5)
        launch(bucket)

    launch, SparseBucket.launch = SparseBucket.launch, launched
    return lambda: setattr(SparseBucket, "launch", launch)


def weighted(reduction):
    """State many samples to owners; return what ends that."""
    launch = ContributionBucket.launch
    ContributionBucket.launch = lambda bucket, samples: launch(bucket, 10**6 * samples)
    return lambda: setattr(ContributionBucket, "launch", launch)


SAMPLES, FINITE, NORM = 2, 6, 12  # places in a step header
OWNER = {"mode": "rankdad", "rank": 4, "wire": "fp32", "merge": "owner"}
PAST_THE_LIMIT = {  # options, what a site states, what it does besides, how loud it is
    "beside a layer": ({"mode": "dad"}, {NORM: 0}, beside, 1.0),
    "beside a merged layer": (OWNER, {NORM: 0}, beside, 1.0),
    "without samples": ({"mode": "dsgd", "wire": "int8"}, {SAMPLES: 0}, None, TIMES),
    "selected without samples": ({"mode": "topk"}, {SAMPLES: 0}, None, TIMES),
    "one element": ({"mode": "topk", "density": 0.5}, {}, repeated, 1.0),
    "samples to owners": (OWNER, {}, weighted, 1.0),
    "beside an idle site": (OWNER, {NORM: 0}, None, TIMES),
    "not finite": ({"mode": "dad"}, {FINITE: 0}, None, TIMES),
}


@support.at_sites(3)
def test_no_statement_gets_a_site_past_the_limit() -> None:
    rank, pack = dist.get_rank(), StepHeader.pack
    for name, (options, lies, does, loud) in PAST_THE_LIMIT.items():
        model, apart = network(torch.float32, (40, 48, 56, 32)), network(torch.float32, (40, 48, 56, 32))
        reduction = dadplug.GradientReduction(model, clip_sites=1.0, **options)
        for step in range(3):
            model.zero_grad()
            attacks, ends = step == 2 and rank == 2, list
            if attacks and does is not None:
                ends = (does(reduction) if does is not beside else None) or list
            if not (step == 2 and rank == 1 and name == "beside an idle site"):
                inputs = torch.randn(16, 40, generator=torch.Generator().manual_seed(10 * step + rank))
                ((loud if attacks else 1.0) * model(inputs).square().mean()).backward()
            if attacks and does is beside:
                beside(model)
            if attacks:
                StepHeader.pack = lambda header, lies=lies: [lies.get(n, each) for n, each in enumerate(pack(header))]
            try:
                if name == "not finite" and step == 2:
                    with pytest.raises(dadplug.errors.MismatchError, match=r"site 2 .*finite is 0 without a fault"):
                        reduction.synchronize()
                elif model[0].weight.grad is None and not attacks and step == 2:
                    reduction.idle()
                else:
                    reduction.synchronize()
            finally:
                StepHeader.pack = pack
                ends()
        apart.load_state_dict(model.state_dict())
        norms = []
        for site in (0, 1):
            apart.zero_grad()
            apart(torch.randn(16, 40, generator=torch.Generator().manual_seed(20 + site))).square().mean().backward()
            norms.append(math.hypot(*(float(p.grad.norm()) for p in apart.parameters())))
        found = 0.0 if name == "not finite" else math.hypot(*(float(p.grad.norm()) for p in model.parameters()))
        assert found < 2 * max(norms), (name, found, norms)
        reduction.detach()


def crafted(kind: str) -> FactorPayload:
    """Return rows that are not finite, or cancel each other but for rounding errors."""
    left, right = torch.randn(6, 8).sign(), torch.ones(6, 9)
    if kind == "cancels":
        return FactorPayload(torch.tensor([1.0, 2.0, -3.0] * 2)[:, None] * 2.0**50 * left[:1], 1e10 * right)
    if kind == "bias":
        return FactorPayload(torch.tensor([1.0, 2.0, -3.0] * 2)[:, None] * 2.0**50 * left[:1], 0 * right)
    return FactorPayload(left.fill_(float(kind)), right)


@pytest.mark.parametrize(("kind", "least"), [("cancels", 1e18), ("bias", 1e8), ("inf", 1e300), ("nan", 1e300)])
def test_no_rows_get_past_the_limit(kind, least):
    """Each site multiplies them by its factor first, so that other rounding errors are left."""
    assert math.sqrt(square_of(crafted(kind), LINEAR, True, True)) > least
