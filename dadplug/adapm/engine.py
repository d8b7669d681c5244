"""State machine of one site, without threads or connections: values, intents, rounds and placement.

The protocol is described in `dadplug.adapm.messages`.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ProtocolError
from ..lowrank.rows import first_outside, gather
from . import kernels
from .backends import Done, TableEngine
from .kernels import AWAY, DIRTY, DROP, DROPPED, MOVED, RELOCATE, RELOCATE_OR_REPLICATE, REPLICATE, STAY, VALUE
from .messages import Message, MessageKind, most_keys
from .store import REPLICA, REQUESTED, Block, Codes, Keys, Numbers, Store

TECHNIQUES = {
    "all": RELOCATE_OR_REPLICATE,
    "replication_only": REPLICATE,
    "relocation_only": RELOCATE,
    "static": STAY,
}
COUNTS = ("pulled", "pulled_remotely", "pushed", "pushed_remotely", "moved", "replicated")
_MOST_KEYS = 2048  # in a SYNC: while an owner serves it, its workers wait for the lock

# Replies to intents and rounds, with the lowest and the highest state that their keys may have at this site.
_STATES = {
    MessageKind.REPLICA: (REQUESTED, REQUESTED),
    MessageKind.MOVE: (REQUESTED, REPLICA),
    MessageKind.SYNCED: (REPLICA, REPLICA),
}
_UNIQUE = {*_STATES, MessageKind.INTENT, MessageKind.SYNC}  # change rows, and have each key once

QUANTILE = 0.9999
SMOOTHING = 0.1
START = 10.0  # ticks, before the first measurement

Outbox = list[tuple[int, Message]]


class RowRequest:
    """Pull, push or set that waits for other sites.

    Args:
        kind: PULL, PUSH or SET.
        table: number of the table.
        keys: n keys that other sites have.
        block: values to set, kept for the replicas at this site; of a pull the room that replies overwrite.
        positions: of a pull, n rows of `block`.
        drops: number of dropped replicas before a pull, if a key was REQUESTED then; otherwise None.

    Attributes:
        done: set when all replies have arrived, or none will arrive any more.
        remaining: number of keys without a reply.
    """

    def __init__(
        self,
        kind: MessageKind,
        table: int,
        keys: Keys,
        block: Any = None,
        positions: Any = None,
        drops: int | None = None,
    ) -> None:
        self.kind, self.table, self.keys, self.block = kind, table, keys, block
        self.positions, self.drops = positions, drops
        self.done = Done()
        self.remaining = keys.shape[0]


@dataclass(slots=True)
class _OpenRound:
    """A round whose replies have not all arrived.

    Attributes:
        pending: number of keys without a reply.
        begin: clock at the check of intents before the one that began the round; None for a synchronisation round.
    """

    pending: int
    begin: int | None


@dataclass
class Flush:
    """State of a flush: it waits until intents are acted on, for a later round, and for the pushes sent until then.

    Attributes:
        intents: number of intents that have been recorded; those that have begun are waited for. None if none is left.
        since: number of the first round that counts.
        last: number of the last request that is waited for; None until a round has been completed.
    """

    intents: int | None
    since: int
    last: int | None = None


class ActionTiming:
    """Estimator of the number of clock ticks between a decision to act on an intent and its effect.

    After AdaPM (Renz-Wieland et al., arXiv:2206.00470): an intent is due if it starts within the 0.9999 quantile of a
    Poisson variable. There its mean is twice the ticks of a round. Here it is the measured number of ticks from one
    check of the intents to the arrival of the keys requested at the next check, since an intent that has just missed a
    check waits that long. The mean follows an increase at once and a decrease slowly.

    Attributes:
        window: an intent is due if it starts at most this many ticks ahead.
    """

    def __init__(self) -> None:
        self._mean = START
        self._clock = 0
        self.window = poisson_quantile(START)

    def observe(self, begin: int, clock: int) -> None:
        """Add a measurement.

        Args:
            begin: clock at the check before the one that requested the keys.
            clock: clock at the arrival of the keys.
        """
        ticks = clock - begin
        if clock != self._clock:  # a worker that rests (validation, a pause) gives no measurement
            self._mean = max(ticks, self._mean + SMOOTHING * (ticks - self._mean))
        self._clock = clock
        self.window = poisson_quantile(self._mean)


def poisson_quantile(rate: float, quantile: float = QUANTILE) -> int:
    """Return the smallest k with ``P(X <= k) >= quantile`` for a Poisson variable X of a rate."""
    if rate > 1000:  # normal approximation, since exp(-rate) would underflow
        return math.ceil(rate + 3.72 * math.sqrt(rate))
    term = total = math.exp(-rate)
    k = 0
    while total < quantile and k < rate + 100 + 10 * math.sqrt(rate):
        k += 1
        term *= rate / k
        total += term
    return k


class Engine(TableEngine):
    """State of one site: stores, requests and intents.

    Any thread may call its methods. They hold one lock, and release the GIL while they hold it.

    Args:
        rank: this site.
        sites: number of sites, at most 62.
        technique: one of `TECHNIQUES`.
        send: function that sends a message to another site. Messages may arrive late and out of order, each once.

    Attributes:
        intents: heap of the intents that have not been acted on: start, order, end, table and keys.
        requests: open requests by number.
    """

    def __init__(self, rank: int, sites: int, technique: str, send: Callable[[int, Message], None]) -> None:
        self.rank, self.sites = rank, sites
        self.technique = TECHNIQUES[technique]
        self.stores: list[Store] = []
        self.clock = 0
        self.counts = dict.fromkeys(COUNTS, 0)
        self.timing = ActionTiming()
        self.intents: list[tuple[int, int, int, int, Keys]] = []
        self.requests: dict[int, RowRequest] = {}
        self._send = send
        self._lock = threading.Lock()
        self._last_request = 0
        self._unapplied: dict[int, RowRequest] = {}  # pushes and sets, by number
        self._held: deque[tuple[int, Outbox]] = deque()
        self._drops = 0  # number of replies that dropped replicas
        self._intent_order = 0
        self._checked = 0  # clock at the last check of intents
        self._round = self._sync_round = 0
        self._open_rounds: dict[int, _OpenRound] = {}
        self._handlers: dict[MessageKind, Callable[[int, Message, Outbox], None]] = {
            MessageKind.PULL: self._on_pull,
            MessageKind.PULLED: self._on_pulled,
            MessageKind.PUSH: self._on_change,
            MessageKind.SET: self._on_change,
            MessageKind.APPLIED: self._on_applied,
            MessageKind.INTENT: self._on_intent,
            MessageKind.REPLICA: self._on_replica,
            MessageKind.MOVE: self._on_move,
            MessageKind.SYNC: self._on_sync,
            MessageKind.SYNCED: self._on_synced,
            MessageKind.OWNER: self._on_owner,
        }

    def add_store(self, store: Store) -> None:
        """Add a table; tables are numbered in the order of these calls."""
        store.clock = lambda: self.clock
        with self._lock:
            self.stores.append(store)

    def release(self) -> None:
        """End the wait of all requests, since no more replies will arrive."""
        with self._lock:
            for request in self.requests.values():
                request.done.set()

    # Messages

    def receive(self, sender: int, message: Message) -> None:
        """Handle a message from another site.

        Raises:
            ProtocolError: if it does not fit the tables and requests of this site. Nothing has been changed.
        """
        outbox: Outbox = []
        with self._lock:
            self._check(message)
            self._handlers[message.kind](sender, message, outbox)
        self._post(outbox)

    def _check(self, message: Message) -> None:
        """Check a message, whose sizes fit, against the tables and requests: kernels do not check what they index.

        Those that use the keys of a PULL and the positions of a PULLED do.
        """
        kind, arrays = message.kind, message.arrays
        if kind is MessageKind.PULL:
            return
        if kind in (MessageKind.PULLED, MessageKind.APPLIED):
            self._check_reply(message)
            return
        store = self.stores[message.table]
        if first_outside(arrays[0], store.limit) >= 0:
            raise ProtocolError(f"{kind.name} with a key out of range of table {message.table}")
        if kind is MessageKind.SYNC and np.count_nonzero(arrays[2] & DIRTY) != arrays[3].shape[0]:
            raise ProtocolError("SYNC whose number of deltas differs from its flags")
        if kind is MessageKind.SYNCED and np.count_nonzero(arrays[1] == VALUE) != arrays[3].shape[0]:
            raise ProtocolError("SYNCED whose number of values differs from its codes")
        if kind in _STATES:
            lowest, highest = _STATES[kind]
            states = np.empty(arrays[0].shape[0], np.int8)
            kernels.states_of(store.rows.finder, store.rows.states, arrays[0], states)
            if states.min() < lowest or states.max() > highest:
                raise ProtocolError(f"{kind.name} for a key that this site has not asked for")
            opened = self._open_rounds.get(message.request)
            if opened is None or opened.pending < states.shape[0]:
                raise ProtocolError(
                    f"{kind.name} for more keys than this site has asked for in round {message.request}"
                )
        if kind in _UNIQUE and np.unique(arrays[0]).shape != arrays[0].shape:
            raise ProtocolError(f"{kind.name} with a key that occurs twice")
        if kind is MessageKind.MOVE and not (0 <= arrays[3].min() <= arrays[3].max() < 1 << self.sites):
            raise ProtocolError(f"MOVE with replicas at sites beyond {self.sites}")

    def _check_reply(self, message: Message) -> None:
        request = self.requests.get(message.request)
        pulled = message.kind is MessageKind.PULLED
        count = message.arrays[0].shape[0] if pulled else message.extra
        if request is None or not 0 < count <= request.remaining or (request.kind is MessageKind.PULL) is not pulled:
            raise ProtocolError(f"{message.kind.name} for {count} keys that this site has not asked for")
        if pulled and request.table != message.table:
            raise ProtocolError("PULLED of another table than this site has asked for")

    def _post(self, outbox: Outbox) -> None:
        for target, message in outbox:
            if target == self.rank:
                self.receive(self.rank, message)
            else:
                self._send(target, message)

    def _number(self, request: RowRequest) -> int:
        self._last_request += 1
        self.requests[self._last_request] = request
        return self._last_request

    def _after_pushes(self, messages: Outbox, outbox: Outbox) -> None:
        """Send messages once all pushes sent so far have been confirmed."""
        if self._unapplied:
            self._held.append((self._last_request, messages))
        else:
            outbox.extend(messages)

    def _answer(
        self,
        kind: MessageKind,
        message: Message,
        outbox: Outbox,
        arrays: list[NDArray[Any]] | None = None,
        extra: int = 0,
    ) -> None:
        """Reply to the site that has sent a message first."""
        reply = Message(kind, message.table, self.rank, message.request, extra, arrays or [])
        outbox.append((message.origin, reply))

    def _spread(
        self, kind: MessageKind, table: int, origin: int, request: int, targets: Codes, *arrays: NDArray[Any]
    ) -> Outbox:
        """Split arrays by target site, and into messages of at most `most_keys` keys."""
        outbox: Outbox = []
        most = most_keys(self.stores[table].width)
        if targets.shape[0] == 1 or (targets == targets[0]).all():
            parts_of = {int(targets[0]): list(arrays)}
        else:
            parts_of = {int(site): [array[targets == site] for array in arrays] for site in np.unique(targets)}
        for target, parts in parts_of.items():
            if parts[0].shape[0] <= most:
                outbox.append((target, Message(kind, table, origin, request, 0, parts)))
                continue
            for start in range(0, parts[0].shape[0], most):
                piece = [part[start : start + most] for part in parts]
                outbox.append((target, Message(kind, table, origin, request, 0, piece)))
        return outbox

    def _serve(self, message: Message, outbox: Outbox) -> tuple[Store, Numbers, list[NDArray[Any]]]:
        """Find the rows of a message's keys, and forward the part of the message that belongs to other sites.

        Returns:
            The store, the rows of the keys owned by this site, and the part of the message's arrays for these keys.
        """
        store = self.stores[message.table]
        where, targets, away_count = store.locate(self.rank, self.sites, message.arrays[0])
        if not away_count:
            return store, where, message.arrays
        here = where >= 0
        away = ~here
        parts = [array[away] for array in message.arrays]
        outbox.extend(self._spread(message.kind, message.table, message.origin, message.request, targets[away], *parts))
        return store, where[here], [array[here] for array in message.arrays]

    # Pulls, pushes and sets

    def pull(self, table: int, keys: Keys, out: Block) -> int | Done | None:
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
        return None if request is None else request.done

    def _pull_rest(self, table: int, keys: Keys, positions: Numbers, out: Block, outbox: Outbox) -> RowRequest | None:
        store = self.stores[table]
        where, targets, away_count = store.locate(self.rank, self.sites, keys)
        if away_count < keys.shape[0]:
            here = where >= 0
            kernels.scatter_rows(_taken(store.rows.values, where[here]), positions[here], out)
            away = ~here
            keys, positions, targets = keys[away], positions[away], targets[away]
        return self._ask(table, keys, positions, targets, out, outbox) if keys.shape[0] else None

    def _ask(
        self, table: int, keys: Keys, positions: Numbers, targets: Codes, out: Block, outbox: Outbox
    ) -> RowRequest:
        """Send a pull to other sites."""
        self.counts["pulled_remotely"] += keys.shape[0]
        store = self.stores[table]
        buffered = store.replicas and kernels.any_requested(store.rows, keys)
        request = RowRequest(MessageKind.PULL, table, keys, out, positions, self._drops if buffered else None)
        number = self._number(request)
        self._after_pushes(self._spread(MessageKind.PULL, table, self.rank, number, targets, keys, positions), outbox)
        return request

    def push(self, table: int, keys: Keys, deltas: Block) -> Done | None:
        outbox: Outbox = []
        with self._lock:
            self.counts["pushed"] += keys.shape[0]
            done = self._push(table, keys, deltas, outbox)
        self._post(outbox)
        return done

    def _push(self, table: int, keys: Keys, deltas: Block, outbox: Outbox) -> Done | None:
        store = self.stores[table]
        where = np.empty(keys.shape[0], np.int32)
        missing = kernels.add(store.rows, keys, deltas, where)
        store.touch(where)
        if not missing:
            return None
        rest = np.flatnonzero(where < 0).astype(np.int32)
        keys, deltas = keys[rest], _taken(deltas, rest)
        where, targets, away_count = store.locate(self.rank, self.sites, keys)
        if away_count < keys.shape[0]:
            here = where >= 0
            kernels.add_owned(store.rows, where[here], deltas[here])
            if not away_count:
                return None
            away = np.flatnonzero(~here).astype(np.int32)
            keys, deltas, targets = keys[away], _taken(deltas, away), targets[away]
        self.counts["pushed_remotely"] += away_count
        return self._send_change(MessageKind.PUSH, table, targets, keys, deltas, outbox)

    def set(self, table: int, keys: Keys, values: Block) -> tuple[bool, Done | None]:
        outbox: Outbox = []
        with self._lock:
            store = self.stores[table]
            if kernels.any_requested(store.rows, keys):
                return False, None
            where, targets, away_count = store.locate(self.rank, self.sites, keys)
            here = where >= 0
            kernels.assign(store.rows, where[here], values[here])
            if not away_count:
                return True, None
            away = ~here
            done = self._send_change(MessageKind.SET, table, targets[away], keys[away], values[away], outbox)
        self._post(outbox)
        return True, done

    def _send_change(
        self, kind: MessageKind, table: int, targets: Codes, keys: Keys, block: Block, outbox: Outbox
    ) -> Done:
        request = RowRequest(kind, table, keys, block if kind is MessageKind.SET else None)
        number = self._number(request)
        self._unapplied[number] = request
        outbox.extend(self._spread(kind, table, self.rank, number, targets, keys, block))
        return request.done

    def here(self, table: int, keys: Keys) -> NDArray[np.bool_]:
        """Return for each key whether this site can read it; no row is created, and no site is asked."""
        found = np.empty(keys.shape[0], np.int8)
        with self._lock:
            kernels.readable(self.stores[table].rows, self.rank, self.sites, keys, found)
        return found.view(np.bool_)

    def states(self, table: int, keys: Keys) -> Codes:
        """Return the states of keys as `dadplug.adapm.store.KeyState`, -1 for absent keys."""
        found = np.empty(keys.shape[0], np.int8)
        with self._lock:
            rows = self.stores[table].rows
            kernels.states_of(rows.finder, rows.states, keys, found)
        return found

    def owned(self, table: int) -> tuple[Keys, Block]:
        """Return copies of the keys owned by this site, and of their values."""
        with self._lock:
            return self.stores[table].owned()

    def nbytes(self, table: int) -> int:
        """Return the bytes of memory that this site has reserved for a table."""
        return self.stores[table].nbytes

    def _on_pull(self, sender: int, message: Message, outbox: Outbox) -> None:
        store = self.stores[message.table]
        keys, positions = message.arrays
        values = np.empty((keys.shape[0], store.width), np.float32)
        where, _, fresh, away, bad = store.read(self.rank, self.sites, True, keys, values)
        if bad >= 0:
            raise ProtocolError(f"PULL with a key out of range of table {message.table}")
        if fresh or away:
            store, rows, (_, positions) = self._serve(message, outbox)
            values = _taken(store.rows.values, rows)
        else:
            store.touch(where)
        if values.shape[0]:
            self._answer(MessageKind.PULLED, message, outbox, [positions, values])

    def _on_pulled(self, sender: int, message: Message, outbox: Outbox) -> None:
        request = self.requests[message.request]
        positions, values = message.arrays
        if not kernels.scatter_rows(values, positions, request.block):
            raise ProtocolError("PULLED with values for places that this site has not asked for")
        request.remaining -= positions.shape[0]
        if request.remaining:
            return
        keys, r = request.keys, self.stores[request.table].rows
        absent = np.empty(keys.shape[0], np.int8)
        gone = kernels.reconcile(r.finder, r.values, r.slots, r.dirty, keys, request.positions, request.block, absent)
        del self.requests[message.request]
        if gone and request.drops not in (None, self._drops):
            # A replica may have been created and dropped meanwhile, with pushes of this site that the reply lacks.
            again = absent.view(np.bool_)
            repeated = self._pull_rest(message.table, keys[again], request.positions[again], request.block, outbox)
            if repeated is not None:
                repeated.done = request.done
                return
        request.done.set()

    def _on_change(self, sender: int, message: Message, outbox: Outbox) -> None:
        store, rows, arrays = self._serve(message, outbox)
        if rows.shape[0]:
            change = kernels.add_owned if message.kind is MessageKind.PUSH else kernels.assign
            change(store.rows, rows, arrays[1])
            self._answer(MessageKind.APPLIED, message, outbox, extra=rows.shape[0])

    def _on_applied(self, sender: int, message: Message, outbox: Outbox) -> None:
        request = self.requests[message.request]
        request.remaining -= message.extra
        if request.remaining:
            return
        if request.kind is MessageKind.SET:
            kernels.overwrite_replicas(self.stores[request.table].rows, request.keys, request.block)
        del self.requests[message.request], self._unapplied[message.request]
        request.done.set()
        while self._held and (not self._unapplied or next(iter(self._unapplied)) > self._held[0][0]):
            outbox.extend(self._held.popleft()[1])

    # Intents and placement

    def intend(self, table: int, keys: Keys, start: int, end: int) -> bool:
        """Record that this site will use keys while ``start <= clock < end``.

        Returns:
            Whether no other intent is recorded, so that the background thread has to be woken up.
        """
        if self.sites == 1 or self.technique == STAY:
            return False
        with self._lock:
            self._intent_order += 1
            heapq.heappush(self.intents, (start, self._intent_order, end, table, keys))
            return len(self.intents) == 1

    def act(self) -> None:
        """Request the keys of the intents that are due."""
        before, self._checked = self._checked, self.clock
        if not self.intents or self.intents[0][0] > self.clock + self.timing.window:
            return
        self._round += 1
        while (outbox := self._act_on_next(before)) is not None:  # workers may take the lock between two intents
            self._post(outbox)

    def _act_on_next(self, before: int) -> Outbox | None:
        with self._lock:
            if not self.intents or self.intents[0][0] > self.clock + self.timing.window:
                return None
            _, _, end, table, keys = heapq.heappop(self.intents)
            outbox: Outbox = []
            if end > self.clock and (asked := self._request_keys(table, keys, end, outbox)):
                self._open_rounds.setdefault(self._round, _OpenRound(0, before)).pending += asked
            return outbox

    def _request_keys(self, table: int, keys: Keys, end: int, outbox: Outbox) -> int:
        store = self.stores[table]
        where, targets, _ = store.locate(self.rank, self.sites, keys)
        store.make_room(keys.shape[0], keys.shape[0])
        wanted, asked = np.empty_like(keys), np.empty_like(targets)
        count: int = kernels.request_keys(store.rows, keys, where, targets, end, self._round, wanted, asked)
        if count:
            messages = self._spread(MessageKind.INTENT, table, self.rank, self._round, asked[:count], wanted[:count])
            self._after_pushes(messages, outbox)
        return count

    def _on_intent(self, sender: int, message: Message, outbox: Outbox) -> None:
        store, rows, (wanted,) = self._serve(message, outbox)
        if not (count := rows.shape[0]):
            return
        store.make_directory_room(count)
        keys, versions, moves, masks = np.empty_like(wanted), *np.empty((2, count), np.int32), np.empty_like(wanted)
        values = np.empty((count, store.width), np.float32)
        moved = kernels.serve_intent(
            store.rows, message.origin, self.clock, self.technique, wanted, rows, keys, versions, moves, masks, values
        )
        self.counts["replicated"] += count - moved
        self.counts["moved"] += moved
        if moved < count:
            self._answer(MessageKind.REPLICA, message, outbox, [keys[moved:], versions[moved:], values[moved:]])
        if moved:
            arrays = [keys[:moved], versions[:moved], moves[:moved], masks[:moved], values[:moved]]
            self._answer(MessageKind.MOVE, message, outbox, arrays)

    def _on_replica(self, sender: int, message: Message, outbox: Outbox) -> None:
        kernels.install_replicas(self.stores[message.table].rows, sender, *message.arrays)
        self._record_replies(message.request, message.arrays[0].shape[0])

    def _on_move(self, sender: int, message: Message, outbox: Outbox) -> None:
        keys, _, moves, _, _ = message.arrays
        store = self.stores[message.table]
        store.make_directory_room(keys.shape[0])
        kernels.take_ownership(store.rows, self.rank, *message.arrays)
        self._record_replies(message.request, keys.shape[0])
        if self.sites == 2:
            return  # the home is one of the two sites that know already
        homes = keys % self.sites
        elsewhere = (homes != self.rank) & (homes != sender)
        if elsewhere.any():
            targets = homes[elsewhere].astype(np.int8)
            arrays = keys[elsewhere], moves[elsewhere]
            outbox.extend(self._spread(MessageKind.OWNER, message.table, self.rank, 0, targets, *arrays))

    def _on_owner(self, sender: int, message: Message, outbox: Outbox) -> None:
        store = self.stores[message.table]
        keys, moves = message.arrays
        store.make_directory_room(keys.shape[0])
        kernels.update_directory(store.rows, keys, moves, message.origin)

    # Synchronisation rounds

    @property
    def replicas(self) -> int:
        """Number of keys of all tables that are replicated or requested at this site."""
        return sum(store.replicas for store in self.stores)

    @property
    def sync_over(self) -> bool:
        """Whether the last synchronisation round has been answered."""
        return self._sync_round not in self._open_rounds

    def synchronise(self) -> None:
        """Begin a synchronisation round of all replicas that have no message in flight."""
        outbox: Outbox = []
        with self._lock:
            self._round += 1
            asked = sum(self._sync(table, outbox) for table in range(len(self.stores)))
            if asked:
                self._sync_round = self._round
                self._open_rounds[self._round] = _OpenRound(asked, None)
        self._post(outbox)

    def _sync(self, table: int, outbox: Outbox) -> int:
        store = self.stores[table]
        if not (size := store.replicas):
            return 0
        keys, versions, slots = np.empty(size, np.int64), np.empty(size, np.int32), np.empty(size, np.int32)
        flags, owners = np.empty(size, np.int8), np.empty(size, np.int8)
        count: int = kernels.collect_replica_updates(
            store.rows, self.clock, self._round, keys, versions, flags, owners, slots
        )
        most = min(_MOST_KEYS, most_keys(store.width))
        for owner in np.unique(owners[:count]):
            replicas = np.flatnonzero(owners[:count] == owner)
            for start in range(0, replicas.shape[0], most):
                chosen = replicas[start : start + most]
                deltas = np.empty((int((flags[chosen] & DIRTY).sum()), store.width), np.float32)
                kernels.take_deltas(store.rows, slots[chosen], deltas)
                arrays: list[NDArray[Any]] = [keys[chosen], versions[chosen], flags[chosen], deltas]
                outbox.append((int(owner), Message(MessageKind.SYNC, table, self.rank, self._round, 0, arrays)))
        return count

    def _record_replies(self, number: int, keys: int) -> None:
        """Record that replies for some keys of a round have arrived."""
        entry = self._open_rounds[number]
        entry.pending -= keys
        if not entry.pending:
            del self._open_rounds[number]
            if entry.begin is not None:
                self.timing.observe(entry.begin, self.clock)

    def _on_sync(self, sender: int, message: Message, outbox: Outbox) -> None:
        keys, versions, flags, deltas = message.arrays
        store, count = self.stores[message.table], keys.shape[0]
        where, targets, _ = store.locate(self.rank, self.sites, keys)
        store.make_directory_room(count)
        codes, moves = np.empty(count, np.int8), np.empty(count, np.int32)
        values = np.empty((count, store.width), np.float32)
        origin, technique = message.origin, self.technique
        sent, moved = kernels.serve_sync(
            store.rows, origin, self.clock, technique, where, flags, deltas, codes, versions, moves, values
        )
        if moved:
            chosen = np.flatnonzero(codes == MOVED)[::-1]  # their values are at the end
            parts = [keys[chosen], versions[chosen], moves[chosen], np.zeros(moved, np.int64), values[count - moved :]]
            self.counts["moved"] += moved
            self._answer(MessageKind.MOVE, message, outbox, parts)
        answered = codes < MOVED
        if answered.any():
            parts = [keys[answered], codes[answered], versions[answered], values[:sent]]
            self._answer(MessageKind.SYNCED, message, outbox, parts)
        away = codes == AWAY
        if away.any():
            dirty = (flags & DIRTY).astype(np.bool_)
            places = np.cumsum(dirty) - 1
            for target in np.unique(targets[away]):
                chosen = away & (targets == target)
                parts = [keys[chosen], versions[chosen], flags[chosen], deltas[places[chosen & dirty]]]
                forwarded = Message(MessageKind.SYNC, message.table, message.origin, message.request, 0, parts)
                outbox.append((int(target), forwarded))

    def _on_synced(self, sender: int, message: Message, outbox: Outbox) -> None:
        keys, codes, versions, values = message.arrays
        store = self.stores[message.table]
        self._drops += int((codes == DROPPED).any())
        after = np.empty(keys.shape[0], np.int8)
        rest = np.empty((keys.shape[0], store.width), np.float32)
        left = kernels.apply_sync_reply(
            store.rows, sender, self.clock, self._round, keys, codes, versions, values, after, rest
        )
        if left:
            self._push(message.table, keys[after == DIRTY], rest[:left], outbox)
        again = keys[after == DROP]
        if again.shape[0]:
            _, targets, _ = store.locate(self.rank, self.sites, again)
            messages = self._spread(MessageKind.INTENT, message.table, self.rank, message.request, targets, again)
            self._after_pushes(messages, outbox)
        self._record_replies(message.request, keys.shape[0] - again.shape[0])

    # Flushes

    def begin_flush(self) -> Flush:
        """Begin a flush: keys of intents that have begun come, pushes reach the owners, and replicas are refreshed."""
        with self._lock:
            return Flush(self._intent_order, self._round + 1)

    def flushed(self, flush: Flush) -> bool:
        """Return whether a flush is complete; the caller has to run rounds meanwhile."""
        with self._lock:
            if flush.intents is not None:
                if any(start <= self.clock and order <= flush.intents for start, order, *_ in self.intents):
                    return False
                flush.intents, flush.since = None, self._round + 1
            if flush.last is None:
                if any(kernels.count_pending(store.rows, flush.since) for store in self.stores):
                    return False
                flush.last = self._last_request
            return not self._unapplied or next(iter(self._unapplied)) > flush.last


def _taken(block: Block, rows: Numbers) -> Block:
    out = np.empty((rows.shape[0], block.shape[1]), np.float32)
    gather(block, rows, out)
    return out
