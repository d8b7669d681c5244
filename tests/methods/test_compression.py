"""PowerSGD and top-k as functions of tensors, with several sites in one process."""

from __future__ import annotations

import pytest
import torch

from dadplug.methods import powersgd, topk

SITES, OUT, WIDTH = 3, 20, 12
WEIGHTS = [0.5, 0.2, 0.3]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def powersgd_step(matrices, basis, scale=1.0):
    """Return P, the summed Q and the agreed gradient."""
    left = sum(powersgd.project(matrix, basis, transposed=True) for matrix in matrices)
    left = powersgd.orthonormal_basis(left.contiguous())
    right = sum(powersgd.project(matrix, left) for matrix in matrices)
    return left, right, powersgd.decode(left, right, scale)


def contribution(matrix):
    return matrix.weight * matrix.gradient + matrix.loss_scale * matrix.error


def matrices_of(rank, loss_scale=1.0):
    columns = random(OUT, rank)  # shared, so that the sum has this rank, too
    return [
        powersgd.WeightedGradient(
            columns @ random(rank, WIDTH, seed=site + 1),
            weight,
            columns @ random(rank, WIDTH, seed=site + 9),
            loss_scale,
        )
        for site, weight in enumerate(WEIGHTS)
    ]


@pytest.mark.parametrize("loss_scale", [1.0, 8.0])
def test_powersgd_finds_a_sum_of_its_rank_exactly(loss_scale):
    matrices = matrices_of(3, loss_scale)
    *_, agreed = powersgd_step(matrices, random(3, WIDTH, seed=50), scale=0.25)
    torch.testing.assert_close(agreed, 0.25 * sum(map(contribution, matrices)))


def test_powersgd_from_its_last_basis_converges_to_the_best_approximation():
    matrices, basis = matrices_of(9), random(3, WIDTH, seed=50)
    for _ in range(60):
        _, basis, agreed = powersgd_step(matrices, basis)
    whole = sum(map(contribution, matrices))
    best = torch.linalg.svdvals(whole)[3:].square().sum().sqrt()
    torch.testing.assert_close((whole - agreed).norm(), best, rtol=1e-6, atol=0)


def test_powersgd_keeps_of_all_sites_together_what_the_agreed_gradient_lacks():
    loss_scale, scale = 4.0, 0.5
    matrices = matrices_of(9, loss_scale)
    *_, agreed = powersgd_step(matrices, random(3, WIDTH, seed=50), scale)
    errors = [matrix.error.clone() for matrix in matrices]
    for error, matrix in zip(errors, matrices, strict=True):
        powersgd.add_to_error(error, matrix)
        powersgd.subtract_sent(error, agreed, 1 / SITES / scale, loss_scale)
    torch.testing.assert_close(loss_scale * sum(errors) + agreed / scale, sum(map(contribution, matrices)))


def test_powersgd_counts_a_site_without_gradient_and_error_as_zero():
    assert powersgd.project(powersgd.WeightedGradient(None, 0.0, None, 1.0), random(3, WIDTH)) is None


def test_powersgd_has_no_basis_of_what_is_not_finite():
    left = random(3, OUT)
    left[1, 2] = torch.nan
    assert powersgd.orthonormal_basis(left) is None


def test_rows_of_zeros_are_drawn_anew_and_alike():
    basis = random(3, WIDTH)
    basis[1] = 0
    filled = powersgd.fill_empty_rows(basis, "weight")
    assert filled[1].any()
    assert torch.equal(filled[[0, 2]], basis[[0, 2]])
    assert torch.equal(filled, powersgd.fill_empty_rows(basis.clone(), "weight"))
    assert powersgd.fill_empty_rows(filled, "weight") is filled


@pytest.mark.parametrize("with_error", [True, False])
def test_topk_sends_the_largest_elements_and_keeps_the_rest(with_error):
    gradient, loss_scale = random(50), 4.0
    error = random(50, seed=1) if with_error else None
    whole = torch.empty_like(gradient)
    topk.accumulate(gradient, 0.5, error, loss_scale, whole)
    expected = 0.5 / loss_scale * gradient + (0 if error is None else error)
    torch.testing.assert_close(whole, expected)
    indices, values = topk.encode(whole, 7, loss_scale)
    assert set(indices.tolist()) == set(expected.abs().topk(7).indices.tolist())
    torch.testing.assert_close(values, loss_scale * expected[indices])
    topk.subtract_sent(whole, indices, values, loss_scale)
    agreed = torch.empty_like(gradient)
    topk.decode([(indices, values)], 1.0, agreed)
    assert int(agreed.count_nonzero()) == 7
    torch.testing.assert_close(loss_scale * whole + agreed, loss_scale * expected)


def test_topk_without_a_gradient_sends_what_is_left():
    error, whole = random(9), torch.empty(9, dtype=torch.float64)
    topk.accumulate(None, 0.0, error, 1.0, whole)
    assert torch.equal(whole, error)
    topk.accumulate(None, 0.0, None, 1.0, whole)
    assert not whole.any()


def test_topk_adds_up_the_sites_where_their_indices_meet():
    sites = [(torch.tensor([0, 3]), torch.tensor([1.0, 2.0])), (torch.tensor([3, 4]), torch.tensor([4.0, 8.0]))]
    agreed = torch.full((5,), 9.0)
    topk.decode(sites, 0.5, agreed)
    assert agreed.tolist() == [0.5, 0.0, 0.0, 3.0, 4.0]
