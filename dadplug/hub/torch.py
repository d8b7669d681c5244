"""Backend of torch.distributed whose messages go over the hub, for trainers and libraries that use collectives.

Every collective is one gather of a transport of the group's own; sums are formed by each site, in the order of ranks,
so that all sites get the same bits. A group holds all processes of all sites, or one.

**Where sites may leave** (``min_sites``), a collective is a round of its own, see `dadplug.hub.site.transport`, and
complete when it returns. Reductions are those of the sites that are present, and barriers wait for these. All others
need what a certain site has sent: they raise an error at all sites, where it is absent.
"""

from __future__ import annotations

import inspect
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from msgspec.msgpack import encode
from torch import Tensor

from ..errors import FrameError, PolicyError, SiteError
from ..exchange.codec import MAX_BYTES
from ..exchange.fields import invalid
from ..exchange.framing import bytes_of
from ..exchange.hierarchy import WorkerThreads
from ..exchange.restrictions import OBJECTS, declared, most_bytes
from ..exchange.traffic import Traffic
from ..support.structs import decode
from .pki.kits import Kit
from .pki.project import Policy
from .server.store import REPLIES, Operation, Reply, Request
from .site.connection import HubConnection
from .site.link import HubLink
from .site.transport import CollectiveTransport, HubTransport
from .wire.messages import PIECE_BYTES, Head, Kind, add_up

_FUTURES = "futures"  # name of a worker thread


