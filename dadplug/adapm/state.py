"""What the parts of a site's engine share: stores, requests, and how messages are spread over the sites."""

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
    """The state of one site: its stores and requests. What changes it holds the lock.

    Args:
        rank: this site.
        sites: number of sites, at most 62.
        send: hands a message to another site; it may be delivered late and out of order, but once.
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
        self._drops = 0  # answers that took replicas away
        self._handlers: dict[Kind, Handler] = {}

    @property
    def waits(self) -> bool:
        """Whether a request is under way."""
        return bool(self._requests)

    def add_store(self, store: Store) -> None:
        """Adds a table, numbered in the order in which they are added."""
        store.clock = lambda: self.clock
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

    def request(self, number: int) -> Request | None:
        """Return a request under way by its number."""
        return self._requests.get(number)

    def receive(self, sender: int, message: Message) -> None:
        """Take in a message from another site.

        Raises:
            ProtocolError: if it does not fit what this site has, or has asked for; nothing has been changed.
        """
        self._handle(sender, message, check=True)

    def _handle(self, sender: int, message: Message, check: bool) -> None:
        outbox: Outbox = []
        with self._lock:
            if check:
                check_message(self, message)
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
        """Sends messages once the pushes that have been sent until now are answered."""
        if self._unapplied:
            self._held.append((self._last_request, messages))
        else:
            outbox.extend(messages)

    def _spread(
        self, kind: Kind, table: int, origin: int, request: int, targets: NDArray[np.int8], *arrays: NDArray[Any]
    ) -> Outbox:
        """Split arrays over the sites that they go to, and into messages of at most as many keys as one may have."""
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
        """Finds the rows of a message's keys, and sends the part of the message on that belongs to another site.

        Returns:
            The store, the rows of the keys that are owned here, and that part of the message's arrays.
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
