"""The cache, and requests that share one call."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from patient import HeldModel, patient_predictor

from dadplug.serving import ModelError
from dadplug.serving.cache import Entry, PopularitySketch, PredictionCache, Ticket, digest_of


def doubling(go=True, factor=2.0):
    return HeldModel(go, lambda batch: batch * factor)


def key_of(x, name="m", version=1):
    return (name, version, digest_of(x))


def request(cache, x):
    """Ask for an input; return the output in the cache, None, or the ticket of a request that has to be computed."""
    found = cache.request(Ticket(key_of(x), x, 0.0, 1.0, [print]))
    return found.output if isinstance(found, Entry) else found


def test_a_key_has_model_version_content_dtype_and_shape():
    x = np.arange(6, dtype=np.float32)
    keys = {
        key_of(x),
        key_of(x, "other"),
        key_of(x, version=2),
        key_of(x.reshape(2, 3)),
        key_of(x.view(np.int32)),
        key_of(x + 1),
        key_of(np.zeros((0, 3), np.float32)),
        key_of(np.zeros((3, 0), np.float32)),
    }
    assert len(keys) == 8
    assert (
        key_of(x)
        == key_of(np.arange(12, dtype=np.float32)[:6])
        == key_of(np.arange(11, dtype=np.float32)[::-2][::-1] / 2)
    )


def put(cache, x, output):
    assert cache.close(request(cache, x), output, None, 1) == [print]


def test_the_cache_is_bounded_in_bytes_and_displaces_what_is_requested_less():
    cache = PredictionCache(limit=3 * 1400)
    inputs = [np.full(3, i, np.float32) for i in range(4)]
    output = np.zeros(250, np.float32)  # 1000 bytes, and what an entry takes besides
    for x in inputs[:3]:
        put(cache, x, output)
    assert len(cache) == 3
    assert cache.bytes == 3 * 1400
    assert request(cache, inputs[0]) is output
    put(cache, inputs[3], output)  # requested once, as the least recently used one was: not kept
    assert len(cache) == 3
    put(cache, inputs[3], output)
    assert len(cache) == 3
    assert cache.bytes == 3 * 1400
    for x in (inputs[0], inputs[2], inputs[3]):
        assert request(cache, x) is output
    assert isinstance(request(cache, inputs[1]), Ticket)
    put(cache, np.ones(1), np.zeros(10**4))  # larger than the cache
    assert len(cache) == 3


def test_popular_entries_stay_through_single_requests_and_go_when_others_are_popular():
    cache, output = PredictionCache(limit=10 * 404), np.zeros(1, np.float32)
    popular, later = ([np.full(1, base + i, np.float32) for i in range(10)] for base in (0, 100))

    def ask(x):
        found = request(cache, x)
        if found is not output:
            cache.close(found, output, None, 1)
        return found is output

    for _ in range(5):
        assert len([ask(x) for x in popular]) == 10
    assert not any(ask(np.full(1, i, np.float32)) for i in range(1000, 1500))
    assert all(ask(x) for x in popular)
    for _ in range(40):
        kept = [ask(x) for x in later]
    assert all(kept)
    assert not any(ask(x) for x in popular)


def test_counts_are_halved_and_never_too_small():
    sketch, digests = PopularitySketch(256), [digest_of(np.array([i])) for i in range(50)]
    for number, digest in enumerate(digests):
        for _ in range(number + 1):
            sketch.record(digest, period=10_000)
    estimates = [sketch.estimate(digest) for digest in digests]
    assert all(estimate >= number + 1 for number, estimate in enumerate(estimates))
    assert sum(estimates) < 1.2 * sum(range(51))
    sketch.record(digests[0], period=1)
    assert [sketch.estimate(digest) for digest in digests[1:]] == [each // 2 for each in estimates[1:]]
    for _ in range(600):
        sketch.record(digests[0], period=10_000)
    assert sketch.estimate(digests[0]) == 255


def test_a_result_of_an_older_version_is_not_kept():
    cache, x = PredictionCache(10**6), np.ones(3)
    ticket = request(cache, x)
    cache.remove_model("m")
    cache.close(ticket, np.ones(1), None, version=2)
    assert len(cache) == 0


def test_a_hundred_equal_concurrent_requests_make_one_call():
    model, answers = doubling(go=False), []
    with patient_predictor({"m": model}, task="regression") as predictor:
        for _ in range(100):
            predictor.submit([1.0, 2.0], answers.append)
        other = threading.Thread(target=lambda: answers.append(predictor.predict([5.0, 2.0])))
        other.start()
        model.go.set()
        other.join(timeout=60)
        while len(answers) < 101:
            assert not other.join(0.01)
        assert model.samples == 2
        assert sorted(float(each.output[0]) for each in answers) == [2.0] * 100 + [10.0]
        assert len({each.id for each in answers}) == 101
        predictor.predict([1.0, 2.0])
        assert model.samples == 2


def test_without_a_cache_each_request_calls_the_model():
    model = doubling()
    with patient_predictor({"m": model}, task="regression", cache_bytes=0) as predictor:
        for _ in range(3):
            predictor.predict([1.0, 2.0])
    assert model.samples == 3


def test_failures_are_not_cached():
    fail = [True]

    def model(batch):
        if fail[0]:
            raise RuntimeError("out of order")
        return batch

    with patient_predictor({"m": model}, task="regression") as predictor:
        with pytest.raises(ValueError, match="out of order"):  # no input of this shape was ever answered
            predictor.predict([1.0])
        fail[0] = False
        assert predictor.predict([1.0]).output == 1
        fail[0] = True
        assert predictor.predict([1.0]).output == 1
        with pytest.raises(ModelError, match="out of order"):
            predictor.predict([2.0])


def test_an_output_that_a_client_has_cannot_be_written_to():
    with patient_predictor({"m": doubling()}, task="regression") as predictor:
        output = predictor.predict([1.0]).output
    with pytest.raises(ValueError, match="read-only"):
        output[0] = 5


def test_zipf_requests_with_a_cache_of_a_tenth_of_the_keys_halve_the_calls():
    rng, keys = np.random.default_rng(0), 1000
    drawn = rng.zipf(1.2, size=20_000)
    drawn = drawn[drawn <= keys][:3000]
    model = doubling()
    entry = 400 + 4
    with patient_predictor({"m": model}, task="regression", cache_bytes=keys // 10 * entry) as predictor:
        for each in drawn:
            assert predictor.predict([float(each)]).output == 2 * each
        assert predictor.status()["cache"]["bytes"] <= keys // 10 * entry
    assert model.samples < len(drawn) / 2
