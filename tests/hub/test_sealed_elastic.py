"""Sealed training that goes on while sites leave and return: the same bits as with a site that is idle."""

import pytest
from elastic_runs import ENDED, Run, idles, presence, same_bits
from sealed_sites import sealed_hub


@pytest.mark.parametrize("mode", ["dad", "rankdad"])
def test_a_site_that_is_killed_and_returns_counts_as_an_idle_one(tmp_path, mode):
    with sealed_hub(tmp_path) as hub:
        run = Run(tmp_path, hub, mode=mode, pause=0.01)
        run.start("ab")
        run.start("c", leave=3, how="late")
        run.end("c", -9)
        run.start("c")
        hub.await_line("c joins", ENDED)
        run.stop(40)
        run.end("abc")
        lines, present = run.lines("a"), presence(run.lines("a"))
        same_bits(lines, run.lines("b"))
        same_bits(lines, run.lines("c"))
    assert [0, 1] in present.values()
    assert present[max(present)] == [0, 1, 2]
    same_bits(lines, idles(tmp_path / "idle", "abc", present, mode=mode))
