"""The parameter server between sites that have dialed a hub."""

from __future__ import annotations

from pathlib import Path

import support
from running_hub import running_hub

RETURNING = support.load(str(Path(__file__).with_name("test_returning.py")))
ON_ONE_NETWORK = support.load(str(Path(__file__).with_name("test_parameter_server.py")))


def test_without_staleness_it_has_the_bits_of_the_reduction_over_a_hub(tmp_path):
    names = ("a", "b")
    with (
        running_hub(tmp_path / "kits", names) as hub,
        support.Sites(2, kits=[hub.kits / name for name in names]) as group,
    ):
        group.run(ON_ONE_NETWORK.follows_reduction, "rankdad", 50, {})
        found = group.run(ON_ONE_NETWORK.follows_its_log, "dad", {"staleness": 4})
    assert 0 <= found[0]["oldest"] <= 4


def test_the_others_go_on_without_a_killed_site_over_a_hub(tmp_path):
    names = ("a", "b", "c")
    with (
        running_hub(tmp_path / "kits", names) as hub,
        support.Sites(3, kits=[hub.kits / name for name in names]) as group,
    ):
        group.start(ON_ONE_NETWORK.loses_a_site, 2, 3)
        first, second, third = group.outcomes()
    assert third.kind == "ended"
    assert first.kind == second.kind == "ok", first.value + second.value
    assert first.value == second.value  # the same log, the same parameters
    assert "site 2" in first.value
    assert "has left, and the others go on" in first.value


def test_a_killed_site_returns_over_a_hub(tmp_path):
    names = ("a", "b", "c")
    with running_hub(tmp_path / "kits", names) as hub:
        RETURNING.check_return(tmp_path, [hub.kits / name for name in names], quorum=2, late="keep")
        address = (tmp_path / "address2").read_text()
        assert address.startswith(f"hub:{(hub.kits / 'c').resolve()}/")
