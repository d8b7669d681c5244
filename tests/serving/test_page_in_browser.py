"""The status page in a headless browser: what it draws comes from the server's data."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import urllib.request

import numpy as np
import pytest
from dadplug.runners.serving.http_app import HttpApp
from http_server import served
from patient import patient_predictor

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def dom_of(url, folder):
    """Return the document after its script has run."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={folder}"]
    command = [BROWSER, *options, "--virtual-time-budget=3000", "--dump-dom", url]
    program = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert program.returncode == 0, program.stderr[-2000:]
    return re.sub("<script>.*?</script>", "", program.stdout, flags=re.DOTALL)


def charts_of(dom):
    """Return, for each chart, its lines as points, and its legend."""
    found = {}
    for title, chart in re.findall(r'<h2>(.*?)</h2>(<div class="chart">.*?</svg>.*?</div>)', dom, re.DOTALL):
        lines = [
            [tuple(map(float, point.split(","))) for point in points.split()]
            for points in re.findall(r'<polyline[^>]* points="([^"]*)"', chart)
        ]
        legend = dict(re.findall(r'<span style="color: [^"]*">(.*?) ([-\d.e]+)</span>', chart))
        found[title] = (lines, {name: float(value) for name, value in legend.items()})
    return found


@pytest.mark.skipif(BROWSER is None, reason="needs chromium or chrome")
def test_the_page_in_a_browser_draws_the_servers_data(tmp_path):
    pytest.importorskip("uvicorn")
    models = {"right": lambda batch: batch, "<wrong>": lambda batch: -batch}
    predictor = patient_predictor(models, policy="exp4", context="site")
    with contextlib.closing(predictor), served(HttpApp(predictor, 10_000, 60.0)) as port:
        url = f"http://127.0.0.1:{port}"
        empty = dom_of(f"{url}/status", tmp_path / "first")
        assert "No requests yet." in empty
        assert "<polyline" not in empty
        for number in range(40):
            p = predictor.predict(np.eye(4, dtype=np.float32)[number % 4], context="ward")
            predictor.feedback(p.id, number % 4)
        dom = dom_of(f"{url}/status", tmp_path / "second")
        state = json.loads(urllib.request.urlopen(f"{url}/status.json", timeout=60).read())
    charts, history = charts_of(dom), state["history"]
    assert set(charts) == {
        "Latency in ms",
        "Requests a second",
        "Batch size",
        "Share of cache hits",
        "Weights in ward",
    }
    for lines, legend in charts.values():
        assert len(lines) == len(legend) > 0
        assert all(0 <= x <= 1000 and 0 <= y <= 100 for line in lines for x, y in line)
    latency, last = charts["Latency in ms"][1], history[-1]
    assert latency["goal"] == 60_000
    assert latency["p50"] == pytest.approx(1000 * last["p50"], rel=0.01)
    assert latency["p99"] == pytest.approx(1000 * last["p99"], rel=0.01)
    assert charts["Requests a second"][1]["all"] == last["requests"]
    assert charts["Share of cache hits"][1]["hits"] == pytest.approx(last["hits"] / last["lookups"], rel=0.01)
    batched = [each["batches"]["right"] for each in history if "right" in each["batches"]]
    assert charts["Batch size"][1]["right"] == pytest.approx(batched[-1], rel=0.01)
    (right, wrong), weights = charts["Weights in ward"]
    assert weights["right"] == pytest.approx(state["weights"]["ward"]["right"], rel=0.01)
    assert weights["right"] > 0.9 > weights["&lt;wrong&gt;"]
    assert right[-1][1] < wrong[-1][1]  # higher up
    rows = re.search(r'<table id="models">(.*?)</table>', dom, re.DOTALL)[1]
    assert "<td>right</td><td>true</td><td>1</td>" in rows
    assert "The server does not answer" not in dom
