"""Samples of keys follow their distribution and seed, and are here when they are used; tables keep within bounds."""

import time

import pytest
import support
import torch
from torch.nn.functional import logsigmoid

from dadplug.adapm import Normal, ParameterManager
from dadplug.adapm.store import KeyState

ROWS = 60


@pytest.fixture
def table():
    with ParameterManager() as manager:
        yield manager.table("words", 4, rows=ROWS, initialiser=Normal())


def drawn(sampler, count, portion=500):
    return torch.cat([sampler.prepare(portion, 0).pull()[0] for _ in range(count // portion)])


@pytest.mark.parametrize("scheme", ["independent", "pool", "local"])
@pytest.mark.parametrize("power", [0.0, 0.75, 1.0])
def test_samples_follow_the_weights(table, scheme, power):
    weights = torch.arange(ROWS).float() ** 2
    expected = torch.where(weights > 0, weights**power, 0)
    expected /= expected.sum()
    sampler = table.sampler(weights, power=power, scheme=scheme, pool=20_000, reuse=1)
    shares = torch.bincount(drawn(sampler, 40_000), minlength=ROWS) / 40_000
    assert shares[0] == 0
    assert (shares - expected).abs().max() < 5 * (expected.max() / 40_000) ** 0.5
    evenly = table.sampler().prepare(40_000, 0).pull()[0]
    assert (evenly.bincount(minlength=ROWS) > 400).all()


@pytest.mark.parametrize("scheme", ["independent", "pool"])
def test_a_seed_gives_the_same_samples_whatever_the_portions(table, scheme):
    options = {"scheme": scheme, "pool": 300, "reuse": 3}
    first = drawn(table.sampler(seed=3, **options), 2000)
    assert torch.equal(first, drawn(table.sampler(seed=3, **options), 2000, 100))
    assert not torch.equal(first, drawn(table.sampler(seed=4, **options), 2000))


def test_a_pool_is_used_again_in_another_order(table):
    keys = drawn(table.sampler(scheme="pool", pool=500, reuse=2), 2000).view(4, 500)
    assert torch.equal(keys[0].sort().values, keys[1].sort().values)
    assert not torch.equal(keys[0], keys[1])
    assert not torch.equal(keys[1].sort().values, keys[2].sort().values)


def test_a_sample_is_pulled_in_portions(table):
    sample = table.sampler().prepare(10, 5)
    keys, values = sample.pull(4)
    assert torch.equal(values, table.pull(keys))
    assert sample.remaining == 6
    with pytest.raises(ValueError, match="7 keys are asked for, of a sample of which 6 remain"):
        sample.pull(7)
    assert sample.pull()[0].shape == (6,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "best"}, "unknown scheme"),
        ({"weights": torch.ones(3)}, "weights must be 60 finite numbers"),
        ({"weights": -torch.ones(ROWS)}, "weights must be 60 finite numbers"),
        ({"weights": torch.zeros(ROWS)}, "must not all be 0"),
        ({"pool": 0}, "pool and reuse must be at least 1"),
    ],
)
def test_wrong_options_are_told(table, options, message):
    with pytest.raises(ValueError, match=message):
        table.sampler(**options)


