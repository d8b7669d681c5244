"""A Ray cluster of two nodes, each in a network namespace of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None,
        reason="namespaces need root",
    ),
]
BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "ray_cluster.py"


def test_what_crosses_the_link_between_two_nodes_is_what_dadplug_sends():
    command = [sys.executable, str(BENCHMARK), "--steps", "3", "--pause", "2", "--methods", "ddp,dad,rankdad"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=590)
    assert found.returncode == 0, found.stderr
    lines = [line.strip("| ").split(" | ") for line in found.stdout.splitlines() if line.startswith("|")]
    rows = {line[0]: [float(cell) if cell.strip() else None for cell in line[1:]] for line in lines[2:]}
    assert rows["ddp"][2] > 17  # MB: the network has 4.4 million parameters
    for mode in ("dad", "rankdad"):
        _, _, sent, payload, of_ray = rows[mode]
        assert payload < sent < 1.2 * payload + of_ray + 0.02
    assert rows["rankdad"][2] < rows["dad"][2] < rows["ddp"][2] / 10
