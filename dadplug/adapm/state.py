"""State shared by the parts of a site's engine: stores, requests, and the distribution of messages to sites."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checks import check_message
from .messages import Kind, Message, most_keys
from .requests import Request
from .rows import Block, Keys
from .store import Store

COUNTS = ("pulled", "pulled_remotely", "pushed", "pushed_remotely", "moved", "replicated")
Outbox = list[tuple[int, Message]]
Handler = Callable[[int, Message, Outbox], None]


class SiteState:
    """Stores and requests of one site. Methods that change them hold the lock.

    Args:
        rank: this site.
        sites: number of sites, at most 62.
        send: function that sends a message to another site. Messages may arrive late and out of order, each once.
    """

    def __init__(self, rank: int, sites: int, send: Callable[[int, Message], None]) -> None:
        self.rank, self.sites = rank, sites
        self.stores: list[Store] = []
        self.clock = 0
        self.counts = dict.fromkeys(COUNTS, 0)
        self._send = send
        self._lock = threading.Lock()
        self._last_request = 0
        self._requests: dict[int, Request] = {}
        self._unapplied: dict[int, Request] = {}  # pushes and sets, by number
        self._held: deque[tuple[int, Outbox]] = deque()
        self._drops = 0  # number of replies that dropped replicas
        self._handlers: dict[Kind, Handler] = {}

    @property
    def waits(self) -> bool:
        """Whether a request is open."""
        return bool(self._requests)

    def add_store(self, store: Store) -> None:
        """Add a table; tables are numbered in the order of these calls."""
        store.clock = lambda: self.clock
        with self._lock:
            self.stores.append(store)

    def owned(self, table: int) -> tuple[Keys, Block]:
        """Return copies of the keys owned by this site, and of their values."""
        with self._lock:
            return self.stores[table].owned()

    def release(self) -> None:
        """End the wait of all requests, since no more replies will arrive."""
        with self._lock:
            for request in self._requests.values():
                request.done.set()

    def receive(self, sender: int, message: Message) -> None:
        """Handle a message from another site.

        Raises:
            ProtocolError: if it does not fit the tables and requests of this site. Nothing has been changed.
        """
        self._handle(sender, message, check=True)

    def _handle(self, sender: int, message: Message, check: bool) -> None:
        outbox: Outbox = []
        with self._lock:
            if check:
                check_message(message, self.stores, self._requests)
            self._handlers[message.kind](sender, message, outbox)
        self._post(outbox)

    def _post(self, outbox: Outbox) -> None:
        for target, message in outbox:
            if target == self.rank:
                self._handle(self.rank, message, check=False)
            else:
                self._send(target, message)

    def _number(self, request: Request) -> int:
        self._last_request += 1
        self._requests[self._last_request] = request
        return self._last_request

    def _after_pushes(self, messages: Outbox, outbox: Outbox) -> None:
        """Send messages once all pushes sent so far have been confirmed."""
        if self._unapplied:
            self._held.append((self._last_request, messages))
        else:
            outbox.extend(messages)

    def _spread(
        self, kind: Kind, table: int, origin: int, request: int, targets: NDArray[np.int8], *arrays: NDArray[Any]
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

    def _serve(self, message: Message, outbox: Outbox) -> tuple[Store, NDArray[np.int32], list[NDArray[Any]]]:
        """Find the rows of a message's keys, and forward the part of the message that belongs to other sites.

        Returns:
            The store, the rows of the keys owned by this site, and the part of the message's arrays for these keys.
        """
        store = self.stores[message.table]
        where, targets, away_count = store.located(self.rank, self.sites, message.arrays[0])
        if not away_count:
            return store, where, message.arrays
        here = where >= 0
        away = ~here
        parts = [array[away] for array in message.arrays]
        outbox.extend(self._spread(message.kind, message.table, message.origin, message.request, targets[away], *parts))
        return store, where[here], [array[here] for array in message.arrays]