class HubWork(dist.Work):
    """Collective in progress.

    Args:
        complete: function of a timeout in seconds that waits for what has to arrive, and writes the results.
        tensors: the results.
        seconds: timeout of the collective.
        threads: threads that complete futures.
    """

    def __init__(
        self,
        complete: Callable[[float], object],
        tensors: Sequence[Tensor],
        seconds: float,
        threads: WorkerThreads,
    ) -> None:
        super().__init__()
        self._complete = complete
        self._tensors = list(tensors)
        self._seconds = seconds
        self._threads = threads
        self._lock = threading.Lock()
        self._over = False
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the collective.

        Args:
            timeout: time to wait at most; none or 0 for that of the collective.

        Raises:
            SiteError: if a site is gone or silent.
        """
        with self._lock:
            if not self._over:
                try:
                    self._complete((timeout.total_seconds() if timeout else 0.0) or self._seconds)
                except BaseException as error:
                    self._error = error
                finally:
                    self._over = True
            if self._error is not None:
                raise self._error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the results, which another thread completes."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        def complete() -> None:
            try:
                self.wait()
            except BaseException as error:
                # Its waiters get a copy: torch tells the message of a RuntimeError only.
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            else:
                future.set_result(self._tensors)

        self._threads.submit((_FUTURES, complete))
        return future

    def is_completed(self) -> bool:
        return self._over

    def is_success(self) -> bool:
        return self._over and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._tensors


if TYPE_CHECKING:

    class _ProcessGroup:
        """The part of `dist.ProcessGroup` that is used here; torch overloads the collectives for its own callers."""

        def __init__(self, rank: int, size: int) -> None: ...

        def size(self) -> int: ...

else:
    _ProcessGroup = dist.ProcessGroup

BACKEND = "dadplug"


class Collectives(_ProcessGroup):
    """Process group whose collectives are gathers; sums are formed by each process, in the order of ranks.

    Args:
        open_transport: function that opens the transport of the group; called when it is first used.
        ranks: ranks of its processes in the default group.
        rank: rank of this process in the group.
        world_size: number of processes in the default group.
        seconds: timeout of a collective.
        policy: policy of this site's kit.

    Attributes:
        seconds: timeout of a collective.
        threads: threads that complete futures.

    Raises:
        ValueError: if the group has several processes, but not all.
    """

    def __init__(
        self,
        open_transport: Callable[[], CollectiveTransport],
        ranks: Sequence[int],
        rank: int,
        world_size: int,
        seconds: float,
        policy: Policy,
    ) -> None:
        super().__init__(rank, len(ranks))
        if len(ranks) > 1 and list(ranks) != list(range(world_size)):
            raise ValueError(
                f"ranks {list(ranks)} of {world_size}: over the hub a process group holds all sites, or one"
            )
        self._own = rank
        self._policy = policy
        self.seconds = seconds
        self.threads = WorkerThreads()
        self._name = ""
        self._open_transport = open_transport
        self._transport: CollectiveTransport | None = None

    # torch stores the name of a group in its backends, and this group has none beside itself.

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """Name of the group in torch.distributed."""
        return self._name

    def getBackendName(self) -> str:
        return BACKEND

    def shutdown(self) -> None:
        """End the threads of the group, and close its connections."""
        self.threads.close(0.0)
        if self._transport is not None:
            self._transport.close()

    # Collectives; their names and arguments are those of torch.distributed's process groups.

    def allreduce(self, tensors: list[Tensor], opts: Any) -> HubWork:
        """Replace tensors by their reduction over the sites."""
        return self._reduce(tensors, opts.reduceOp, lambda total: _put(total, tensors))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> HubWork:
        """Replace tensors by their reduction over the sites, at one site."""
        here = self._own == opts.rootRank
        return self._reduce(tensors, opts.reduceOp, lambda total: _put(total, tensors if here else []))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> HubWork:
        """Replace tensors by those of one site."""
        own = self._own == opts.rootRank
        sizes = [0] * self.size()
        sizes[opts.rootRank] = sum(each.numel() for each in tensors)
        flat = _flat(tensors) if own else _flat(tensors)[:0]
        return self._gather(flat, sizes, lambda parts: _put(parts[opts.rootRank], [] if own else tensors), tensors)

    def barrier(self, opts: Any = None) -> HubWork:
        """Wait until all sites have called it."""
        own = torch.zeros(1, dtype=torch.uint8)
        with declared(len(own)):
            return self._gather(own, [1] * self.size(), lambda parts: None, [], needs_all=False)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> HubWork:
        """Gather a tensor of each site at all sites."""
        rooms = outputs[0]
        sizes = [room.numel() for room in rooms]
        return self._gather(_flat(inputs), sizes, lambda parts: _put(torch.cat(parts), rooms), rooms)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any) -> HubWork:
        """Gather a tensor of each site in one tensor, at all sites."""
        return self.all_gather_single_coalesced([output], [own], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> HubWork:
        """Gather several tensors of each site, each of them in one tensor; functional collectives call it."""
        counts = [each.numel() for each in inputs]

        def put(parts: list[Tensor]) -> None:
            by_site = [part.split(counts) for part in parts]
            _put(torch.cat([each for same in zip(*by_site, strict=True) for each in same]), outputs)

        return self._gather(_flat(inputs), [sum(counts)] * self.size(), put, outputs)

    # Their names before torch 2.13
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> HubWork:
        """Gather a tensor of each site at one site. The hub passes it on to all: the others discard it."""
        rooms = outputs[0] if self._own == opts.rootRank else []
        sizes = [inputs[0].numel()] * self.size()
        return self._gather(_flat(inputs), sizes, lambda parts: _put(torch.cat(parts), rooms), rooms)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> HubWork:
        """Send one of a site's tensors to each site. The hub passes all on to all: a site discards the others'."""
        count, root = outputs[0].numel(), opts.rootRank
        sizes = [0] * self.size()
        sizes[root] = count * self.size()
        flat = _flat(inputs[0]) if self._own == root else _flat(outputs)[:0]
        start = count * self._own
        return self._gather(flat, sizes, lambda parts: _put(parts[root][start : start + count], outputs), outputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> HubWork:
        """Reduce a list of tensors over the sites; each site gets the one of its rank."""
        start = sum(each.numel() for each in inputs[0][: self._own])
        count = outputs[0].numel()
        return self._reduce(inputs[0], opts.reduceOp, lambda total: _put(total[start : start + count], outputs))

    def reduce_scatter_single(self, output: Tensor, own: Tensor, opts: Any) -> HubWork:
        """Reduce a tensor over the sites; each site gets the part of its rank."""
        return self.reduce_scatter_single_coalesced([output], [own], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> HubWork:
        """Reduce several tensors over the sites, as one; functional collectives call it."""

        def put(total: Tensor) -> None:
            every = total.split([each.numel() for each in inputs])
            _put(torch.cat([each.view(self.size(), -1)[self._own] for each in every]), outputs)

        return self._reduce(inputs, opts.reduceOp, put)

    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> HubWork:
        """Send one tensor to each site, and receive one of each."""
        table = self._tables(inputs, outputs)
        starts = [sum(row[: self._own]) for row in table]

        def put(parts: list[Tensor]) -> None:
            pieces = [
                part[start : start + room.numel()] for part, start, room in zip(parts, starts, outputs, strict=True)
            ]
            _put(torch.cat(pieces), outputs)

        return self._gather(_flat(inputs), [sum(row) for row in table], put, outputs)

    def all_to_all_single(
        self, output: Tensor, own: Tensor, output_sizes: list[int], sizes: list[int], opts: Any
    ) -> HubWork:
        """Send a part of a tensor to each site, and receive one of each, in one tensor."""
        even = [1] * self.size()
        rooms = list(_split(output, output_sizes or even))
        return self.alltoall(rooms, list(_split(own, sizes or even)), opts)

    alltoall_base = all_to_all_single  # its name before torch 2.13

    def send(self, *_: Any) -> HubWork:
        """Refuse to send: the hub passes all on to all sites."""
        raise RuntimeError("the hub's process group has collectives only: use broadcast, gather or scatter")

    recv = send
    recv_anysource = send

    # The two kinds of exchange

    def _reduce(self, tensors: Sequence[Tensor], operation: Any, put: Callable[[Tensor], object]) -> HubWork:
        flat = _flat(tensors)
        combine = _reduction(operation)
        sizes = [len(flat)] * self.size()
        return self._gather(flat, sizes, lambda parts: put(combine(parts)), tensors, needs_all=False)

    def _gather(
        self,
        own: Tensor,
        sizes: Sequence[int],
        put: Callable[[list[Tensor]], object],
        tensors: Sequence[Tensor],
        needs_all: bool = True,
    ) -> HubWork:
        """Start a gather.

        Args:
            own: this site's tensor, flat and on the CPU.
            sizes: number of elements of each site's tensor, by rank.
            put: function that writes the results, given the flat tensors by rank.
            tensors: the results.
            needs_all: see `_exchange`.

        Raises:
            PolicyError: if the policy of this site does not allow it; nothing has been sent.
            ValueError: if this site's tensor does not have the size that it should have.
            SiteError: at all sites, if a tensor that is needed is that of a site which is absent.
        """
        if self.size() > 1:
            _check_pickles(self._policy)
            self._policy.check_bytes(own.numel() * own.element_size(), most_bytes())
        if len(own) != sizes[self._own]:
            raise ValueError(f"the tensor of rank {self._own} has {len(own)} elements, not {sizes[self._own]}")
        receive = self._exchange(own, sizes, needs_all)
        return HubWork(lambda seconds: put(receive(seconds)), tensors, self.seconds, self.threads)

    def _exchange(self, own: Tensor, sizes: Sequence[int], needs_all: bool) -> Callable[[float], list[Tensor]]:
        """Send this site's tensor to all others, and prepare to receive theirs.

        Args:
            own: this site's tensor, which may be changed once this call has returned.
            sizes: number of elements of each site's tensor, by rank.
            needs_all: whether the tensors of all sites that send one are needed; those of the sites that are present
                otherwise.

        Returns:
            A function of a timeout in seconds that waits for the tensors, and returns them by rank.
        """
        if self.size() == 1:
            kept = own.clone()
            return lambda seconds: [kept]
        transport = self._opened()
        gather = transport.gather(sizes, own.dtype, once=True)
        gather.payload.copy_(own)
        gather.launch()

        def receive(seconds: float) -> list[Tensor]:
            transport.timeout = seconds
            return gather.wait()

        return receive

    def _opened(self) -> CollectiveTransport:
        if self._transport is None:
            self._transport = self._open_transport()
        return self._transport

    def _tables(self, inputs: Sequence[Tensor], rooms: Sequence[Tensor]) -> list[list[int]]:
        """Gather the numbers of elements that each site sends to each.

        Args:
            inputs: the tensors that this site sends, by rank.
            rooms: the tensors that it receives, by rank.

        Raises:
            MismatchError: if a number is out of range, or is not that of this site's room.
        """
        rows: list[Tensor] = []
        own = torch.tensor([each.numel() for each in inputs], dtype=torch.int64)
        self._gather(own, [self.size()] * self.size(), rows.extend, []).wait()
        table = [row.tolist() for row in rows]
        for rank, (row, room) in enumerate(zip(table, rooms, strict=True)):
            most = MAX_BYTES // room.element_size()
            if not all(0 <= each <= most for each in row) or sum(row) > most or row[self._own] != room.numel():
                name = f"process {rank}" if self._transport is None else self._transport.sites[rank]
                raise invalid("list of sizes", name, f"it sends {row} elements to all, here is room for {room.numel()}")
        return table


_EXECUTING = {  # functions by which libraries unpickle or evaluate what arrives in collectives, by their modules
    "torch.distributed.distributed_c10d": (
        *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
        *("send_object_list", "recv_object_list"),
    ),
    "torch.distributed.optim.zero_redundancy_optimizer": ("_broadcast_object",),
    "catalyst.utils.distributed": ("all_gather",),
    "accelerate.utils.operations": ("_neuron_gather_object", "_neuron_broadcast_object_list"),
    "ignite.distributed.comp_models.base": ("_setup_placeholder",),
}


def _check_pickles(policy: Policy) -> None:
    """Raise PolicyError if the current call is one of a function that unpickles or evaluates what other sites send.

    Functions are found in the stack: they may have been imported by name, or replaced by another library.
    """
    if policy.allow_pickle:
        return
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name in _EXECUTING.get(frame.f_globals.get("__name__", ""), ()):
            raise PolicyError(
                f"the policy of this site's kit has allow_pickle = false, and {frame.f_code.co_name} unpickles or "
                "evaluates what arrives, by which other sites and the hub could run programs here. Exchange objects by "
                "gather_objects() of dadplug.exchange or of a reduction, or set allow_pickle = true in the kit's "
                "policy.toml; nothing has been sent"
            )
        frame = frame.f_back


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors as one flat tensor on the CPU.

    Raises:
        ValueError: if their types differ, which would round some of them.
    """
    if len(dtypes := {each.dtype for each in tensors}) > 1:
        raise ValueError(f"the tensors of one collective have one type over the hub, got {sorted(map(str, dtypes))}")
    flat = [each.detach().reshape(-1).cpu() for each in tensors]
    return flat[0].contiguous() if len(flat) == 1 else torch.cat(flat)


