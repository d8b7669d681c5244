"""Selection policies, feedback, and batch sizes and the queue of one model."""

import json
import math
import random
import threading
import time

import numpy as np
import pytest
import torch
from served import patient_predictor

from dadplug.errors import InputError, ModelError, UnavailableError
from dadplug.serving import FeedbackError
from dadplug.serving.cache import Ticket
from dadplug.serving.policies import Choice, Exp3, Exp4, FeedbackJournal, Fixed, Record, policy_of
from dadplug.serving.served_model import BatchLimit, RequestQueue, measured_latency

MODELS = ("a", "b", "c")


def bound(policy, models=MODELS):
    policy.bind(models)
    return policy


def queue_of(*tickets, most=100):
    """Return a queue in which some requests wait."""
    queue = RequestQueue("m", most)
    for each in tickets:
        queue.put(each)
    queue.wait()
    return queue


def test_fixed_takes_the_first_model_or_the_named_one():
    assert bound(Fixed()).choose("x").models == ("a",)
    assert bound(Fixed("c")).choose("x").models == ("c",)
    with pytest.raises(ValueError, match="unknown model 'd'"):
        bound(Fixed("d"))


def test_policies_have_names():
    assert isinstance(policy_of("exp4"), Exp4)
    with pytest.raises(ValueError, match="unknown policy 'ucb'; valid ones are fixed, exp3, exp4"):
        policy_of("ucb")


def test_exp3_updates_as_published():
    policy = bound(Exp3(gamma=0.3, share=0.01, seed=1))
    choice = policy.choose("x")
    (name,) = choice.models
    assert choice.probability == pytest.approx(1 / 3)
    policy.learn("x", choice, {name: 0.25})
    grown = math.exp(0.3 * 0.75 * 3 / 3) / 3
    shared = math.e * 0.01 / 3
    total = grown + 2 / 3 + 3 * shared
    expected = {each: ((grown if each == name else 1 / 3) + shared) / total for each in MODELS}
    assert policy.weights("x") == pytest.approx(expected)
    assert policy.weights("y") == pytest.approx(dict.fromkeys(MODELS, 1 / 3))


def test_exp4_updates_by_all_losses():
    policy = bound(Exp4(eta=0.5, share=0.1))
    policy.learn("x", policy.choose("x"), {"a": 0.0, "b": 1.0, "c": 0.5})
    raw = {"a": 1.0, "b": math.exp(-0.5), "c": math.exp(-0.25)}
    total = sum(raw.values())
    expected = {name: 0.9 * value / total + 0.1 / 3 for name, value in raw.items()}
    assert policy.weights("x") == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(3))
