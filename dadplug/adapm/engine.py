"""State machine of one site, without threads or network: intents, rounds and placement.

The protocol is described in `dadplug.adapm.messages`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import placement, synchronisation
from .access import Access
from .interfaces import TableEngine
from .messages import Kind, Message, most_keys
from .requests import Flush
from .rows import Keys
from .state import Outbox
from .states import ReplicaFlag, SyncCode, Technique
from .timing import ActionTiming

TECHNIQUES = {
    "all": Technique.RELOCATE_OR_REPLICATE,
    "replication_only": Technique.REPLICATE,
    "relocation_only": Technique.RELOCATE,
    "static": Technique.STAY,
}
_MOST_KEYS = 2048  # in a SYNC: while an owner serves it, its workers wait for the lock


class _OpenRound:
    """A round whose replies have not all arrived.

    Args:
        pending: number of keys without a reply.
        begin: clock at the check of intents before the one that began the round; None for a synchronisation round.
    """

    __slots__ = ("begin", "pending")

    def __init__(self, pending: int, begin: int | None) -> None:
        self.pending, self.begin = pending, begin


class Engine(Access, TableEngine):
    """State of one site: stores, requests and intents.

    Any thread may call its methods. They hold one lock, and release the GIL while they hold it.

    Args:
        rank: this site.
        sites: number of sites, at most 62.
        technique: one of `TECHNIQUES`.
        send: function that sends a message to another site. Messages may arrive late and out of order, each once.
    """

    def __init__(self, rank: int, sites: int, technique: str, send: Callable[[int, Message], None]) -> None:
        super().__init__(rank, sites, send)
        self.technique = TECHNIQUES[technique].value  # numba takes longer to find the type of an enumeration
        self.round = 0
        self.timing = ActionTiming()
        self._intents: list[tuple[int, int, int, int, Keys]] = []  # heap: start, order, end, table, keys
        self._intent_order = 0
        self._checked = 0  # clock at the last check of intents
        self._sync_round = 0
        self._open_rounds: dict[int, _OpenRound] = {}
        self._handlers |= {
            Kind.INTENT: self._on_intent,
            Kind.REPLICA: self._on_replica,
            Kind.MOVE: self._on_move,
            Kind.SYNC: self._on_sync,
            Kind.SYNCED: self._on_synced,
            Kind.OWNER: self._on_owner,
        }

    def intend(self, table: int, keys: Keys, start: int, end: int) -> bool:
        """Record that this site will use keys while ``start <= clock < end``.

        Returns:
            Whether no other intent is recorded, so that the background thread has to be woken up.
        """
        if self.sites == 1 or self.technique == Technique.STAY:
            return False
        with self._lock:
            self._intent_order += 1
            heapq.heappush(self._intents, (start, self._intent_order, end, table, keys))
            return len(self._intents) == 1

    # Rounds

    @property
    def intends(self) -> bool:
        """Whether intents are left that have not been acted on."""
        return bool(self._intents)

    @property
    def replicas(self) -> int:
        """Number of keys of all tables that are replicated or requested at this site."""
        return sum(store.replicas for store in self.stores)

    @property
    def round_over(self) -> bool:
        """Whether all rounds so far have been answered."""
        return not self._open_rounds

    @property
    def sync_over(self) -> bool:
        """Whether the last synchronisation round has been answered."""
        return self._sync_round not in self._open_rounds

    def run_round(self) -> None:
        """Act on the intents that are due, and begin a synchronisation round."""
        self.act()
        self.synchronise()

    def act(self) -> None:
        """Request the keys of the intents that are due."""
        before, self._checked = self._checked, self.clock
        if not self._intents or self._intents[0][0] > self.clock + self.timing.window:
            return
        self.round += 1
        while (outbox := self._act_on_next(before)) is not None:  # workers may take the lock between two intents
            self._post(outbox)

    def _act_on_next(self, before: int) -> Outbox | None:
        with self._lock:
            if not self._intents or self._intents[0][0] > self.clock + self.timing.window:
                return None
            _, _, end, table, keys = heapq.heappop(self._intents)
            outbox: Outbox = []
            if end > self.clock and (asked := self._request_keys(table, keys, end, outbox)):
                self._open_rounds.setdefault(self.round, _OpenRound(0, before)).pending += asked
            return outbox

    def synchronise(self) -> None:
        """Begin a synchronisation round of all replicas that have no message in flight."""
        outbox: Outbox = []
        with self._lock:
            self.round += 1
            asked = sum(self._sync(table, outbox) for table in range(len(self.stores)))
            if asked:
                self._sync_round = self.round
                self._open_rounds[self.round] = _OpenRound(asked, None)
        self._post(outbox)

    def _request_keys(self, table: int, keys: Keys, end: int, outbox: Outbox) -> int:
        store = self.stores[table]
        where, targets = store.locate(self.rank, self.sites, keys)
        store.make_room(keys.shape[0], keys.shape[0])
        wanted, asked = np.empty_like(keys), np.empty_like(targets)
        count: int = placement.request_keys(store.rows, keys, where, targets, end, self.round, wanted, asked)
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
        count: int = synchronisation.collect_replica_updates(
            store.rows, self.clock, self.round, keys, versions, flags, owners, slots
        )
        most = min(_MOST_KEYS, most_keys(store.width))
        for owner in np.unique(owners[:count]):
            replicas = np.flatnonzero(owners[:count] == owner)
            for start in range(0, replicas.shape[0], most):
                chosen = replicas[start : start + most]
                deltas = np.empty((int((flags[chosen] & ReplicaFlag.DIRTY).sum()), store.width), np.float32)
                synchronisation.take_deltas(store.rows, slots[chosen], deltas)
                arrays: list[NDArray[Any]] = [keys[chosen], versions[chosen], flags[chosen], deltas]
                outbox.append((int(owner), Message(Kind.SYNC, table, self.rank, self.round, 0, arrays)))
        return count

    def _record_replies(self, number: int, keys: int) -> None:
        """Record that replies for some keys of a round have arrived."""
        entry = self._open_rounds[number]
        entry.pending -= keys
        if not entry.pending:
            del self._open_rounds[number]
            if entry.begin is not None:
                self.timing.observe(entry.begin, self.clock)

    def begin_flush(self) -> Flush:
        """Begin a flush: keys of intents that have begun come, pushes reach the owners, and replicas are refreshed."""
        with self._lock:
            return Flush(self._intent_order, self.round + 1)

    def flushed(self, flush: Flush) -> bool:
        """Return whether a flush is complete; the caller has to run rounds meanwhile."""
        with self._lock:
            if flush.intents is not None:
                if any(start <= self.clock and order <= flush.intents for start, order, *_ in self._intents):
                    return False
                flush.intents, flush.since = None, self.round + 1
            if flush.last is None:
                if any(synchronisation.count_pending(store.rows, flush.since) for store in self.stores):
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
        placement.install_replicas(self.stores[message.table].rows, sender, *message.arrays)
        self._record_replies(message.request, message.arrays[0].shape[0])

    def _on_move(self, sender: int, message: Message, outbox: Outbox) -> None:
        keys, versions, moves, masks, values = message.arrays
        store = self.stores[message.table]
        store.make_directory_room(keys.shape[0])
        placement.take_ownership(store.rows, self.rank, keys, versions, moves, masks, values)
        self._record_replies(message.request, keys.shape[0])
        if self.sites == 2:
            return  # the home is one of the two sites that know already
        homes = keys % self.sites
        elsewhere = (homes != self.rank) & (homes != sender)
        if elsewhere.any():
            arrays = keys[elsewhere], moves[elsewhere]
            targets = homes[elsewhere].astype(np.int8)
            outbox.extend(self._spread(Kind.OWNER, message.table, self.rank, 0, targets, *arrays))

    def _on_owner(self, sender: int, message: Message, outbox: Outbox) -> None:
        store = self.stores[message.table]
        keys, moves = message.arrays
        store.make_directory_room(keys.shape[0])
        placement.update_directory(store.rows, keys, moves, message.origin)

    def _on_sync(self, sender: int, message: Message, outbox: Outbox) -> None:
        keys, versions, flags, deltas = message.arrays
        store = self.stores[message.table]
        where, targets = store.locate(self.rank, self.sites, keys)
        store.make_directory_room(keys.shape[0])
        count = keys.shape[0]
        codes, moves = np.empty(count, np.int8), np.empty(count, np.int32)
        values = np.empty((count, store.width), np.float32)
        sent, moved = synchronisation.serve_sync(
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
            chosen = np.flatnonzero(codes == SyncCode.MOVED)[::-1]  # their values are at the end
            parts = [keys[chosen], versions[chosen], moves[chosen], np.zeros(moved, np.int64), values[count - moved :]]
            self.counts["moved"] += moved
            self._answer(Kind.MOVE, message, parts, outbox)
        away = codes == SyncCode.AWAY
        answered = codes < SyncCode.MOVED
        if answered.any():
            self._answer(
                Kind.SYNCED, message, [keys[answered], codes[answered], versions[answered], values[:sent]], outbox
            )
        if away.any():
            dirty = (flags & ReplicaFlag.DIRTY).astype(np.bool_)
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
        self._drops += int((codes == SyncCode.DROPPED).any())
        after = np.empty(keys.shape[0], np.int8)
        rest = np.empty((keys.shape[0], store.width), np.float32)
        left = synchronisation.apply_sync_reply(
            store.rows, sender, self.clock, self.round, keys, codes, versions, values, after, rest
        )
        if left:
            self._push(message.table, keys[after == ReplicaFlag.DIRTY], rest[:left], outbox)
        again = keys[after == ReplicaFlag.DROP]
        if again.shape[0]:
            _, targets = store.locate(self.rank, self.sites, again)
            messages = self._spread(Kind.INTENT, message.table, self.rank, message.request, targets, again)
            self._after_pushes(messages, outbox)
        self._record_replies(message.request, keys.shape[0] - again.shape[0])
