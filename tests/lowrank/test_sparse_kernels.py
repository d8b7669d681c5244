"""Kernels on rows: numba's and torch's agree with one another and with torch.optim."""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dadplug.lowrank import dispatch, portable, sparse

TYPES = [torch.float32, torch.float64]
CASES = {
    "count": st.integers(1, 30),
    "width": st.integers(1, 20),
    "n": st.integers(0, 60),
    "seed": st.integers(0, 10**6),
    "dtype": st.sampled_from(TYPES),
}


@contextmanager
def torch_only():
    loaded = dispatch.cpu_kernels
    dispatch.cpu_kernels = lambda: portable
    try:
        yield
    finally:
        dispatch.cpu_kernels = loaded


@pytest.fixture(params=["numba", "torch"])
def implementation(request):
    """Run a test with the numba kernels, and with those in torch alone."""
    if request.param == "numba":
        yield request.param
        return
    with torch_only():
        yield request.param


def case(count, width, n, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(count, width, generator=generator, dtype=dtype)
    rows = torch.randint(count, (n,), generator=generator)
    return table, rows, torch.randn(n, width, generator=generator, dtype=dtype)


def both(function):
    """Call a function with either implementation."""
    by_numba = function()
    with torch_only():
        by_torch = function()
    return by_numba, by_torch


@settings(max_examples=50, deadline=None)
@given(**CASES)
def test_gather_copies_rows(count, width, n, seed, dtype):
    table, rows, _ = case(count, width, n, seed, dtype)
    for found in both(lambda: sparse.gather(table, rows)):
        assert torch.equal(found, table[rows])
    out = torch.empty(n, width, dtype=dtype)
    assert sparse.gather(table, rows, out=out) is out
    assert torch.equal(out, table[rows])


@settings(max_examples=50, deadline=None)
@given(keys=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9), max_size=60))
def test_unique_keeps_the_order_of_first_occurrence(keys):
    keys = torch.tensor(keys, dtype=torch.int64)
    for distinct, inverse in both(lambda: sparse.unique(keys)):
        assert distinct.tolist() == list(dict.fromkeys(keys.tolist()))
        assert torch.equal(distinct[inverse], keys)


@settings(max_examples=50, deadline=None)
@given(**CASES)
def test_sums_of_duplicates_agree_to_the_bit(count, width, n, seed, dtype):
    _, keys, deltas = case(count, width, n, seed, dtype)
    (distinct, sums), (distinct_by_torch, sums_by_torch) = both(lambda: sparse.sum_duplicates(keys, deltas))
    assert torch.equal(distinct, distinct_by_torch)
    assert torch.equal(sums, sums_by_torch)
    for key, total in zip(distinct, sums, strict=True):
        torch.testing.assert_close(total, deltas[keys == key].sum(0))


@settings(max_examples=50, deadline=None)
@given(**CASES, scale=st.sampled_from([1.0, -0.5]))
def test_scatter_add_adds_equal_rows_up(count, width, n, seed, dtype, scale):
    table, rows, deltas = case(count, width, n, seed, dtype)

    def added():
        result = table.clone()
        sparse.scatter_add(result, rows, deltas, scale=scale)
        return result

    by_numba, by_torch = both(added)
    torch.testing.assert_close(by_numba, table.index_add(0, rows, deltas, alpha=scale))
    torch.testing.assert_close(by_numba, by_torch)


def optimize(kind, table, batches):
    """Run a torch optimizer on sparse gradients."""
    weights = torch.nn.Parameter(table.clone())
    optimizer = {
        "adagrad": lambda: torch.optim.Adagrad([weights], lr=0.1),
        "adam": lambda: torch.optim.SparseAdam([weights], lr=0.1),
    }[kind]()
    for rows, gradients in batches:
        weights.grad = torch.sparse_coo_tensor(rows[None], gradients, weights.shape, check_invariants=False)
        optimizer.step()
    return weights.detach()


@settings(max_examples=40, deadline=None)
@given(**CASES, kind=st.sampled_from(["adagrad", "adam"]))
def test_steps_are_those_of_torch(count, width, n, seed, dtype, kind):
    table, _, _ = case(count, width, n, seed, dtype)
    batches = [case(count, width, n, seed + step, dtype)[1:] for step in range(3)]

    def stepped():
        weights, first, second = table.clone(), torch.zeros_like(table), torch.zeros_like(table)
        for step, (rows, gradients) in enumerate(batches, 1):
            if kind == "adagrad":
                sparse.adagrad(weights, first, rows, gradients, lr=0.1)
            else:
                sparse.adam(weights, first, second, rows, gradients, step=step, lr=0.1)
        return weights

    expected = optimize(kind, table, batches)
    for found in both(stepped):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.usefixtures("implementation")
