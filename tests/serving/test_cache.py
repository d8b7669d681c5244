"""The cache, and requests that share one call."""

import contextlib
import json
import re
import socket
import threading
import time
from functools import partial

import numpy as np
import pytest
from dadplug.runners.serving import PredictionClient, http_app
from dadplug.runners.serving.http_app import HttpApp
from dadplug.runners.serving.lit_server import Connection, Limits
from served import HeldModel, patient_predictor, served
from support import until
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dadplug.serving import Exp3, ModelError, ServingOptions
from dadplug.serving.backends import backend_of
from dadplug.serving.cache import Entry, PopularitySketch, PredictionCache, Ticket, digest_of
from dadplug.serving.predictor import Recalled


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


# Requests that are equal to earlier ones byte by byte: answered without parsing, as if they were parsed


SECONDS = 60.0


def double(batch):
    return 2 * batch


def negative(batch):
    return -batch


def app_of(policy, known, **options):
    """Return an app; without `known`, every request is parsed."""
    policy = Exp3(gamma=0.5, seed=3) if policy == "exp3" else policy
    models = {"a": double, "b": negative}
    predictor = patient_predictor(models, policy=policy, context="site", input_shape=(3,), dtype="float32", **options)
    found = []
    recall = predictor.recall

    def counted(*given):
        answer = recall(*given) if known else None
        found.append(isinstance(answer, Recalled))
        return answer

    predictor.recall = counted
    return HttpApp(predictor, 10_000, SECONDS), found


def http_request(body, kind=b"application/json", path=b"/predict", head=b""):
    lines = (b"POST " + path + b" HTTP/1.1", b"Host: x", b"Content-Type: " + kind)
    return b"\r\n".join((*lines, b"Content-Length: %d" % len(body))) + b"\r\n" + head + b"\r\n" + body


def stream():
    """Return requests: equal inputs in other contexts, as arrays, and in other words; and requests that are wrong."""
    rng = np.random.default_rng(0)
    inputs = [[1.0, 2.0, 0.5], [3.0, -1.0, 2.5], [0.0, 0.25, -4.0]]
    made = []
    for _ in range(60):
        x, site = inputs[rng.integers(3)], "ns"[rng.integers(2)]
        kind = rng.integers(12)
        if kind == 0:
            made.append(http_request(json.dumps({"input": x[:2], "site": site}).encode()))
        elif kind == 1:
            made.append(http_request(json.dumps({"input": x}).encode()))
        elif kind == 2:
            made.append(http_request(json.dumps({"input": x, "site": site}).encode(), kind=b"text/plain"))
        elif kind in (3, 4):
            array = http_app.dump_npy(np.array(x, np.float32))
            made.append(http_request(array, b"application/x-npy", b"/predict?site=" + site.encode()))
        elif kind == 5:
            made.append(
                http_request(json.dumps({"site": site, "input": x}).encode(), head=b"X-Trace: %d\r\n" % len(made))
            )
        else:
            made.append(http_request(json.dumps({"input": x, "site": site}).encode()))
    return made


def exchange(connection, data):
    connection.sendall(data)
    return receive(connection)


def receive(connection, rest=b""):
    answer = rest
    while b"\r\n\r\n" not in answer:
        answer += connection.recv(1 << 16)
    head, _, body = answer.partition(b"\r\n\r\n")
    length = int(re.search(rb"content-length: (\d+)", head)[1])
    while len(body) < length:
        body += connection.recv(1 << 16)
    assert len(body) == length
    fields = {line.split(b":")[0] for line in head.split(b"\r\n")[1:]}
    return int(head[9:12]), json.loads(body), fields


def reload(app):
    """Load the model "a" again, as another one."""
    model = app._predictor._models["a"]
    backend = backend_of(lambda batch: 3 * batch, ServingOptions())
    backend.start()
    model.replace(backend)
    until(lambda: model.version > 1)


def run(app, exchange_one):
    """Send the stream with feedback for some predictions, and return all that a client and an operator can see."""
    seen, ids = [], set()
    for number, data in enumerate(stream()):
        if number == 30:
            reload(app)
        status, answer, fields = exchange_one(data)
        if status == 200:
            key = answer.pop("id")
            assert key not in ids
            ids.add(key)
            if number % 3 == 0:
                feedback = json.dumps({"id": key, "y": number % 2}).encode()
                statuses = [exchange_one(http_request(feedback, path=b"/feedback"))[0] for _ in range(2)]
                assert statuses == [200, 409]
        seen.append((status, answer, fields))
    text = app._predictor.prometheus()
    counts = [line for line in text.splitlines() if not re.search("_seconds_(sum|bucket|total)|cache_bytes", line)]
    history = app._predictor.metrics.history()
    totals = [sum(each[key] for each in history) for key in ("requests", "failures", "hits", "lookups")]
    assert totals[0] == len(seen)
    return seen, sorted(counts), totals, app._predictor.state_dict()


@contextlib.contextmanager
def connected(app):
    """Serve an app until the end; yield its port and a connection to it."""
    with (
        contextlib.closing(app._predictor),
        served(app, partial(Connection, app, Limits())) as port,
        socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection,
    ):
        yield port, connection


def over_sockets(app, http):
    with served(app, http) as port, socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        return run(app, lambda data: exchange(connection, data))


