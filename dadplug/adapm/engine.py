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
from .messages import Kind, Message, most_keys
from .requests import Flush
from .rows import AWAY, DIRTY, DROP, DROPPED, MOVED, RELOCATE, RELOCATE_OR_REPLICATE, REPLICATE, STAY, Keys
from .state import Outbox
from .timing import ActionTiming

TECHNIQUES = {
    "all": RELOCATE_OR_REPLICATE,
    "replication_only": REPLICATE,
    "relocation_only": RELOCATE,
    "static": STAY,
}
_MOST_KEYS = 2048  # in a SYNC: while an owner works on it, its workers wait


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
        self.round = 0
        self.timing = ActionTiming()
        self._intents: list[tuple[int, int, int, int, Keys]] = []  # heap: start, order, end, table, keys
        self._intent_order = 0
        self._looked = 0  # clock at the last look at intents
        self._sync_round = 0
        # Rounds that are not answered: keys still under way; clock at the look before, unless it is a synchronisation.
        self._open: dict[int, list[Any]] = {}
        self._handlers |= {
            Kind.INTENT: self._on_intent,
            Kind.REPLICA: self._on_replica,
            Kind.MOVE: self._on_move,
            Kind.SYNC: self._on_sync,
            Kind.SYNCED: self._on_synced,
            Kind.OWNER: self._on_owner,
        }

    def intend(self, table: int, keys: Keys, start: int, end: int) -> bool:
        """Notes that this site will use keys while ``start <= clock < end``; says whether it is the only intent."""
        if self.sites == 1 or self.technique == STAY:
            return False
        with self._lock:
            self._intent_order += 1
            heapq.heappush(self._intents, (start, self._intent_order, end, table, keys))
            return len(self._intents) == 1

    # Rounds

    @property
    def intends(self) -> bool:
        """Whether there are intents that have not been acted on."""
        return bool(self._intents)

    @property
    def replicas(self) -> int:
        """Number of keys, of all tables, that are replicated here, or requested."""
        return sum(store.replicas for store in self.stores)

    @property
    def round_over(self) -> bool:
        """Whether all that the rounds so far have asked for has been answered."""
        return not self._open

    @property
    def sync_over(self) -> bool:
        """Whether the last synchronisation of the replicas has been answered."""
        return self._sync_round not in self._open

    def run_round(self) -> None:
        """Acts on the intents that are due, and has all replicas synchronised that are not already."""
        self.act()
        self.synchronise()

    def act(self) -> None:
        """Acts on the intents that are due."""
        before, self._looked = self._looked, self.clock
        if not self._intents or self._intents[0][0] > self.clock + self.timing.window:
            return
        self.round += 1
        while (outbox := self._act_on_next(before)) is not None:  # workers get the lock between two intents
            self._post(outbox)

    def _act_on_next(self, before: int) -> Outbox | None:
        with self._lock:
            if not self._intents or self._intents[0][0] > self.clock + self.timing.window:
                return None
            _, _, end, table, keys = heapq.heappop(self._intents)
            outbox: Outbox = []
            if end > self.clock and (asked := self._want(table, keys, end, outbox)):
                self._open.setdefault(self.round, [0, before])[0] += asked
            return outbox

    def synchronise(self) -> None:
        """Has all replicas synchronised of which nothing is under way."""
        outbox: Outbox = []
        with self._lock:
            self.round += 1
            asked = sum(self._sync(table, outbox) for table in range(len(self.stores)))
            if asked:
                self._sync_round = self.round
                self._open[self.round] = [asked, None]
        self._post(outbox)

    def _want(self, table: int, keys: Keys, end: int, outbox: Outbox) -> int:
        store = self.stores[table]
        where, targets = store.locate(self.rank, self.sites, keys)
        store.make_room(keys.shape[0], keys.shape[0])
        wanted, asked = np.empty_like(keys), np.empty_like(targets)
        count = placement.want(store.rows, keys, where, targets, end, self.round, wanted, asked)
        if count:
            messages = self._spread(Kind.INTENT, table, self.rank, self.round, asked[:count], wanted[:count])
            self._after_pushes(messages, outbox)
        return count

    def _sync(self, table: int, outbox: Outbox) -> int:
        store = self.stores[table]
        if not (size := store.replicas):
            return 0
        keys, versions, slots = np.empty(size, np.int64), np.empty(size, np.int32), np.empty(size, np.int32)
        flags, owners = np.empty(size, np.int8), np.empty(size, np.int8)
        count = placement.collect(store.rows, self.clock, self.round, keys, versions, flags, owners, slots)
        most = min(_MOST_KEYS, most_keys(store.width))
        for owner in np.unique(owners[:count]):
            replicas = np.flatnonzero(owners[:count] == owner)
            for start in range(0, replicas.shape[0], most):
                chosen = replicas[start : start + most]
                deltas = np.empty((int((flags[chosen] & DIRTY).sum()), store.width), np.float32)
                placement.take_deltas(store.rows, slots[chosen], deltas)
                arrays: list[NDArray[Any]] = [keys[chosen], versions[chosen], flags[chosen], deltas]
                outbox.append((int(owner), Message(Kind.SYNC, table, self.rank, self.round, 0, arrays)))
        return count

    def _answered(self, number: int, keys: int) -> None:
        """Notes that keys of a round have been answered."""
        entry = self._open[number]
        entry[0] -= keys
        if not entry[0]:
            del self._open[number]
            if entry[1] is not None:
                self.timing.observe(entry[1], self.clock)

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
        store, rows, (wanted,) = self._serve(message, outbox)
        if not (count := rows.shape[0]):
            return
        store.make_directory_room(count)
        keys, versions, moves, masks = np.empty_like(wanted), *np.empty((2, count), np.int32), np.empty_like(wanted)
        values = np.empty((count, store.width), np.float32)
        moved = placement.serve_intent(
            store.rows, message.origin, self.clock, self.technique, wanted, rows, keys, versions, moves, masks, values
        )
        if moved < count:
            self.counts["replicated"] += count - moved
            self._answer(Kind.REPLICA, message, [keys[moved:], versions[moved:], values[moved:]], outbox)
        if moved:
            arrays = [keys[:moved], versions[:moved], moves[:moved], masks[:moved], values[:moved]]
            self.counts["moved"] += moved
            self._answer(Kind.MOVE, message, arrays, outbox)

    def _answer(self, kind: Kind, message: Message, arrays: list[NDArray[Any]], outbox: Outbox) -> None:
        outbox.append((message.origin, Message(kind, message.table, self.rank, message.request, 0, arrays)))

    def _on_replica(self, sender: int, message: Message, outbox: Outbox) -> None:
        placement.install(self.stores[message.table].rows, sender, *message.arrays)
        self._answered(message.request, message.arrays[0].shape[0])

    def _on_move(self, sender: int, message: Message, outbox: Outbox) -> None:
        keys, versions, moves, masks, values = message.arrays
        store = self.stores[message.table]
        store.make_directory_room(keys.shape[0])
        placement.own(store.rows, self.rank, keys, versions, moves, masks, values)
        self._answered(message.request, keys.shape[0])
        if self.sites == 2:
            return  # the home is here or there
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
        count = keys.shape[0]
        codes, moves = np.empty(count, np.int8), np.empty(count, np.int32)
        values = np.empty((count, store.width), np.float32)
        sent, moved = placement.serve_sync(
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
            values,
        )
        if moved:
            chosen = np.flatnonzero(codes == MOVED)[::-1]  # their values stand at the end
            parts = [keys[chosen], versions[chosen], moves[chosen], np.zeros(moved, np.int64), values[count - moved :]]
            self.counts["moved"] += moved
            self._answer(Kind.MOVE, message, parts, outbox)
        away = codes == AWAY
        answered = codes < MOVED
        if answered.any():
            self._answer(
                Kind.SYNCED, message, [keys[answered], codes[answered], versions[answered], values[:sent]], outbox
            )
        if away.any():
            dirty = (flags & DIRTY).astype(np.bool_)
            places = np.cumsum(dirty) - 1
            for target in np.unique(targets[away]):
                chosen = away & (targets == target)
                arrays = [keys[chosen], versions[chosen], flags[chosen], deltas[places[chosen & dirty]]]
                outbox.append(
                    (int(target), Message(Kind.SYNC, message.table, message.origin, message.request, 0, arrays))
                )

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
        if again.shape[0]:
            _, targets = store.locate(self.rank, self.sites, again)
            messages = self._spread(Kind.INTENT, message.table, self.rank, message.request, targets, again)
            self._after_pushes(messages, outbox)
        self._answered(message.request, keys.shape[0] - again.shape[0])
