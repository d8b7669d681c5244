"""The parameter manager: tables of values spread over the sites."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ..exchange import DEFAULT_TIMEOUT
from .backends import BACKENDS, TableSpec
from .initialisers import Constant, Initialiser
from .table import Table


class ParameterManager:
    """Tables of float32 values by key, spread over the sites and placed adaptively (AdaPM, arXiv:2206.00470).

    Each key is owned by one site at a time. Workers pull and push values of any key; keys that are not local are
    requested from their owner. A worker that signals early which keys it will use (`Table.intent`) has them brought to
    its site in time: the key itself (relocation) if no other site needs it at that time, otherwise a replica. All sites
    must create the manager and its tables together, with the same options.

    As a context manager, it waits for all sites at the end and closes; after an error it leaves without waiting.

    Args:
        backend: ``"builtin"``, or ``"adapm"`` for AdaPM's own engine, see `dadplug.adapm.backends.bindings`.
        technique: effect of intents: ``"all"`` (relocation or replication, as above), ``"replication_only"``,
            ``"relocation_only"``, or ``"static"`` (none: keys remain at their home).
        process_group: group whose processes are the sites; None for the default group.
        timeout: seconds after which a site that does not respond counts as lost.
        interval: minimum time between two synchronisation rounds, in seconds; replicas are about that stale.

    Attributes:
        rank: number of this site.
        world_size: number of sites.
        traffic: meter of the bytes that this site has sent.
        technique: the technique.
        timeout: the timeout in seconds.

    Raises:
        ValueError: if an option is out of range.
        MismatchError: if the sites' options differ.
        SiteError: if a site exits or does not answer.

    Example:
        >>> import torch
        >>> from dadplug.adapm import Normal, ParameterManager
        >>> with ParameterManager() as manager:
        ...     words = manager.table("words", width=4, rows=200, initialiser=Normal(std=0.1))
        ...     keys = torch.tensor([3, 14, 3])
        ...     words.intent(keys, start=manager.current_clock + 1)
        ...     clock = manager.advance_clock()
        ...     values = words.pull(keys)
        ...     words.push(keys, -0.1 * values)
        ...     manager.wait_sync()
        >>> values.shape
        torch.Size([3, 4])
    """

    def __init__(
        self,
        *,
        backend: str = "builtin",
        technique: str = "all",
        process_group: dist.ProcessGroup | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        interval: float = 0.002,
    ) -> None:
        self._backend = BACKENDS[backend](technique, process_group, timeout, interval)
        self.technique, self.timeout = technique, timeout
        self.traffic = self._backend.traffic
        self.rank, self.world_size = self._backend.rank, self._backend.world_size
        self._transport = self._backend.transport
        self._tables: dict[str, Table] = {}

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
        """Add a table; all sites must add the same tables in the same order.

        With ``backend="adapm"``, `rows` is required, `max_rows` is not supported, and all tables must be added before
        the first use.

        Args:
            name: name of the table, for messages.
            width: number of values per key.
            rows: keys are 0 to rows - 1; None for any key of at least 0, with values that are created at first use.
            initialiser: initialiser of the values, see `dadplug.adapm.initialisers`; None for zeros.
            capacity: number of keys for which this site reserves memory at first.
            max_rows: maximum number of keys that this site keeps. Above it, the least recently used keys that it owns
                are evicted with all that has been pushed to them; when they are used again, they start with their
                initial values. Keys with a replica elsewhere, or with intent that has been acted on, are kept even
                above the maximum. None keeps all keys.

        Returns:
            The table.

        Raises:
            ValueError: if an argument is out of range, or there is a table of this name.
            MismatchError: if the sites' tables differ.

        Example:
            >>> with ParameterManager() as manager:
            ...     users = manager.table("users", width=2, max_rows=1000)
            ...     users.push(torch.tensor([10**12]), torch.ones(1, 2))
            ...     users.pull(torch.tensor([10**12]))
            tensor([[1., 1.]])
        """
        if width < 1 or (rows is not None and rows < 1):
            raise ValueError(f"width and rows must be at least 1, got {width} and {rows}")
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}")
        if name in self._tables:
            raise ValueError(f"there is a table {name!r} already")
        spec = TableSpec(name, width, rows, initialiser or Constant(), capacity, max_rows)
        number = len(self._tables)
        self._backend.add_table(spec)
        self._tables[name] = table = Table(self._backend, number, spec)
        self._backend.check_equal(f"table {number}", (name, width, rows, max_rows))
        return table

    def gather_objects(self, item: Any) -> list[Any]:
        """Gather one small object per site; all sites must call it.

        Args:
            item: an object that `dadplug.exchange.codec.encode` supports.

        Returns:
            The objects by site.
        """
        return self._transport.gather_objects(item)

    def broadcast_bytes(self, content: bytes) -> bytes:
        """Return the bytes of site 0; all sites must call it, and the arguments of other sites are ignored."""
        return self._transport.broadcast_bytes(content)

    def sum_over_sites(self, tensor: torch.Tensor) -> None:
        """Replace a CPU tensor's values by their sums over the sites; all sites must call it with the same shape."""
        self._transport.all_reduce(tensor).wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replace a tensor's values by those of site 0; all sites must call it with the same shape."""
        self._transport.broadcast(tensor)

    @property
    def current_clock(self) -> int:
        """Clock of this site: the number of calls of `advance_clock`."""
        return self._backend.clock

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of keys at this site, by event since the start.

        ``pulled`` and ``pushed`` by workers; ``pulled_remotely`` and ``pushed_remotely``, of these, those that another
        site had to answer; ``moved`` and ``replicated`` to other sites; ``evicted`` (see `table`); and the current
        numbers of ``rows`` and ``replicas``. With ``backend="adapm"`` only the first four, where all keys of a call
        count as remote if any of them is.
        """
        return self._backend.counts

    def advance_clock(self) -> int:
        """Advance this site's clock by one, usually once per batch; return the new value.

        Raises:
            SiteError: if a site is lost.
            RuntimeError: if the manager has been closed.
        """
        return self._backend.advance_clock()

    def wait_sync(self, *, everywhere: bool = False) -> None:
        """Wait until all pushes of this site have reached the owners, and its replicas have been refreshed.

        Keys of intents that have begun are at this site then.

        Args:
            everywhere: whether to also wait for the other sites to do so, and to refresh the replicas after that, so
                that each site reads all earlier pushes of all sites. All sites must call it.

        Raises:
            SiteError: if a site exits or does not answer.
        """
        self._backend.flush()
        if everywhere:
            self.barrier()
            self._backend.flush()
            self.barrier()

    def barrier(self) -> None:
        """Wait until all sites have called it.

        Raises:
            SiteError: if a site exits or does not answer.
        """
        self._backend.barrier()

    def check(self) -> None:
        """Raise the error that has ended the manager, if there is one.

        Raises:
            SiteError: if a site is lost.
            RuntimeError: if the manager has been closed.
        """
        self._backend.check()

    def close(self) -> None:
        """Leave the other sites; afterwards nothing can be pulled or pushed. May be called twice.

        The values that this site owns are lost: call `barrier` before, or use the manager in a ``with`` block.
        """
        self._backend.leave()

    def abandon(self, reason: str) -> None:
        """Leave the other sites after an error, without waiting for any of them.

        Args:
            reason: exit reason, for the other sites' messages.
        """
        self._backend.abandon(reason)

    def __enter__(self) -> ParameterManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.abandon(f"{type(error).__name__}: {error}")
            return
        self.barrier()
        self.close()
