"""Layers whose gradients rankdad forms in a memory of all that it has not sent."""

from functools import partial

import pytest
import support
import torch
import torch.distributed as dist
from comparison import off_by
from dadplug.hooks import Factor
from torch import nn

import dadplug
from dadplug.exchange.factor_buckets import FactorBucket
from dadplug.exchange.owned_buckets import ContributionBucket
from dadplug.exchange.summed_buckets import SparseBucket, SummedBucket
from dadplug.exchange.wire import wire_format
from dadplug.lowrank import dispatch, portable
from dadplug.options import Options
from dadplug.step.methods.formed import FormedSlot
from dadplug.step.methods.rankdad import RankDAD, keeps_whole

OUT, WIDTH = 40, 48
SINGLE = 2e-5  # of sums over many steps in single precision


def rows_of(count, generator, dtype=torch.float32, rank=None):
    """Return factors of a gradient with `count` rows, of a lower rank if asked."""
    deltas, activations = (torch.randn(count, n, generator=generator, dtype=dtype) for n in (OUT, WIDTH))
    if rank is not None:
        deltas = torch.randn(count, rank, generator=generator, dtype=dtype) @ deltas[:rank]
    return Factor(activations, deltas)


def decoded(method, payload):
    """Return what the sites decode: the gradients of weight and bias."""
    wire = wire_format(method.options.wire_of("lowrank"), payload.left.dtype)
    parts = payload if payload.encoded is None else payload.encoded
    left, right = (wire.decode(part).to(payload.left.dtype) for part in parts[:2])
    return left.T @ right, None if payload.bias is None else wire.decode(parts.bias[None])[0].to(payload.left.dtype)


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numba", [True, False], ids=["numba", "torch"])
def test_what_is_sent_and_kept_is_the_sum_of_all_gradients(wire, dtype, numba, monkeypatch):
    """Weights and loss scales change, steps do not count, gradients come in two parts, and some have a low rank."""
    if not numba:
        monkeypatch.setattr(dispatch, "cpu_kernels", lambda: portable)
    generator = torch.Generator().manual_seed(0)
    method = RankDAD(Options(mode="rankdad", rank=4, wire=wire))
    kinds = torch.float64 if dtype == torch.float64 and wire != "bf16" else dtype
    total, sent = torch.zeros(2, OUT, WIDTH, dtype=torch.float64)
    of_bias, sent_of_bias = torch.zeros(2, OUT, dtype=torch.float64)
    for number in range(40):
        method.weight, scale = (0.2, 0.5, 0.3)[number % 3], (1.0, 256.0)[number % 2]
        counts, rank = (7, 24) if number % 5 == 3 else (24,), 3 if number < 5 else None
        parts, made = [rows_of(count, generator, kinds, rank) for count in counts], []
        with method.loss_scales.stated(scale):
            method.loss_scales.record("w")
            for part in parts:
                payload = method.encode("w", Factor(part.activations, scale * part.deltas), True)
                made.append([each.clone() for each in decoded(method, payload)])
        method.loss_scales.end_step()
        if number % 7 == 4:
            method.rollback("w")
            continue
        weight = method.weight * (1.25 if number % 11 == 5 else 1.0)  # other sites' samples were not known
        method.commit("w", weight)
        total += weight * sum(part.gradient() for part in parts).double()
        of_bias += weight * sum(part.bias_gradient() for part in parts).double()
        sent += weight / scale * sum(weights for weights, _ in made).double()
        sent_of_bias += weight / scale * sum(biases for _, biases in made).double()
    state = method.state_dict()
    last = state["weights"]["w"]
    bound = 1e-12 if kinds == torch.float64 and wire == "fp32" else SINGLE
    assert off_by(sent + last * state["errors"]["errors"]["w"].double(), total) < bound
    assert "w" not in state["lost"]
    assert float((sent - total).norm()) > 0.01 * float(total.norm())  # something is kept
    if wire != "bf16":
        kept = state["biases"]["w"].double() if wire == "int8" else 0.0
        assert off_by(sent_of_bias + last * kept, of_bias) < 1e-5


