"""The parameter manager: tables of values spread over the sites, and samples of their keys."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..exchange import DEFAULT_TIMEOUT
from ..exchange.restrictions import OBJECTS, declared
from ..lowrank.rows import first_outside
from ..support.refusals import refuse
from ..support.signature import check_choice
from . import kernels
from .backends import BACKENDS, NO_PLACES, Backend, Done, TableSpec
from .bindings import BindingsBackend
from .builtin import BuiltinBackend
from .store import UNBOUNDED, Block, Constant, Initialiser, Keys

BACKENDS.register("builtin")(BuiltinBackend)
BACKENDS.register("adapm")(BindingsBackend)

SCHEMES = ("independent", "pool", "local")
_TRIES = 16  # draws for a local key, before a remote one is accepted

T = TypeVar("T")


class Pending(Generic[T]):
    """Asynchronous call of a `Table`.

    Args:
        backend: backend that waits for the call.
        done: end of the call; None if it is complete.
        result: result of the call.

    Example:
        >>> import torch
        >>> from dadplug.adapm import ParameterManager
        >>> with ParameterManager() as manager:
        ...     words = manager.table("words", width=2, rows=10)
        ...     pending = words.pull_async(torch.tensor([3]))
        ...     values = pending.wait()
        >>> values
        tensor([[0., 0.]])
    """

    def __init__(self, backend: Backend, done: Done | None, result: T) -> None:
        self._backend, self._done, self._result = backend, done, result

    @property
    def done(self) -> bool:
        """Whether the call is complete."""
        return self._done is None or self._done.is_set()

    def wait(self) -> T:
        """Wait until the call is complete; return its result.

        Raises:
            SiteError: if a site exits or does not answer.
        """
        if self._done is not None:
            self._backend.wait_for(self._done)
        return self._result


class Table:
    """Values of one width by key, spread over the sites; created by `ParameterManager.table`.

    Keys are int64 CPU tensors of any shape; values are float32 CPU tensors of shape (*keys.shape, width). A call may
    have duplicate keys. Calls whose keys are all local return at once; other calls wait for the owners of the keys.

    Args:
        backend: backend of the manager.
        number: number of the table.
        spec: arguments of `ParameterManager.table`.

    Attributes:
        name: name of the table, for messages.
        width: number of values per key.
        rows: upper bound of keys, exclusive; None for any key of at least 0.
        rank: number of this site.
        world_size: number of sites; the home of key k, its first owner, is site ``k % world_size``.

    Example:
        >>> import torch
        >>> from dadplug.adapm import ParameterManager
        >>> with ParameterManager() as manager:
        ...     words = manager.table("words", width=2, rows=10)
        ...     words.push(torch.tensor([1, 1]), torch.ones(2, 2))
        ...     words.set(torch.tensor([2]), torch.zeros(1, 2))
        ...     words.pull(torch.tensor([[1], [2]]))
        tensor([[[2., 2.]],
        <BLANKLINE>
                [[0., 0.]]])
    """

    def __init__(self, backend: Backend, number: int, spec: TableSpec) -> None:
        self.name, self.width, self.rows = spec.name, spec.width, spec.rows
        self.rank, self.world_size = backend.rank, backend.world_size
        self._backend, self._engine, self._number = backend, backend.engine, number
        self._limit = UNBOUNDED if spec.rows is None else spec.rows

    def pull(self, keys: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Copy the values of keys.

        Args:
            keys: int64, of any shape.
            out: contiguous float32 tensor of shape (*keys.shape, width) for the result; None for a new one.

        Returns:
            The values, of shape (*keys.shape, width). They include all pushes of this site, and pushes of other sites
            until about one round ago.

        Raises:
            ValueError: if a type or shape does not fit.
            IndexError: if a key is out of range.
            SiteError: if a site exits or does not answer.
        """
        out, done = self._pull(keys, out)
        if done is not None:
            self._backend.wait_for(done)
        return out

    def pull_async(self, keys: Tensor, *, out: Tensor | None = None) -> Pending[Tensor]:
        """Begin a `pull`, with the same arguments and errors.

        Returns:
            The call; its ``wait()`` returns the values.
        """
        out, done = self._pull(keys, out)
        return Pending(self._backend, done, out)

    def _pull(self, keys: Tensor, out: Tensor | None) -> tuple[Tensor, Done | None]:
        self._backend.check()
        flat = self._flat(keys)
        shape = (*keys.shape, self.width)
        if out is None:
            out = torch.empty(shape)
        elif out.shape != shape or out.dtype != torch.float32 or not out.is_contiguous() or out.is_cuda:
            raise ValueError(
                f"out of table {self.name!r} must be a contiguous float32 CPU tensor of shape {shape}, got {out.dtype} "
                f"of shape {tuple(out.shape)} on {out.device}"
            )
        block = out.detach() if out.requires_grad else out
        done = self._engine.pull(self._number, flat, block.numpy().reshape(-1, self.width))
        if isinstance(done, int):
            self._refuse(flat, done)
        return out, done

    def push(self, keys: Tensor, deltas: Tensor) -> None:
        """Add deltas to the values of keys. This site reads them at once, other sites about one round later.

        Args:
            keys: int64, of any shape.
            deltas: float32, of shape (*keys.shape, width); deltas of equal keys are added up.

        Raises:
            ValueError: if a type or shape does not fit.
            IndexError: if a key is out of range.
            FloatingPointError: if the deltas hold NaN or Inf. Nothing has been pushed.
            SiteError: if a site exits or does not answer.
        """
        self.push_async(keys, deltas).wait()

    def push_async(self, keys: Tensor, deltas: Tensor) -> Pending[None]:
        """Begin a `push`, with the same arguments and errors.

        The deltas may be changed at once, and a later `pull` of this site includes them.
        """
        self._backend.check()
        flat = self._in_range(keys)
        done = self._engine.push(self._number, flat, self._block("deltas", keys, deltas))
        return Pending(self._backend, done, None)

    def set(self, keys: Tensor, values: Tensor) -> None:
        """Set the values of keys, after all earlier pushes of this site.

        The order relative to pushes of other sites at the same time is that of their arrival at the owner.

        Args:
            keys: int64, of any shape, distinct.
            values: float32, of shape (*keys.shape, width).

        Raises:
            ValueError: if a type or shape does not fit, or a key occurs twice.
            IndexError: if a key is out of range.
            FloatingPointError: if the values hold NaN or Inf.
            SiteError: if a site exits or does not answer.
        """
        self.set_async(keys, values).wait()

    def set_async(self, keys: Tensor, values: Tensor) -> Pending[None]:
        """Begin a `set`, with the same arguments and errors; waits until this site's pushes have been delivered."""
        self._backend.check()
        flat = self._in_range(keys)
        block = self._block("values", keys, values)
        if torch.unique(keys).numel() != keys.numel():
            raise ValueError(f"a key occurs twice in a set of table {self.name!r}: which value should it have?")
        while True:
            self._backend.flush()
            begun, done = self._engine.set(self._number, flat, block)
            if begun:
                return Pending(self._backend, done, None)

    def intent(self, keys: Tensor, start: int, end: int = 0) -> None:
        """Signal that this site will use keys; returns at once.

        Args:
            keys: int64, of any shape.
            start: clock at which the use begins.
            end: clock at which the use ends, exclusive; 0 for ``start + 1``.

        Raises:
            ValueError: if a type or shape does not fit, or `end` is not greater than `start`.
            IndexError: if a key is out of range.
        """
        self._backend.check()
        end = end or start + 1
        if end <= start:
            raise ValueError(f"an intent must end after it starts, got start {start} and end {end}")
        flat = self._in_range(keys)
        if end > self._engine.clock:
            self._backend.intend(self._number, flat.copy(), start, end)

    def sampler(self, weights: Tensor | None = None, **options: Any) -> Sampler:
        """Create a sampler of keys, such as negative examples.

        Args:
            weights: of shape (rows,), see `Sampler`.
            options: options of `Sampler`.

        Raises:
            ValueError: if an option is out of range, or the backend does not support it.
        """
        if options.get("scheme") == "local" and not self._engine.locates_keys:
            raise ValueError(f'{NO_PLACES}: no scheme="local"')
        return Sampler(self, weights, **options)

    def here(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for each key, in range, whether this site can read it without asking another.

        Args:
            keys: int64 array of shape (n,).

        Returns:
            A Boolean array of shape (n,).

        Raises:
            RuntimeError: if the backend does not support it.
        """
        return self._engine.here(self._number, keys)

    def owned(self) -> tuple[Tensor, Tensor]:
        """Return copies of the keys that this site owns, in ascending order, and of their values.

        After `ParameterManager.wait_sync(everywhere=True)`, and while no site pushes, those of all sites are the whole
        table. Keys that no site has used are owned by none. With ``backend="adapm"``, the keys whose home is this site.

        Returns:
            Keys, int64 of shape (n,), and values, float32 of shape (n, width).
        """
        keys, values = self._engine.owned(self._number)
        return torch.from_numpy(keys), torch.from_numpy(values)

    def states(self, keys: Tensor) -> Tensor:
        """Return the states of keys at this site, without asking another.

        Args:
            keys: int64, of any shape.

        Returns:
            int8 tensor of the keys' shape: `dadplug.adapm.store.KeyState`, -1 for absent keys.

        Raises:
            RuntimeError: if the backend does not support it.
        """
        return torch.from_numpy(self._engine.states(self._number, self._flat(keys))).view(keys.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that this site has reserved for the table; 0 if unknown."""
        return self._engine.nbytes(self._number)

    def _flat(self, keys: Tensor) -> Keys:
        if not isinstance(keys, Tensor):
            raise TypeError(f"keys of table {self.name!r} must be a tensor, got {type(keys).__name__}")
        if keys.dtype != torch.int64 or keys.is_cuda:
            raise ValueError(
                f"keys of table {self.name!r} must be int64 on the CPU, got {keys.dtype} on {keys.device}: "
                "use keys.long().cpu()"
            )
        flat: Keys = keys.numpy()
        return flat if flat.ndim == 1 and flat.flags.c_contiguous else np.ascontiguousarray(flat).reshape(-1)

    def _in_range(self, keys: Tensor) -> Keys:
        flat = self._flat(keys)
        if (position := first_outside(flat, self._limit)) >= 0:
            self._refuse(flat, position)
        return flat

    def _block(self, name: str, keys: Tensor, values: Tensor) -> Block:
        if values.dtype != torch.float32 or values.is_cuda:
            raise ValueError(
                f"{name} of table {self.name!r} must be float32 on the CPU, got {values.dtype} on {values.device}: "
                f"use {name}.float().cpu()"
            )
        if values.shape != (*keys.shape, self.width):
            raise ValueError(
                f"{name} of table {self.name!r} must be of shape {(*keys.shape, self.width)}, a row for each key, got "
                f"{tuple(values.shape)}"
            )
        block: Block = values.detach().contiguous().numpy().reshape(-1, self.width)
        if (row := kernels.first_not_finite(block)) >= 0:
            key = int(keys.reshape(-1)[row])
            raise FloatingPointError(f"the {name} of key {key} (position {row}) of table {self.name!r} hold NaN or Inf")
        return block

    def _refuse(self, flat: Keys, position: int) -> NoReturn:
        most = "" if self.rows is None else f" to {self.rows - 1}"
        raise IndexError(
            f"key {int(flat[position])} (position {position}) is out of range: table {self.name!r} has keys 0{most}"
        )


class Sample:
    """Keys that a `Sampler` has prepared; their values are pulled in parts or at once.

    Args:
        sampler: the sampler.
        count: number of keys.
        keys: the keys, of shape (count,); None to draw local keys when they are pulled.

    Attributes:
        remaining: number of keys that have not been pulled.
    """

    def __init__(self, sampler: Sampler, count: int, keys: Keys | None) -> None:
        self._sampler, self._keys = sampler, keys
        self.remaining = count

    def pull(self, count: int | None = None) -> tuple[Tensor, Tensor]:
        """Pull the next keys of the sample.

        Args:
            count: number of keys; None for all remaining ones.

        Returns:
            The keys, int64 of shape (count,), and their values, of shape (count, width).

        Raises:
            ValueError: if fewer keys remain.
            SiteError: if a site exits or does not answer.
        """
        count = self.remaining if count is None else count
        if not 0 <= count <= self.remaining:
            raise ValueError(f"{count} keys are asked for, of a sample of which {self.remaining} remain")
        if self._keys is None:
            keys = self._sampler._draw_local(count)
        else:
            start = self._keys.shape[0] - self.remaining
            keys = self._keys[start : start + count]
        self.remaining -= count
        found = torch.from_numpy(keys.copy())
        return found, self._sampler.table.pull(found)


class Sampler:
    """Sampler of keys of a table with replacement; created by `Table.sampler`.

    The schemes follow AdaPM (Renz-Wieland et al., arXiv:2206.00470) and NuPS (arXiv:2104.00501):

    - ``"independent"``: keys are drawn independently when a sample is prepared, with intent for the time of use;
    - ``"pool"``: `pool` keys are drawn independently and used `reuse` times, each time in another order. Keys are used
      again while they are still local, so fewer keys move;
    - ``"local"``: keys are drawn among the local keys when they are pulled. Nothing is sent. The distribution depends
      on the keys that the sites use.

    With the first two schemes, the keys of a site depend only on the seed.

    Args:
        table: the table; it must have a number of rows.
        weights: of shape (rows,), at least 0, such as word frequencies; None for a uniform distribution.
        power: exponent on the weights; word2vec uses frequencies with 0.75.
        seed: seed of the samples; each site has its own sequence.
        scheme: ``"independent"``, ``"pool"`` or ``"local"``.
        pool: number of keys of a pool.
        reuse: number of times that a pool is used.

    Attributes:
        table: the table.
        scheme: the scheme.

    Raises:
        ValueError: if an option is out of range.

    Example:
        >>> import torch
        >>> from dadplug.adapm import ParameterManager
        >>> with ParameterManager() as manager:
        ...     contexts = manager.table("contexts", width=2, rows=100)
        ...     sampler = contexts.sampler(torch.arange(100), power=0.75, seed=1)
        ...     sample = sampler.prepare(8, start=manager.current_clock)
        ...     keys, values = sample.pull(5)
        >>> keys.shape, values.shape, sample.remaining
        (torch.Size([5]), torch.Size([5, 2]), 3)
    """

    def __init__(
        self,
        table: Table,
        weights: Tensor | None = None,
        *,
        power: float = 1.0,
        seed: int = 0,
        scheme: str = "independent",
        pool: int = 4096,
        reuse: int = 16,
    ) -> None:
        check_choice("scheme", scheme, SCHEMES)
        refuse(
            (table.rows is None, f"table {table.name!r} has any keys: samples need one with a number of rows"),
            (
                pool < 1 or reuse < 1 or seed < 0,
                f"pool and reuse must be at least 1 and seed at least 0, got {pool}, {reuse} and {seed}",
            ),
        )
        self.table, self.scheme = table, scheme
        self._rows, self._seed, self._size, self._reuse = table.rows or 0, seed, pool, reuse
        self._shares, self._aliases = np.empty(0), np.empty(0, np.int64)
        if weights is not None:
            self._weigh(weights, power)
        self._drawn = 0
        self._pool, self._used = np.empty(0, np.int64), 0  # keys in the order of use, and number of uses
        self._left = 0  # unused keys of the pool in this use

    def _weigh(self, weights: Tensor, power: float) -> None:
        numbers = weights.detach().double().cpu().numpy().reshape(-1)
        if weights.shape != (self._rows,) or not np.isfinite(numbers).all() or (numbers < 0).any():
            raise ValueError(
                f"weights must be {self._rows} finite numbers of at least 0, one for each row, got shape "
                f"{tuple(weights.shape)}"
            )
        powers = np.where(numbers > 0, np.power(numbers, power, where=numbers > 0, out=np.zeros_like(numbers)), 0)
        if not powers.sum() > 0:
            raise ValueError("weights must not all be 0")
        self._shares, self._aliases = np.empty(self._rows), np.empty(self._rows, np.int64)
        kernels.alias_table(powers * (self._rows / powers.sum()), self._shares, self._aliases)

    def prepare(self, count: int, start: int, end: int = 0) -> Sample:
        """Draw keys for later use, and signal intent for them; returns at once.

        Args:
            count: number of keys.
            start: clock at which the use begins, see `Table.intent`.
            end: clock at which the use ends, exclusive; 0 for ``start + 1``.

        Returns:
            The sample.

        Raises:
            ValueError: if `count` is less than 1, or `end` is not greater than `start`.
        """
        if count < 1:
            raise ValueError(f"a sample has at least one key, got {count}")
        if self.scheme == "local":
            return Sample(self, count, None)
        keys = self._draw(count) if self.scheme == "independent" else self._from_pool(count)
        self.table.intent(torch.from_numpy(keys), start, end)
        return Sample(self, count, keys)

    def _draw(self, count: int) -> Keys:
        keys = np.empty(count, np.int64)
        kernels.draw(self._seed, self.table.rank, self._drawn, self._shares, self._aliases, self._rows, keys)
        self._drawn += count
        return keys

    def _from_pool(self, count: int) -> Keys:
        parts = []
        while count:
            if not self._left:
                if self._used % self._reuse == 0:
                    self._pool = self._draw(self._size)
                order = np.random.default_rng((self._seed, self.table.rank, self._used)).permutation(self._size)
                self._pool = self._pool[order]
                self._used += 1
                self._left = self._size
            taken = min(count, self._left)
            begin = self._size - self._left
            parts.append(self._pool[begin : begin + taken])
            self._left -= taken
            count -= taken
        return np.concatenate(parts)

    def _draw_local(self, count: int) -> Keys:
        keys = self._draw(count)
        for _ in range(_TRIES):
            away = np.flatnonzero(~self.table.here(keys))
            if not away.shape[0]:
                break
            keys[away] = self._draw(away.shape[0])
        return keys


class ParameterManager:
    """Tables of float32 values by key, spread over the sites and placed adaptively (AdaPM, arXiv:2206.00470).

    Each key is owned by one site at a time. Workers pull and push values of any key; keys that are not local are
    requested from their owner. A worker that signals early which keys it will use (`Table.intent`) has them brought to
    its site in time: the key itself (relocation) if no other site needs it at that time, otherwise a replica. All sites
    must create the manager and its tables together, with the same options.

    As a context manager, it waits for all sites at the end and closes; after an error it leaves without waiting.

    Args:
        backend: ``"builtin"``, or ``"adapm"`` for AdaPM's own engine, see `dadplug.adapm.bindings`.
        technique: effect of intents: ``"all"`` (relocation or replication, as above), ``"replication_only"``,
            ``"relocation_only"``, or ``"static"`` (none: keys remain at their home).
        process_group: group whose processes are the sites; None for the default group.
        timeout: seconds after which a site that does not respond counts as lost.
        interval: minimum time between two synchronisation rounds, in seconds; replicas are about that stale.

    Attributes:
        rank: number of this site.
        world_size: number of sites.
        transport: transport of the process group.
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
        self.transport = self._backend.transport
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
            initialiser: initialiser of the values, see `dadplug.adapm.store`; None for zeros.
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
        refuse(
            (
                width < 1 or (rows is not None and rows < 1),
                f"width and rows must be at least 1, got {width} and {rows}",
            ),
            (max_rows is not None and max_rows < 1, f"max_rows must be at least 1, got {max_rows}"),
            (name in self._tables, f"there is a table {name!r} already"),
            (
                initialiser is not None and not callable(initialiser),
                f"initialiser must be a function of keys and values, such as Constant(3.0), got {initialiser!r}",
            ),
        )
        spec = TableSpec(name, width, rows, initialiser or Constant(), capacity, max_rows)
        number = len(self._tables)
        self._backend.add_table(spec)
        self._tables[name] = table = Table(self._backend, number, spec)
        self._backend.check_equal(f"table {number}", (name, width, rows, max_rows))
        return table

    def gather_objects(self, item: Any, kind: Any = Any, what: str = "object") -> list[Any]:
        """Gather one small object per site; all sites must call it.

        Args:
            item: an object that `dadplug.exchange.codec.encode` supports.
            kind: type that the objects of all sites must have.
            what: what an object is, for the error about another one.

        Returns:
            The objects by site.

        Raises:
            MismatchError: if the object of a site is of another type.
        """
        with declared(OBJECTS):
            return self.transport.gather_objects(item, kind, what)

    @property
    def current_clock(self) -> int:
        """Clock of this site: the number of calls of `advance_clock`."""
        return self._backend.engine.clock

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
