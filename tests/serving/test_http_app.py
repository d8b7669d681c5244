"""Requests over ASGI, without a network: answers, errors, sizes, pace; the page and its data, also in a browser."""

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import time
from functools import partial

import numpy as np
import pytest
from dadplug.runners.serving import http_app
from dadplug.runners.serving.http_app import HttpApp
from dadplug.runners.serving.lit_server import Connection, Limits
from served import HeldModel, patient_predictor, served

JSON = ((b"content-type", b"application/json"),)


def identity(batch):
    return batch


def app_of(models=None, max_body=10_000, read_seconds=60.0, api_key=None, **options):
    return HttpApp(patient_predictor(models or {"m": identity}, **options), max_body, read_seconds, api_key)


@pytest.fixture
def opened():
    apps = []

    def open_app(*given, **options):
        apps.append(app_of(*given, **options))
        return apps[-1]

    yield open_app
    for app in apps:
        app._predictor.close()


async def send(app, method, path, body=b"", headers=JSON, parts=None, query=b""):
    """Send one request, and return status, content and headers."""
    sent = []
    parts = [body] if parts is None else list(parts)

    async def receive():
        if not parts:
            await asyncio.sleep(3600)  # a client that stays silent
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts) or part is STALL}

    async def collect(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": list(headers), "query_string": query}
    await app(scope, receive, collect)
    start, end, *_ = sent
    kind = dict(start["headers"])[b"content-type"].decode()
    content = json.loads(end["body"]) if kind == http_app.JSON else end["body"].decode()
    return start["status"], content, dict(start["headers"])


STALL = b"{"


def post(path, request, **given):
    return ("POST", path, json.dumps(request).encode()), given


def run(app, *requests):
    """Send requests one after the other."""

    async def every():
        return [await send(app, *each[0], **each[1]) for each in requests]

    return asyncio.run(every())


def test_a_prediction_and_its_feedback(opened):
    models = {"a": lambda batch: -batch, "b": identity}
    app = opened(models, policy="exp4", context="site")
    ((status, answer, _),) = run(app, post("/predict", {"input": [1.0, 2.0, 0.5], "site": "x"}))
    assert status == 200
    assert set(answer) == {"id", "output", "label", "model", "confidence", "models"}
    assert (answer["models"], answer["confidence"]) == (["a", "b"], 0.5)
    found = run(
        app,
        post("/feedback", {"id": answer["id"], "y": 1}),
        post("/feedback", {"id": answer["id"], "y": 1}),
        post("/feedback", {"id": "unknown", "y": 1}),
        post("/feedback", {"id": "unknown"}),
        post("/predict", {"input": [1.0, 2.0, 0.5], "site": "x"}),
        post("/predict", {"input": [1.0, 2.0, 0.5]}),
    )
    assert [status for status, _, _ in found] == [200, 409, 404, 422, 200, 422]
    assert (found[4][1]["label"], found[4][1]["model"]) == (1, "b")
    assert found[4][1]["confidence"] > 0.5
    assert "needs 'site'" in found[5][1]["error"]


def test_numpy_files_are_inputs(opened):
    app = opened(context="site", input_shape=(2, 2), task="regression")
    npy = ((b"content-type", b"application/x-npy"),)
    x = np.array([[1.0, 2.0], [3.0, 4.0]])
    for given in (x, np.asfortranarray(x), x.astype(">f4")):
        ((status, answer, _),) = run(
            app, (("POST", "/predict", http_app.dump_npy(given)), {"headers": npy, "query": b"site=a%20b"})
        )
        assert (status, answer["output"]) == (200, x.tolist())
    ok = http_app.dump_npy(x)
    wrong = (b"", b"\x93NUMPY", ok[:-1], ok + b"x", ok.replace(b"(2, 2)", b"(9, 9)"), b"x" * 100)
    objects = ok.replace(b"'<f8'", b"'|O8'")
    for body in (*wrong, objects, ok.replace(b"{'descr'", b"{[[[[[[[")):
        ((status, answer, _),) = run(app, (("POST", "/predict", body), {"headers": npy, "query": b"site=a"}))
        assert (status, "numpy.save" in answer["error"]) == (400, True)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"\x00\xff\xfe", 400),
        (b"[1, 2]", 400),
        (b"[" * 5000, 400),
        (b'{"input": [1, 2', 400),
        (b'{"inputs": [1, 2, 3]}', 422),
        (b'{"input": [1, 2, 3], "extra": 1}', 422),
        (b'{"input": [1, 2]}', 422),
        (b'{"input": [1, NaN, 3]}', 422),
        (b'{"input": [1, Infinity, 3]}', 422),
        (b'{"input": [1, 1e999, 3]}', 422),
        (b'{"input": [1, 1e39, 3]}', 422),
        (b'{"input": [1, null, 3]}', 422),
        (b'{"input": "123"}', 422),
        (b'{"input": {"a": 1}}', 422),
        (b'{"input": [[1], [2, 3]]}', 422),
        (b'{"input": [1' + b"0" * 5000 + b", 2, 3]}", 400),
    ],
)
def test_garbage_fails_alone(opened, body, status):
    app = opened(input_shape=(3,), dtype="float32")
    found = run(app, (("POST", "/predict", body), {}), post("/predict", {"input": [1, 2, 3]}))
    assert [each[0] for each in found] == [status, 200]
    assert found[0][1]["error"]


