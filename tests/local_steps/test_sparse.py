"""Sparse deltas of local steps: the code of blocks and its memory, bytes, mean over sites, options, resuming."""

import math
from contextlib import suppress
from fractions import Fraction

import pytest
import support
import torch
from comparison import off_by
from hypothesis import example, given, settings
from hypothesis import strategies as st
from local_reference import adam, build, ends_equal
from torch import Tensor, nn

from dadplug import LocalSGD, MismatchError
from dadplug.local_steps import delta_format, sparse_codec, sparse_portable
from dadplug.local_steps.delta_format import SparseFormat
from dadplug.local_steps.sparse_codec import BLOCK, BlockCode, SparseCode

KINDS = {
    "normal": lambda n, g: torch.randn(n, generator=g, dtype=torch.float64),
    "heavy": lambda n, g: torch.exp(20 * torch.randn(n, generator=g, dtype=torch.float64)).clamp(max=1e37),
    "ties": lambda n, g: torch.randint(-2, 3, (n,), generator=g).double(),
    "ones": lambda n, g: torch.ones(n, dtype=torch.float64),
    "zeros": lambda n, g: torch.zeros(n, dtype=torch.float64),
    "rare": lambda n, g: (torch.rand(n, generator=g) < 0.01).double(),
    "denormal": lambda n, g: torch.randint(-9, 10, (n,), generator=g).double() * 2.0**-149,
    "fewer": lambda n, g: (
        (torch.rand(n, generator=g) < torch.where(torch.arange(n) < BLOCK, 0.03, 0.015)).double() * 2.0**-149
    ),
    "huge": lambda n, g: torch.randn(n, generator=g, dtype=torch.float64).clamp(-1, 1) * 3e38,
}


def made(kind: str, size: int, seed: int, dtype: torch.dtype) -> Tensor:
    return KINDS[kind](size, torch.Generator().manual_seed(seed)).to(dtype)


def is_exact_sum(whole: Tensor, memory: Tensor, sent: Tensor) -> bool:
    """Return whether memory and what was sent add up without any rounding."""
    apart = (memory != whole).nonzero().view(-1)  # elsewhere nothing was sent
    parts = zip(whole[apart].tolist(), memory[apart].tolist(), sent[apart].tolist(), strict=True)
    untouched = torch.equal(sent[memory == whole], torch.zeros_like(sent[memory == whole]))
    return untouched and all(Fraction(w) == Fraction(m) + Fraction(s) for w, m, s in parts)


def coded(delta: Tensor, memory: Tensor, density: float, decay: float) -> tuple[Tensor, Tensor, Tensor]:
    """Encode and decode; return the code, the memory afterwards, and what was sent."""
    code = SparseCode(delta.numel(), density)
    after, out, sent = memory.clone(), torch.full((code.nbytes,), 255, dtype=torch.uint8), torch.zeros_like(delta)
    code.encode(delta, after, decay, out)
    code.decode(out, sent, 1.0)
    return out, after, sent


cases = given(
    size=st.sampled_from([1, 2, 5, 33, 700, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 100]),
    density=st.one_of(st.sampled_from([1e-9, 1 / 64, 0.02, 0.5, 1.0]), st.floats(1e-4, 1.0)),
    kinds=st.tuples(*[st.sampled_from(sorted(KINDS))] * 2),
    decay=st.sampled_from([0.0, 0.95, 1.0]),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)


@cases
@settings(max_examples=60, deadline=None)
@example(BLOCK, 0.02, ("heavy", "normal"), 0.95, 3, torch.float32)
@example(3 * BLOCK, 0.02, ("fewer", "zeros"), 0.95, 3, torch.float32)
@example(BLOCK + 1, 1.0, ("denormal", "zeros"), 1.0, 3, torch.float32)
def test_memory_and_what_was_sent_add_up_exactly(size, density, kinds, decay, seed, dtype):
    delta, memory = made(kinds[0], size, seed, dtype), made(kinds[1], size, seed + 1, dtype)
    limit = torch.finfo(dtype).max
    whole = (memory * decay).add_(delta).clamp_(-limit, limit)
    _, after, sent = coded(delta, memory, density, decay)
    assert is_exact_sum(whole, after, sent)
    assert bool((after.abs() <= whole.abs()).all())  # no entry's error is larger than the entry
    for first in range(0, size, BLOCK):
        own, of_block = whole[first : first + BLOCK], sent[first : first + BLOCK]
        count = min(len(own), max(1, math.ceil(density * len(own))))
        least = own.abs().sort(descending=True).values[count - 1]
        assert int((of_block != 0).sum()) <= count
        assert bool((own[of_block != 0].abs() >= least).all())
        assert len(of_block[of_block != 0].abs().unique()) <= 2
        if count == len(own) or kinds == ("normal", "normal"):
            assert (own - of_block).norm() <= own.norm() * (0.75 if count == len(own) else 1)


