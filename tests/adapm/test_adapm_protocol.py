"""The protocol in one process: sites whose messages arrive late and in any order, and sums that stay exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import WIDTH, Simulation, run_round

from dadplug.adapm.engine import TECHNIQUES
from dadplug.adapm.kernels import SAME, VALUE


@settings(max_examples=60, deadline=None)
@given(
    sites=st.integers(2, 4),
    technique=st.sampled_from(sorted(TECHNIQUES)),
    seed=st.integers(0, 10**9),
    steps=st.integers(1, 600),
)
def test_sums_are_exact_whatever_the_order_of_messages(sites, technique, seed, steps):
    simulation = Simulation(sites, technique, seed)
    for _ in range(steps):
        simulation.step()
    simulation.check()


@settings(max_examples=30, deadline=None)
@given(sites=st.integers(2, 4), seed=st.integers(0, 10**9))
def test_what_is_set_follows_own_pushes_and_is_seen_at_once(sites, seed):
    simulation = Simulation(sites, "all", seed)
    for _ in range(8):
        for _ in range(40):
            simulation.step(pulls=False)
        rank = simulation.random.randrange(sites)
        keys = np.unique(simulation.some_keys())
        values = np.full((keys.shape[0], WIDTH), 1000.0 * simulation.random.randrange(1, 9), np.float32)
        simulation.flush()  # what other sites push at the same time would come before or after
        simulation.flush()
        while not (outcome := simulation.engines[rank].set(0, keys, values))[0]:
            simulation.flush()
        for engine in simulation.engines:
            run_round(engine)
        while outcome[1] is not None and not outcome[1].is_set():
            simulation.deliver()
        np.testing.assert_array_equal(simulation.pull(rank, keys), values)
        simulation.expected[keys] = values
        simulation.own[:, keys] = 0
    simulation.check()


def settled(simulation, rounds=6):
    for _ in range(rounds):
        for engine in simulation.engines:
            run_round(engine)
        while simulation.on_the_way:
            simulation.deliver()


def owner_of(simulation, key):
    (owner,) = [rank for rank, engine in enumerate(simulation.engines) if key in engine.owned(0)[0]]
    return owner


def test_a_key_wanted_by_one_site_moves_there_and_stays():
    simulation = Simulation(3, "all", 0)
    key = np.array([4], np.int64)  # at home at site 1
    simulation.engines[2].intend(0, key, 0, 5)
    settled(simulation)
    assert owner_of(simulation, 4) == 2
    simulation.engines[2].clock = 9
    settled(simulation)
    assert owner_of(simulation, 4) == 2
    assert not simulation.engines[2].stores[0].replicas


def test_a_key_wanted_by_several_is_replicated_and_the_last_one_keeps_it():
    simulation = Simulation(3, "all", 0)
    key = np.array([4], np.int64)
    for rank in range(3):
        simulation.engines[rank].intend(0, key, 0, 5 if rank < 2 else 50)
    settled(simulation)
    assert owner_of(simulation, 4) == 1
    assert [engine.stores[0].replicas for engine in simulation.engines] == [1, 0, 1]
    simulation.engines[2].push(0, key, np.ones((1, WIDTH), np.float32))
    settled(simulation, 2)
    found = np.empty((1, WIDTH), np.float32)
    assert simulation.engines[0].pull(0, key, found) is None
    assert (found == 1).all()
    for engine in simulation.engines:
        engine.clock = 10
    settled(simulation)
    assert owner_of(simulation, 4) == 2
    assert not any(engine.stores[0].replicas for engine in simulation.engines)


@pytest.mark.parametrize(("technique", "owner", "replicas"), [("replication_only", 1, 1), ("static", 1, 0)])
def test_techniques_that_never_move_a_key(technique, owner, replicas):
    simulation = Simulation(3, technique, 0)
    simulation.engines[2].intend(0, np.array([4], np.int64), 0, 5)
    simulation.pull(2, np.array([4], np.int64))
    settled(simulation)
    assert owner_of(simulation, 4) == owner
    assert simulation.engines[2].stores[0].replicas == replicas


def test_relocation_only_never_replicates():
    simulation = Simulation(3, "relocation_only", 0)
    for rank in (0, 2):
        simulation.engines[rank].intend(0, np.array([4], np.int64), 0, 50)
    settled(simulation)
    assert owner_of(simulation, 4) in (0, 2)
    assert not any(engine.stores[0].replicas for engine in simulation.engines)


def test_intents_far_ahead_wait():
    simulation = Simulation(2, "all", 0)
    engine = simulation.engines[0]
    engine.intend(0, np.array([1], np.int64), 1000, 1001)
    settled(simulation)
    assert owner_of_or_none(simulation, 1) is None
    engine.clock = 995
    settled(simulation)
    assert owner_of(simulation, 1) == 0


def owner_of_or_none(simulation, key):
    return next((rank for rank, engine in enumerate(simulation.engines) if key in engine.owned(0)[0]), None)


def test_a_replica_that_nobody_changes_is_not_sent_again():
    simulation = Simulation(2, "replication_only", 0)
    simulation.engines[0].intend(0, np.array([1, 3], np.int64), 0, 50)
    settled(simulation)
    simulation.engines[1].push(0, np.array([3], np.int64), np.ones((1, WIDTH), np.float32))
    run_round(simulation.engines[0])
    simulation.deliver()
    ((_, _, answer),) = simulation.on_the_way
    keys, codes, _, values = answer.arrays
    assert dict(zip(keys.tolist(), codes.tolist(), strict=True)) == {1: SAME, 3: VALUE}
    assert values.shape == (1, WIDTH)


def test_intents_are_acted_on_while_a_round_is_under_way():
    simulation = Simulation(2, "all", 0)
    first, second = simulation.engines
    second.intend(0, np.array([1], np.int64), 0, 50)
    second.pull(0, np.array([1], np.int64), np.empty((1, WIDTH), np.float32))
    first.intend(0, np.array([1], np.int64), 0, 50)
    settled(simulation)
    first.synchronise()
    assert not first.sync_over
    first.intend(0, np.array([3], np.int64), 0, 50)
    first.act()
    kinds = {message.kind.name for _, _, message in simulation.on_the_way}
    assert kinds == {"SYNC", "INTENT"}
    while simulation.on_the_way:
        simulation.deliver()
    assert not first._open_rounds
    assert first.sync_over
    assert owner_of(simulation, 3) == 0