def test_adam_on_all_rows_is_torchs_dense_adam():
    table, _, _ = case(6, 5, 0, 1, torch.float64)
    expected = torch.nn.Parameter(table.clone())
    optimizer = torch.optim.Adam([expected], lr=0.1, eps=0.3)
    weights, averages, squares = table.clone(), torch.zeros_like(table), torch.zeros_like(table)
    for step in range(1, 5):
        expected.grad = torch.randn_like(table)
        optimizer.step()
        sparse.adam(
            weights, averages, squares, torch.arange(6), expected.grad, step=step, lr=0.1, eps=0.3, sparse=False
        )
    torch.testing.assert_close(weights, expected.detach())


@settings(max_examples=40, deadline=None)
@given(**CASES)
def test_rowwise_adagrad_keeps_one_sum_a_row(count, width, n, seed, dtype):
    table, rows, gradients = case(count, width, n, seed, dtype)

    def stepped():
        weights, sums = table.clone(), torch.ones(count, dtype=dtype)
        sparse.rowwise_adagrad(weights, sums, rows, gradients, lr=0.1)
        return weights, sums

    whole = torch.zeros_like(table).index_add_(0, rows, gradients)
    expected = 1 + whole.square().mean(1)
    for weights, sums in both(stepped):
        torch.testing.assert_close(sums, expected)
        torch.testing.assert_close(weights, table - 0.1 * whole / expected.sqrt()[:, None])


@pytest.mark.usefixtures("implementation")
def test_parameters_step_in_place():
    weights = torch.nn.Parameter(torch.ones(4, 3))
    sparse.adagrad(weights, torch.zeros(4, 3), torch.tensor([1, 1]), torch.ones(2, 3), lr=1.0)
    torch.testing.assert_close(weights.detach(), torch.tensor([[1.0], [0.0], [1.0], [1.0]]).expand(4, 3))


def test_half_precision_takes_torch():
    table = torch.zeros(4, 3, dtype=torch.bfloat16)
    sparse.scatter_add(table, torch.tensor([2, 2]), torch.ones(2, 3, dtype=torch.bfloat16))
    assert table[2].tolist() == [2, 2, 2]


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t, r, d: sparse.gather(t, r.int()), ValueError, "rows must be a vector of int64, got torch.int32"),
        (lambda t, r, d: sparse.gather(t, r[None]), ValueError, r"of shape \(1, 3\): use rows.long\(\).flatten\(\)"),
        (lambda t, r, d: sparse.gather(t, r + 3), IndexError, r"row 5 \(position 1\) lies outside of the table's 5"),
        (lambda t, r, d: sparse.gather(t, r - 1), IndexError, r"row -1 \(position 2\) lies outside"),
        (lambda t, r, d: sparse.gather(t.T, r), ValueError, "must be a contiguous matrix"),
        (lambda t, r, d: sparse.gather(t, r, out=d.double()), ValueError, r"out must be \(3, 4\) torch.float32"),
        (lambda t, r, d: sparse.scatter_add(t, r, d[:2]), ValueError, r"deltas must be \(3, 4\) torch.float32"),
        (lambda t, r, d: sparse.sum_duplicates(r, d[:2]), ValueError, r"deltas must be \(3 x width\)"),
        (lambda t, r, d: sparse.adagrad(t, t[:2], r, d), ValueError, r"sums must be \(5, 4\)"),
        (lambda t, r, d: sparse.rowwise_adagrad(t, t, r, d), ValueError, r"sums must be \(5,\)"),
        (lambda t, r, d: sparse.rowwise_adagrad(t, t[:, 0], r, d), ValueError, "sums must be contiguous"),
        (lambda t, r, d: sparse.adagrad(t, t, r, d, lr=-1), ValueError, "lr and eps must be at least 0"),
        (lambda t, r, d: sparse.adam(t, t, t, r, d, step=0), ValueError, "step counts from 1"),
        (lambda t, r, d: sparse.adam(t, t, t, r, d, step=1, betas=(0.9, 1.0)), ValueError, "betas must lie in 0 to 1"),
    ],
)
def test_wrong_arguments_are_told(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.zeros(5, 4), torch.tensor([1, 2, 0]), torch.zeros(3, 4))
