"""`dadplug.accelerate` in programs that launchers start, and over a hub that a site leaves and joins again."""

from __future__ import annotations

from pathlib import Path

import pytest
import support
from fleet import Fleet, presence

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
    with Fleet(tmp_path, "ab", SITE, mode=mode, pause=0.02) as fleet:
        fleet.start("a")
        fleet.start("b", leave=4)
        fleet.end("b", -9)
        fleet.hub.await_line("b has left", ENDED)
        fleet.start("b")
        fleet.await_more("b", 8, "a")
        fleet.stop(8)
        fleet.end("ab")
    first, other = fleet.lines("a"), fleet.lines("b")
    assert sorted(first) == list(range(1, max(first) + 1))  # site 0 has lost no step
    assert [1] not in presence(first).values()
    assert [0] in presence(first).values()
    assert presence(first)[max(first)] == [0, 1]
    assert max(other) == max(first)
    for step, line in other.items():
        assert line["lr"] == first[step]["lr"]
        if mode == "rankdad" or (line["agreed"] and 1 in first[step]["present"]):
            assert line["digest"] == first[step]["digest"]
