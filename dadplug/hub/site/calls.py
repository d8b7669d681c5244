"""Places of the sites of a hub, which they exchange once they do not make the same calls."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ...errors import MismatchError, SiteError
from ...exchange.calls import explain, own_place
from ...exchange.handshake import Deadline
from .inbox import CALLS

_SECONDS = 1.5  # for the places of the other sites to arrive


def check_calls(link: Any, patience: Deadline) -> None:
    """Raise MismatchError if other sites make other calls than this one.

    Where sites may leave, and fewer than half of them do, the hub is asked to drop these instead.

    Args:
        link: the `HubLink` of this site.
        patience: when a wait is long enough for that.
    """
    if not patience.over:
        return
    with link.lock:
        differ = [slot for slot in range(link.world_size) if link.inbox.differs(slot, link.step)]
        few = link.rounds.elastic and 2 * len(differ) < link.world_size - len(link.gone)
    if differ and not few:
        raise mismatch(link)
    for slot in differ:
        link.rounds.accuse(slot, "it does not make the same calls as this site")


def mismatch(link: Any) -> MismatchError:
    """Return the error of sites that do not make the same calls, and exchange the places of the sites for it."""
    slots = range(link.world_size)
    with link.lock:
        own = f"{link.inbox.awaited} of round {link.step}, step {own_place.step}"
    with suppress(SiteError):  # the others may be gone
        link.send(CALLS, memoryview(own.encode()))
        link.converse(lambda: int(not any(map(link.inbox.place_of, slots))), _SECONDS)
    present = [slot for slot in slots if slot not in link.gone]
    places = {slot: link.inbox.place_of(slot) or "an exchange that it does not state" for slot in present}
    places[link.rank] = own
    return MismatchError(explain(places, [*map(link.name, slots)]))
