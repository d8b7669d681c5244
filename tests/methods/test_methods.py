"""Encoding and decoding, without a process group."""

import json

import pytest
import torch
from dadplug.hooks import Factor

from dadplug import signature
from dadplug.exchange.factor_buckets import FactorPayload
from dadplug.local_steps.options import LocalOptions
from dadplug.methods import METHODS, Method, Traits, decode, make_method, method_names, powersgd, register_method, topk
from dadplug.methods.base import GradientPath
from dadplug.options import Options
from dadplug.parameter_server.connect import ServerOptions


def factor(rows, out=9, width=7):
    return Factor(torch.randn(rows, width).double(), torch.randn(rows, out).double())


def method(mode, **options):
    return make_method(Options.create(mode=mode, **options))


@pytest.mark.parametrize("rows", [(3, 5), (0, 4), (0, 0), (1, 1)])
def test_dad_decodes_to_the_weighted_mean(rows):
    factors = [factor(count) for count in rows]
    weights = [0.25, 0.75]
    shares = [method("dad").encode("w", each, with_bias=True) for each in factors]
    gradient, bias = decode(shares, weights, with_bias=True)
    torch.testing.assert_close(gradient, sum(w * each.gradient() for w, each in zip(weights, factors)))
    torch.testing.assert_close(bias, sum(w * each.bias_gradient() for w, each in zip(weights, factors)))


def test_rankdad_sends_rank_rows_and_the_bias_as_it_is():
    rankdad, each = method("rankdad", rank=2), factor(6)
    payload = rankdad.encode("w", each, with_bias=True)
    assert payload.rows == 2
    gradient, bias = decode([payload], [1.0], with_bias=True)
    torch.testing.assert_close(bias, each.bias_gradient())
    error = (gradient - each.gradient()).norm() / each.gradient().norm()
    assert 0 < error < 1
    assert rankdad.quality()["w"].residual == pytest.approx(float(error), rel=1e-6)
    assert rankdad.quality()["w"].effective_rank == 2


def test_rankdad_is_exact_where_the_rank_suffices():
    each = factor(3)
    gradient, _ = decode([method("rankdad", rank=3).encode("w", each, with_bias=False)], [1.0], with_bias=False)
    torch.testing.assert_close(gradient, each.gradient())


def test_rankdad_adapts_its_rank_to_the_gradient():
    repeated = Factor(torch.randn(1, 7).double().expand(5, 7), torch.randn(1, 9).double().expand(5, 9))
    assert method("rankdad", rank=4).encode("w", repeated, with_bias=False).rows == 1


def test_rankdad_warm_starts_get_better_and_survive_a_checkpoint(monkeypatch):
    monkeypatch.setattr("dadplug.methods.rankdad._MEASURE_EVERY", 1)
    each = Factor(torch.randn(60, 50).double(), torch.randn(60, 70).double())
    rankdad = method("rankdad", rank=4, iterations=1, error_feedback=False)

    def residual():
        rankdad.encode("w", each, with_bias=False)
        rankdad.commit("w")
        return rankdad.quality()["w"].residual

    residuals = [residual() for _ in range(4)]
    assert residuals == sorted(residuals, reverse=True)
    other = method("rankdad", rank=4, iterations=1, error_feedback=False)
    other.load_state_dict(rankdad.state_dict())
    torch.testing.assert_close(other.encode("w", each, False).right, rankdad.encode("w", each, False).right)
    cold = method("rankdad", rank=4, iterations=1, warm_start=False)
    cold.load_state_dict(rankdad.state_dict())
    assert not torch.allclose(cold.encode("w", each, False).right, rankdad.encode("w", each, False).right)


