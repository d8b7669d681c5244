"""The parameter manager over a hub: exact sums, without ports and in short outages."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import support
from cutting_relay import CuttingRelay
from hub_sites import link_all, transports
from running_hub import running_hub

from dadplug.adapm import ParameterManager, connections
from dadplug.adapm.backends import base
from dadplug.hub import tunnels

NAMES = ("a", "b", "c")
OPERATIONS = 120_000  # keys, at all sites together; fewer leave keys that are never pushed
STRESS = support.load(str(support.Path(__file__).parents[2] / "benchmarks" / "adapm_stress.py"))


@pytest.fixture
def run(monkeypatch):
    """Function that runs another one at each site of a group of links, in threads; returns the results by rank."""
    of_thread = threading.local()
    monkeypatch.setattr(base, "open_transport", lambda *args: of_thread.transport)
    monkeypatch.setattr(connections, "connect_sites", None)  # no site opens a port

    def at_all(links, function, *args):
        def at(rank):
            (of_thread.transport,) = transports([links[rank]])
            try:
                return function(*args)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(links)) as pool:
            return list(pool.map(at, range(len(links))))

    return at_all


def close(links):
    for link in links:
        with tunnels._opening:
            found = tunnels._tunnels.get(link)
        if found is not None:
            found.close()
        link.close(0.1)


@pytest.mark.parametrize("technique", ["all", "replication_only", "relocation_only"])
def test_sums_are_exact(tmp_path, run, technique):
    with running_hub(tmp_path / "kits", NAMES) as hub:
        links = link_all(hub, 3)
        counts = run(links, STRESS.stress, OPERATIONS // 3, technique)
        close(links)
    assert all(isinstance(each, dict) for each in counts), counts
    moved, replicated = (sum(each[name] for each in counts) for name in ("moved", "replicated"))
    assert (moved > 0) == (technique != "replication_only")
    assert (replicated > 0) == (technique != "relocation_only")


def test_sums_are_exact_while_connections_are_cut(tmp_path, run):
    with running_hub(tmp_path / "kits", NAMES, grace=60.0) as hub, CuttingRelay(hub.address) as relay:
        links = link_all(hub, 3, [relay.address] * 3)
        over = threading.Event()

        def cut():
            number = 0
            while not over.wait(0.02 * (number + 1)):  # a new connection takes as long as thousands of keys
                if relay._cut_at is None:
                    number += 1
                    relay.cut_after(number % 2, 7919 * number % 50_000 + 1)

        cutting = threading.Thread(target=cut)
        cutting.start()
        results = run(links, STRESS.stress, OPERATIONS // 3, "all")
        over.set()
        cutting.join()
        cuts = relay.cuts
        close(links)
    assert all(isinstance(each, dict) for each in results), results
    assert cuts >= 6


def test_several_managers_share_a_connection(tmp_path, run):
    def train():
        with ParameterManager(timeout=200) as first, ParameterManager(timeout=200) as second:
            tables = [each.table("values", 2, rows=100) for each in (first, second)]
            keys = STRESS.torch.arange(100)
            for number, table in enumerate(tables):
                table.push(keys, STRESS.torch.full((100, 2), number + 1.0))
            for manager in (first, second):
                manager.wait_sync(everywhere=True)
            return [table.pull(keys).unique().tolist() for table in tables]

    with running_hub(tmp_path / "kits", NAMES) as hub:
        links = link_all(hub, 3)
        assert run(links, train) == [[[3.0], [6.0]]] * 3
        assert len({id(each) for each in tunnels._tunnels.values()}) >= 3
        assert {channel for channel, _ in hub.hub.relay.sessions} == {"training", "parameters"}
        close(links)
