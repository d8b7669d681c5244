"""The predictor with models that are objects, and the server on LitServe, its client, its command and its example."""

import argparse
import contextlib
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path

import forkserver
import numpy as np
import pytest
import support
import torch
from dadplug.runners.serving import PredictionClient, PredictionServer
from prometheus_client.parser import text_string_to_metric_families
from served import HeldModel, patient_predictor
from support import refuses

from dadplug.serving import (
    Exp3,
    FeedbackError,
    InputError,
    LoadError,
    Model,
    ModelError,
    ServingOptions,
    UnavailableError,
)
from dadplug.tools.cli.commands import main, named, seconds, shape

SECONDS = 120.0
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "serve_digits.py"
BUILDER = "import torch\n\n\ndef net():\n    return torch.nn.Linear(3, 2)\n"


def wait_for(condition, server):
    end = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        assert server.poll() is None, server.read()
        time.sleep(0.02)
    return found


def test_a_checkpoint_is_served_by_the_command_until_sigterm(tmp_path):
    pytest.importorskip("litserve")
    module = torch.nn.Linear(3, 2)
    torch.save({"state_dict": module.state_dict()}, tmp_path / "best.ckpt")
    (tmp_path / "net.py").write_text(BUILDER)
    port = support.free_port()
    command = ["-m", "dadplug", "serve", "best.ckpt", f"other={tmp_path / 'best.ckpt'}"]
    command += ["--builder", "net.py:net", "--slo", "500ms", "--deadline", "60s", "--policy", "exp4"]
    command += ["--context", "site", "--port", str(port), "--input-shape", "3", "--state", "weights.json"]
    server = forkserver.start(command, folder=tmp_path)
    client = PredictionClient(f"http://127.0.0.1:{port}", context="site", timeout=SECONDS)
    try:
        line = f"serving best, other on http://127.0.0.1:{port}/predict\n"
        wait_for(lambda: line in server.read()[0], server)
        state = client.status()  # at once: the address is not printed before
        pids = [model["pid"] for model in state["models"].values()]
        assert set(state["models"]) == {"best", "other"}
        x = np.array([1.0, 2.0, 3.0], np.float32)
        p = client.predict(x, context="ward")
        np.testing.assert_allclose(p.output, module(torch.from_numpy(x)).detach().numpy(), rtol=1e-5)
        client.feedback(p.id, p.label)
        refuses(
            (lambda: client.feedback(p.id, p.label), "has had its feedback"),
            (lambda: client.predict([1.0], context="ward"), r"expects \(3\)", InputError),
            error=FeedbackError,
        )
        with socket.create_connection(("127.0.0.1", port)) as garbage:
            garbage.sendall(b"\x16\x03\x01 no HTTP at all\r\n\r\n")
            with socket.create_connection(("127.0.0.1", port)) as silent:
                silent.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
                assert client.predict(x, context="ward").label == p.label
        os.kill(pids[0], signal.SIGKILL)
        for _ in range(20):
            with contextlib.suppress(UnavailableError):
                assert client.predict(x + 1, context="ward").models
        wait_for(lambda: all(model["ready"] for model in client.status()["models"].values()), server)
        pids += [model["pid"] for model in client.status()["models"].values()]
    finally:
        client.close()
        for _ in range(50):  # the first one shuts it down, and further ones do not interrupt that
            if server.poll() is None:
                server.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        status = server.wait(SECONDS)
        server.kill()
    output, errors = server.read()
    assert status == 0, errors
    assert "Traceback" not in errors
    assert output == line
    assert "ward" in (tmp_path / "weights.json").read_text()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_no_thread_of_litserve_asks_its_manager_after_the_end():
    pytest.importorskip("litserve")
    from dadplug.runners.serving.lit_server import PredictorServer

    assert not PredictorServer({"m": identity}, {}, 1 << 20, 1.0, 10)._monitor_workers


def test_a_model_that_cannot_be_loaded_ends_the_command_with_the_reason(tmp_path):
    pytest.importorskip("litserve")
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "m.pt")
    command = ["-m", "dadplug", "serve", "m.pt", "--port", str(support.free_port())]
    (program,) = support.run_programs([command], timeout=SECONDS, folder=tmp_path)
    assert program.status == 1
    assert "m.pt holds weights and no code" in program.errors
    assert "http://" not in program.output
    assert "Traceback" not in program.errors


