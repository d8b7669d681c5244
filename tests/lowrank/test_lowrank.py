"""Low-rank compression: properties over shapes, types, strides and ranks, for every implementation."""

import importlib
import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import refuses

from dadplug.lowrank import Carry, compress, compress_matrix, dispatch, portable, sparse, squared_norm, warmup
from dadplug.lowrank.algorithms import ALGORITHMS

compress_module = importlib.import_module("dadplug.lowrank.compression")
SIZES = st.integers(1, 40)


@pytest.fixture(params=["numba", "torch"])
def implementation(request, monkeypatch):
    """Run a test with the numba kernels, and with those in torch alone."""
    if request.param == "torch":
        monkeypatch.setattr(dispatch, "cpu_kernels", lambda: portable)
    return request.param


def factors(rows, out, width, seed=0, dtype=torch.float64, decay=0.3):
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.exp(-decay * torch.arange(out, dtype=torch.float64))
    deltas = torch.randn(rows, out, generator=generator, dtype=torch.float64) * spectrum
    return deltas.to(dtype), torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype)


def error(deltas, activations, left, right):
    gradient = deltas.double().T @ activations.double()
    return float((gradient - left.double() @ right.double().T).norm() / gradient.norm().clamp(min=1e-300))


def optimum(deltas, activations, rank):
    values = torch.linalg.svdvals(deltas.double().T @ activations.double())
    return float(values[rank:].norm() / values.norm())


@settings(max_examples=60, deadline=None)
@given(
    rows=SIZES,
    out=SIZES,
    width=SIZES,
    rank=st.integers(1, 12),
    iterations=st.integers(0, 4),
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    strides=st.sampled_from(["plain", "transposed", "expanded", "strided"]),
    algorithm=st.sampled_from(["auto", *ALGORITHMS]),
)
def test_never_worse_than_sending_nothing(rows, out, width, rank, iterations, seed, dtype, strides, algorithm):
    deltas, activations = factors(rows, out, width, seed, dtype)
    if strides == "transposed":
        deltas = deltas.T.contiguous().T
    elif strides == "expanded":
        deltas = deltas[:1].expand(rows, out)
    elif strides == "strided":
        activations = activations.repeat_interleave(2, 1)[:, ::2]
    compressed = compress(deltas, activations, rank, iterations=iterations, algorithm=algorithm)
    left, right = compressed
    k = min(rank, rows, out, width)
    assert left.shape == (out, k)
    assert right.shape == (width, k)
    assert error(deltas, activations, left, right) <= 1 + 1e-5
    kept = left[:, : compressed.effective_rank].double()
    torch.testing.assert_close(kept.T @ kept, torch.eye(kept.shape[1], dtype=torch.float64), atol=1e-5, rtol=0)
    assert not left[:, compressed.effective_rank :].any()
    if k in (rows, out, width):
        assert error(deltas, activations, left, right) < (1e-9 if dtype == torch.float64 else 2e-3)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("algorithm", ["auto", "gram", "iteration", "formed"])
@pytest.mark.parametrize(
    ("rows", "out", "width"), [(16, 64, 48), (32, 256, 128), (200, 30, 40), (1, 5, 5), (64, 10, 256)]
)
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_iterations_reach_the_optimum(rows, out, width, rank, algorithm):
    deltas, activations = factors(rows, out, width)
    best = optimum(deltas, activations, rank)
    found = [
        error(deltas, activations, *compress(deltas, activations, rank, iterations=n, algorithm=algorithm))
        for n in (1, 3, 12)
    ]
    assert found[0] >= found[1] - 1e-9 >= found[2] - 2e-9
    assert found[2] <= 1.01 * best + 1e-9


@pytest.mark.usefixtures("implementation")
def test_a_warm_start_does_better_than_a_cold_one():
    deltas, activations = factors(32, 128, 96, decay=0.05)
    warm = None
    for _ in range(5):
        compressed = compress(deltas, activations, 4, iterations=1, warm_start=warm)
        warm = compressed.left
    cold = compress(deltas, activations, 4, iterations=1)
    assert error(deltas, activations, *compressed) < error(deltas, activations, *cold)
    assert error(deltas, activations, *compressed) < 1.02 * optimum(deltas, activations, 4)


