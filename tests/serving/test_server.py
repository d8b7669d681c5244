"""The server on LitServe, its client, its command and its example, with real processes."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import forkserver
import numpy as np
import pytest
import support
import torch
from dadplug.runners.serving import PredictionClient

from dadplug.cli.commands import named, seconds, shape
from dadplug.serving import FeedbackError, InputError, UnavailableError

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
        with pytest.raises(FeedbackError, match="has had its feedback"):
            client.feedback(p.id, p.label)
        with pytest.raises(InputError, match=r"expects \(3\)"):
            client.predict([1.0], context="ward")
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
    with pytest.raises(ImportError, match=r"pip install 'dadplug\[serve\]'"):
        dadplug.serve({"m": lambda batch: batch})
    with pytest.raises(ValueError, match="slo has to be positive"):
        dadplug.serve({"m": lambda batch: batch}, slo=-1)


def test_a_client_needs_an_address():
    for wrong in ("127.0.0.1:8000", "ftp://a", "http://"):
        with pytest.raises(ValueError, match="no address of http"):
            PredictionClient(wrong)
    with pytest.raises(OSError, match="refused"):
        PredictionClient(f"http://127.0.0.1:{support.free_port()}").predict([1.0])


@pytest.mark.parametrize(
    ("parse", "values", "invalid"),
    [
        (seconds, {"50ms": 0.05, "0.05": 0.05, ".05s": 0.05, "2s": 2.0}, ["", "ms", "-1", "1h", "nan"]),
        (shape, {"1,28,28": (1, 28, 28), "?, 4": (None, 4), "": ()}, ["a", "1,-2", "1.5"]),
    ],
)
def test_durations_and_shapes(parse, values, invalid):
    assert {text: parse(text) for text in values} == values
    for wrong in invalid:
        with pytest.raises(argparse.ArgumentTypeError):
            parse(wrong)


def test_names_of_models():
    assert named("a=b/best.ckpt") == ("a", "b/best.ckpt")
    assert named("b/best.ckpt") == ("best", "b/best.ckpt")
    assert named("b=1/best.ckpt") == ("b", "1/best.ckpt")
    assert named("runs/b=1/best.ckpt") == ("best", "runs/b=1/best.ckpt")


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