def test_the_pass_from_known_directions_finds_what_a_compression_finds():
    """As much of a gradient that changes little, to a few percent of what the best approximation leaves."""
    generator = torch.Generator().manual_seed(1)
    steady = torch.randn(OUT, WIDTH, generator=generator) * 0.8 ** torch.arange(WIDTH)
    method = RankDAD(Options(mode="rankdad", rank=6, wire="fp32", error_feedback=True, memory_decay=0.0))
    found = []
    for _ in range(8):
        gradient = steady + 0.01 * torch.randn(OUT, WIDTH, generator=generator)
        payload = method.encode("w", Factor.formed(gradient), False)
        method.commit("w")
        best = torch.linalg.svdvals(gradient)[6:].norm()
        found.append(float((gradient - payload.left.T @ payload.right).norm() / best))
    assert max(found[3:]) < 1.02
    assert abs(method.quality()["w"].residual - float(best / gradient.norm())) < 0.02


def test_the_pass_is_taken_where_directions_are_known(monkeypatch):
    taken = []
    find = FormedSlot.find
    monkeypatch.setattr(FormedSlot, "find", lambda *args: taken.append(find(*args)) or taken[-1])
    generator = torch.Generator().manual_seed(2)
    method = RankDAD(Options(mode="rankdad"))
    for _ in range(4):
        method.encode("w", rows_of(64, generator), True)
        method.commit("w")
    assert taken == ([8, 8, 8] if dispatch.cpu_kernels() is not portable else [-1, -1, -1])


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_gradients_of_any_size_are_found(scale):
    generator = torch.Generator().manual_seed(3)
    method = RankDAD(Options(mode="rankdad", rank=8, wire="fp32"))
    for _ in range(3):
        factor = rows_of(6, generator)
        gradient = scale * factor.gradient()
        payload = method.encode("w", Factor(factor.activations, scale * factor.deltas), False)
        method.rollback("w") if _ == 1 else method.commit("w")
        assert off_by(payload.left.T @ payload.right, gradient) < 1e-4


def test_nan_raises_and_leaves_the_memory_as_it_was():
    generator = torch.Generator().manual_seed(4)
    method = RankDAD(Options(mode="rankdad"))
    for _ in range(3):
        method.encode("w", rows_of(64, generator), False)
        method.commit("w")
    before = method.state_dict()["errors"]["errors"]["w"]
    factor = rows_of(64, generator)
    factor.deltas[3, 3] = torch.nan
    with pytest.raises(FloatingPointError):
        method.encode("w", factor, False)
    method.rollback("w")
    assert torch.equal(method.state_dict()["errors"]["errors"]["w"], before)
    assert bool(before.any())


def test_a_state_of_0_3_goes_on():
    """There, what had been sent lay beside the memory, as rows with the opposite sign."""
    generator = torch.Generator().manual_seed(5)
    method, other = (RankDAD(Options(mode="rankdad", rank=4, wire="fp32", error_feedback=True)) for _ in range(2))
    for _ in range(3):
        method.encode("w", rows_of(30, generator, torch.float64), False)
        method.commit("w")
    state = method.state_dict()
    rows = [torch.randn(4, n, generator=generator, dtype=torch.float64) for n in (OUT, WIDTH)]
    state["errors"]["errors"]["w"] = state["errors"]["errors"]["w"] - rows[0].T @ rows[1]
    state["lost"]["w"] = tuple(rows)
    other.load_state_dict(state)
    factor = rows_of(30, generator, torch.float64)
    sent = [each.encode("w", factor, False) for each in (method, other)]
    assert off_by(sent[1].left.T @ sent[1].right, sent[0].left.T @ sent[0].right) < 1e-9