def word2vec(scheme):
    """Words 2k and 2k + 1 occur together; sites see different ones, and share the negative samples."""
    with ParameterManager(timeout=200) as manager:
        words = manager.table("words", 8, rows=ROWS, initialiser=Normal(std=0.3, seed=1))
        contexts = manager.table("contexts", 8, rows=ROWS, initialiser=Normal(std=0.3, seed=2))
        sampler = contexts.sampler(torch.ones(ROWS), power=0.75, scheme=scheme, seed=5)
        generator = torch.Generator().manual_seed(manager.rank)
        own = torch.arange(ROWS // 2) if manager.rank == 0 else torch.arange(ROWS // 2, ROWS)
        ready = []
        for step in range(260):
            centres = own[torch.randint(own.numel(), (16,), generator=generator)]
            clock = manager.current_clock + 10 if step >= 10 else step
            words.intent(centres, clock)
            contexts.intent(centres ^ 1, clock)
            ready.append((centres, sampler.prepare(64, clock)))
            if step < 10:
                continue
            if step in (10, 60):
                manager.wait_sync()
                before = manager.counts
            centres, sample = ready.pop(0)
            keys, values = sample.pull()
            w, c, n = (each.requires_grad_() for each in (words.pull(centres), contexts.pull(centres ^ 1), values))
            loss = -logsigmoid((w * c).sum(1)).sum() - logsigmoid(-(w[:, None] * n.view(16, 4, 8)).sum(2)).sum()
            loss.backward()
            for table, at, gradient in ((words, centres, w), (contexts, centres ^ 1, c), (contexts, keys, n)):
                table.push_async(at, -0.2 * gradient.grad)
            manager.advance_clock()
            if step % 10 == 0:  # sites that train one after the other do not see each other's words
                manager.wait_sync(everywhere=True)
        counts = manager.counts
        manager.wait_sync(everywhere=True)
        scores = words.pull(torch.arange(ROWS)) @ contexts.pull(torch.arange(ROWS)).T
        right = (scores[torch.arange(ROWS), torch.arange(ROWS) ^ 1] > scores.mean(1) + 1).float().mean()
        local = 1 - (counts["pulled_remotely"] - before["pulled_remotely"]) / (counts["pulled"] - before["pulled"])
        manager.barrier()
        return float(right), local


@pytest.mark.parametrize("scheme", ["independent", "pool", "local"])
def test_negative_samples_train_word_vectors(sites, scheme):
    for right, local in sites(2).run(word2vec, scheme):
        assert right > 0.7  # 0 without training; it depends on how late the other site's updates are seen
        assert local > 0.8


def test_a_table_keeps_its_bound_and_what_was_used_last():
    with ParameterManager() as manager:
        table = manager.table("ids", 3, initialiser=Normal(seed=1), max_rows=100)
        first = table.pull(torch.arange(20))
        table.push(torch.arange(20), torch.ones(20, 3))
        for start in range(1000, 3000, 10):
            table.pull(torch.arange(start, start + 10))
            assert torch.equal(table.pull(torch.arange(10)), first[:10] + 1)  # used all the time
            assert manager.counts["rows"] <= 100
        assert torch.equal(table.pull(torch.arange(10, 20)), first[10:])  # dropped, and made anew
        assert manager.counts["evicted"] >= 1900
        assert table.pull(torch.arange(5000, 5300)).shape == (300, 3)  # more than the bound in one call


def drops_only_what_nobody_needs():
    with ParameterManager(timeout=200) as manager:
        table = manager.table("ids", 2, max_rows=64)
        mine = torch.arange(8) * 2 + manager.rank
        both = torch.arange(100, 110)
        table.intent(mine, 0, 1000)
        table.intent(both, 0, 1000)
        manager.wait_sync(everywhere=True)
        table.push(torch.cat([mine, both]), torch.ones(18, 2))
        for start in range(1000, 6000, 50):
            table.push(torch.arange(start, start + 50), torch.ones(50, 2))
        manager.wait_sync(everywhere=True)
        table.pull(torch.tensor([9000 + manager.rank]))  # the bound holds after the next new key
        manager.barrier()
        assert (table.pull(mine) == 1).all()
        assert (table.pull(both) == 2).all()
        manager.barrier()
        return manager.counts


def test_rows_with_intent_or_replicas_are_not_dropped(sites):
    for counts in sites(2).run(drops_only_what_nobody_needs):
        assert counts["evicted"] > 1000
        assert counts["rows"] <= 64


@support.at_sites(2)
def test_wait_sync_waits_for_keys_of_intents_that_have_begun():
    with ParameterManager(timeout=200) as manager:
        table, engine = manager.table("late", 2), manager._backend.engine
        act = engine.act

        def act_late():
            time.sleep(0.1)
            act()

        engine.act = act_late  # as on a busy machine, where the background thread waits for a core
        theirs = torch.arange(8) * 2 + 1 - manager.rank
        table.intent(theirs, 0, 1000)
        manager.wait_sync()
        assert (table.states(theirs) == KeyState.OWNED).all()
        later = theirs + 100
        table.intent(later, 10, 1000)
        manager.wait_sync()  # does not wait for intents that have not begun