def test_exp3_stays_within_its_bound_against_an_adversary_that_changes_the_best_model(seed):
    steps, gamma, share, segments = 4000, 0.1, 1 / 4000, 4
    policy, rng, k = bound(Exp3(gamma, share, seed)), random.Random(seed), len(MODELS)
    gain, best = 0.0, 0.0
    for step in range(steps):
        winner = MODELS[step * segments // steps % k]
        rewards = {name: float(rng.random() < (0.9 if name == winner else 0.2)) for name in MODELS}
        rewards[max(MODELS, key=lambda name: policy.weights("")[name])] *= rng.random() < 0.9  # it knows the favourite
        choice = policy.choose("")
        (name,) = choice.models
        gain, best = gain + rewards[name], best + rewards[winner]
        policy.learn("", choice, {name: 1 - rewards[name]})
    limit = k * (segments * math.log(k / share) + math.e * share * steps) / gamma + (math.e - 1) * gamma * steps
    uniform = best * (1 - 1 / segments)
    assert best - gain <= limit < uniform * 1.1  # the second: the bound says something here


def test_exp3_finds_the_best_model_and_another_after_it_has_broken():
    policy, rng = bound(Exp3(seed=3)), random.Random(3)
    accuracy = {"a": 0.3, "b": 0.95, "c": 0.6}

    def run(steps):
        right = 0
        for _ in range(steps):
            choice = policy.choose("")
            (name,) = choice.models
            hit = rng.random() < accuracy[name]
            right += hit
            policy.learn("", choice, {name: float(not hit)})
        return right / steps

    run(2000)
    assert run(500) > 0.85
    accuracy["b"], accuracy["a"] = 0.0, 0.95
    run(1000)
    assert run(500) > 0.8


def test_exp4_follows_the_best_model_of_each_context_and_recovers_from_its_end():
    policy, rng = bound(Exp4()), random.Random(5)
    accuracy = {"x": {"a": 0.99, "b": 0.6, "c": 0.9}, "y": {"a": 0.2, "b": 0.97, "c": 0.9}}

    def run(steps):
        for step in range(steps):
            context = "xy"[step % 2]
            losses = {name: float(rng.random() > accuracy[context][name]) for name in MODELS}
            policy.learn(context, policy.choose(context), losses)

    run(2000)
    assert policy.weights("x")["a"] > 0.9
    assert policy.weights("y")["b"] > 0.9
    accuracy["x"]["a"] = 0.0
    run(1000)
    assert policy.weights("x")["c"] > 0.9


@pytest.mark.parametrize("kind", [Exp3, Exp4])
def test_weights_are_saved_and_restored(kind):
    policy = bound(kind(seed=0) if kind is Exp3 else kind())
    choice = policy.choose("ward 1")
    assert choice.models != ("b",)  # whose loss is 1
    policy.learn("ward 1", choice, {name: float(name == "b") for name in choice.models})
    state = json.loads(json.dumps(policy.state_dict()))
    other = bound(kind(), ("c", "a", "b"))
    other.load_state_dict(state)
    assert other.weights("ward 1") == pytest.approx(policy.weights("ward 1"))
    assert len(set(other.weights("ward 1").values())) > 1
    before = other.weights("ward 1")
    damaged = {**state, "weights": {"ward 1": {"a": 1.0, "b": math.nan, "c": 1.0}}}
    for wrong in ({**state, "models": ["a"]}, {**state, "policy": "Fixed"}, damaged, {"policy": 3}):
        with pytest.raises(ValueError, match=r"saved weights|the weights are of"):
            other.load_state_dict(wrong)
    assert other.weights("ward 1") == before


# Feedback: joined by id, within its time, once; errors change nothing


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
        for wrong in ([1.0, 2.0], 10**400):
            with pytest.raises(FeedbackError, match="1 finite numbers"):
                predictor.feedback(predictor.predict([1.0]).id, wrong)
    counts = {name: lambda batch, count=count: np.full(len(batch), count) for name, count in (("a", 1), ("b", 2))}
    with patient_predictor(counts, policy="exp4", task="regression") as predictor:
        assert float(predictor.predict([0.0]).output) == 1.5


# Batch sizes and the queue of one model


def test_a_batch_is_not_taken_for_one_input_of_a_classifier():
    model = torch.nn.Linear(4, 3)
    with patient_predictor({"a": model}) as predictor:
        assert predictor.predict(torch.ones(4)).label in range(3)
        for shape in ((8, 4), (1, 4)):
            with pytest.raises(ModelError, match="one score for each class"):
                predictor.predict(torch.ones(shape))
    with patient_predictor({"a": model}, input_shape=(4,)) as predictor, pytest.raises(InputError, match="expects"):
        predictor.predict(torch.ones(8, 4))
    with patient_predictor({"a": model}, task="regression", scale=1.0) as predictor:
        assert predictor.predict(torch.ones(8, 4)).output.shape == (8, 3)


def test_the_limit_grows_by_one_below_the_goal_and_shrinks_by_a_tenth_above():
    limit = BatchLimit(0.05, maximum=8)
    for expected in (2, 3, 4):
        limit.record(limit.size, 0.01)
        assert limit.value == expected
    limit.record(4, 0.051)
    assert limit.value == pytest.approx(3.6)
    for _ in range(100):
        limit.record(limit.size, 0.06)
    assert limit.value == 1
    for _ in range(100):
        limit.record(limit.size, 0.01)
    assert limit.value == 8


def test_a_batch_below_the_limit_is_no_evidence_for_a_larger_one():
    limit = BatchLimit(0.05, maximum=64)
    limit.record(1, 0.01)
    for _ in range(10):
        limit.record(1, 0.01)
    assert limit.value == 2


def test_the_limit_settles_where_the_latency_is_the_goal():
    limit = BatchLimit(0.05, maximum=256)
    # 25 samples take 0.05 s; then the model becomes four times slower
    for seconds, settled, least, most in ((0.002, 100, 21, 26), (0.008, 50, 4, 7)):
        sizes = []
        for _ in range(400):
            limit.record(limit.size, seconds * limit.size)
            sizes.append(limit.size)
        assert least <= min(sizes[settled:])
        assert max(sizes[settled:]) <= most


def test_a_backlog_does_not_count_against_the_batch():
    assert measured_latency(arrived=10.0, previous=9.0, done=10.5) == 0.5
    assert measured_latency(arrived=1.0, previous=9.0, done=10.5) == 1.5


def ticket(shape=(2,), deadline=1e9, dtype=np.float32):
    return Ticket(("m", 1, b""), np.zeros(shape, dtype), 0.0, deadline, [])


def test_a_batch_takes_what_waits_up_to_the_limit():
    tickets = [ticket() for _ in range(5)]
    queue = queue_of(*tickets)
    assert queue.take(3, 0.0) == (tickets[:3], [])
    assert queue.take(3, 0.0) == (tickets[3:], [])
    assert queue.take(3, 0.0) == ([], [])


def test_only_inputs_of_one_shape_and_dtype_are_batched():
    tickets = [ticket((2,)), ticket((3,)), ticket((2,)), ticket((2,), dtype=np.int64)]
    queue = queue_of(*tickets)
    assert queue.take(9, 0.0)[0] == [tickets[0], tickets[2]]
    assert queue.take(9, 0.0)[0] == [tickets[1]]
    assert queue.take(9, 0.0)[0] == [tickets[3]]


def test_requests_past_their_deadlines_are_not_computed():
    late, early = ticket(deadline=5.0), ticket(deadline=50.0)
    assert queue_of(late, early).take(9, 10.0) == ([early], [late])


def test_a_full_queue_refuses_requests():
    queue = queue_of(ticket(), ticket(), most=2)
    with pytest.raises(UnavailableError, match="2 requests wait for model 'm'"):
        queue.put(ticket())


def test_an_idle_queue_uses_no_processor_time():
    queue, spent = RequestQueue("m", most=2), []

    def wait():
        before = time.thread_time()
        queue.wait()
        spent.append(time.thread_time() - before)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)  # a loop that spins would use as much processor time
    queue.wake()
    thread.join(timeout=60)
    assert spent[0] < 0.05