def _put(flat: Tensor, rooms: Sequence[Tensor]) -> None:
    """Write a flat tensor into tensors one after the other.

    Raises:
        ValueError: if it does not have as many elements as they have.
    """
    if not rooms:
        return
    count = sum(room.numel() for room in rooms)
    if len(flat) != count:
        raise ValueError(f"{len(flat)} elements have arrived, and there is room for {count}")
    with torch.no_grad():
        for room, part in zip(rooms, flat.split([room.numel() for room in rooms]), strict=True):
            room.copy_(part.view(room.shape))


def _split(tensor: Tensor, shares: Sequence[int]) -> tuple[Tensor, ...]:
    """Return views of a tensor's rows, as many for each site as its share of them."""
    rows = len(tensor) // sum(shares) if sum(shares) else 0
    return torch.split(tensor, [share * rows for share in shares])


def _reduction(operation: Any) -> Callable[[list[Tensor]], Tensor]:
    """Return the function that reduces the tensors of all sites.

    Raises:
        ValueError: if the operation is not known.
    """
    op = dist.ReduceOp
    functions: dict[Any, Callable[[list[Tensor]], Tensor]] = {
        op.SUM: _sum,
        op.AVG: lambda parts: _sum(parts, len(parts)),
        op.PRODUCT: lambda parts: math.prod(parts[1:], start=parts[0]),
        op.MIN: lambda parts: torch.stack(parts).amin(0),
        op.MAX: lambda parts: torch.stack(parts).amax(0),
    }
    for each, function in functions.items():
        if operation == each:
            return function
    raise ValueError("the operations of the hub's process group are SUM, AVG, PRODUCT, MIN and MAX")


