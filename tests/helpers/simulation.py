"""A simulation of sites whose messages arrive in any order."""

from __future__ import annotations

import random

import numpy as np

from dadplug.adapm.engine import Engine
from dadplug.adapm.initialisers import Constant
from dadplug.adapm.store import Store

KEYS, WIDTH = 23, 3


def run_round(engine: Engine) -> None:
    """Act on the intents that are due, and begin a synchronisation round."""
    engine.act()
    engine.synchronise()


class Simulation:
    """Sites and what is on its way between them, delivered in random order."""

    def __init__(self, sites: int, technique: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.on_the_way: list = []
        self.engines = [Engine(rank, sites, technique, self._sender(rank)) for rank in range(sites)]
        for engine in self.engines:
            engine.add_store(Store(WIDTH, KEYS, Constant(), 4))
        self.expected = np.zeros((KEYS, WIDTH), np.float32)
        self.own = np.zeros((sites, KEYS, WIDTH), np.float32)  # what each site has pushed

    def _sender(self, rank):
        return lambda target, message: self.on_the_way.append((rank, target, message))

    def deliver(self) -> None:
        """Deliver one of the messages that are on their way."""
        sender, target, message = self.on_the_way.pop(self.random.randrange(len(self.on_the_way)))
        self.engines[target].receive(sender, message)

    def some_keys(self) -> np.ndarray:
        return np.array([self.random.randrange(KEYS) for _ in range(self.random.randrange(1, 6))], np.int64)

    def push(self, rank: int) -> None:
        keys = self.some_keys()
        deltas = np.array([[self.random.randrange(1, 9) for _ in range(WIDTH)] for _ in keys], np.float32)
        np.add.at(self.expected, keys, deltas)
        np.add.at(self.own[rank], keys, deltas)
        self.engines[rank].push(0, keys, deltas)

    def pull(self, rank: int, keys: np.ndarray) -> np.ndarray:
        out = np.full((keys.shape[0], WIDTH), np.nan, np.float32)
        request = self.engines[rank].pull(0, keys, out)
        while request is not None and not request.is_set():
            self.deliver()
        return out

    def flush(self) -> None:
        flushes = [engine.begin_flush() for engine in self.engines]
        pending = list(zip(self.engines, flushes, strict=True))
        for _ in range(10_000):
            pending = [(engine, flush) for engine, flush in pending if not engine.flushed(flush)]
            if not pending:
                return
            if self.on_the_way:
                self.deliver()
            if self.random.random() < 0.2:
                run_round(self.random.choice(self.engines))
            elif not self.on_the_way:
                for engine in self.engines:
                    run_round(engine)
        raise AssertionError("the flush does not end")

    def step(self, pulls: bool = True) -> None:
        rank = self.random.randrange(len(self.engines))
        engine = self.engines[rank]
        action = self.random.random()
        if action < 0.25:
            self.push(rank)
        elif action < 0.35 and pulls:
            keys = self.some_keys()
            own = self.own[rank][keys].copy()
            found = self.pull(rank, keys)
            assert (found >= own).all(), "a site does not see its own pushes"
            assert (found <= self.expected[keys]).all(), "something has been added twice"
        elif action < 0.5:
            start = engine.clock + self.random.randrange(0, 30)
            engine.intend(0, self.some_keys(), start, start + self.random.randrange(1, 10))
        elif action < 0.6:
            engine.clock += 1
        elif action < 0.66:
            engine.act()
        elif action < 0.72:
            engine.synchronise()
        elif self.on_the_way:
            self.deliver()

    def check(self) -> None:
        """After a flush everywhere, each site sees all sums, and each key has one owner."""
        self.flush()
        self.flush()
        while self.on_the_way:
            self.deliver()
        assert not any(engine._open_rounds for engine in self.engines)
        owners = [engine.owned(0)[0] for engine in self.engines]
        together = np.concatenate(owners)
        assert len(set(together.tolist())) == len(together)
        for rank in range(len(self.engines)):
            np.testing.assert_array_equal(self.pull(rank, np.arange(KEYS)), self.expected)