def test_the_extra_is_named_if_litserve_is_missing(monkeypatch):
    import dadplug

    monkeypatch.setitem(sys.modules, "litserve", None)
    refuses(
        (lambda: dadplug.serve({"m": lambda batch: batch}), r"pip install 'dadplug\[serve\]'"),
        (lambda: dadplug.serve({"m": lambda batch: batch}, slo=-1), "slo must be a positive number", ValueError),
        error=ImportError,
    )


def test_a_client_needs_an_address():
    free = f"http://127.0.0.1:{support.free_port()}"
    refuses(
        *(
            (partial(PredictionClient, wrong), "no address of http")
            for wrong in ("127.0.0.1:8000", "ftp://a", "http://")
        ),
        (lambda: PredictionClient(free).predict([1.0]), "refused", OSError),
    )


@pytest.mark.parametrize(
    ("parse", "values", "invalid"),
    [
        (seconds, {"50ms": 0.05, "0.05": 0.05, ".05s": 0.05, "2s": 2.0}, ["", "ms", "-1", "0", "1h", "nan"]),
        (shape, {"1,28,28": (1, 28, 28), "?, 4": (None, 4), "": ()}, ["a", "1,-2", "1.5"]),
    ],
)
def test_durations_and_shapes(parse, values, invalid):
    assert {text: parse(text) for text in values} == values
    refuses(*((partial(parse, wrong), "") for wrong in invalid), error=argparse.ArgumentTypeError)


@pytest.mark.parametrize("size", ["inf", "nan", "-1", "x"])
def test_a_wrong_size_of_the_cache_is_named(size, capsys):
    with pytest.raises(SystemExit):
        main(["serve", "m.pt", f"--cache-mb={size}"])
    assert "is no number of megabytes such as 64" in capsys.readouterr().err


def test_names_of_models():
    expected = {
        "a=b/best.ckpt": ("a", "b/best.ckpt"),
        "b/best.ckpt": ("best", "b/best.ckpt"),
        "b=1/best.ckpt": ("b", "1/best.ckpt"),
        "runs/b=1/best.ckpt": ("best", "runs/b=1/best.ckpt"),
    }
    assert {text: named(text) for text in expected} == expected


def test_the_example_finds_the_right_model_of_each_site(tmp_path):
    pytest.importorskip("sklearn")
    command = [str(EXAMPLE), "--in-process", "--requests", "300", "--steps", "80"]
    (program,) = support.run_programs([command], timeout=300, folder=tmp_path)
    assert program.status == 0, program.errors
    last = dict(re.findall(r"after  300 requests, site (\w): (.*)", program.output))
    assert set(last) == {"a", "b"}
    for site, other in ("ab", "ba"):
        weights = dict(re.findall(r"([\w-]+) ([\d.]+)", last[site]))
        assert float(weights[f"site-{other}"]) < 0.05  # which has never seen these digits
    shares = [float(each) for each in re.findall(r"([\d.]+) % of the answers", program.output)]
    assert min(shares) > 90


# Predictor with models that are objects: inputs, deadlines, failures, several models


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
        ones = predictor.predict([1.0, 0, 1, 0]).output
        np.testing.assert_array_equal(predictor.predict([1, 0, 1, 0]).output, ones)
        np.testing.assert_array_equal(predictor.predict(torch.tensor([1.0, 0, 1, 0]).bfloat16()).output, ones)


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
        refuses(
            (lambda: predictor.predict([128, 0]), "outside the range of int8"),
            (lambda: predictor.predict([1.5, 0.0]), "expects int8"),
            error=InputError,
        )


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
    with patient_predictor({"m": identity}, context="site") as predictor, patient_predictor({"m": identity}) as plain:
        refuses(
            *(
                (partial(predictor.predict, [1.0, 2.0], context=wrong), "needs 'site'")
                for wrong in (None, "", 7, "x" * 201)
            ),
            (lambda: plain.predict([1.0, 2.0], context="a"), "without contexts"),
            error=InputError,
        )


