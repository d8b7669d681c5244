"""Low-rank compression of inputs that are hard for its numerics: no gradient is lost, on any implementation."""

from __future__ import annotations

import functools
import importlib
import math

import pytest
import torch

from dadplug.lowrank import compress, compress_matrix, dispatch, kernels, orthonormalise, portable
from dadplug.lowrank.algorithms import ALGORITHMS

compress_module = importlib.import_module("dadplug.lowrank.compression")
SHAPES = [(1, 5, 3), (2, 40, 7), (9, 12, 30), (16, 64, 48), (33, 80, 10), (64, 10, 90), (130, 200, 150), (256, 40, 300)]
EPSILON = {torch.float32: 1e-6, torch.float64: 1e-14}


def plain(deltas, activations):
    return deltas, activations


def of_low_rank(deltas, activations):
    weights = torch.randn(len(deltas), 3, generator=torch.Generator().manual_seed(1), dtype=deltas.dtype)
    return weights @ deltas[:3] if len(deltas) >= 3 else deltas, activations


def slopes(count):
    return torch.logspace(0, -12, count, dtype=torch.float64)[:, None]


def graded(deltas, activations):
    return deltas * slopes(len(deltas)), activations


def graded_columns(deltas, activations):
    return deltas * slopes(deltas.shape[1]).T, activations


def graded_in_opposite_ways(deltas, activations):
    return deltas * slopes(len(deltas)) * 1e6, activations * slopes(len(deltas)).flip(0) * 1e6