def test_paths():
    assert method("dsgd").path(100, 100) == "allreduce"
    assert method("dad").path(2, 2) == "factors"
    assert method("rankdad", rank=4).path(100, 100) == "lowrank"
    assert method("rankdad", rank=4).path(6, 6) == "allreduce"  # 4 x 12 numbers are more than 6 x 6


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        (Options, {"mode": "dad", "rank": 5}, ["rank=5", "'powersgd' or 'rankdad'"]),
        (Options, {"mode": "rankdad", "density": 0.2, "rank": 4}, ["density=0.2", "'topk'"]),
        (Options, {"mode": "powersgd", "iterations": 4}, ["iterations=4", "'rankdad'"]),
        (Options, {"mode": "dsgd", "error_feedback": False}, ["error_feedback=False", "'topk'"]),
        (Options, {"patience": 7.0}, ["patience=7.0", "late='skip'"]),
        (ServerOptions, {"mode": "dad", "tolerance": 0.5, "site_timeout": 3.0}, ["tolerance=0.5", "'rankdad'"]),
        (LocalOptions, {"warm_up_mode": "dad"}, ["warm_up_mode='dad'", "warm_up"]),
        (Options, {"mode": "dad", "rank": "auto", "density": 0.01}, []),  # the defaults, as command lines pass them
        (Options, {"mode": "rankdad", "rank": 4, "iterations": 2, "dense": "lowrank"}, []),
        (Options, {"mode": "powersgd", "rank": 4, "warm_start": False}, []),
    ],
)
def test_options_without_effect_are_told_once(kind, values, words, caplog, monkeypatch):
    monkeypatch.setattr(signature, "_warned", set())
    for _ in range(2):
        kind.create(**values)
    assert len(caplog.records) == bool(words)
    assert all(word in caplog.text for word in words)


def test_a_new_method_is_a_class_and_a_registration():
    @register_method("half")
    class Half(Method):
        traits = Traits(exact=False)

        def path(self, out, width):
            return "factors"

        def rows_sent(self, rows, out, width):
            return rows

        def encode(self, name, factor, with_bias):
            return FactorPayload(factor.deltas / 2, factor.activations)

    try:
        assert "half" in method_names()
        each = factor(3)
        gradient, _ = decode([method("half").encode("w", each, False)], [1.0], False)
        torch.testing.assert_close(gradient, each.gradient() / 2)
    finally:
        del METHODS["half"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "foo"}, "unknown mode 'foo'; valid ones are 'dad', .*'rankdad', 'topk'"),
        ({"mode": "DAD"}, "unknown mode 'DAD'.*did you mean 'dad'"),
        ({"mode": "rank-dad"}, "did you mean 'rankdad'"),
        ({"mode": "Rank_DAD"}, "did you mean 'rankdad'"),
        ({"mode": "localsgd"}, r"dadplug\.LocalSGD"),
        ({"mode": "DiLoCo"}, r"dadplug\.LocalSGD.*outer_momentum"),
        ({"mode": "ddp"}, "'dsgd' averages whole gradients"),
        ({"rnk": 3}, r"unknown option 'rnk' \(did you mean 'rank'\?\); valid options are mode, rank"),
        ({"rank": 0}, "rank must be a whole number of at least 1 or 'auto', got 0"),
        ({"rank": 2.5}, "rank must be a whole number"),
        ({"rank": True}, "rank must be a whole number"),
        ({"iterations": -1}, "iterations must be"),
        ({"tolerance": 1.0}, "tolerance must be"),
        ({"weighting": "size"}, "unknown weighting 'size'; valid ones are 'uniform', 'samples'"),
        ({"wire": "fp8"}, "unknown wire 'fp8'"),
        ({"sync_batchnorm": 1}, "sync_batchnorm must be True or False"),
        ({"timeout": 0}, "timeout must be a positive number"),
        ({"timeout": float("inf")}, "timeout must be a positive number of seconds, got inf"),
        ({"timeout": True}, "timeout must be a positive number"),
        ({"tolerance": False}, "tolerance must be"),
        ({"bucket_mb": -1}, "bucket_mb must be a positive number"),
    ],
)
def test_wrong_options_are_reported_with_the_valid_ones(values, message):
    with pytest.raises(ValueError, match=message):
        Options.create(**values)


def test_paths_are_plain_strings():
    path = GradientPath.FACTORS
    assert path == "factors"
    assert {path: 1}["factors"] == 1
    assert f"{path} {path!s} {path!r} {path:>8}" == "factors factors 'factors'  factors"
    assert json.dumps([path]) == '["factors"]'
    assert GradientPath("lowrank") is GradientPath.LOWRANK


# PowerSGD and top-k as functions of tensors, with several sites in one process


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