@cases
@settings(max_examples=40, deadline=None)
def test_torch_and_numba_give_the_same_bits(size, density, kinds, decay, seed, dtype):
    delta, memory = made(kinds[0], size, seed, dtype), made(kinds[1], size, seed + 1, dtype)
    limit, found = torch.finfo(dtype).max, []
    code = BlockCode.of(size, density)
    for kernels in (sparse_codec._cpu_kernels(), sparse_portable):
        after, out = memory.clone(), torch.full((code.nbytes,), 255, dtype=torch.uint8)
        kernels.encode(delta, after, decay, limit, *code, out)
        total, signs = made(kinds[0], size, seed + 2, dtype), torch.tensor([3, 5])
        before = total.clone()
        assert kernels.decode(out, total, 0.3, limit, *code, signs) == -1
        added = torch.zeros_like(total)
        assert kernels.decode(out, added, 0.3, limit, *code, torch.zeros(2, dtype=torch.int64)) == -1
        directions = before.sign() * added.sign()
        assert signs.tolist() == [3 + int((directions > 0).sum()), 5 + int((directions < 0).sum())]
        found.append((after, out, total, signs))
    assert sparse_codec._cpu_kernels() is not sparse_portable
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_of_equal_entries_the_first_are_sent():
    _, _, sent = coded(torch.ones(BLOCK), torch.zeros(BLOCK), 10 / BLOCK, 1.0)
    assert torch.equal(sent, (torch.arange(BLOCK) < 10).float())


def test_two_magnitudes_lose_little_of_what_is_sent():
    delta = made("normal", 8 * BLOCK, 0, torch.float32)
    _, after, sent = coded(delta, torch.zeros_like(delta), 0.02, 1.0)
    chosen = sent != 0
    assert int(chosen.sum()) == 8 * 82
    assert after[chosen].norm() < 0.12 * delta[chosen].norm()
    assert off_by(sent[chosen].abs().mean(), delta[chosen].abs().mean()) < 0.04


def test_indices_take_about_half_a_bit_more_than_their_entropy():
    for density in (0.005, 0.01, 1 / 64, 0.02, 0.05):
        code = BlockCode.of(BLOCK, density)
        rest = code.size - code.sent
        natural = math.lgamma(code.size + 1) - math.lgamma(code.sent + 1) - math.lgamma(rest + 1)
        entropy = natural / math.log(2) / code.sent
        index = code.low + 1 + ((code.size - 1) >> code.low) / code.sent  # bits, without those that fill the last byte
        assert entropy < index < entropy + 0.7
        assert index < math.log2(1 / density) + 2.1
    assert 4 * BLOCK / BlockCode.of(BLOCK, 0.02).nbytes > 160
    assert 4 * BLOCK / BlockCode.of(BLOCK, 1 / 64).nbytes > 190


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([3, 100, BLOCK, BLOCK + 50]),
    data=st.data(),
    portable=st.booleans(),
)
def test_a_damaged_code_is_an_error_or_a_valid_code_and_stays_within_its_tensor(size, data, portable):
    delta = made("normal", size, 1, torch.float32)
    code = SparseCode(size, 0.1)
    out, _, _ = coded(delta, torch.zeros_like(delta), 0.1, 0.0)
    for _ in range(data.draw(st.integers(1, 4))):
        out[data.draw(st.integers(0, len(out) - 1))] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        out = torch.randint(0, 256, out.shape, generator=torch.Generator().manual_seed(size), dtype=torch.uint8)
    around = torch.zeros(size + 200)
    with pytest.MonkeyPatch.context() as patch:
        if portable:
            patch.setattr(sparse_codec, "_cpu_kernels", lambda: sparse_portable)
        with suppress(ValueError):
            code.decode(out, around[100:-100], 0.5)
            assert int((around != 0).sum()) <= code.count
    assert not around[:100].any()
    assert not around[-100:].any()
    assert not around.isnan().any()


def test_a_code_of_another_length_is_an_error():
    code = SparseCode(50, 0.1)
    with pytest.raises(ValueError, match=f"expected {code.nbytes} bytes, got {code.nbytes - 1} elements"):
        code.decode(torch.zeros(code.nbytes - 1, dtype=torch.uint8), torch.zeros(50), 1.0)


# The format