def test_wide_layers_of_few_rows_are_compressed_by_their_rows():
    assert keeps_whole(512, 128, 128, 8)
    assert keeps_whole(2080, 128, 512, 8)
    assert keeps_whole(4096, 16, 144, 8)
    assert not keeps_whole(512, 768, 3072, 8)
    assert not keeps_whole(16, 2048, 784, 8)
    for stated in (False, True):  # by the user
        method = RankDAD(Options(mode="rankdad", error_feedback=stated))
        assert method._keeps_whole(Factor(torch.ones(1, 4096), torch.ones(1, 4096))) is stated
        assert method._keeps_whole(Factor.formed(torch.ones(9, 9))) is stated


@support.at_sites(2)
def test_rows_that_are_decoded_into_kept_memory_are_those_of_new_memory() -> None:
    """To the bit, for equal and for different weights, and where a site has fewer rows in a step."""
    weights = []
    for keeps in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 48), nn.Tanh(), nn.Linear(48, 32, bias=False))
        reduction = dadplug.GradientReduction(model, rank=8, wire="int8", weighting="samples")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        made = []
        for step in range(12):
            handlers = reduction._planner._reducer._handlers if step else []
            buckets = [each.bucket for each in handlers if isinstance(each.bucket, FactorBucket)]
            for bucket in buckets:
                bucket._keeps = keeps and bucket._keeps
            rows = (16, 5 if step == 8 else 16 if step < 6 else 24)[dist.get_rank()]
            optimizer.zero_grad()
            model(torch.randn(rows, 40)).square().sum().backward()
            reduction.synchronize()
            optimizer.step()
            made.append(sum(len(bucket.stacked.shares) for bucket in buckets if bucket.stacked))
        assert (max(made[1:]) == 2) is keeps
        weights.append([each.detach().clone() for each in model.parameters()])
        assert reduction.first_difference() is None
        reduction.detach()
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("wire", ["auto", "fp32", "int8"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.02), (torch.float16, 0.003)], ids=str)
def test_gradients_of_16_bits_are_sent_and_kept(dtype, bound, wire):
    generator = torch.Generator().manual_seed(6)
    method = RankDAD(Options(mode="rankdad", wire=wire))
    total, sent = torch.zeros(2, OUT, WIDTH, dtype=torch.float64)
    for _ in range(10):
        factor = rows_of(24, generator, dtype)
        payload = method.encode("w", factor, True)
        sent += payload.left.double().T @ payload.right.double()
        method.commit("w")
        total += factor.to(torch.float64).gradient()
    assert off_by(sent + method.state_dict()["errors"]["errors"]["w"].double(), total) < bound


def test_zeros_leave_the_directions_as_they_are():
    """Also where a later step does not count."""
    generator = torch.Generator().manual_seed(7)
    method = RankDAD(Options(mode="rankdad", rank=6, wire="fp32", error_feedback=True, memory_decay=0.0))
    method.encode("w", rows_of(30, generator), False)
    method.commit("w")
    known = method.state_dict()["carried"]["w"]
    for _ in range(3):
        method.encode("w", Factor(torch.zeros(30, WIDTH), torch.zeros(30, OUT)), False)
        method.commit("w")
        method.encode("w", rows_of(30, generator), False)
        method.rollback("w")
        assert torch.equal(method.state_dict()["carried"]["w"], known)


@pytest.mark.parametrize("shape", [(OUT, WIDTH), (48, 40), (40, 50), (30, 48)], ids=str)
@pytest.mark.parametrize("formed", [True, False], ids=["formed", "rows"])
def test_a_layer_may_get_another_type_or_shape(shape, formed):
    generator = torch.Generator().manual_seed(8)
    method = RankDAD(Options(mode="rankdad"))
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        for out, width in ((OUT, WIDTH), shape):
            method._whole["w"] = formed
            gradients = Factor(torch.randn(24, width, generator=generator), torch.randn(24, out, generator=generator))
            payload = method.encode("w", gradients.to(dtype), True)
            method.commit("w", 0.5)
            assert payload.left.shape == (8, out)
            assert bool((payload.left.double().T @ payload.right.double()).isfinite().all())