def test_methods_types_and_sizes(opened):
    app = opened(max_body=100)
    large = json.dumps({"input": [0.5] * 100}).encode()
    found = run(
        app,
        (("GET", "/predict"), {}),
        (("POST", "/predict", b'{"input": [1, 2]}'), {"headers": ((b"content-type", b"text/plain"),)}),
        (("POST", "/predict", large), {}),
        (("POST", "/predict", large), {"headers": (*JSON, (b"content-length", b"1000000"))}),
        (("POST", "/predict"), {"parts": [large[:60], large[60:120], large[120:]]}),
        post("/predict", {"input": [1, 2]}),
    )
    assert [status for status, _, _ in found] == [405, 415, 413, 413, 413, 200]
    assert found[0][1]["error"] == "use POST for /predict"
    assert found[2][2][b"connection"] == b"close"


def test_requests_that_are_refused_before_the_predictor_count_in_the_metrics(opened):
    app = opened(max_body=100)
    predictions = [
        post("/predict", {"input": [1, 2], "unknown": 1}),
        (("POST", "/predict", b"[]"), {}),
        (("POST", "/predict", b"[" * 101), {}),
        (("POST", "/predict", b"a"), {"headers": ((b"content-type", b"text/plain"),)}),
        post("/predict", {"input": [1, 2]}),
    ]
    first, *_ = run(app, *predictions)
    assert "unknown field 'unknown'" in first[1]["error"]
    run(app, post("/feedback", {"id": "a", "y": 1, "unknown": 1}))
    lines = app._predictor.prometheus().splitlines()
    for status in (422, 400, 413, 415, 200):
        assert f'dadplug_requests_total{{status="{status}"}} 1.0' in lines
    assert 'dadplug_feedback_total{status="422"} 1.0' in lines
    assert sum(each["failures"] for each in app._predictor.metrics.history()) == 4


def test_a_key_is_needed_where_one_is_set(opened):
    app = opened(api_key="secret")
    request = post("/predict", {"input": [1, 2]})
    found = run(app, request, (request[0], {"headers": (*JSON, (b"x-api-key", b"secret"))}), (("GET", "/status"), {}))
    assert [status for status, _, _ in found] == [401, 200, 401]


def test_a_late_body_leaves_no_cancellation_behind(opened):
    app = opened(read_seconds=0.01)

    async def late():
        status, answer, _ = await send(app, "POST", "/predict", parts=[STALL])
        task = asyncio.current_task()
        return status, answer["error"], task.cancelling() if hasattr(task, "cancelling") else 0

    status, error, cancelling = asyncio.run(late())
    assert (status, "did not arrive" in error, cancelling) == (408, True, 0)


def test_slow_clients_do_not_hold_up_others(opened):
    app = opened(read_seconds=0.5)

    async def both():
        slow = [asyncio.create_task(send(app, "POST", "/predict", parts=[STALL])) for _ in range(20)]
        await asyncio.sleep(0)
        quick = await send(app, *post("/predict", {"input": [1, 2]})[0])
        waiting = sum(not each.done() for each in slow)
        return quick[0], waiting, {(await each)[0] for each in slow}

    assert asyncio.run(both()) == (200, 20, {408})


def test_concurrent_requests_are_batched_and_each_gets_its_own_answer(opened):
    model = HeldModel(compute=lambda batch: batch * 2)
    app = opened({"m": model})
    app._predictor._models["m"].limit.value = 50

    async def every():
        requests = [asyncio.create_task(send(app, *post("/predict", {"input": [i, 1.5]})[0])) for i in range(40)]
        await asyncio.to_thread(model.started.wait, 60)
        while len(app._open) < 40:
            await asyncio.sleep(0.001)
        model.go.set()
        return [(await each)[1]["output"] for each in requests]

    assert asyncio.run(every()) == [[2 * i, 3.0] for i in range(40)]
    assert model.samples == 40
    assert len(model.batches) <= 10


def test_a_request_past_its_deadline_gets_503(opened):
    model = HeldModel()
    app = opened({"m": model}, slo=0.01, deadline=0.05)
    ((status, answer, _),) = run(app, post("/predict", {"input": [1, 2]}))
    model.go.set()
    assert (status, "deadline" in answer["error"]) == (503, True)
    assert app._open == {}


