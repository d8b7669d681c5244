"""The state machine of one site, without threads or a network: messages in, messages out.

The protocol is written down in `dadplug.adapm.messages`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import placement
from .access import Access
from .messages import Kind, Message
from .requests import Flush
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
from .state import Outbox
from .timing import ActionTiming

TECHNIQUES = {
    "all": RELOCATE_OR_REPLICATE,
    "replication_only": REPLICATE,
    "relocation_only": RELOCATE,
    "static": STAY,
}


class Engine(Access):
    """The state of one site: its stores, its requests, its intents.

    Any thread may call its methods; they hold one lock, during which the GIL is released.

    Args:
        rank: this site.
        sites: number of sites, at most 62.
        technique: one of `TECHNIQUES`.
        send: hands a message to another site; it may be delivered late and out of order, but once.
    """

    def __init__(self, rank: int, sites: int, technique: str, send: Callable[[int, Message], None]) -> None:
        super().__init__(rank, sites, send)
        self.technique = TECHNIQUES[technique]
        self.clock = 0
        self.round = 0
        self.timing = ActionTiming()
        self._intents: list[tuple[int, int, int, int, Keys]] = []  # heap: start, order, end, table, keys
        self._intent_order = 0
        self._unanswered = 0  # keys for which an INTENT or SYNC is under way
        self._handlers |= {
            Kind.INTENT: self._on_intent,
            Kind.REPLICA: self._on_replica,
            Kind.MOVE: self._on_move,
            Kind.SYNC: self._on_sync,
            Kind.SYNCED: self._on_synced,
            Kind.OWNER: self._on_owner,
        }

    def intend(self, table: int, keys: Keys, start: int, end: int) -> None:
        """Notes that this site will use keys while ``start <= clock < end``."""
        if self.sites == 1 or self.technique == STAY:
            return
        with self._lock:
            self._intent_order += 1
            heapq.heappush(self._intents, (start, self._intent_order, end, table, keys))

    @property
    def busy(self) -> bool:
        """Whether a round would do anything."""
        return bool(self._intents) or any(store.replicas for store in self.stores)

    @property
    def round_over(self) -> bool:
        """Whether all that the rounds so far have asked for has been answered."""
        return self._unanswered == 0

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
