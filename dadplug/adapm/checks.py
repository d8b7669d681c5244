"""Checks of the contents of messages from other sites: kernels trust what they index."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import kernels
from .lookup import states_of
from .messages import Kind, Message, ProtocolError
from .requests import PullRequest
from .rows import DIRTY, REPLICA, REQUESTED, VALUE

if TYPE_CHECKING:
    from .state import SiteState

# Answers to intents and rounds, with the lowest and the highest of the states that their keys have here.
_STATES = {Kind.REPLICA: (REQUESTED, REQUESTED), Kind.MOVE: (REQUESTED, REPLICA), Kind.SYNCED: (REPLICA, REPLICA)}


def check_message(site: SiteState, message: Message) -> None:
    """Check what a message says against what this site has, and has asked for.

    Raises:
        ProtocolError: if it does not fit; nothing has been changed.
    """
    kind, arrays = message.kind, message.arrays
    if kind in (Kind.PULLED, Kind.APPLIED):
        _check_answer(site, message)
        return
    store = site.stores[message.table]
    if kernels.first_bad_key(arrays[0], store.limit) >= 0:
        raise ProtocolError(f"{kind.name} with a key out of range of table {message.table}")
    if kind is Kind.SYNC and np.count_nonzero(arrays[2] & DIRTY) != arrays[3].shape[0]:
        raise ProtocolError("SYNC with another number of deltas than its flags say")
    if kind is Kind.SYNCED and np.count_nonzero(arrays[1] == VALUE) != arrays[3].shape[0]:
        raise ProtocolError("SYNCED with another number of values than its codes say")
    if kind in _STATES:
        lowest, highest = _STATES[kind]
        states = np.empty(arrays[0].shape[0], np.int8)
        states_of(store.rows.finder, store.rows.states, arrays[0], states)
        if states.min() < lowest or states.max() > highest:
            raise ProtocolError(f"{kind.name} for a key that this site has not asked for")


def _check_answer(site: SiteState, message: Message) -> None:
    request = site.request(message.request)
    pulled = message.kind is Kind.PULLED
    count = message.arrays[0].shape[0] if pulled else message.extra
    if request is None or not 0 < count <= request.remaining or isinstance(request, PullRequest) is not pulled:
        raise ProtocolError(f"{message.kind.name} for {count} keys that this site has not asked for")
    if isinstance(request, PullRequest):
        positions = message.arrays[0].view(np.uint32)  # a negative one is out of range, too
        if request.table != message.table or positions.max() >= request.out.shape[0]:
            raise ProtocolError("PULLED with values for places that this site has not asked for")