@pytest.mark.usefixtures("implementation")
def test_a_warm_start_with_fewer_columns_is_filled_up():
    deltas, activations = factors(32, 128, 96)
    first = compress(deltas, activations, 2)
    assert compress(deltas, activations, 6, warm_start=first.left).effective_rank == 6


def test_the_implementations_agree(monkeypatch):
    deltas, activations = factors(24, 60, 50, dtype=torch.float32)
    by_numba = compress(deltas, activations, 4, iterations=6)
    monkeypatch.setattr(dispatch, "cpu_kernels", lambda: portable)
    by_torch = compress(deltas, activations, 4, iterations=6)
    torch.testing.assert_close(by_numba.left @ by_numba.right.T, by_torch.left @ by_torch.right.T, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(by_numba.singular_values, by_torch.singular_values, rtol=1e-4, atol=1e-6)


def test_the_same_seed_gives_the_same_bits_and_leaves_random_states_alone():
    deltas, activations = factors(24, 60, 50, dtype=torch.float32)
    state = torch.get_rng_state()
    first, second = (compress(deltas, activations, 4, seed=3) for _ in range(2))
    assert torch.equal(first.left, second.left)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("implementation")
def test_singular_values_come_sorted_and_tolerance_cuts_them():
    deltas, activations = factors(40, 30, 30, decay=1.0)
    compressed = compress(deltas, activations, 8, iterations=8)
    assert torch.equal(compressed.singular_values, compressed.singular_values.sort(descending=True).values)
    torch.testing.assert_close(compressed.right.norm(dim=0), compressed.singular_values)
    threshold = float(
        (compressed.singular_values[2] + compressed.singular_values[3]) / 2 / compressed.singular_values[0]
    )
    cut = compress(deltas, activations, 8, iterations=8, tolerance=threshold)
    assert cut.effective_rank == 3
    assert not cut.right[:, 3:].any()


@pytest.mark.parametrize(("rows", "out", "width"), [(8, 60, 50), (300, 20, 30)])
def test_the_residual_is_measured_from_norms(rows, out, width):
    deltas, activations = factors(rows, out, width)
    compressed = compress(deltas, activations, 3)
    assert math.isclose(compressed.residual(deltas, activations), error(deltas, activations, *compressed), rel_tol=1e-6)
    exact = float((deltas.T @ activations).square().sum())
    assert math.isclose(squared_norm(deltas, activations), exact, rel_tol=1e-9)


@pytest.mark.usefixtures("implementation")
def test_repeated_rows_have_an_effective_rank_of_one():
    deltas, activations = torch.randn(1, 9).expand(6, 9), torch.randn(1, 7).expand(6, 7)
    compressed = compress(deltas, activations, 4, tolerance=1e-3)
    assert compressed.effective_rank == 1
    assert error(deltas, activations, *compressed) < 1e-5
    assert compressed.residual(deltas, activations) < 1e-3


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("rows", [0, 5])
def test_zero_rows_and_zero_deltas_compress_to_nothing(rows):
    compressed = compress(torch.zeros(rows, 9), torch.ones(rows, 7), 4)
    assert compressed.effective_rank == 0
    assert not compressed.left.any()
    assert compressed.residual(torch.zeros(rows, 9), torch.ones(rows, 7)) == 0.0


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    ("size_of_deltas", "size_of_activations"), [(1e-25, 1.0), (1e18, 1e12), (1e-20, 1e-15), (1e30, 1e-30)]
)
def test_huge_and_tiny_numbers_keep_their_digits(size_of_deltas, size_of_activations):
    deltas, activations = factors(12, 40, 30, dtype=torch.float32)
    expected = error(deltas, activations, *compress(deltas, activations, 4))
    deltas, activations = deltas * size_of_deltas, activations * size_of_activations
    left, right = compress(deltas, activations, 4)
    assert abs(error(deltas, activations, left, right) - expected) < 1e-3


