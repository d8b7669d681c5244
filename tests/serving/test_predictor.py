"""Predictor with models that are objects: inputs, deadlines, failures, several models."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from patient import HeldModel, patient_predictor

from dadplug.serving import InputError, LoadError, ModelError, UnavailableError


def identity(batch):
    return batch


def test_the_answer_is_the_models():
    module = torch.nn.Sequential(torch.nn.Dropout(0.9), torch.nn.Linear(4, 3))
    x = torch.randn(4)
    with patient_predictor({"m": module}) as predictor:
        p = predictor.predict(x)
        expected = module.eval()(x[None])[0].detach().numpy()
        np.testing.assert_allclose(p.output, expected, rtol=1e-6)
        assert (p.label, p.model, p.confidence, p.models) == (int(expected.argmax()), "m", 1.0, ("m",))
        np.testing.assert_array_equal(predictor.predict(x.tolist()).output, p.output)
        np.testing.assert_array_equal(predictor.predict([1, 0, 1, 0]).output, predictor.predict([1.0, 0, 1, 0]).output)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1.0, 2.0, float("nan"), 3.0], r"not finite at position \(2\)"),
        ([1.0, 2.0, float("inf"), 3.0], "not finite"),
        ([1.0, 2.0, 1e300, 3.0], "not finite"),
        ([1.0, 2.0], r"has shape \(2\), the model expects \(4\)"),
        ([[1.0, 2.0, 3.0, 4.0]], r"has shape \(1, 4\)"),
        ([[1.0], [2.0, 3.0]], "not an array of numbers"),
        (["a", "b", "c", "d"], "not an array of numbers"),
        ("abcd", "is str"),
        ({"a": 1}, "is dict"),
        (None, "is NoneType"),
        ([2**70, 1, 1, 1], "not an array of numbers"),
        ([True, False, True, True], "true and false"),
        (np.zeros((1,) * 9), "9 dimensions"),
    ],
)
def test_wrong_inputs_are_named(given, message):
    with patient_predictor({"m": identity}, input_shape=(4,), dtype="float32") as predictor:
        with pytest.raises(InputError, match=message) as error:
            predictor.predict(given)
        assert error.value.status == 422
        assert predictor.predict([1, 2, 3, 4]).label == 3


def test_integers_have_to_be_in_range():
    with patient_predictor({"m": identity}, input_shape=(None,), dtype="int8") as predictor:
        assert predictor.predict([5, -128]).label == 0
        for given, message in (([128, 0], "outside the range of int8"), ([1.5, 0.0], "expects int8")):
            with pytest.raises(InputError, match=message):
                predictor.predict(given)


def test_only_the_input_at_fault_fails():
    answers = {}

    def compute(batch):
        if (batch == 13).any():
            raise RuntimeError("thirteen")
        return batch

    model = HeldModel(compute=compute)
    with patient_predictor({"m": model}) as predictor:
        predictor._models["m"].limit.value = 64
        ended = threading.Event()

        def collect(number):
            def done(answer):
                answers[number] = answer
                if len(answers) == 31:
                    ended.set()

            return done

        predictor.submit([0.5, 0.0], collect(-1))
        assert model.started.wait(60)
        for number in range(30):  # all wait: they are one batch
            predictor.submit([float(number), 0.0], collect(number))
        model.go.set()
        assert ended.wait(60)
    failed = [number for number, answer in answers.items() if isinstance(answer, Exception)]
    assert failed == [13]
    assert isinstance(answers[13], ModelError)
    assert "thirteen" in str(answers[13])
    assert all(answers[number].output[0] == number for number in range(30) if number != 13)


def test_a_shape_that_was_never_answered_is_the_inputs_fault():
    with patient_predictor({"m": torch.nn.Linear(3, 2)}) as predictor:
        with pytest.raises(InputError, match=r"does not answer inputs of shape \(5,\)"):
            predictor.predict([1.0] * 5)
        assert predictor.predict([1.0] * 3).model == "m"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda batch: batch[:0], "returned shape"),
        (lambda batch: {"logits": batch}, "returned dict"),
        (lambda batch: batch * np.nan, "returned NaN"),
        (lambda batch: batch[:, 0], "one number"),
    ],
)
def test_an_answer_is_never_invented(model, message):
    with patient_predictor({"m": model}) as predictor, pytest.raises((ModelError, InputError), match=message):
        predictor.predict([0.0, 1.0])


def test_a_request_fails_at_its_deadline():
    model = HeldModel()
    with patient_predictor({"m": model}) as predictor:
        with pytest.raises(UnavailableError, match="before the deadline") as error:
            predictor.predict([1.0, 2.0], timeout=0.05)
        assert error.value.status == 503
        model.go.set()
        assert predictor.predict([2.0, 1.0], timeout=60).label == 0


def test_a_waiting_request_past_its_deadline_is_never_computed():
    model, answers = HeldModel(), []
    with patient_predictor({"m": model}, max_batch=1) as predictor:
        first = predictor.submit([1.0, 0.0], answers.append, timeout=60)
        assert model.started.wait(60)
        late = predictor.submit([2.0, 0.0], answers.append, timeout=0.0)
        late.expire(late.deadline)
        assert isinstance(answers[0], UnavailableError)
        model.go.set()
        assert predictor.predict([3.0, 0.0], timeout=60).label == 0
    assert [batch[0, 0] for batch in model.batches] == [1.0, 3.0]
    assert first.outputs


def test_an_ensemble_answers_without_models_that_fail_or_hang():
    hanging = HeldModel()

    def broken(batch):
        raise RuntimeError("broken")

    models = {"broken": broken, "hanging": hanging, "fine": identity}
    with patient_predictor(models, policy="exp4", slo=0.05) as predictor:
        for _ in range(3):
            p = predictor.predict([0.0, 1.0])
            assert (p.label, p.model, p.models, p.confidence) == (1, "fine", ("fine",), 1.0)
            predictor.feedback(p.id, 1)
        weights = predictor.weights()
        assert weights["fine"] > weights["broken"]
        hanging.go.set()


@pytest.mark.parametrize(
    "invalid", [lambda batch: batch * np.nan, lambda batch: batch[:, :1]], ids=["nan", "one number"]
)
def test_an_ensemble_waits_for_a_slower_model_beside_one_without_a_valid_output(invalid):
    slow, failing, answers = HeldModel(), HeldModel(go=True, compute=invalid), []
    with patient_predictor({"failing": failing, "slow": slow}, policy="exp4") as predictor:
        call = predictor.submit([0.0, 1.0], answers.append, timeout=120)
        while not (call.errors or call.outputs):  # the listener is called after the model has returned
            assert not slow.go.wait(0.01)
        call.expire(call.straggling)
        assert not answers
        slow.go.set()
        p = predictor.predict([0.0, 1.0])
        assert (p.label, p.models) == (1, ("slow",))
        predictor.feedback(p.id, 1)
        assert predictor.weights()["slow"] > predictor.weights()["failing"]
    assert answers[0].models == ("slow",)


def test_a_drawn_model_that_fails_is_chosen_less():
    calls = []

    def broken(batch):
        calls.append(len(batch))
        if len(calls) > 1:
            raise RuntimeError("broken")
        return batch

    with patient_predictor({"broken": broken, "fine": identity}, policy="exp3") as predictor:
        failures = 0
        for number in range(400):
            try:
                predictor.feedback(predictor.predict([0.0, 1.0 + number]).id, 1)
            except ModelError:
                failures += 1
        assert 0 < failures < 150
        assert predictor.weights()["fine"] > 0.9


def test_contexts_have_to_be_given_where_they_are_used():
    with patient_predictor({"m": identity}, context="site") as predictor:
        for wrong in (None, "", 7, "x" * 201):
            with pytest.raises(InputError, match="needs 'site'"):
                predictor.predict([1.0, 2.0], context=wrong)
    with patient_predictor({"m": identity}) as predictor, pytest.raises(InputError, match="without contexts"):
        predictor.predict([1.0, 2.0], context="a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slo": 0}, "slo has to be positive"),
        ({"slo": 0.05, "deadline": 0.01}, "deadline"),
        ({"policy": "best"}, "unknown policy"),
        ({"task": "ranking"}, "unknown task"),
        ({"dtype": "complex64"}, "unknown dtype"),
        ({"cache_bytes": -1}, "cache_bytes"),
        ({"task": "regression", "scale": 0.0}, "scale has to be positive"),
    ],
)
def test_wrong_options_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        patient_predictor({"m": identity}, **options)


@pytest.mark.parametrize(
    ("models", "error", "message"),
    [
        ({}, ValueError, "no model to serve"),
        ({"m": 3}, LoadError, "not int"),
        ({"m": "nowhere.ckpt"}, LoadError, "no file or folder"),
    ],
)
def test_what_is_no_model_is_an_error(models, error, message):
    with pytest.raises(error, match=message):
        patient_predictor(models)


def test_counters_are_in_prometheus_text():
    with patient_predictor({'quo"te': identity}, policy="exp4", context="site") as predictor:
        p = predictor.predict([1.0, 2.0], context="a\nb")
        predictor.predict([1.0, 2.0], context="a\nb")
        predictor.feedback(p.id, 1)
        with pytest.raises(InputError):
            predictor.predict([1.0, float("nan")], context="a")
        lines = predictor.prometheus().splitlines()
        history = predictor.metrics.history()
    for line in (
        'dadplug_requests_total{status="200"} 2',
        'dadplug_requests_total{status="422"} 1',
        'dadplug_feedback_total{status="200"} 1',
        'dadplug_batched_requests_total{model="quo\\"te"} 1',
        "dadplug_cache_hits_total 1",
        "dadplug_latency_seconds_count 2",
        'dadplug_latency_seconds_bucket{le="+Inf"} 2',
        'dadplug_weight{context="a\\nb",model="quo\\"te"} 1',
    ):
        assert line in lines, line
    assert sum(each["requests"] for each in history) == 3
    assert sum(each["hits"] for each in history) == 1
    assert history[-1]["weights"] in ({"a\nb": {'quo"te': 1.0}}, {})
    assert all(each["p50"] <= each["p99"] for each in history)
