"""Checks of the contents of messages from other sites: kernels do not check what they index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import ProtocolError
from . import kernels
from .messages import Kind, Message
from .requests import PullRequest, Request
from .states import KeyState, ReplicaFlag, SyncCode
from .store import Store

# Replies to intents and rounds, with the lowest and the highest state that their keys may have at this site.
_STATES = {
    Kind.REPLICA: (KeyState.REQUESTED, KeyState.REQUESTED),
    Kind.MOVE: (KeyState.REQUESTED, KeyState.REPLICA),
    Kind.SYNCED: (KeyState.REPLICA, KeyState.REPLICA),
}


def check_message(message: Message, stores: Sequence[Store], requests: Mapping[int, Request]) -> None:
    """Check a message against the tables and requests of this site.

    The kernels that use the keys of a PULL and the positions of a PULLED check these.

    Args:
        message: the message; its sizes have been checked.
        stores: the stores of this site, by table.
        requests: the open requests of this site, by number.

    Raises:
        ProtocolError: if it does not fit them. Nothing has been changed.
    """
    kind, arrays = message.kind, message.arrays
    if kind is Kind.PULL:
        return
    if kind in (Kind.PULLED, Kind.APPLIED):
        _check_reply(message, requests)
        return
    store = stores[message.table]
    if kernels.first_bad_key(arrays[0], store.limit) >= 0:
        raise ProtocolError(f"{kind.name} with a key out of range of table {message.table}")
    if kind is Kind.SYNC and np.count_nonzero(arrays[2] & ReplicaFlag.DIRTY) != arrays[3].shape[0]:
        raise ProtocolError("SYNC whose number of deltas differs from its flags")
    if kind is Kind.SYNCED and np.count_nonzero(arrays[1] == SyncCode.VALUE) != arrays[3].shape[0]:
        raise ProtocolError("SYNCED whose number of values differs from its codes")
    if kind in _STATES:
        lowest, highest = _STATES[kind]
        states = np.empty(arrays[0].shape[0], np.int8)
        kernels.states_of(store.rows.finder, store.rows.states, arrays[0], states)
        if states.min() < lowest or states.max() > highest:
            raise ProtocolError(f"{kind.name} for a key that this site has not asked for")


def _check_reply(message: Message, requests: Mapping[int, Request]) -> None:
    request = requests.get(message.request)
    pulled = message.kind is Kind.PULLED
    count = message.arrays[0].shape[0] if pulled else message.extra
    if request is None or not 0 < count <= request.remaining or isinstance(request, PullRequest) is not pulled:
        raise ProtocolError(f"{message.kind.name} for {count} keys that this site has not asked for")
    if isinstance(request, PullRequest) and request.table != message.table:
        raise ProtocolError("PULLED of another table than this site has asked for")