def drifting(steps, rows, out, width):
    """Factors that change a little from step to step, as in training."""
    deltas, activations = factors(rows, out, width, dtype=torch.float32, decay=0.05)
    for step in range(steps):
        more, others = factors(rows, out, width, seed=step + 1, dtype=torch.float32, decay=0.05)
        deltas, activations = 0.9 * deltas + 0.2 * more, 0.9 * activations + 0.2 * others
        yield deltas, activations


@pytest.mark.parametrize("kind", ["carry", "compressed", "left", "right"])
def test_any_part_of_a_result_starts_the_next(kind):
    start, ratios = None, []
    for deltas, activations in drifting(12, 90, 160, 120):
        warm = compress(deltas, activations, 4, iterations=1, warm_start=start, algorithm="iteration")
        ratios.append(error(deltas, activations, *warm) / optimum(deltas, activations, 4))
        start = warm if kind == "compressed" else getattr(warm, kind)
    assert max(ratios) < 1.05


def test_columns_align_in_time_where_nothing_is_read_back(monkeypatch):
    """The way of a CUDA tensor, on the CPU."""
    monkeypatch.setattr(compress_module, "_on_device", lambda _: True)
    start = None
    for deltas, activations in drifting(12, 90, 160, 120):
        warm = compress(deltas, activations, 4, iterations=1, warm_start=start, algorithm="iteration")
        start = warm.carry
    assert error(deltas, activations, *warm) < 1.1 * optimum(deltas, activations, 4)


def test_a_formed_gradient_compresses_like_its_factors():
    deltas, activations = factors(40, 60, 50)
    best = optimum(deltas, activations, 3)
    compressed = compress_matrix(deltas.T @ activations, 3, iterations=4)
    assert error(deltas, activations, *compressed) < 1.001 * best
    for scale in (1e-200, 1e200):
        left, right = compress_matrix(scale * (deltas.T @ activations), 3, iterations=4)
        assert error(deltas, activations, left, right / scale) < 1.001 * best
    refuses(
        (lambda: compress_matrix(torch.full((5, 4), math.nan), 2), "NaN or Inf"),
        (lambda: compress_matrix(torch.ones(5), 2), "gradient must be a matrix", ValueError),
        error=FloatingPointError,
    )


def test_results_go_where_the_caller_wants_them():
    deltas, activations = factors(24, 60, 50, dtype=torch.float32)
    expected = compress(deltas, activations, 4)
    places = (torch.empty(60, 4), torch.empty(4, 50).T)
    left, right = compress(deltas, activations, 4, out=places)
    torch.testing.assert_close(places[0] @ places[1].T, expected.left @ expected.right.T)  # strides may change bits
    torch.testing.assert_close(places[1].norm(dim=0).double(), expected.singular_values)
    assert left.data_ptr() == places[0].data_ptr()
    assert right.data_ptr() == places[1].data_ptr()