def _sum(parts: list[Tensor], count: int = 1) -> Tensor:
    """Add tensors in their order, and divide by a count."""
    dtype, total = parts[0].dtype, add_up(parts)
    return (total if count == 1 else total / count).to(dtype)


_NUMBERS = 1 << 23  # of the collectives of a channel, before they begin again


def register(open_group: Callable[[Sequence[int], int, float], Collectives]) -> None:
    """Register the backend.

    Args:
        open_group: function that makes a process group of ranks in the default group, the rank of this process in the
            new one, and a timeout in seconds.
    """

    def create(options: Any, _: Any) -> Collectives:
        ranks = options.global_ranks_in_group or range(options.group_size)
        return open_group(ranks, options.group_rank, options.timeout.total_seconds())

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])


class HubGroup(Collectives):
    """Process group over the hub, of sites with one process each, which may leave.

    Args:
        link: the link to the hub.
        slots: slots of the sites, by rank.
        rank: rank of this site in the group.
        seconds: timeout of a collective.

    Raises:
        ValueError: if the group has several sites, but not all.
    """

    def __init__(self, link: HubLink, slots: Sequence[int], rank: int, seconds: float) -> None:
        open_transport = partial(HubTransport, link, Traffic(), seconds)
        super().__init__(open_transport, slots, rank, link.world_size, seconds, link.kit.policy)
        self._link = link
        # A group of one site exists at this site only, so it must not take a channel that others give to another group.
        if len(slots) > 1:
            self._opened()

    def _exchange(self, own: Tensor, sizes: Sequence[int], needs_all: bool) -> Callable[[float], list[Tensor]]:
        link, transport = self._link, self._transport
        if transport is None or not link.rounds.elastic:
            return super()._exchange(own, sizes, needs_all)
        assert isinstance(transport, HubTransport)
        parts = [torch.empty(size, dtype=own.dtype) for size in sizes]
        parts[link.rank] = own.clone()
        # Numbers are those of rounds, which a site that joins learns, as it has no part in earlier collectives.
        exchange = transport.rounds.channel + link.step % _NUMBERS
        absent = link.rounds.gather(exchange, [bytes_of(part) for part in parts], self.seconds)
        if needs_all and (missing := [slot for slot, part in enumerate(parts) if slot in absent and len(part)]):
            names = ", ".join(map(link.name, missing))
            raise SiteError(
                f"{names} is gone, and a collective needs what it would have sent: where sites may leave, there are "
                "reductions, barriers, and GradientReduction.gather_objects"
            )
        present = parts if needs_all else [part for slot, part in enumerate(parts) if slot not in absent]
        return lambda seconds: present


