"""Requests that are equal to earlier ones byte by byte: answered without parsing, as if they were parsed."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from functools import partial

import numpy as np
import pytest
from dadplug.runners.serving import PredictionClient, http_app
from dadplug.runners.serving.connection import Connection, Limits
from dadplug.runners.serving.http_app import HttpApp
from http_server import served
from patient import patient_predictor
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dadplug.serving import Exp3, ServingOptions
from dadplug.serving.backends import backend_of
from dadplug.serving.predictor import Recalled

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


def request(body, kind=b"application/json", path=b"/predict", head=b""):
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
            made.append(request(json.dumps({"input": x[:2], "site": site}).encode()))
        elif kind == 1:
            made.append(request(json.dumps({"input": x}).encode()))
        elif kind == 2:
            made.append(request(json.dumps({"input": x, "site": site}).encode(), kind=b"text/plain"))
        elif kind in (3, 4):
            array = http_app.dump_npy(np.array(x, np.float32))
            made.append(request(array, b"application/x-npy", b"/predict?site=" + site.encode()))
        elif kind == 5:
            made.append(request(json.dumps({"site": site, "input": x}).encode(), head=b"X-Trace: %d\r\n" % len(made)))
        else:
            made.append(request(json.dumps({"input": x, "site": site}).encode()))
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
    end = time.monotonic() + SECONDS
    while model.version == 1:
        assert time.monotonic() < end
        time.sleep(0.001)


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
                statuses = [exchange_one(request(feedback, path=b"/feedback"))[0] for _ in range(2)]
                assert statuses == [200, 409]
        seen.append((status, answer, fields))
    text = app._predictor.prometheus()
    counts = [line for line in text.splitlines() if not re.search("_seconds_(sum|bucket|total)|cache_bytes", line)]
    history = app._predictor.metrics.history()
    totals = [sum(each[key] for each in history) for key in ("requests", "failures", "hits", "lookups")]
    assert totals[0] == len(seen)
    return seen, sorted(counts), totals, app._predictor.state_dict()


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
    one, other = (request(json.dumps({"input": [x, 2.0, 0.5], "site": "n"}).encode()) for x in (1.0, 7.0))
    with (
        contextlib.closing(app._predictor),
        served(app, partial(Connection, app, Limits())) as port,
        socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection,
    ):
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
    one, other = (request(json.dumps({"input": [x, 2.0, 0.5], "site": "n"}).encode()) for x in (1.0, 7.0))
    with (
        contextlib.closing(app._predictor),
        served(app, partial(Connection, app, Limits())) as port,
        socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection,
    ):
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
    right, wrong = (request(body, head=b"X-API-Key: " + key + b"\r\n") for key in (b"secret", b"wrong"))
    with (
        contextlib.closing(app._predictor),
        served(app, partial(Connection, app, Limits())) as port,
        socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection,
    ):
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
