"""Feedback: joined by id, within its time, once; errors change nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from patient import patient_predictor

from dadplug.serving import FeedbackError
from dadplug.serving.feedback import FeedbackJournal, Record
from dadplug.serving.policies import Choice


def votes_for(label, classes=3):
    return lambda batch: np.tile(np.eye(classes, dtype=np.float32)[label], (len(batch), 1))


def test_feedback_moves_the_weights_of_its_context_only():
    with patient_predictor({"a": votes_for(0), "b": votes_for(1)}, policy="exp4", context="site") as predictor:
        for number in range(20):
            p = predictor.predict([float(number)], context="ward")
            predictor.feedback(p.id, torch.tensor(1))
        weights = predictor.weights("ward")
        assert weights["b"] > 0.9 > 0.1 > weights["a"]
        assert predictor.weights("other") == {"a": 0.5, "b": 0.5}
        last = predictor.predict([0.0], context="ward")
        assert (last.label, last.model, last.models) == (1, "b", ("a", "b"))
        assert last.confidence == pytest.approx(weights["b"])


def test_errors_change_nothing():
    with patient_predictor({"a": votes_for(0), "b": votes_for(1)}, policy="exp4") as predictor:
        p = predictor.predict([1.0])
        for y in (3, -1, 0.5, "0", None, True, [1, 2]):
            with pytest.raises(FeedbackError, match="a class from 0 to 2") as error:
                predictor.feedback(p.id, y)
            assert error.value.status == 422
        for unknown in ("", "nonsense", 7, p.id[:-1] + "x", None):
            with pytest.raises(FeedbackError, match="no prediction") as error:
                predictor.feedback(unknown, 1)
            assert error.value.status == 404
        assert predictor.weights() == {"a": 0.5, "b": 0.5}
        predictor.feedback(p.id, 1)
        before = predictor.weights()
        assert before["b"] > before["a"]
        with pytest.raises(FeedbackError, match="has had its feedback") as error:
            predictor.feedback(p.id, 1)
        assert error.value.status == 409
        assert predictor.weights() == before


def record():
    return Record("", Choice(("a",), {"a": 1.0}), {"a": (0.0, 3.0)})


def test_late_feedback_is_told_from_an_unknown_id():
    journal = FeedbackJournal(seconds=10.0, most=3)
    key = journal.add(record(), now=100.0)
    assert journal.find(key, 109.0) == record()
    for now in (110.0, 200.0):
        with pytest.raises(FeedbackError, match="later than 10 s") as error:
            journal.find(key, now)
        assert error.value.status == 410
    journal.add(record(), now=300.0)
    assert len(journal) == 1  # the first is dropped, and still late
    with pytest.raises(FeedbackError, match="later than 10 s"):
        journal.find(key, 300.0)
    assert journal.close(key) is False


def test_the_journal_is_bounded():
    journal = FeedbackJournal(seconds=10.0, most=3)
    keys = [journal.add(record(), now=1.0) for _ in range(5)]
    assert len(journal) == 3
    assert len(set(keys)) == 5
    assert journal.close(keys[4]) is True
    assert journal.close(keys[4]) is False


def test_the_number_of_contexts_is_bounded():
    with patient_predictor(
        {"a": votes_for(0), "b": votes_for(1)}, policy="exp4", context="site", max_contexts=2
    ) as predictor:
        for context in ("x", "y"):
            predictor.feedback(predictor.predict([1.0], context=context).id, 0)
        p = predictor.predict([1.0], context="z")
        with pytest.raises(FeedbackError, match="2 contexts already"):
            predictor.feedback(p.id, 0)
        assert set(predictor.status()["weights"]) == {"x", "y"}


def test_weights_outlive_the_predictor(tmp_path):
    models = {"a": votes_for(0), "b": votes_for(1)}
    with patient_predictor(models, policy="exp4", state=tmp_path / "weights.json") as predictor:
        predictor.feedback(predictor.predict([1.0]).id, 1)
        weights = predictor.weights()
    with patient_predictor(models, policy="exp4", state=tmp_path / "weights.json") as predictor:
        assert predictor.weights() == weights != {"a": 0.5, "b": 0.5}
    with pytest.raises(ValueError, match=r"weights\.json: the weights are of Exp4 with the models a, b"):
        patient_predictor({"c": votes_for(0)}, policy="exp4", state=tmp_path / "weights.json")


def test_regression_averages_and_learns_by_the_error():
    def constant(value):
        return lambda batch: np.full((len(batch), 1), value, np.float32)

    with patient_predictor(
        {"a": constant(1.0), "b": constant(3.0)}, policy="exp4", task="regression", scale=4.0
    ) as predictor:
        p = predictor.predict([0.0])
        assert (float(p.output[0]), p.label, p.confidence) == (2.0, None, 0.75)
        predictor.feedback(p.id, 3.0)
        assert predictor.weights()["b"] > predictor.weights()["a"]
        with pytest.raises(FeedbackError, match="1 finite numbers"):
            predictor.feedback(predictor.predict([1.0]).id, [1.0, 2.0])
