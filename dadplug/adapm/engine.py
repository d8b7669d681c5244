"""The state machine of one site, without threads or a network: messages in, messages out.

The protocol is written down in `dadplug.adapm.messages`.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import kernels, placement
from .messages import Kind, Message
from .requests import Flush, PullRequest, Request, SetRequest
from .rows import (
    AWAY,
    DIRTY,
    DROP,
    DROPPED,
    MOVED,
    RELOCATE,
    RELOCATE_OR_REPLICATE,
    REPLICATE,
    SAME,
    STAY,
    VALUE,
    Block,
    Keys,
)
from .store import Store
from .timing import ActionTiming

TECHNIQUES = {
    "all": RELOCATE_OR_REPLICATE,
    "replication_only": REPLICATE,
    "relocation_only": RELOCATE,
    "static": STAY,
}
COUNTS = ("pulled", "pulled_remotely", "pushed", "pushed_remotely", "moved", "replicated")
Outbox = list[tuple[int, Message]]


class Engine:
    """The state of one site: its stores, its requests, its intents.

    Any thread may call its methods; they hold one lock, during which the GIL is released.

    Args:
        rank: this site.
        sites: number of sites, at most 62.
        technique: one of `TECHNIQUES`.
        send: hands a message to another site; it may be delivered late and out of order, but once.
    """

    def __init__(self, rank: int, sites: int, technique: str, send: Callable[[int, Message], None]) -> None:
        self.rank, self.sites = rank, sites
        self.technique = TECHNIQUES[technique]
        self.stores: list[Store] = []
        self.clock = 0
        self.round = 0
        self.timing = ActionTiming()
        self.counts = dict.fromkeys(
            ("pulled", "pulled_remotely", "pushed", "pushed_remotely", "moved", "replicated"), 0
        )
        self._send = send
        self._lock = threading.Lock()
        self._last_request = 0
        self._requests: dict[int, Request] = {}
        self._unapplied: dict[int, Request] = {}  # pushes and sets, by number
        self._held: deque[tuple[int, Outbox]] = deque()
        self._intents: list[tuple[int, int, int, int, Keys]] = []  # heap: start, order, end, table, keys
        self._intent_order = 0
        self._drops = 0
        self._unanswered = 0  # keys for which an INTENT or SYNC is under way
        self._handlers: dict[Kind, Callable[[int, Message, Outbox], None]] = {
            Kind.PULL: self._on_pull,
            Kind.PULLED: self._on_pulled,
            Kind.PUSH: self._on_push,
            Kind.SET: self._on_set,
            Kind.APPLIED: self._on_applied,
            Kind.INTENT: self._on_intent,
            Kind.REPLICA: self._on_replica,
            Kind.MOVE: self._on_move,
            Kind.SYNC: self._on_sync,
            Kind.SYNCED: self._on_synced,
            Kind.OWNER: self._on_owner,
        }

    # What workers ask for; keys and values are checked by the caller.

    def pull(self, table: int, keys: Keys, out: Block) -> int | PullRequest | None:
        """Copies values into `out`, asking other sites where needed.

        Returns:
            None if all were here; the position of a key that is out of range, and nothing has been done; else the
            request.
        """
        outbox: Outbox = []
        with self._lock:
            store = self.stores[table]
            where = np.empty(keys.shape[0], np.int32)
            missing = kernels.read(store.rows, keys, store.limit, out, where)
            if missing < 0:
                return -1 - missing
            self.counts["pulled"] += keys.shape[0]
            if not missing:
                return None
            positions = np.flatnonzero(where < 0).astype(np.int32)
            request = self._pull_rest(table, keys[positions], positions, out, outbox)
            self._post(outbox)  # all of it goes to other sites, which work while the rest is copied
            kernels.read_found(store.rows, where, out)
        return request

    def _pull_rest(
        self, table: int, keys: Keys, positions: NDArray[np.int32], out: Block, outbox: Outbox
    ) -> PullRequest | None:
        where, targets = self.stores[table].locate(self.rank, self.sites, keys)
        here = where >= 0
        if here.any():
            kernels.place(self.stores[table].read_rows(where[here]), positions[here], out)
            away = ~here
            keys, positions, targets = keys[away], positions[away], targets[away]
        if not keys.shape[0]:
            return None
        self.counts["pulled_remotely"] += keys.shape[0]
        store = self.stores[table]
        buffered = store.replicas and kernels.any_requested(store.rows, keys)
        request = PullRequest(table, keys, positions, out, self._drops if buffered else None)
        number = self._number(request)
        self._after_pushes(self._spread(Kind.PULL, table, self.rank, number, targets, keys, positions), outbox)
        return request

    def push(self, table: int, keys: Keys, deltas: Block) -> Request | None:
        """Adds deltas; returns None if that is done, else the request."""
        outbox: Outbox = []
        with self._lock:
            self.counts["pushed"] += keys.shape[0]
            request = self._push(table, keys, deltas, outbox)
        self._post(outbox)
        return request

    def _push(self, table: int, keys: Keys, deltas: Block, outbox: Outbox) -> Request | None:
        store = self.stores[table]
        where = np.empty(keys.shape[0], np.int32)
        if not kernels.add(store.rows, keys, deltas, where):
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
        """Sets distinct keys; this site's pushes have been flushed before.

        Returns:
            False where that must be done again, since a key is on its way here; and the request, None if it is done.
        """
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

    def intend(self, table: int, keys: Keys, start: int, end: int) -> None:
        """Notes that this site will use keys while ``start <= clock < end``."""
        if self.sites == 1 or self.technique == STAY:
            return
        with self._lock:
            self._intent_order += 1
            heapq.heappush(self._intents, (start, self._intent_order, end, table, keys))

    # Rounds

    @property
    def busy(self) -> bool:
        """Whether a round would do anything."""
        return bool(self._intents) or any(store.replicas for store in self.stores)

    @property
    def round_over(self) -> bool:
        """Whether all that the rounds so far have asked for has been answered."""
        return self._unanswered == 0

    @property
    def waits(self) -> bool:
        """Whether a request is under way."""
        return bool(self._requests)

    def run_round(self) -> None:
        """Acts on the intents that are due, and has all replicas synchronised that are not already."""
        outbox: Outbox = []
        with self._lock:
            self.round += 1
            self.timing.end_round(self.clock)
            while self._intents and self._intents[0][0] <= self.clock + self.timing.window:
                _, _, end, table, keys = heapq.heappop(self._intents)
                if end > self.clock:
                    self._want(table, keys, end, outbox)
            for table in range(len(self.stores)):
                self._sync(table, outbox)
        self._post(outbox)

    def _want(self, table: int, keys: Keys, end: int, outbox: Outbox) -> None:
        store = self.stores[table]
        where, targets = store.locate(self.rank, self.sites, keys)
        missing = int((where < 0).sum())
        store.make_room(missing, missing)
        wanted = np.empty(keys.shape[0], np.int8)
        placement.want(store.rows, keys, where, end, self.round, wanted)
        asked = wanted.view(np.bool_)
        if asked.any():
            self._unanswered += int(asked.sum())
            messages = self._spread(Kind.INTENT, table, self.rank, 0, targets[asked], keys[asked])
            self._after_pushes(messages, outbox)

    def _sync(self, table: int, outbox: Outbox) -> None:
        store = self.stores[table]
        if not (size := store.replicas):
            return
        keys, versions, slots = np.empty(size, np.int64), np.empty(size, np.int32), np.empty(size, np.int32)
        flags, owners = np.empty(size, np.int8), np.empty(size, np.int8)
        count = placement.collect(store.rows, self.clock, self.round, keys, versions, flags, owners, slots)
        self._unanswered += count
        for owner in np.unique(owners[:count]):
            chosen = np.flatnonzero(owners[:count] == owner)
            deltas = np.empty((int((flags[chosen] & DIRTY).sum()), store.width), np.float32)
            placement.take_deltas(store.rows, slots[chosen], deltas)
            arrays: list[NDArray[Any]] = [keys[chosen], versions[chosen], flags[chosen], deltas]
            outbox.append((int(owner), Message(Kind.SYNC, table, self.rank, 0, 0, arrays)))

    def begin_flush(self) -> Flush:
        """Begins to wait until this site's pushes are with their owners, and its replicas are fresh."""
        with self._lock:
            return Flush(self.round + 1)

    def flushed(self, flush: Flush) -> bool:
        """Says whether a flush is over; rounds must go on meanwhile."""
        with self._lock:
            if flush.last is None:
                if any(placement.unsettled(store.rows, flush.since) for store in self.stores):
                    return False
                flush.last = self._last_request
            return not self._unapplied or next(iter(self._unapplied)) > flush.last

    # Messages

    def handle(self, sender: int, message: Message) -> None:
        """Takes in a message from another site, or from this one."""
        outbox: Outbox = []
        with self._lock:
            self._handlers[message.kind](sender, message, outbox)
        self._post(outbox)

    def add_store(self, store: Store) -> None:
        """Adds a table, numbered in the order in which they are added."""
        with self._lock:
            self.stores.append(store)

    def owned(self, table: int) -> tuple[Keys, Block]:
        """Copies the keys that are owned here, and their values."""
        with self._lock:
            return self.stores[table].owned()

    def release(self) -> None:
        """Ends the wait of all requests: they will not be answered any more."""
        with self._lock:
            for request in self._requests.values():
                request.done.set()

    def _post(self, outbox: Outbox) -> None:
        for target, message in outbox:
            if target == self.rank:
                self.handle(self.rank, message)
            else:
                self._send(target, message)

    def _number(self, request: Request) -> int:
        self._last_request += 1
        self._requests[self._last_request] = request
        return self._last_request

    def _after_pushes(self, messages: Outbox, outbox: Outbox) -> None:
        """Sends messages once the pushes that have been sent until now are answered."""
        if self._unapplied:
            self._held.append((self._last_request, messages))
        else:
            outbox.extend(messages)

    def _spread(
        self, kind: Kind, table: int, origin: int, request: int, targets: NDArray[np.int8], *arrays: NDArray[Any]
    ) -> Outbox:
        """Splits arrays over the sites that they go to."""
        if (targets == targets[0]).all():
            return [(int(targets[0]), Message(kind, table, origin, request, 0, list(arrays)))]
        outbox: Outbox = []
        for target in np.unique(targets):
            chosen = targets == target
            parts = [array[chosen] for array in arrays]
            outbox.append((int(target), Message(kind, table, origin, request, 0, parts)))
        return outbox

    def _serve(self, message: Message, outbox: Outbox) -> tuple[Store, NDArray[np.bool_], NDArray[np.int32]]:
        """Finds the rows of a message's keys, and sends the part of the message on that belongs to another site."""
        store = self.stores[message.table]
        where, targets = store.locate(self.rank, self.sites, message.arrays[0])
        here = where >= 0
        if not here.all():
            away = ~here
            parts = [array[away] for array in message.arrays]
            outbox.extend(
                self._spread(message.kind, message.table, message.origin, message.request, targets[away], *parts)
            )
        return store, here, where[here]

    def _on_pull(self, sender: int, message: Message, outbox: Outbox) -> None:
        store, here, rows = self._serve(message, outbox)
        if rows.shape[0]:
            arrays: list[NDArray[Any]] = [message.arrays[1][here], store.read_rows(rows)]
            answer = Message(Kind.PULLED, message.table, self.rank, message.request, 0, arrays)
            outbox.append((message.origin, answer))

    def _on_pulled(self, sender: int, message: Message, outbox: Outbox) -> None:
        request = self._requests[message.request]
        assert isinstance(request, PullRequest)
        positions, values = message.arrays
        kernels.place(values, positions, request.out)
        request.remaining -= positions.shape[0]
        if request.remaining:
            return
        store = self.stores[request.table]
        absent = np.empty(request.keys.shape[0], np.int8)
        gone = kernels.reconcile(store.rows, request.keys, request.positions, request.out, absent)
        if gone and request.drops not in (None, self._drops):
            # What was requested may have come and gone since, with pushes of this site that the answer lacks.
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
        store, here, rows = self._serve(message, outbox)
        if rows.shape[0]:
            kernels.add_owned(store.rows, rows, message.arrays[1][here])
            self._confirm(message, rows.shape[0], outbox)

    def _on_set(self, sender: int, message: Message, outbox: Outbox) -> None:
        store, here, rows = self._serve(message, outbox)
        if rows.shape[0]:
            kernels.assign(store.rows, rows, message.arrays[1][here])
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
            kernels.overwrite(self.stores[request.table].rows, request.keys, request.values)
        del self._requests[message.request], self._unapplied[message.request]
        request.done.set()
        while self._held and (not self._unapplied or next(iter(self._unapplied)) > self._held[0][0]):
            outbox.extend(self._held.popleft()[1])

    def _on_intent(self, sender: int, message: Message, outbox: Outbox) -> None:
        store, here, rows = self._serve(message, outbox)
        if not (count := rows.shape[0]):
            return
        store.make_directory_room(count)
        keys = message.arrays[0][here]
        codes, versions, moves, masks, values = _decisions(count, store.width)
        placement.serve_intent(
            store.rows, message.origin, self.clock, self.technique, rows, codes, versions, moves, masks, values
        )
        chosen = codes == VALUE
        if chosen.any():
            self.counts["replicated"] += int(chosen.sum())
            arrays = [keys[chosen], versions[chosen], values[chosen]]
            outbox.append((message.origin, Message(Kind.REPLICA, message.table, self.rank, 0, 0, arrays)))
        self._move(message, codes == MOVED, keys, versions, moves, masks, values, outbox)

    def _move(self, message: Message, chosen: NDArray[np.bool_], *arrays_and_outbox: Any) -> None:
        *arrays, outbox = arrays_and_outbox
        if chosen.any():
            self.counts["moved"] += int(chosen.sum())
            parts = [array[chosen] for array in arrays]
            outbox.append((message.origin, Message(Kind.MOVE, message.table, self.rank, 0, 0, parts)))

    def _on_replica(self, sender: int, message: Message, outbox: Outbox) -> None:
        self._unanswered -= message.arrays[0].shape[0]
        placement.install(self.stores[message.table].rows, sender, *message.arrays)

    def _on_move(self, sender: int, message: Message, outbox: Outbox) -> None:
        keys, versions, moves, masks, values = message.arrays
        store = self.stores[message.table]
        store.make_directory_room(keys.shape[0])
        self._unanswered -= keys.shape[0]
        placement.own(store.rows, self.rank, keys, versions, moves, masks, values)
        homes = keys % self.sites
        told = (homes != self.rank) & (homes != sender)
        if told.any():
            targets = homes[told].astype(np.int8)
            outbox.extend(self._spread(Kind.OWNER, message.table, self.rank, 0, targets, keys[told], moves[told]))

    def _on_owner(self, sender: int, message: Message, outbox: Outbox) -> None:
        store = self.stores[message.table]
        store.make_directory_room(message.arrays[0].shape[0])
        placement.direct(store.rows, *message.arrays, message.origin)

    def _on_sync(self, sender: int, message: Message, outbox: Outbox) -> None:
        keys, versions, flags, deltas = message.arrays
        store = self.stores[message.table]
        where, targets = store.locate(self.rank, self.sites, keys)
        store.make_directory_room(keys.shape[0])
        codes, _, moves, masks, values = _decisions(keys.shape[0], store.width)
        placement.serve_sync(
            store.rows,
            message.origin,
            self.clock,
            self.technique,
            where,
            flags,
            deltas,
            codes,
            versions,
            moves,
            masks,
            values,
        )
        self._move(message, codes == MOVED, keys, versions, moves, masks, values, outbox)
        away = codes == AWAY
        answered = ~away & (codes != MOVED)
        if answered.any():
            arrays = [keys[answered], codes[answered], versions[answered], values[codes == VALUE]]
            outbox.append((message.origin, Message(Kind.SYNCED, message.table, self.rank, 0, 0, arrays)))
        if away.any():
            dirty = (flags & DIRTY).astype(np.bool_)
            places = np.cumsum(dirty) - 1
            for target in np.unique(targets[away]):
                chosen = away & (targets == target)
                arrays = [keys[chosen], versions[chosen], flags[chosen], deltas[places[chosen & dirty]]]
                outbox.append((int(target), Message(Kind.SYNC, message.table, message.origin, 0, 0, arrays)))

    def _on_synced(self, sender: int, message: Message, outbox: Outbox) -> None:
        keys, codes, versions, values = message.arrays
        store = self.stores[message.table]
        self._drops += int((codes == DROPPED).any())
        after = np.empty(keys.shape[0], np.int8)
        rest = np.empty((keys.shape[0], store.width), np.float32)
        left = placement.settle(store.rows, sender, self.clock, self.round, keys, codes, versions, values, after, rest)
        if left:
            self._push(message.table, keys[after == DIRTY], rest[:left], outbox)
        again = keys[after == DROP]
        self._unanswered += again.shape[0] - keys.shape[0]
        if again.shape[0]:
            _, targets = store.locate(self.rank, self.sites, again)
            messages = self._spread(Kind.INTENT, message.table, self.rank, 0, targets, again)
            self._after_pushes(messages, outbox)


def _taken(block: Block, rows: NDArray[np.int32]) -> Block:
    out = np.empty((rows.shape[0], block.shape[1]), np.float32)
    kernels.take(block, rows, out)
    return out


def _decisions(count: int, width: int) -> tuple[Any, Any, Any, Any, Block]:
    """Makes room for codes, versions, moves, masks and values of an answer."""
    numbers = np.zeros((2, count), np.int32)
    return (
        np.full(count, SAME, np.int8),
        numbers[0],
        numbers[1],
        np.zeros(count, np.int64),
        np.empty((count, width), np.float32),
    )