def test_outputs_that_are_not_finite_become_null(opened):
    app = opened({"m": lambda batch: np.where(batch > 0, batch, -np.inf)}, task="regression")
    for _ in range(2):  # from the model, and from the cache
        ((status, answer, _),) = run(app, post("/predict", {"input": [1.0, -2.0]}))
        assert (status, answer["output"]) == (200, [1.0, None])


def test_the_state_of_the_server(opened):
    app = opened({"a": identity, "b": identity}, policy="exp4", context="site")
    ((_, answer, _),) = run(app, post("/predict", {"input": [1.0, 2.0], "site": "<x>"}))
    found = run(
        app,
        post("/feedback", {"id": answer["id"], "y": 1}),
        (("GET", "/metrics"), {}),
        (("GET", "/health"), {}),
        (("GET", "/status.json"), {}),
        (("GET", "/status"), {}),
    )
    assert [status for status, _, _ in found] == [200] * 5
    assert 'dadplug_requests_total{status="200"} 1.0\n' in found[1][1]
    assert found[2][1] == {"ready": {"a": True, "b": True}}
    history = found[3][1]["history"]
    assert sum(each["requests"] for each in history) == 1
    assert history[-1]["weights"] == {"<x>": {"a": 0.5, "b": 0.5}}
    page = http_app.PAGE.read_text()
    assert found[4][1] == page
    assert b"default-src 'none'" in found[4][2][b"content-security-policy"]
    assert "http" not in page.replace("http-equiv", "")  # no external resources


STATE = {
    "slo": 0.05,
    "models": {"<a>": {"ready": True, "version": 1, "restarts": 0, "waiting": 0, "batch_limit": 3, "pid": 5}},
    "history": [
        {
            "time": 100 + i,
            "requests": 10 * i,
            "failures": 0,
            "above_goal": 1,
            "p50": 0.01,
            "p99": 0.02,
            "batches": {"<a>": 4 + i},
            "hits": i,
            "lookups": 10,
            "weights": {"w<1>": {"<a>": 0.25 * i}},
        }
        for i in range(3)
    ],
}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, to run the page's script")
def test_the_page_draws_its_data(tmp_path):
    script = http_app.PAGE.read_text().split("<script>")[1].split("</script>")[0]
    state = json.dumps(STATE)
    idle = {
        "requests": 0,
        "failures": 0,
        "above_goal": 0,
        "hits": 0,
        "batches": {"<a>": 0},
        "weights": {"w": {"<a>": 0}},
    }
    zero = json.dumps(STATE | {"history": [each | idle for each in STATE["history"]]})
    script += f"\nconst state = {state}, zero = {zero};\n"
    script += "console.log(JSON.stringify([charts(state), page(state), table(state), page(zero)]));"
    (tmp_path / "page.js").write_text(script)
    node = subprocess.run(["node", str(tmp_path / "page.js")], capture_output=True, text=True, timeout=120)
    assert node.returncode == 0, node.stderr
    charts, page, table, zero = json.loads(node.stdout)
    assert charts["Latency in ms"]["p99"] == [[101, 20], [102, 20]]  # the first second had no answers
    assert charts["Latency in ms"]["goal"] == [[100, 50], [101, 50], [102, 50]]
    assert charts["Batch size"] == {"<a>": [[100, 4], [101, 5], [102, 6]]}
    assert charts["Share of cache hits"]["hits"][-1] == [102, 0.2]
    assert charts["Weights in w<1>"] == {"<a>": [[100, 0], [101, 0.25], [102, 0.5]]}
    assert page.count("<svg") == 5
    assert "<polyline" in page
    assert "NaN" not in page
    assert "<a>" not in page + table  # names are escaped
    assert "&#60;a&#62;" in table
    assert zero.count("<span>1</span><span>0</span>") == 4  # all charts but that of latencies, whose goal is drawn


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium or chrome")
@pytest.mark.parametrize("width", [500, 1280])
def test_the_page_follows_the_systems_colours_at_both_widths(tmp_path, width):
    image = pytest.importorskip("PIL.Image")
    corners = []
    for scheme in (0, 1):  # dark and light, of Chromium's settings
        shot = tmp_path / f"{scheme}.png"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options += [f"--user-data-dir={tmp_path / str(scheme)}", f"--window-size={width},600", f"--screenshot={shot}"]
        command = [BROWSER, *options, f"--blink-settings=preferredColorScheme={scheme}", http_app.PAGE.as_uri()]
        program = subprocess.run(command, capture_output=True, text=True, timeout=150)
        assert program.returncode == 0, program.stderr[-2000:]
        picture = image.open(shot).convert("RGB")
        assert picture.width == width
        corners.append([picture.getpixel((x, 599)) for x in (0, width - 1)])
    assert corners == [[(13, 17, 23)] * 2, [(255, 255, 255)] * 2]


