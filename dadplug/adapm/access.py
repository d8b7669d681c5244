"""Pulls, pushes and sets of workers, and the messages between sites for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..errors import ProtocolError
from . import kernels
from .messages import Kind, Message
from .requests import PullRequest, Request, SetRequest
from .rows import Block, Keys
from .state import Outbox, SiteState


class Access(SiteState):
    """Part of a site's engine that reads and changes values; arguments are those of `SiteState`."""

    def __init__(self, rank: int, sites: int, send: Callable[[int, Message], None]) -> None:
        super().__init__(rank, sites, send)
        self._handlers |= {
            Kind.PULL: self._on_pull,
            Kind.PULLED: self._on_pulled,
            Kind.PUSH: self._on_push,
            Kind.SET: self._on_set,
            Kind.APPLIED: self._on_applied,
        }

    def pull(self, table: int, keys: Keys, out: Block) -> int | PullRequest | None:
        outbox: Outbox = []
        with self._lock:
            store = self.stores[table]
            where, targets, fresh, away, bad = store.read(self.rank, self.sites, False, keys, out)
            if bad >= 0:
                return bad
            count = keys.shape[0]
            self.counts["pulled"] += count
            store.touch(where)
            if not fresh and not away:
                return None
            whole = fresh + away == count
            positions = np.arange(count, dtype=np.int32) if whole else np.flatnonzero(where < 0).astype(np.int32)
            rest = keys.copy() if whole else keys[positions]
            if fresh:
                request = self._pull_rest(table, rest, positions, out, outbox)
            else:
                request = self._ask(table, rest, positions, targets if whole else targets[positions], out, outbox)
            self._post(outbox)  # other sites work while the local values are copied
            if not whole:
                kernels.read_found(store.rows.values, where, out)
        return request

    def here(self, table: int, keys: Keys) -> NDArray[np.bool_]:
        """Return for each key whether this site can read it; no row is created, and no site is asked."""
        found = np.empty(keys.shape[0], np.int8)
        with self._lock:
            kernels.readable(self.stores[table].rows, self.rank, self.sites, keys, found)
        return found.view(np.bool_)

    def states(self, table: int, keys: Keys) -> NDArray[np.int8]:
        """Return the states of keys as `dadplug.adapm.states.KeyState`, -1 for absent keys."""
        found = np.empty(keys.shape[0], np.int8)
        with self._lock:
            rows = self.stores[table].rows
            kernels.states_of(rows.finder, rows.states, keys, found)
        return found

    def nbytes(self, table: int) -> int:
        """Return the bytes of memory that this site has reserved for a table."""
        return self.stores[table].nbytes

    def _pull_rest(
        self, table: int, keys: Keys, positions: NDArray[np.int32], out: Block, outbox: Outbox
    ) -> PullRequest | None:
        where, targets, away_count = self.stores[table].located(self.rank, self.sites, keys)
        if away_count < keys.shape[0]:
            here = where >= 0
            kernels.scatter_rows(self.stores[table].read_rows(where[here]), positions[here], out)
            away = ~here
            keys, positions, targets = keys[away], positions[away], targets[away]
        return self._ask(table, keys, positions, targets, out, outbox) if keys.shape[0] else None

    def _ask(
        self,
        table: int,
        keys: Keys,
        positions: NDArray[np.int32],
        targets: NDArray[np.int8],
        out: Block,
        outbox: Outbox,
    ) -> PullRequest:
        """Send a pull to other sites."""
        self.counts["pulled_remotely"] += keys.shape[0]
        store = self.stores[table]
        buffered = store.replicas and kernels.any_requested(store.rows, keys)
        request = PullRequest(table, keys, positions, out, self._drops if buffered else None)
        number = self._number(request)
        self._after_pushes(self._spread(Kind.PULL, table, self.rank, number, targets, keys, positions), outbox)
        return request

    def push(self, table: int, keys: Keys, deltas: Block) -> Request | None:
        outbox: Outbox = []
        with self._lock:
            self.counts["pushed"] += keys.shape[0]
            request = self._push(table, keys, deltas, outbox)
        self._post(outbox)
        return request

    def _push(self, table: int, keys: Keys, deltas: Block, outbox: Outbox) -> Request | None:
        store = self.stores[table]
        where = np.empty(keys.shape[0], np.int32)
        missing = kernels.add(store.rows, keys, deltas, where)
        store.touch(where)
        if not missing:
            return None
        rest = np.flatnonzero(where < 0).astype(np.int32)
        keys, deltas = keys[rest], _taken(deltas, rest)
        where, targets = store.locate(self.rank, self.sites, keys)
        here = where >= 0
        if here.any():
            kernels.add_owned(store.rows, where[here], deltas[here])
            away = np.flatnonzero(~here).astype(np.int32)
            keys, deltas, targets = keys[away], _taken(deltas, away), targets[away]
        if not keys.shape[0]:
            return None
        self.counts["pushed_remotely"] += keys.shape[0]
        request = Request(keys.shape[0])
        number = self._number(request)
        self._unapplied[number] = request
        outbox.extend(self._spread(Kind.PUSH, table, self.rank, number, targets, keys, deltas))
        return request

    def set(self, table: int, keys: Keys, values: Block) -> tuple[bool, Request | None]:
        outbox: Outbox = []
        with self._lock:
            store = self.stores[table]
            if kernels.any_requested(store.rows, keys):
                return False, None
            where, targets = store.locate(self.rank, self.sites, keys)
            here = where >= 0
            kernels.assign(store.rows, where[here], values[here])
            away = ~here
            keys, values, targets = keys[away], values[away], targets[away]
            if not keys.shape[0]:
                return True, None
            request = SetRequest(table, keys, values)
            number = self._number(request)
            self._unapplied[number] = request
            outbox.extend(self._spread(Kind.SET, table, self.rank, number, targets, keys, values))
        self._post(outbox)
        return True, request

    def _on_pull(self, sender: int, message: Message, outbox: Outbox) -> None:
        store = self.stores[message.table]
        keys, positions = message.arrays
        values = np.empty((keys.shape[0], store.width), np.float32)
        where, _, fresh, away, bad = store.read(self.rank, self.sites, True, keys, values)
        if bad >= 0:
            raise ProtocolError(f"PULL with a key out of range of table {message.table}")
        if fresh or away:
            store, rows, (_, positions) = self._serve(message, outbox)
            values = store.read_rows(rows)
        else:
            store.touch(where)
        if values.shape[0]:
            answer = Message(Kind.PULLED, message.table, self.rank, message.request, 0, [positions, values])
            outbox.append((message.origin, answer))

    def _on_pulled(self, sender: int, message: Message, outbox: Outbox) -> None:
        request = self._requests[message.request]
        assert isinstance(request, PullRequest)
        positions, values = message.arrays
        if not kernels.scatter_rows(values, positions, request.out):
            raise ProtocolError("PULLED with values for places that this site has not asked for")
        request.remaining -= positions.shape[0]
        if request.remaining:
            return
        store = self.stores[request.table]
        absent = np.empty(request.keys.shape[0], np.int8)
        r = store.rows
        gone = kernels.reconcile(
            r.finder, r.values, r.slots, r.dirty, request.keys, request.positions, request.out, absent
        )
        if gone and request.drops not in (None, self._drops):
            # A replica may have been created and dropped meanwhile, with pushes of this site that the reply lacks.
            again = absent.view(np.bool_)
            repeated = self._pull_rest(
                message.table, request.keys[again], request.positions[again], request.out, outbox
            )
            if repeated is not None:
                repeated.done = request.done
                del self._requests[message.request]
                return
        del self._requests[message.request]
        request.done.set()

    def _on_push(self, sender: int, message: Message, outbox: Outbox) -> None:
        store, rows, arrays = self._serve(message, outbox)
        if rows.shape[0]:
            kernels.add_owned(store.rows, rows, arrays[1])
            self._confirm(message, rows.shape[0], outbox)

    def _on_set(self, sender: int, message: Message, outbox: Outbox) -> None:
        store, rows, arrays = self._serve(message, outbox)
        if rows.shape[0]:
            kernels.assign(store.rows, rows, arrays[1])
            self._confirm(message, rows.shape[0], outbox)

    def _confirm(self, message: Message, count: int, outbox: Outbox) -> None:
        answer = Message(Kind.APPLIED, message.table, self.rank, message.request, count)
        outbox.append((message.origin, answer))

    def _on_applied(self, sender: int, message: Message, outbox: Outbox) -> None:
        request = self._requests[message.request]
        request.remaining -= message.extra
        if request.remaining:
            return
        if isinstance(request, SetRequest):
            kernels.overwrite_replicas(self.stores[request.table].rows, request.keys, request.values)
        del self._requests[message.request], self._unapplied[message.request]
        request.done.set()
        while self._held and (not self._unapplied or next(iter(self._unapplied)) > self._held[0][0]):
            outbox.extend(self._held.popleft()[1])


def _taken(block: Block, rows: NDArray[np.int32]) -> Block:
    out = np.empty((rows.shape[0], block.shape[1]), np.float32)
    kernels.gather_rows(block, rows, out)
    return out