class StoreConnection(HubConnection):
    """Connection of the channel "store"."""

    def __init__(self, kit: Kit, address: tuple[str, int] | None = None) -> None:
        super().__init__(kit, "store", address)
        self._numbers = itertools.count(1)
        self._policy = kit.policy
        self._replies: dict[int, Reply | None] = {}  # None where none has arrived

    def room(self, head: Head) -> memoryview:
        if head.kind is not Kind.MESSAGE:
            raise FrameError(f"a {head.kind.name} frame is not expected")
        return memoryview(bytearray(head.length))

    def complete(self, head: Head, body: memoryview) -> None:
        reply = decode(REPLIES, body, "reply of the store", FrameError)
        if reply.number in self._replies:  # otherwise it has been given up
            self._replies[reply.number] = reply

    def ask(
        self,
        operation: Operation,
        timeout: float,
        keys: Sequence[str] = (),
        values: Sequence[bytes] = (),
        amount: int = 0,
    ) -> Reply:
        """Send a request, and wait for the reply.

        Args:
            operation: the operation, see `dadplug.hub.server.store`.
            timeout: seconds to wait.
            keys: the keys.
            values: the values.
            amount: a number.

        Raises:
            dist.DistStoreError: if there is no reply in time, or it is an error.
            SiteError: if the hub is lost.
        """
        number = next(self._numbers)
        body = encode(Request(number, operation, tuple(keys), tuple(values), amount))
        self._policy.check_bytes(len(body), OBJECTS)
        if len(body) > PIECE_BYTES:
            raise dist.DistStoreError(f"{operation} of {len(body)} bytes: the hub's store takes {PIECE_BYTES} at most")
        with self.lock:
            self._replies[number] = None
        try:
            self.post(Head(Kind.MESSAGE, self.rank), body)
            self.converse(lambda: int(self._replies[number] is None), timeout)
        finally:
            with self.lock:
                reply = self._replies.pop(number)
        if reply is None:
            self.post(Head(Kind.MESSAGE, self.rank), encode(Request(0, "cancel", amount=number)))
            waited = f"{operation} of {', '.join(keys)}" if keys else operation
            raise dist.DistStoreError(f"{waited} at the store of {self.hub} has timed out after {timeout:g} s")
        if reply.error:
            raise dist.DistStoreError(reply.error)
        return reply