def test_the_form_of_a_layer_is_in_the_state():
    """Also where a layer that is compressed by its rows has kept none of them."""
    generator = torch.Generator().manual_seed(9)
    method, other = (RankDAD(Options(mode="rankdad", wire="fp32")) for _ in range(2))
    method._whole["w"] = False
    method.encode("w", rows_of(1, generator), False)
    method.commit("w")
    state = method.state_dict()
    assert not state["lost"]
    other.load_state_dict(state)
    factor = rows_of(64, generator)
    sent = [each.encode("w", factor, False) for each in (method, other)]
    assert other._whole == {"w": False}
    assert torch.equal(sent[0].right, sent[1].right)


def test_the_form_that_the_user_has_stated_holds_for_a_loaded_state():
    generator = torch.Generator().manual_seed(10)
    method = RankDAD(Options(mode="rankdad", wire="fp32"))
    other = RankDAD(Options(mode="rankdad", wire="fp32", error_feedback=True))
    method._whole["w"] = False
    for _ in range(3):
        method.encode("w", rows_of(30, generator), False)
        method.commit("w")
    other.load_state_dict(method.state_dict())
    other.encode("w", rows_of(30, generator), False)
    other.commit("w")
    assert list(other.state_dict()["errors"]["errors"]) == ["w"]


def spoil(handler, launch) -> None:
    """Launch a bucket with NaN in it, after it was found to be finite."""
    kinds = (SummedBucket, FactorBucket, SparseBucket)
    bucket = next(each for each in vars(handler).values() if isinstance(each, kinds))
    bucket = getattr(handler, "_contributions", bucket)  # what goes to owners
    if isinstance(bucket, FactorBucket | ContributionBucket):
        left = bucket._own[0].left
        left[0, -4:] = torch.tensor([torch.nan]).view(torch.int8) if left.dtype == torch.int8 else torch.nan
    elif isinstance(bucket, SparseBucket):
        bucket._views(bucket._gather.payload, 0)[1][0] = torch.nan
    else:
        bucket._parts[0][0] = torch.nan
    launch()


NAMED = r"at site 1 .*what it has sent of '2.weight'"
SUMMED = "|".join([NAMED, "NaN or Inf in the sum of the sites' gradients of '2.weight'"])  # not if it is gathered


@support.at_sites(2)
def test_nan_under_a_header_that_states_finite_is_found_in_every_mode() -> None:
    for mode, options, told in (
        ("dad", {}, NAMED),
        ("dad", {"wire": "int8"}, NAMED),
        ("dad", {"clip_sites": 3.0}, NAMED),
        ("rankdad", {}, NAMED),
        ("rankdad", {"wire": "fp32"}, NAMED),
        ("rankdad", {"error_feedback": False}, NAMED),
        ("rankdad", {"merge": "owner", "rank": 4, "wire": "fp32"}, NAMED),
        ("rankdad", {"merge": "owner", "rank": 4, "wire": "fp32", "clip_sites": 3.0}, NAMED),
        ("edad", {}, NAMED),
        ("dsgd", {}, SUMMED),
        ("dsgd", {"wire": "int8"}, NAMED),
        ("powersgd", {"rank": 2}, SUMMED),
        ("topk", {}, NAMED),
    ):
        model = nn.Sequential(nn.Linear(40, 48, False), nn.Tanh(), nn.Linear(48, 64, False))
        reduction = dadplug.GradientReduction(model, mode, **options)
        for step in range(4):
            handler = reduction._planner._reducer._handlers[0] if step else None
            launch = handler.launch if step else None
            if step == 3 and dist.get_rank():
                handler.launch = partial(spoil, handler, launch)
            model.zero_grad()
            model(torch.randn(16, 40)).square().sum().backward()
            if step < 3:
                reduction.synchronize()
                continue
            with pytest.raises(dadplug.NonFiniteError, match=told):
                reduction.synchronize()
            assert all(each.grad is None or bool(each.grad.isfinite().all()) for each in model.parameters()), mode
            handler.launch = launch
        reduction.detach()