# Clients that hold connections, send slow heads or large bodies: others are served, and each learns why it is not


SECONDS = 60.0
BODY = json.dumps({"input": [1.0, 2.0]}).encode()
HEAD = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
MEGABYTE = 1 << 20


@pytest.fixture
def open_server():
    with contextlib.ExitStack() as stack:

        def start(most, seconds, api_key=None):
            predictor = stack.enter_context(patient_predictor({"m": identity}, input_shape=(2,)))
            app = HttpApp(predictor, 10_000, seconds, api_key)
            port = stack.enter_context(served(app, partial(Connection, app, Limits(most, seconds))))
            return lambda: stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=SECONDS))

        yield start


def received(connection):
    """Return all that the server sends until it ends the connection."""
    found = b""
    while part := connection.recv(1 << 16):
        found += part
    return found


def ended(connection):
    """Return whether the server has ended a connection, with or without a reset, before the time limit."""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        return not received(connection).startswith(b"HTTP/1.1 200")
    return True


def send_until_ended(connection, part):
    end = time.monotonic() + SECONDS
    with contextlib.suppress(OSError):
        while time.monotonic() < end:
            connection.sendall(part)
            time.sleep(0.02)
        pytest.fail("the connection was not ended")


def read_answer(connection):
    answer = b""
    while not answer.endswith(b"}"):
        part = connection.recv(1 << 16)
        assert part, answer
        answer += part
    return answer


def predict(connection):
    connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
    return read_answer(connection).startswith(b"HTTP/1.1 200")


def test_connections_that_wait_make_room_for_others(open_server):
    connect = open_server(most=5, seconds=SECONDS * 10)
    kept = connect()
    assert predict(kept)
    idle = [connect() for _ in range(6)]
    slow = [connect() for _ in range(6)]
    for each in slow:
        with contextlib.suppress(OSError):  # perhaps it is ended already
            each.sendall(HEAD)
    assert predict(connect())
    assert all(ended(each) for each in idle)
    assert predict(kept)  # those that never sent a request are ended before it


def test_slow_heads_have_a_time_limit(open_server):
    connect = open_server(most=100, seconds=0.2)
    slow, silent, lines, kept = connect(), connect(), connect(), connect()
    assert predict(kept)
    slow.sendall(HEAD)
    lines.sendall(b"\r\n")
    send_until_ended(slow, b"X-A: b\r\n")  # bytes of a head give it no more time
    assert ended(silent)
    assert ended(lines)
    assert predict(kept)  # the time between two requests is not that of a head


def test_a_long_head_is_refused(open_server):
    connect = open_server(most=100, seconds=SECONDS)
    client = connect()
    client.sendall(HEAD + b"X-A: " + b"b" * (1 << 18))
    client.shutdown(socket.SHUT_WR)
    assert received(client).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("announced", [True, False])
def test_a_client_that_sends_too_large_a_body_reads_the_reason(open_server, announced):
    client = open_server(most=100, seconds=SECONDS)()
    if announced:
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (100 * MEGABYTE))
        part = b"x" * MEGABYTE
    else:
        client.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        part = b"%x\r\n" % MEGABYTE + b"x" * MEGABYTE + b"\r\n"
    for _ in range(100):  # all of it, before anything is read
        client.sendall(part)
    answer = read_answer(client)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in answer
    assert answer.endswith(b'{"error": "the body is larger than 10000 bytes"}')


def test_a_client_without_the_key_reads_so_after_its_body(open_server):
    client = open_server(most=100, seconds=SECONDS, api_key="secret")()
    client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (10 * MEGABYTE))
    for _ in range(10):
        client.sendall(b"x" * MEGABYTE)
    assert received(client).startswith(b"HTTP/1.1 401")


def test_what_follows_a_refusal_is_read_for_a_limited_time(open_server):
    client = open_server(most=100, seconds=0.2)()
    client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (100 * MEGABYTE))
    send_until_ended(client, b"x")


def test_refused_bodies_and_heads_do_not_keep_others_out(open_server):
    connect = open_server(most=5, seconds=SECONDS, api_key="secret")
    refused = [connect() for _ in range(8)]
    for number, each in enumerate(refused):
        with contextlib.suppress(OSError):  # perhaps it is ended already
            each.sendall(HEAD + b"Content-Length: 100\r\n\r\n" if number % 2 else b"X: y\r\n" * 20_000)
    client = connect()
    client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-API-Key: secret\r\nConnection: close\r\n\r\n")
    assert received(client).startswith(b"HTTP/1.1 200")