def deltas_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"weight": (90, 70), "bias": (7,), "scale": (), "none": (0, 4)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_a_steady_delta_arrives_over_rounds_and_what_reaches_no_site_leaves_the_memory_as_it_was():
    form = SparseFormat(lambda number: 0.05, 1.0, True)
    form.begin_round(0)
    delta = deltas_of(1)
    room = {dtype: torch.zeros(size, dtype=dtype) for dtype, size in form.layout(delta).items()}
    arrived = {name: torch.zeros_like(each) for name, each in delta.items()}
    for number in range(80):
        if number == 40:  # the others were frozen
            form.layout({"bias": delta["bias"]})
            form.layout(delta)
        before = form.state_dict()
        form.encode(delta, room)
        if number % 4 == 3:  # it has reached no site
            form.load_state_dict(before)
            continue
        for name, each in form.decode({torch.uint8: [room[torch.uint8]] * 2}, [0.25, 0.75]).items():
            arrived[name] += each
    errors = form.state_dict()["errors"]
    for name, each in delta.items():
        if each.numel():
            assert off_by(arrived[name] + errors[name], 60 * each) < 1e-4, name
            assert off_by(arrived[name], 60 * each) < 0.3, name


def test_an_invalid_payload_names_its_site_and_parameter():
    form = SparseFormat(lambda number: 0.05, 0.95, True, {0: "site 0 (a)", 1: "site 1 (b)"}.__getitem__)
    form.begin_round(0)
    delta = deltas_of(1)
    room = {dtype: torch.zeros(size, dtype=dtype) for dtype, size in form.layout(delta).items()}
    form.encode(delta, room)
    wrong = room[torch.uint8].clone()
    wrong[-SparseCode(7, 0.05).nbytes - SparseCode(1, 0.05).nbytes] ^= 255
    wrong[:4] = 255
    with pytest.raises(MismatchError, match=r"site 1 \(b\) has sent an invalid delta of parameter 'weight'"):
        form.decode({torch.uint8: [room[torch.uint8], wrong]}, [0.5, 0.5])
    form.decode({torch.uint8: [room[torch.uint8], wrong]}, [1.0, 0.0])  # which is not read


def test_the_outer_rate_says_how_far_sites_agree_on_the_signs_of_what_they_send():
    form = SparseFormat(lambda number: 0.1, 0.95, True)
    form.begin_round(0)
    delta = {"weight": torch.randn(200, 300, generator=torch.Generator().manual_seed(0))}
    halved = {"weight": delta["weight"] * torch.tensor([1.0, -1.0, 1.0, 1.0]).repeat(15000).view(200, 300)}
    rooms = {}
    for name, own in (("one", delta), ("other", {"weight": -delta["weight"]}), ("halved", halved)):
        form = SparseFormat(lambda number: 0.1, 0.95, True)
        form.begin_round(0)
        rooms[name] = torch.zeros(form.layout(own)[torch.uint8], dtype=torch.uint8)
        form.encode(own, {torch.uint8: rooms[name]})
    for names, shares, expected in (
        (("one", "one"), (0.5, 0.5), 2.5),
        (("one", "other"), (0.5, 0.5), 1.0),
        (("one", "halved"), (0.3, 0.7), 1.75),
        (("one", "other", "one"), (0.5, 0.2, 0.3), 1.0),
        (("one", "other"), (1.0, 0.0), 1.0),  # alone
    ):
        form.decode({torch.uint8: [rooms[name] for name in names]}, shares)
        assert abs(form.rate_of("weight") - expected) < 0.03, names
    assert 1.0 < delta_format.outer_rate(1, 0) < 1.1  # chance, where few entries are sent


# Sites


def test_a_memory_without_room_and_whole_numbers_are_refused():
    model = build()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_format, "available_memory", lambda device: 100)
        with pytest.raises(ValueError, match=r"memory of what sparse deltas do not send takes 0\.0 GB on cpu"):
            LocalSGD(model, adam(model.parameters()), every=2, density=0.02, wire="int2")
    counted = nn.ParameterDict({"w": torch.ones(2), "n": nn.Parameter(torch.ones(2, dtype=torch.int64), False)})
    with pytest.raises(ValueError, match=r"parameter 'n' is of type torch.int64: local steps are for floating-point"):
        LocalSGD(counted, torch.optim.SGD(counted.parameters(), lr=0.1), every=2, density=0.02, wire="int2")


def sends_a_hundredth() -> None:
    model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 256))
    sizes = {}
    for options in ({}, {"density": 0.02, "wire": "int2"}, {"density": 1 / 64, "wire": "int2"}):
        local = LocalSGD(model, adam(model.parameters()), every=1, overlap=False, **options)
        model(torch.randn(4, 512)).square().mean().backward()
        local.step()
        sizes[options.get("density")] = local.traffic.bytes_sent
        ends_equal(local)
    assert sizes[None] > 100 * sizes[0.02]
    assert sizes[None] > 146 * sizes[1 / 64]


@support.at_sites(2)
def test_a_round_sends_a_hundredth_of_the_dense_bytes() -> None:
    sends_a_hundredth()