def repeated(deltas, activations):
    rows = torch.arange(len(deltas)) % max(1, len(deltas) // 3)
    return deltas[rows], activations[rows]


def with_zero_rows(deltas, activations):
    deltas = deltas.clone()
    deltas[::2] = 0
    activations = activations.clone()
    activations[::3] = 0
    if len(deltas) == 1:
        return deltas + 1, activations + 1
    return deltas, activations


def sparse(deltas, activations):
    """Most elements are zero, so that directions of the first rows are missing in others."""
    generator = torch.Generator().manual_seed(2)
    keep = torch.rand(deltas.shape, generator=generator) < 0.05
    return torch.where(keep, deltas, 0.0) if keep.any() else deltas, activations.relu()


KINDS = [plain, of_low_rank, graded, graded_columns, graded_in_opposite_ways, repeated, with_zero_rows, sparse]
RANKS = (1, 4, 10)
SCALES = [(1.0, 1.0), (1e-30, 1.0), (1.0, 1e30), (1e15, 1e15), (1e-15, 1e-15), (1e-30, 1e30), (1e20, 1e-25)]
TINIEST = [(1e-44, 1e35), (1e36, 1e-44)]  # numbers of few digits, whose products have a usual size
# The largest error beside that of the optimum, as a share of the gradient: published vectors find it over steps.
SLACK = {"gram": 1e-3, "iteration": 0.05, "formed": 0.05, "deflation": 0.6}


@pytest.fixture(params=["numba", "torch"], autouse=True)
def _implementation(request, monkeypatch):
    """Run a test with the numba kernels, and with those in torch alone."""
    if request.param == "torch":
        monkeypatch.setattr(dispatch, "cpu_kernels", lambda: portable)


def inputs(kind, shape, dtype, scales):
    generator = torch.Generator().manual_seed(sum(shape))
    rows, out, width = shape
    deltas = torch.randn(rows, out, generator=generator, dtype=torch.float64)
    activations = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    deltas, activations = kind(deltas, activations)
    return (deltas * scales[0]).to(dtype), (activations * scales[1]).to(dtype)


def gradient_of(deltas, activations):
    """Return the gradient by float64, divided by its largest element, and that element."""
    largest = [float(factor.double().abs().max()) for factor in (deltas, activations)]
    gradient = (deltas.double() / largest[0]).T @ (activations.double() / largest[1])
    size = float(gradient.abs().max())
    return gradient / size, size * largest[0] * largest[1]


@functools.cache
def case(kind, shape, dtype, scales):
    """Return inputs, what `gradient_of` makes of them, and its singular values: a large part of the tests' time."""
    deltas, activations = inputs(kind, shape, dtype, scales)
    gradient, scale = gradient_of(deltas, activations)
    return deltas, activations, gradient, scale, torch.linalg.svdvals(gradient)


def check(compressed, gradient, scale, rank, slack, dtype, values=None):
    """Compare factors with the optimum of LAPACK in float64."""
    left, right = (part.double() for part in compressed)
    whole = float(gradient.norm())
    values = torch.linalg.svdvals(gradient) if values is None else values
    best = float(values[rank:].norm()) / whole
    found = float((gradient - left @ (right / scale).T).norm()) / whole
    assert found <= best + slack + 30 * math.sqrt(EPSILON[dtype]) * (best > 0) + 2000 * EPSILON[dtype]
    kept = left[:, : compressed.effective_rank]
    torch.testing.assert_close(kept.T @ kept, torch.eye(kept.shape[1], dtype=torch.float64), atol=1e-5, rtol=0)
    lengths = (right / scale).norm(dim=0)  # whose squares the type holds
    torch.testing.assert_close(compressed.singular_values / scale, lengths, rtol=1e-5, atol=1e-6 * whole)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_gradient_is_lost(algorithm, kind, dtype):
    """Each shape has one of the ranks, in turn by kind, so that it meets all of them."""
    for number, shape in enumerate(SHAPES):
        deltas, activations, gradient, scale, values = case(kind, shape, dtype, SCALES[number % len(SCALES)])
        rank = RANKS[(number + KINDS.index(kind)) % len(RANKS)]
        compressed = compress(deltas, activations, rank, algorithm=algorithm)
        found = check(compressed, gradient, scale, rank, SLACK[algorithm], dtype, values)
        assert compressed.residual(deltas, activations) == pytest.approx(found, abs=3e-3)


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_scales_do_not_matter(algorithm, scales):
    for dtype in (torch.float32, torch.float64):
        for shape in SHAPES[:6]:
            deltas, activations, gradient, scale, values = case(plain, shape, dtype, scales)
            compressed = compress(deltas, activations, 4, algorithm=algorithm)
            check(compressed, gradient, scale, 4, SLACK[algorithm], dtype, values)


@pytest.mark.parametrize("scales", [(1e120, 1e120), (1e-150, 1e-120), (1e200, 1e-250)], ids=str)
def test_double_precision_keeps_its_range(scales):
    for algorithm in ALGORITHMS:
        deltas, activations = inputs(plain, (16, 64, 48), torch.float64, scales)
        gradient, scale = gradient_of(deltas, activations)
        compressed = compress(deltas, activations, 4, algorithm=algorithm)
        found = check(compressed, gradient, scale, 4, SLACK[algorithm], torch.float64)
        assert compressed.residual(deltas, activations) == pytest.approx(found, abs=3e-3)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("scales", TINIEST, ids=str)
def test_numbers_of_few_digits_lose_no_others(scales, algorithm):
    for shape in SHAPES[:6]:
        for rank in (1, 4, 20):
            deltas, activations = inputs(plain, shape, torch.float32, scales)
            compressed = compress(deltas, activations, rank, algorithm=algorithm)
            slack = SLACK[algorithm] if rank < min(shape) else 1e-3
            check(compressed, *gradient_of(deltas, activations), rank, slack, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_formed_gradient_is_lost(kind, dtype):
    for shape, scale in zip(SHAPES, (1.0, 1e-30, 1e30, 1e-15, 1e15, 1.0, 1.0, 1e-20), strict=True):
        gradient, _ = gradient_of(*inputs(kind, shape, torch.float64, (1.0, 1.0)))
        given = (gradient * scale).to(dtype)
        compressed = compress_matrix(given, 4)
        check(compressed, given.double() / scale, scale, 4, SLACK["formed"], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_dependent_rows_hide_no_others(dtype):
    generator = torch.Generator().manual_seed(0)
    for count in (2, 5, 8, 24):
        independent = torch.randn(count, 40, generator=generator, dtype=dtype)
        rows = torch.zeros(count, 40, dtype=dtype)
        rows[1::2] = independent[1::2]  # zeros first: the first directions of a careless QR are arbitrary
        rows[2::4] = rows[1]
        wanted = rows[1::2].double()
        basis = orthonormalise(rows.clone()).double()
        torch.testing.assert_close(wanted @ basis.T @ basis, wanted, atol=1e-4, rtol=1e-4)
        assert torch.linalg.matrix_rank(basis) == len(wanted)
        lengths = basis.norm(dim=1)
        assert bool(((lengths < 1e-12) | ((lengths - 1).abs() < 1e-5)).all())


@pytest.mark.parametrize("rows", [2, 16, 47, 48, 96])
@pytest.mark.parametrize("rank", [1, 5])
def test_a_projection_of_low_rank_is_diagonalised(rows, rank):
    generator = torch.Generator().manual_seed(rows)
    root = torch.randn(rows, rank, generator=generator, dtype=torch.float64)
    wanted, identity = torch.linalg.svdvals(root), torch.eye(rows, dtype=torch.float64)
    for scale in (1.0, 1e-100, 1e100):
        left, right = torch.empty(rows, rows, dtype=torch.float64), torch.empty(rows, rank, dtype=torch.float64)
        kernels = dispatch.kernels_for(root)
        values = kernels.diagonalise(identity, root * scale, left, right, right[:0])
        torch.testing.assert_close(values[: len(wanted)] / scale, wanted, atol=1e-12 * float(wanted[0]), rtol=1e-10)
        assert float(values[len(wanted) :].sum()) < 1e-6 * scale * float(wanted[0])
        torch.testing.assert_close(left @ left.T, identity, atol=1e-10, rtol=0)
        torch.testing.assert_close(left.T @ right / scale, root)
        gram = right @ right.T / scale**2
        torch.testing.assert_close(gram, gram.diagonal().diag(), atol=1e-10 * float(wanted[0]) ** 2, rtol=0)


@pytest.mark.parametrize("rows", [2, 16, 47, 79])
@pytest.mark.parametrize("rank", [1, 5])
def test_kernels_converge_without_lapack(rows, rank):
    """A test of convergence against neighbouring diagonal elements alone fails for a tenth of those of 79 rows."""
    values, vectors = torch.empty(rows, dtype=torch.float64), torch.empty(rows, rows, dtype=torch.float64)
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        root, other = torch.randn(2, rows, rank, generator=generator, dtype=torch.float64)
        gram = root @ root.T * (1.0, 1e-30, 1e30)[seed % 3]
        assert kernels.eigh(gram.clone().numpy(), values.numpy(), vectors.numpy())
        assert math.isfinite(kernels.gram_vectors(gram.numpy(), (other @ other.T).numpy(), 1e-14, vectors.numpy()))


def no_basis(*_):
    raise portable.LinAlgError("of the test")


def zero_basis(operator, k, search):
    return torch.zeros(k, operator.shape[0], dtype=operator.activations.dtype)


def spoilt_basis(operator, k, search):
    return zero_basis(operator, k, search) + math.nan


@pytest.mark.parametrize("find", [zero_basis, spoilt_basis])
def test_lapack_takes_the_place_of_an_algorithm_that_fails(find, monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "gram", find)
    deltas, activations = inputs(plain, (16, 64, 48), torch.float32, (1e15, 1e15))
    gradient, scale = gradient_of(deltas, activations)
    check(compress(deltas, activations, 4, algorithm="gram"), gradient, scale, 4, 1e-5, torch.float32)
    monkeypatch.setattr(compress_module, "exact", no_basis)
    with pytest.raises(FloatingPointError, match="neither the algorithm nor LAPACK has converged"):
        compress(deltas, activations, 4, algorithm="gram")


def test_lapack_takes_the_place_of_a_kernel_that_fails(monkeypatch):
    monkeypatch.setattr(kernels, "diagonalise", lambda *_: False)
    monkeypatch.setattr(kernels, "gram_vectors", lambda *_: math.nan)
    test_a_projection_of_low_rank_is_diagonalised(16, 5)
    test_no_gradient_is_lost("gram", graded, torch.float32)
    gram, found = torch.eye(16, dtype=torch.float64), torch.zeros(2, 16, dtype=torch.float64)
    assert dispatch.kernels_for(gram).gram_vectors(gram, gram, 1e-14, found) == pytest.approx(1.0)
    assert bool(found.any())


def test_products_beyond_the_range_of_the_type_raise():
    deltas, activations = inputs(plain, (16, 64, 48), torch.float32, (1e30, 1e30))
    for algorithm in ALGORITHMS:
        with pytest.raises(FloatingPointError, match=r"singular value .*e\+6\d is out of the range of torch.float32"):
            compress(deltas, activations, 4, algorithm=algorithm)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_raises(bad):
    for shape in SHAPES:
        deltas, activations = inputs(plain, shape, torch.float32, (1.0, 1.0))
        deltas[-1, 0] = bad
        for algorithm in ALGORITHMS:
            with pytest.raises(FloatingPointError, match="hold NaN or Inf"):
                compress(deltas, activations, 4, algorithm=algorithm)
        with pytest.raises(FloatingPointError, match="hold NaN or Inf"):
            compress_matrix(deltas, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (1e-8, 1e-8), (1e12, 1e-12), (1e-15, 1e4)], ids=str)
def test_merged_factors_are_the_optimum_at_every_scale(dtype, scales):
    generator = torch.Generator().manual_seed(3)
    left = (torch.randn(50, 12, generator=generator, dtype=torch.float64) * scales[0]).to(dtype).double()
    right = (torch.randn(30, 12, generator=generator, dtype=torch.float64) * scales[1]).to(dtype).double()
    left[:, 5] = left[:, 2]
    x, y = dispatch.merge_coefficients((left.T @ left).to(dtype), (right.T @ right).to(dtype), 4)
    gradient, scale = left @ right.T, scales[0] * scales[1]
    best = float(torch.linalg.svdvals(gradient / scale)[4:].norm())
    found = float(((gradient - (left @ x) @ (right @ y).T) / scale).norm())
    assert found <= best * 1.01
