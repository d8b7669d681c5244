"""Encoding and decoding, without a process group."""

import json

import pytest
import torch
from dadplug.hooks import Factor

from dadplug.exchange.factor_buckets import FactorPayload
from dadplug.local_steps.options import LocalOptions
from dadplug.options import Options
from dadplug.parameter_server.connect import ServerOptions
from dadplug.step.methods import (
    METHODS,
    Method,
    Traits,
    decode,
    make_method,
    method_names,
    powersgd,
    register_method,
)
from dadplug.step.methods.base import GradientPath
from dadplug.support import signature


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
    monkeypatch.setattr("dadplug.step.methods.rankdad._MEASURE_EVERY", 1)
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


def test_no_method_takes_the_name_of_one_of_dadplug_by_which_policies_allow_it():
    dsgd = METHODS["dsgd"]
    with pytest.raises(ValueError, match="mode 'dsgd' is one of dadplug, by which policies allow it"):
        register_method("dsgd")(type("Mine", (METHODS["dad"],), {"__module__": "program"}))
    assert METHODS["dsgd"] is dsgd
    assert dsgd.name == "dsgd"


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


def test_rows_of_zeros_are_drawn_anew_and_alike():
    basis = torch.randn(3, 12, dtype=torch.float64)
    basis[1] = 0
    filled = powersgd.fill_empty_rows(basis, "weight")
    assert filled[1].any()
    assert torch.equal(filled[[0, 2]], basis[[0, 2]])
    assert torch.equal(filled, powersgd.fill_empty_rows(basis.clone(), "weight"))
    assert powersgd.fill_empty_rows(filled, "weight") is filled
