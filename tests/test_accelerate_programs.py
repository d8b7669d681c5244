"""`dadplug.accelerate` in programs that launchers start, and over a hub that a site leaves and joins again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import forkserver
import pytest
import support
from running_hub import running_hub

pytest.importorskip("accelerate", minversion="1.1")
SITE = str(Path(__file__).parent / "helpers" / "accelerate_site.py")
ENDED = 300.0


def ended(commands) -> list[str]:
    """Run programs, and return what they have printed."""
    found = support.run_programs(commands, timeout=ENDED)
    for each in found:
        assert each.status == 0, each.errors
    return [each.output for each in found]


@pytest.mark.slow
def test_accelerate_launches_sites_on_two_machines():
    address = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(support.free_port())]
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "2"]
    fixed = ["--mixed_precision", "no", "--dynamo_backend", "no", *address]
    outputs = ended([[*launch, "--machine_rank", str(rank), *fixed, SITE] for rank in range(2)])
    assert ["equal at 0 after 4 steps" in outputs[0], "equal at 1 after 4 steps" in outputs[1]] == [True, True]


@pytest.mark.slow
def test_processes_that_a_notebook_forks_are_sites():
    (output,) = ended([[SITE, "--fork"]])
    assert sorted(output.splitlines()) == ["equal at 0 after 4 steps", "equal at 1 after 4 steps"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rankdad", "localsgd"])
def test_a_site_leaves_a_training_over_a_hub_and_joins_again(tmp_path, mode):
    with running_hub(tmp_path / "kits", ("a", "b")) as hub:
        command = [SITE, str(hub.kits / "a"), str(tmp_path), "-1", mode]
        stays = forkserver.start(command, os.environ | support.ONE_THREAD, None, [])
        try:
            (lost,) = support.run_programs([[SITE, str(hub.kits / "b"), str(tmp_path), "4", mode]], timeout=ENDED)
            assert lost.status == -9, lost.errors
            hub.await_line("b has left", ENDED)
            (returned,) = support.run_programs([[SITE, str(hub.kits / "b"), str(tmp_path), "-1", mode]], timeout=ENDED)
            assert returned.status == 0, returned.errors
            stays.wait(ENDED)
            assert stays.returncode == 0, stays.read()[1]
        finally:
            stays.kill()
    lines = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.glob("*.jsonl")
    }
    first = {line["step"]: line for line in lines["0-0"]}
    assert sorted(first) == list(range(1, max(first) + 1))  # site 0 has lost no step
    assert [1] not in [line["present"] for line in first.values()]
    assert [0] in [line["present"] for line in first.values()]
    again = next(found for name, found in lines.items() if name.startswith("1-") and name != "1-0")
    assert again[-1]["step"] == max(first)
    for line in [*lines["1-0"], *again]:
        other = first[line["step"]]
        assert line["lr"] == other["lr"]
        if mode == "rankdad" or (line["agreed"] and 1 in line["present"]):
            assert line["digest"] == other["digest"]