@pytest.mark.parametrize("policy", ["fixed", "exp3", "exp4"])
@pytest.mark.parametrize("quick", [False, True], ids=["parsed by uvicorn", "without a task"])
def test_known_requests_are_answered_as_if_they_were_parsed(policy, quick):
    (plain, none), (knowing, found) = app_of(policy, known=False), app_of(policy, known=True)
    answered = []
    answer_known = knowing.answer_known

    def counted(*given):
        answered.append(answer_known(*given))
        return answered[-1]

    knowing.answer_known = counted
    http = partial(Connection, knowing, Limits()) if quick else "auto"
    with contextlib.closing(plain._predictor), contextlib.closing(knowing._predictor):
        assert over_sockets(plain, "auto") == over_sockets(knowing, http)
    assert sum(none) == 0
    assert sum(found) > 15
    assert (sum(each is not None for each in answered) > 10) is quick


def test_requests_in_pieces_and_in_a_row_are_answered_in_order():
    app, found = app_of("fixed", known=True)
    one, other = (http_request(json.dumps({"input": [x, 2.0, 0.5], "site": "n"}).encode()) for x in (1.0, 7.0))
    with connected(app) as (port, connection):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(3):
            assert exchange(connection, one)[1]["output"] == [2.0, 4.0, 1.0]
        assert sum(found) == 1
        for cut in (1, 20, len(one) - 1):
            connection.sendall(one[:cut])
            time.sleep(0.02)  # so that it arrives in two pieces, mostly
            assert exchange(connection, one[cut:])[1]["output"] == [2.0, 4.0, 1.0]
        head = one.index(b"{")
        for wait in (0.02, 0.2):  # longer than a head is held
            connection.sendall(one[:head])
            time.sleep(wait)
            connection.sendall(one[head : head + 5])
            time.sleep(0.02)
            assert exchange(connection, one[head + 5 :])[1]["output"] == [2.0, 4.0, 1.0]
        client = PredictionClient(f"http://127.0.0.1:{port}", context="site")
        before = len(found)
        for _ in range(4):
            assert client.predict([1.0, 2.0, 0.5], context="n").output.tolist() == [2.0, 4.0, 1.0]
        assert len(found) == before + 4
        client.close()
        connection.sendall(one + other + one)
        answers = b""
        while answers.count(b"}") < 3:
            answers += connection.recv(1 << 16)
        assert re.findall(rb'"output": \[([\d.]+)', answers) == [b"2.0", b"14.0", b"2.0"]
        status, _, fields = exchange(connection, one.replace(b"Host: x", b"Host: x\r\nConnection: close"))
        assert (status, b"connection" in fields) == (200, True)
        assert connection.recv(10) == b""


def test_a_request_with_the_head_of_the_last_one_is_not_parsed(monkeypatch):
    parsed, parse = [], HttpToolsProtocol.data_received
    monkeypatch.setattr(HttpToolsProtocol, "data_received", lambda *given: (parsed.append(given[1]), parse(*given)))
    app, _ = app_of("fixed", known=True)
    one, other = (http_request(json.dumps({"input": [x, 2.0, 0.5], "site": "n"}).encode()) for x in (1.0, 7.0))
    with connected(app) as (_, connection):
        for _ in range(5):
            assert exchange(connection, one)[1]["output"] == [2.0, 4.0, 1.0]
        assert parsed == [one] * 3  # computed, then looked up, then known
        assert exchange(connection, other)[1]["output"] == [14.0, 4.0, 1.0]  # by a task, without the parser
        assert parsed == [one] * 3
        for data in (other + one[:20], one[20:], one):  # a request in pieces, and one after it
            assert exchange(connection, data)[0] == 200
        assert b"".join(parsed) == one * 3 + other + one * 2


def test_known_requests_need_the_key():
    app, found = app_of("fixed", known=True)
    app._key = b"secret"
    body = json.dumps({"input": [1.0, 2.0, 0.5], "site": "n"}).encode()
    right, wrong = (http_request(body, head=b"X-API-Key: " + key + b"\r\n") for key in (b"secret", b"wrong"))
    with connected(app) as (_, connection):
        assert [exchange(connection, right)[0] for _ in range(3)] == [200, 200, 200]
        assert sum(found) == 1
        assert exchange(connection, wrong)[0] == 401
    assert len(found) == 3


def test_what_is_known_is_bounded_and_ends_with_its_entry():
    x = [1.0, 2.0, 3.0]
    with patient_predictor({"a": double}, task="regression", cache_bytes=20_000) as predictor:
        cache, answers = predictor._cache, []
        names = [b"%032d" % number for number in range(40)]
        predictor.submit(x, answers.append, body=names[0])
        while not answers:
            time.sleep(0.001)
        assert cache.known(names[0]) is None  # not from the cache
        for name in names:
            predictor.submit(x, answers.append, body=name)
        known = [name for name in names if cache.known(name)]
        assert known == names[-16:]
        before = cache.bytes
        prediction, text = predictor.recall(known[0], http_app.output_text, 0.0)
        assert (prediction.output.tolist(), text) == ([2.0, 4.0, 6.0], b"[2.0, 4.0, 6.0]")
        assert cache.bytes == before + len(text)
        predictor._models["a"]._begin_version()
        assert cache.bytes == 0
        assert not any(map(cache.known, names))