WRONG = {  # each names the option and describes valid values
    "slo": (0, -1, math.inf, math.nan, "50ms", None, True),
    "policy": ("best", None, 3, ["exp4"], Exp3),
    "context": ("", "input", 3, ["site"]),
    "task": ("ranking", None, 3),
    "scale": (0.0, -1, math.nan, math.inf, "1", None),
    "input_shape": (4, (0,), (-1, 3), (1.5,), "4", (True,)),
    "dtype": ("complex64", torch.float32, 3),
    "deadline": (0.01, math.nan, math.inf, "1s"),
    "max_batch": (0, 1.5, math.inf, "8", None),
    "max_waiting": (0, 1.5, "8", None),
    "cache_bytes": (-1, 1e6, math.inf, "64MB", None),
    "feedback_seconds": (0, math.nan, "1", None),
    "max_open": (0, 1.5, "1"),
    "max_contexts": (0, 1.5, "1"),
    "state": ("absent/weights.json", "", Path.cwd(), 3),
    "reload": ("yes", None, 1),
    "hang_seconds": (0, math.inf, "1"),
    "load_seconds": (0, math.inf, "1"),
    "threads": (0, 1.5, "1", None),
    "slow": (1,),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_of_an_option_is_an_error_that_names_it(name):
    assert {"slow", *ServingOptions.names()} == set(WRONG)
    message = rf"{name}\b.*(must be|valid (ones|options) are|has to be)"
    refuses(*((partial(patient_predictor, {"m": identity}, **{"slo": 0.05, name: v}), message) for v in WRONG[name]))


def test_what_cannot_be_served_is_refused():
    linear = torch.nn.Linear(2, 2)
    refuses(
        *((partial(patient_predictor, wrong), "models must be a dictionary by name") for wrong in ([linear], linear)),
        (lambda: patient_predictor({1: linear}), "models must be a dictionary by name"),
        (lambda: PredictionServer([linear]), "models must be a dictionary by name"),
        (lambda: patient_predictor({}), "no model to serve"),
        (lambda: patient_predictor({"m": 3}), "not int", LoadError),
        (lambda: patient_predictor({"m": torch.nn.Linear}), "not the class Linear", LoadError),
        (lambda: patient_predictor({"m": "nowhere.ckpt"}), "no file or folder", LoadError),
        (lambda: Model(None), "path must be"),
        (lambda: Model("m.pt", arguments=[1]), "arguments must be"),
        (lambda: Model("m.pt", input_shape=4), "input_shape must be"),
        (lambda: Model("m.pt", dtype="complex64"), "dtype must be"),
    )


def test_counters_are_in_prometheus_text():
    with patient_predictor({'quo"te': identity}, policy="exp4", context="site") as predictor:
        p = predictor.predict([1.0, 2.0], context="a\nb")
        predictor.predict([1.0, 2.0], context="a\nb")
        predictor.feedback(p.id, 1)
        with pytest.raises(InputError):
            predictor.predict([1.0, float("nan")], context="a")
        families = text_string_to_metric_families(predictor.prometheus())
        found = {(each.name, *sorted(each.labels.values())): each.value for one in families for each in one.samples}
        history = predictor.metrics.history()
    expected = {
        ("dadplug_requests_total", "200"): 2,
        ("dadplug_requests_total", "422"): 1,
        ("dadplug_feedback_total", "200"): 1,
        ("dadplug_batches_total", 'quo"te'): 1,
        ("dadplug_batched_requests_total", 'quo"te'): 1,
        ("dadplug_cache_hits_total",): 1,
        ("dadplug_cache_joined_total",): 0,
        ("dadplug_cache_misses_total",): 1,
        ("dadplug_model_ready", 'quo"te'): 1,
        ("dadplug_model_last_good", 'quo"te'): 0,
        ("dadplug_queue_length", 'quo"te'): 0,
        ("dadplug_latency_seconds_count",): 2,
        ("dadplug_latency_seconds_bucket", "+Inf"): 2,
        ("dadplug_weight", "a\nb", 'quo"te'): 1,
    }
    assert expected.items() <= found.items()
    others = {name for name, *_ in found.keys() - expected.keys()}
    assert others == {
        *("dadplug_batch_seconds_total", "dadplug_batch_limit", "dadplug_cache_bytes"),
        *("dadplug_latency_seconds_sum", "dadplug_latency_seconds_bucket"),
    }
    assert sum(each["requests"] for each in history) == 3
    assert sum(each["hits"] for each in history) == 1
    assert history[-1]["weights"] in ({"a\nb": {'quo"te': 1.0}}, {})
    assert all(each["p50"] <= each["p99"] for each in history)