class HubStore(dist.Store):
    """Store at the hub. Connects when it is first used: few programs use it.

    Args:
        kit: kit of this site.
        timeout: seconds for which `get` and `wait` wait, unless `set_timeout` changes it.
        address: host and port of the hub; None for those of the kit.

    Attributes:
        timeout: the timeout.
    """

    timeout: timedelta

    def __init__(self, kit: Kit, timeout: float, address: tuple[str, int] | None = None) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout))
        self._place = kit, address
        self._lock = threading.Lock()
        self._connection: StoreConnection | None = None

    def _ask(self, operation: Operation, keys: Sequence[str] = (), *values: Any, **settings: Any) -> Reply:
        encoded = [value.encode() if isinstance(value, str) else bytes(value) for value in values]
        settings.setdefault("timeout", self.timeout.total_seconds())
        with self._lock:
            if self._connection is None:
                connection = StoreConnection(*self._place)
                connection.start(self.timeout.total_seconds())
                connection.ask("hello", self.timeout.total_seconds())
                self._connection = connection
        return self._connection.ask(operation, keys=keys, values=encoded, **settings)

    def close(self) -> None:
        """Close the connection, if there is one. May be called twice."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()

    # What torch.distributed calls, from Python or, by way of PrefixStore, from C++

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], value)

    def get(self, key: str) -> bytes:
        return self._ask("get", [key]).values[0]

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", [key], amount=amount).amount

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", [key], value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask("compare_set", [key], expected, desired).values[0]

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys).amount)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = (self.timeout if timeout is None else timeout).total_seconds()
        self._ask("wait", keys, timeout=seconds)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key]).amount)

    def num_keys(self) -> int:
        return self._ask("num_keys").amount

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return list(self._ask("get", keys).values)

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        self._ask("set", keys, *values)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> HubStore:
        return self

    deleteKey, getNumKeys = delete_key, num_keys  # the names that C++ calls
