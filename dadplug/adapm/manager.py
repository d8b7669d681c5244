"""The parameter manager: tables of values spread over the sites, and what workers call."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ..errors import MismatchError
from ..exchange import DEFAULT_TIMEOUT, Traffic, open_transport
from .background import Background
from .engine import TECHNIQUES, Engine
from .initialisers import Initialiser
from .messages import Message
from .network import Network
from .requests import Done
from .table import Table

_MOST_SITES = 62


class ParameterManager:
    """Tables of float32 values by key, spread over the sites, adaptively placed (AdaPM, arXiv:2206.00470).

    Each key belongs to one site at a time. Workers pull and push values of any key; those that are not here are asked
    for at the site that has them. A worker that says early what it will use (`Table.intent`) has the keys brought here
    before: the key itself where no other site wants it at the time, a replica where one does. All sites must make the
    manager and its tables together, with the same options.

    Args:
        backend: ``"builtin"``, or ``"adapm"`` for AdaPM's own engine, see `dadplug.adapm.backends.bindings`.
        technique: what intents lead to: ``"all"`` (relocation or replication, whichever suits), ``"replication_only"``,
            ``"relocation_only"``, or ``"static"`` (nothing: every key stays at its home), for comparison.
        process_group: the group whose processes are the sites; the default group where None.
        timeout: seconds after which a silent site counts as lost.
        interval: least time between two rounds of synchronisation, in seconds; replicas are about that stale.

    Attributes:
        rank: this site.
        world_size: number of sites.
        traffic: the meter of the bytes that this site has sent.

    Raises:
        ValueError: if an option is out of range.
        MismatchError: if the sites' options differ.
        SiteError: if a site ends or does not answer.

    Example:
        >>> with dadplug.adapm.ParameterManager() as manager:
        ...     words = manager.table("words", width=64, rows=200_000)
        ...     words.intent(keys_of_batch_10, 10, 11)
        ...     values = words.pull(keys)
        ...     words.push(keys, deltas)
        ...     manager.advance_clock()
        ...     manager.wait_sync()
    """

    def __new__(cls, *, backend: str = "builtin", **options: Any) -> ParameterManager:
        from .backends import manager_class

        return super().__new__(manager_class(backend) if cls is ParameterManager else cls)

    def __init__(
        self,
        *,
        backend: str = "builtin",
        technique: str = "all",
        process_group: dist.ProcessGroup | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        interval: float = 0.002,
    ) -> None:
        if technique not in TECHNIQUES:
            raise ValueError(f"unknown technique {technique!r}; valid ones are {', '.join(map(repr, TECHNIQUES))}")
        if timeout <= 0 or interval < 0:
            raise ValueError(f"timeout must exceed 0 and interval be at least 0, got {timeout} and {interval}")
        self.traffic = Traffic()
        self.timeout = timeout
        self.technique = technique
        self._transport = open_transport(process_group, self.traffic, torch.device("cpu"), timeout)
        self.rank, self.world_size = self._transport.rank, self._transport.world_size
        if self.world_size > _MOST_SITES:
            raise ValueError(f"at most {_MOST_SITES} sites can share parameters, there are {self.world_size}")
        self._agree("options", (technique, timeout, interval))
        self._tables: list[Table] = []
        self._widths: list[int] = []
        self._closed = False
        self._background: Background | None = None
        self._engine = Engine(self.rank, self.world_size, technique, self._send)
        if self.world_size > 1:
            name = self._transport.sites.__getitem__
            network = Network(self.rank, self._transport.gather_objects, timeout, self.traffic, self._widths, name)
            self._transport.gather_objects(None)  # all are connected
            self._transport.sites.watch(self)
            self._background = Background(self._transport, self._engine, network, timeout, interval)

    def _send(self, peer: int, message: Message) -> None:
        assert self._background is not None
        self._background.send(peer, message)

    def table(
        self,
        name: str,
        width: int,
        *,
        rows: int | None = None,
        initialiser: Initialiser | None = None,
        capacity: int | None = None,
        max_rows: int | None = None,
    ) -> Table:
        """Adds a table; all sites must add the same ones in the same order.

        Args:
            name: its name, for messages.
            width: number of values a key.
            rows: keys are 0 to rows - 1; None for any key of at least 0, whose values come to be when first used.
            initialiser: makes the first values from the keys, see `dadplug.adapm.initialisers`; zeros where None.
            capacity: number of keys for which memory is reserved at this site at first.
            max_rows: number of keys that this site keeps, for keys without end. Where there would be more, it drops
                those that it owns and that were not used for longest, with all that has been pushed to them: when they
                are used again, they begin with their first values. Keys with a replica elsewhere or with intent that
                has been acted on stay, even if there are more. None keeps all.

        Raises:
            ValueError: if an argument is out of range.
            MismatchError: if the sites' tables differ.
        """
        if width < 1 or (rows is not None and rows < 1):
            raise ValueError(f"width and rows must be at least 1, got {width} and {rows}")
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}")
        if any(table.name == name for table in self._tables):
            raise ValueError(f"there is a table {name!r} already")
        table = Table(self, self._engine, len(self._tables), name, width, rows, initialiser, capacity, max_rows)
        self._tables.append(table)
        self._widths.append(width)
        self._agree(f"table {len(self._tables) - 1}", (name, width, rows, max_rows))
        return table

    def _agree(self, what: str, item: tuple[Any, ...]) -> None:
        for rank, other in enumerate(self._transport.gather_objects(item)):
            if other != item:
                sites = self._transport.sites
                raise MismatchError(f"{what} of the manager is {item} at {sites[self.rank]}, {other} at {sites[rank]}")

    def gather_objects(self, item: Any) -> list[Any]:
        """Gathers one small object a site, by site; all sites must call it. See `dadplug.exchange.codec.encode`."""
        return self._transport.gather_objects(item)

    def broadcast_bytes(self, content: bytes) -> bytes:
        """Send site 0's bytes to all sites; what others pass is ignored. All sites must call it."""
        return self._transport.broadcast_bytes(content)

    def sum_over_sites(self, tensor: torch.Tensor) -> None:
        """Replace a CPU tensor's values by their sums over the sites; all sites must call it with the same shape."""
        self._transport.all_reduce(tensor).wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replaces a tensor's values by those of site 0; all sites must call it."""
        self._transport.broadcast(tensor)

    @property
    def current_clock(self) -> int:
        """The number of times that `advance_clock` has been called."""
        return self._engine.clock

    @property
    def counts(self) -> dict[str, int]:
        """What has happened at this site so far, in keys.

        ``pulled`` and ``pushed`` by workers, ``pulled_remotely`` and ``pushed_remotely`` the part that another site had
        to answer, ``moved`` and ``replicated`` to other sites, ``evicted`` (see `table`), and what is here now:
        ``rows`` and ``replicas``.
        """
        here = {"rows": 0, "replicas": 0, "evicted": 0}
        for store in self._engine.stores:
            here["rows"] += len(store)
            here["replicas"] += store.replicas
            here["evicted"] += store.evicted
        return self._engine.counts | here

    def intend(self, table: int, keys: NDArray[np.int64], start: int, end: int) -> None:
        """Notes an intent for a table, by number; see `Table.intent`."""
        if self._engine.intend(table, keys, start, end) and self._background is not None:
            self._background.wake()

    def advance_clock(self) -> int:
        """Moves this site's clock on by one, usually once a batch; returns the new time."""
        self.check()
        self._engine.clock += 1
        if self._background is not None:
            self._background.give_way()
        return self._engine.clock

    def wait_sync(self, *, everywhere: bool = False) -> None:
        """Waits until all that this site has pushed is with its owners, and its replicas are as fresh as now.

        Args:
            everywhere: also wait for the other sites to do so, and refresh the replicas after that: then each site
                sees what any site has pushed before. All sites must call it.

        Raises:
            SiteError: if a site ends or does not answer.
        """
        self._flush()
        if everywhere:
            self.barrier()
            self._flush()
            self.barrier()

    def _flush(self) -> None:
        self.check()
        if self._background is not None:
            self._background.flush()

    def barrier(self) -> None:
        """Waits until all sites have called it.

        Raises:
            SiteError: if a site ends or does not answer.
        """
        self.check()
        if self._background is not None:
            self._background.barrier()

    def wait_for(self, done: Done) -> None:
        """Waits for an answer from other sites.

        Raises:
            SiteError: if a site ends or does not answer.
        """
        assert self._background is not None
        self._background.wait_for(done)

    def check(self) -> None:
        """Raises what has gone wrong in the background, if anything has.

        Raises:
            SiteError: if a site is gone.
            RuntimeError: if the manager has been closed.
        """
        if self._background is not None:
            self._background.check()
        elif self._closed:
            raise RuntimeError("the parameter manager cannot go on: it has been closed")

    def close(self) -> None:
        """Leaves the other sites; nothing can be pulled or pushed afterwards. May be called twice.

        The values that this site owns go with it: `barrier` first, or use the manager in a ``with`` block.
        """
        if self._closed:
            return
        self._closed = True
        if self._background is not None:
            self._background.close()
            self._transport.close()

    def abandon(self, reason: str) -> None:
        """Leaves the other sites after an error, without waiting for any of them; rows may be gone with a site.

        Args:
            reason: why, for the other sites' messages.
        """
        self._transport.sites.announce(reason)
        self.close()

    def __enter__(self) -> ParameterManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            self.abandon(f"{type(error).__name__}: {error}")
            return
        self.barrier()
        self.close()