def allocated(call):
    """Bytes that a call allocates through torch."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        call()
    return sum(max(0, event.self_cpu_memory_usage) for event in profiler.key_averages())


@pytest.mark.parametrize(
    ("rows", "out", "width"), [(16, 1024, 768), (128, 512, 640), (256, 512, 384), (300, 128, 96), (2000, 80, 100)]
)
def test_no_gradient_is_formed_and_nothing_but_results_is_allocated_in_time(rows, out, width):
    deltas, activations = factors(rows, out, width, dtype=torch.float32, decay=0.01)

    def first():  # in a new thread, without scratch
        sizes.append(allocated(lambda: compress(deltas, activations, 4)))

    sizes: list[int] = []
    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
    if rows <= min(out, width):
        assert sizes[0] < out * width * 4
    carry = compress(deltas, activations, 4).carry
    compress(deltas, activations, 4, iterations=1, warm_start=carry)
    again = allocated(lambda: compress(deltas, activations, 4, iterations=1, warm_start=carry))
    results = 4 * (4 * (out + width) + 8 * width)  # both factors, and what is carried beside them
    assert again <= results + 2000


def test_threads_do_not_disturb_one_another():
    cases = [factors(rows, 90 + rows, 80, seed=rows, dtype=torch.float32) for rows in (8, 24, 60, 120)]
    expected = [compress(*case, 4, algorithm="iteration") for case in cases]
    problems = []

    def work(index):
        for _ in range(30):
            found = compress(*cases[index], 4, algorithm="iteration")
            if not (torch.equal(found.left, expected[index].left) and torch.equal(found.right, expected[index].right)):
                problems.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


@pytest.mark.parametrize(("rows", "out", "width"), [(16, 600, 500), (128, 700, 300), (500, 200, 150)])
def test_the_number_of_threads_changes_nothing(rows, out, width):
    deltas, activations = factors(rows, out, width, dtype=torch.float32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(compress(deltas, activations, 4, seed=5))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        torch.testing.assert_close(other.left @ other.right.T, results[0].left @ results[0].right.T)
        torch.testing.assert_close(other.singular_values, results[0].singular_values, rtol=1e-5, atol=1e-6)


def test_the_published_algorithm_can_be_asked_for():
    deltas, activations = factors(32, 60, 50)
    few, many = (compress(deltas, activations, 4, iterations=n, algorithm="deflation") for n in (1, 30))
    best = optimum(deltas, activations, 4)
    assert best * (1 - 1e-9) <= error(deltas, activations, *many) < 1.001 * best < error(deltas, activations, *few) <= 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_raises(bad):
    deltas, activations = factors(6, 9, 7)
    for place in (deltas, activations):
        kept = float(place[2, 3])
        place[2, 3] = bad
        with pytest.raises(FloatingPointError, match="NaN or Inf"):
            compress(deltas, activations, 2)
        place[2, 3] = kept


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "rank must be at least 1"),
        ({"iterations": -1}, "iterations must be at least 0"),
        ({"tolerance": 1.0}, "tolerance must lie in 0 to 1"),
        ({"activations": torch.ones(5, 3)}, "the same number of rows"),
        ({"deltas": torch.ones(4)}, "must be matrices"),
        ({"warm_start": torch.ones(3, 2)}, r"warm_start must be \(out x columns\) with out = 6, or"),
        ({"warm_start": Carry(torch.ones(2, 6))}, "of a layer with other widths"),
        ({"algorithm": "svd"}, "unknown algorithm 'svd'; valid ones are 'auto', 'gram', 'iteration'"),
        ({"out": (torch.ones(6, 2), torch.ones(6, 2))}, r"out: right must be of shape \(7, 2\)"),
    ],
)
def test_wrong_arguments_are_told(arguments, message):
    settings = {"deltas": torch.randn(4, 6), "activations": torch.randn(4, 7), "rank": 2} | arguments
    with pytest.raises(ValueError, match=message):
        compress(**settings)


def test_without_numba_torch_does_the_work(monkeypatch):
    def broken():
        raise ImportError("no numba here")

    monkeypatch.setattr(dispatch, "NumbaKernels", broken)
    dispatch.cpu_kernels.cache_clear()
    try:
        with pytest.warns(UserWarning, match="numba cannot run here"):
            warmup()
        assert compress(*factors(6, 9, 7), rank=2).effective_rank == 2
        assert sparse.unique(torch.tensor([3, 3]))[0].tolist() == [3]
    finally:
        dispatch.cpu_kernels.cache_clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_gives_the_numbers_of_the_cpu():
    deltas, activations = factors(24, 60, 50, dtype=torch.float32)
    on_cpu = compress(deltas, activations, 4, iterations=6)
    on_gpu = compress(deltas.cuda(), activations.cuda(), 4, iterations=6)
    torch.testing.assert_close((on_gpu.left @ on_gpu.right.T).cpu(), on_cpu.left @ on_cpu.right.T, rtol=1e-3, atol=1e-4)
