"""The built-in backend: an engine of numba kernels, TCP connections, and a background thread."""

from __future__ import annotations

import torch.distributed as dist

from ..background import Background
from ..connections import connect_sites
from ..engine import TECHNIQUES, Engine
from ..interfaces import Completion
from ..messages import Message
from ..network import Network
from ..rows import Keys
from ..store import Store
from .base import Backend, TableSpec

_MOST_SITES = 62  # sites with replicas are the bits of an int64


class BuiltinBackend(Backend):
    """The built-in backend. Arguments and errors are those of `Backend`; a single site has no background thread."""

    techniques = tuple(TECHNIQUES)

    def __init__(
        self, technique: str, process_group: dist.ProcessGroup | None, timeout: float, interval: float
    ) -> None:
        super().__init__(technique, process_group, timeout, interval)
        if self.world_size > _MOST_SITES:
            raise ValueError(f"at most {_MOST_SITES} sites can share parameters, there are {self.world_size}")
        self.check_equal("options", (technique, timeout, interval))
        self._widths: list[int] = []
        self._closed = False
        self._background: Background | None = None
        self._engine = self.engine = Engine(self.rank, self.world_size, technique, self._send)
        if self.world_size > 1:
            gather, name = self.transport.gather_objects, self.transport.sites.__getitem__
            sockets = self.transport.open_streams(timeout) or connect_sites(self.rank, gather, timeout, name)
            network = Network(sockets, timeout, self.traffic, self._widths)
            gather(None)  # all sites are connected
            self.transport.sites.watch(self)
            self._background = Background(self.transport, self._engine, network, timeout, interval)

    def _send(self, peer: int, message: Message) -> None:
        assert self._background is not None
        self._background.send(peer, message)

    def add_table(self, spec: TableSpec) -> None:
        capacity = spec.capacity
        if capacity is None:
            capacity = 1024 if spec.rows is None else -(-spec.rows // self.world_size)
        self._engine.add_store(Store(spec.width, spec.rows, spec.initialiser, capacity, spec.max_rows))
        self._widths.append(spec.width)

    @property
    def clock(self) -> int:
        return self._engine.clock

    def advance_clock(self) -> int:
        self.check()
        self._engine.clock += 1
        if self._background is not None:
            self._background.give_way()
        return self._engine.clock

    @property
    def counts(self) -> dict[str, int]:
        here = {"rows": 0, "replicas": 0, "evicted": 0}
        for store in self._engine.stores:
            here["rows"] += len(store)
            here["replicas"] += store.replicas
            here["evicted"] += store.evicted
        return self._engine.counts | here

    def intend(self, table: int, keys: Keys, start: int, end: int) -> None:
        if self._engine.intend(table, keys, start, end) and self._background is not None:
            self._background.wake()

    def flush(self) -> None:
        self.check()
        if self._background is not None:
            self._background.flush()

    def barrier(self) -> None:
        self.check()
        if self._background is not None:
            self._background.barrier()

    def wait_for(self, done: Completion) -> None:
        assert self._background is not None
        self._background.wait_for(done)

    def check(self) -> None:
        if self._background is not None:
            self._background.check()
        elif self._closed:
            raise RuntimeError("the parameter manager cannot go on: it has been closed")

    def leave(self) -> None:
        self._close(aborts=False)

    def close(self) -> None:
        self._close(aborts=True)  # at the end of the program, which `Sites` has announced

    def _close(self, *, aborts: bool) -> None:
        if self._closed:
            return
        self._closed = True
        if self._background is not None:
            self._background.close(aborts=aborts)
            self.transport.close()

    def abandon(self, reason: str) -> None:
        self.transport.sites.announce(reason)
        self._close(aborts=True)
