"""Encoding and decoding: int8 rows, the largest elements, sums of products, by every implementation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dadplug.lowrank import dequantise, dispatch, portable, quantise, sum_of_products, sum_one_by_one, top_k

IMPLEMENTATIONS = {"numba": dispatch.cpu_kernels, "torch": lambda: portable}


@pytest.fixture(params=list(IMPLEMENTATIONS), autouse=True)
def _implementation(request, monkeypatch):
    monkeypatch.setattr(dispatch, "cpu_kernels", IMPLEMENTATIONS[request.param])


def round_trip(rows):
    quantised, scales, back = torch.empty(rows.shape, dtype=torch.int8), torch.empty(len(rows)), torch.empty(rows.shape)
    quantise(rows, quantised, scales)
    dequantise(quantised, scales, back)
    return quantised, scales, back


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@given(rows=st.integers(0, 6), width=st.integers(0, 70), seed=st.integers(0, 99), power=st.integers(-30, 30))
@settings(deadline=None, max_examples=60)
def test_quantised_values_are_as_near_as_their_scale_allows(rows, width, seed, power):
    values = random(rows, width, seed=seed) * 10.0**power
    _, scales, back = round_trip(values)
    assert torch.equal(scales, (values.abs().amax(1) if width else torch.zeros(rows)) / 127)
    assert ((back - values).abs() <= 0.5001 * scales[:, None]).all()


@pytest.mark.parametrize("size", [1e-35, 1e-38, 1e-41, 1e-43, 2e-45])
def test_tiny_rows_are_quantised_as_far_as_the_type_allows(size):
    values = random(4, 50) * size
    values[3] = 0
    _, scales, back = round_trip(values)
    check_alike(values)
    smallest = 2.0**-149
    assert ((back.double() - values.double()).abs() <= 0.5001 * scales.double()[:, None]).all()
    assert (scales[:3] <= values[:3].abs().amax(1) / 127 + smallest).all()
    assert not back[3].any()


def check_alike(values):
    """Check that the kernels in use return exactly the payload, decoded values and rest that torch's do."""
    found = []
    for kernels in (dispatch.cpu_kernels(), portable):
        payload = torch.empty(len(values), values.shape[1] + 4, dtype=torch.int8)
        rounded, rest = torch.empty_like(values), torch.empty_like(values)
        kernels.quantise(values, payload, rounded, rest)
        back = torch.empty_like(values, dtype=torch.float32)
        kernels.dequantise(payload, back)
        assert torch.equal(back.to(values), rounded)
        assert torch.equal(rest, values - rounded)
        found.append(payload)
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_implementations_quantise_alike(dtype):
    check_alike(random(5, 333, dtype=dtype))


def test_only_what_is_wanted_is_written():
    values, payload = random(3, 40), torch.empty(3, 44, dtype=torch.int8)
    rounded, rest = torch.empty_like(values), torch.empty_like(values)
    dispatch.cpu_kernels().quantise(values, payload, rounded, rest[:0])
    dispatch.cpu_kernels().quantise(values, payload, rounded[:0], rest)
    assert torch.equal(rounded + rest, values)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_survive_as_nan(bad):
    values = random(3, 40)
    values[1, 7] = bad
    _, _, back = round_trip(values)
    assert back[1].isnan().all()
    assert back[[0, 2]].isfinite().all()


def test_a_row_of_zeros_stays_one():
    assert not round_trip(torch.zeros(2, 9))[2].any()


@given(count=st.integers(1, 300), share=st.floats(0, 1), seed=st.integers(0, 99), distinct=st.sampled_from([3, 10**6]))
@settings(deadline=None, max_examples=80)
def test_top_k_is_a_stable_sort_by_size(count, share, seed, distinct):
    values = (random(count, seed=seed) * distinct).round() / distinct * 2.0 ** (seed - 50)
    k = round(share * count)
    indices, found = top_k(values, k)
    expected = torch.argsort(values.abs(), descending=True, stable=True)[:k].sort().values
    assert torch.equal(indices, expected)
    assert torch.equal(found, values[expected])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_top_k_takes_any_float_and_counts_nan_as_largest(dtype):
    values = torch.tensor([0.0, -3.0, math.nan, 2.0, -math.inf], dtype=dtype)
    assert top_k(values, 3)[0].tolist() == [1, 2, 4]
    assert top_k(values, 3)[1].dtype == dtype


def test_top_k_refuses_what_it_cannot_find():
    with pytest.raises(ValueError, match=r"0 to the number of values.*got 4 of \(3,\)"):
        top_k(torch.zeros(3), 4)


@given(
    sites=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    out=st.integers(1, 21),
    width=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
@settings(deadline=None, max_examples=80)
def test_the_sum_of_products_is_that_of_each(sites, out, width, dtype):
    lefts = [random(rows, out, seed=site).to(dtype) for site, rows in enumerate(sites)]
    rights = [random(rows, width, seed=site + 50).to(dtype) for site, rows in enumerate(sites)]
    weights = [0.25 * (site + 1) for site in range(len(sites))]
    result = sum_of_products(lefts, rights, weights)
    expected = sum(w * left.double().T @ right.double() for w, left, right in zip(weights, lefts, rights, strict=True))
    assert result.shape == (out, width)
    assert result.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.2}[dtype]
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", [(0, 3), (5, 0), (7, 9), (1000, 300), (513, 257), (20, 131_077), (131_077, 2)])
@pytest.mark.parametrize("rows", [(4,), (0, 3), (2, 5, 1)])
def test_products_added_one_by_one_are_their_sum(shape, rows):
    """Also where the result is larger than a block, or a row of it is."""
    lefts = [random(count, shape[0], seed=site, dtype=torch.float64) for site, count in enumerate(rows)]
    rights = [random(count, shape[1], seed=site + 9, dtype=torch.float64) for site, count in enumerate(rows)]
    expected = torch.cat(lefts).T @ torch.cat(rights)
    torch.testing.assert_close(sum_one_by_one(lefts, rights), expected, atol=1e-12, rtol=1e-12)
