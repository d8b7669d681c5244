"""Requests that are equal to earlier ones byte by byte: answered without parsing, as if they were parsed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time

import numpy as np
import pytest
from dadplug.runners._serving import bodies
from dadplug.runners._serving.connection import connection_class
from dadplug.runners._serving.face import Face
from dadplug.runners.serving import PredictionClient
from face_server import served
from patient import patient_predictor

from dadplug.serving import Exp3
from dadplug.serving.backend_factory import backend_of

SECONDS = 60.0


def double(batch):
    return 2 * batch


def negative(batch):
    return -batch


def face_of(policy, known, **options):
    """Return a face; without `known`, every request is parsed."""
    policy = Exp3(gamma=0.5, seed=3) if policy == "exp3" else policy
    models = {"a": double, "b": negative}
    predictor = patient_predictor(models, policy=policy, context="site", input_shape=(3,), dtype="float32", **options)
    found = []
    recall = predictor.recall

    def counted(*given):
        answer = recall(*given) if known else None
        found.append(isinstance(answer, tuple) and hasattr(answer, "prediction"))
        return answer

    predictor.recall = counted
    return Face(predictor, 10_000, SECONDS), found


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
            array = bodies.dump_npy(np.array(x, np.float32))
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


def reload(face):
    """Load the model "a" again, as another one."""
    model = face._predictor._models["a"]
    backend = backend_of(lambda batch: 3 * batch, hang_seconds=1.0, load_seconds=1.0, threads=1)
    backend.start()
    model.replace(backend)
    end = time.monotonic() + SECONDS
    while model.version == 1:
        assert time.monotonic() < end
        time.sleep(0.001)


def run(face, exchange_one):
    """Send the stream with feedback for some predictions, and return all that a client and an operator can see."""
    seen, ids = [], set()
    for number, data in enumerate(stream()):
        if number == 30:
            reload(face)
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
    text = face._predictor.prometheus()
    counts = [line for line in text.splitlines() if not re.search("_seconds_(sum|bucket|total)|cache_bytes", line)]
    history = face._predictor.metrics.history()
    totals = [sum(each[key] for each in history) for key in ("requests", "failures", "hits", "lookups")]
    assert totals[0] == len(seen)
    return seen, sorted(counts), totals, face._predictor.state_dict()


def over_sockets(face, http):
    with served(face, http) as port, socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        return run(face, lambda data: exchange(connection, data))


def over_asgi(face):
    def one(data):
        head, _, body = data.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        path, _, query = first.split()[1].partition(b"?")
        headers = [tuple(each.strip() for each in line.split(b":", 1)) for line in lines]
        scope = {"method": "POST", "path": path.decode(), "query_string": query}
        scope |= {"headers": [(name.lower(), value) for name, value in headers]}
        sent = []

        async def collect(message):
            sent.append(message)

        async def body_of():
            return {"type": "http.request", "body": body}

        asyncio.run(face(scope, body_of, collect))
        return sent[0]["status"], json.loads(sent[1]["body"]), {name for name, _ in sent[0]["headers"]}

    return run(face, one)


@pytest.mark.parametrize("policy", ["fixed", "exp3", "exp4"])
def test_known_bodies_are_answered_as_if_they_were_parsed(policy):
    (plain, none), (quick, found) = face_of(policy, known=False), face_of(policy, known=True)
    with contextlib.closing(plain._predictor), contextlib.closing(quick._predictor):
        assert over_asgi(plain) == over_asgi(quick)
    assert sum(none) == 0
    assert sum(found) > 15


@pytest.mark.parametrize("policy", ["fixed", "exp3", "exp4"])
def test_known_requests_on_a_connection_are_answered_as_if_they_were_parsed(policy):
    pytest.importorskip("httptools")
    pytest.importorskip("uvicorn")
    (plain, none), (quick, found) = face_of(policy, known=False), face_of(policy, known=True)
    answered = []
    attempt = quick.attempt

    def counted(*given):
        answered.append(attempt(*given))
        return answered[-1]

    quick.attempt = counted
    with contextlib.closing(plain._predictor), contextlib.closing(quick._predictor):
        assert over_sockets(plain, "auto") == over_sockets(quick, connection_class(lambda: quick))
    assert sum(none) == 0
    assert sum(found) > 15
    assert sum(each is not None and each.answer is not None for each in answered) > 10


def test_requests_in_pieces_and_in_a_row_are_answered_in_order():
    pytest.importorskip("httptools")
    pytest.importorskip("uvicorn")
    face, found = face_of("fixed", known=True)
    one, other = (request(json.dumps({"input": [x, 2.0, 0.5], "site": "n"}).encode()) for x in (1.0, 7.0))
    with (
        contextlib.closing(face._predictor),
        served(face, connection_class(lambda: face)) as port,
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


def test_a_known_head_needs_the_key_and_its_own_length():
    face, _ = face_of("fixed", known=True)
    face._key = b"secret"
    body = json.dumps({"input": [1.0, 2.0, 0.5], "site": "n"}).encode()
    scope = {"http_version": "1.1", "method": "POST", "path": "/predict", "query_string": b""}
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    head = b"POST /predict HTTP/1.1\r\n\r\n"
    with contextlib.closing(face._predictor):
        for extra in ([], [(b"x-api-key", b"wrong")], [(b"x-api-key", b"secret"), (b"expect", b"100-continue")]):
            face.learn_head(scope | {"headers": headers + extra}, head + body, len(head))
            assert face.attempt(head + body, len(head), 0.0) is None
        face.learn_head(scope | {"headers": [*headers, (b"x-api-key", b"secret")]}, head + body, len(head))
        assert face.attempt(head + body, len(head), 0.0).answer is None
        assert face.attempt(head + body + b" ", len(head), 0.0) is None
        for number in range(300):  # heads that never repeat do not fill the memory
            own = b"%d\r\n\r\n" % number
            face.learn_head(scope | {"headers": [*headers, (b"x-api-key", b"secret")]}, own + body, len(own))
        assert len(face._heads) <= 256


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
        prediction, text = predictor.recall(known[0], bodies.output_text, 0.0)
        assert (prediction.output.tolist(), text) == ([2.0, 4.0, 6.0], b"[2.0, 4.0, 6.0]")
        assert cache.bytes == before + len(text)
        predictor._models["a"]._begin_version()
        assert cache.bytes == 0
        assert not any(map(cache.known, names))
