"""Calls that sites are in, and exchanges that they have begun, to name sites that do not make the same calls.

All sites of a group begin its exchanges in one order. So two sites make different calls if each of them waits for an
exchange that the other has not begun: neither will end. Objects carry the function that gathers them.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import DamagedError, MismatchError
from . import codec

DIFFERENT = "the sites do not make the same calls"
ASK_SECONDS = 2.0  # of a wait, after which a site asks what the others wait for
_LIBRARIES = {"dadplug", "torch", *sys.stdlib_module_names} - {"__main__"}
_TRANSPORTS = ("dadplug.exchange", "dadplug.hub.site", "dadplug.parameter_server")
_NAMES = {"_wrapped_call_impl": "forward", "wrapper": "step"}  # of torch: calls of a module and of an optimizer
_groups: weakref.WeakValueDictionary[str, BegunExchanges] = weakref.WeakValueDictionary()


@codec.register
class Wait(NamedTuple):
    """Wait of a process for an exchange.

    Attributes:
        group: name of the group.
        kind: kind of the exchange.
        number: its number among those of the kind.
    """

    group: str
    kind: str
    number: int


class BegunExchanges(Counter[str]):
    """Exchanges that this process has begun in a group, by kind.

    Args:
        group: name of the group, the same at all its sites.
    """

    def __init__(self, group: str) -> None:
        super().__init__()
        self._group = group
        _groups[group] = self

    def begin(self, kind: str) -> Wait:
        """Begin an exchange, and return what the wait for it is."""
        self[kind] += 1
        return Wait(self._group, kind, self[kind])


class OwnPlace:
    """Place of this process.

    Attributes:
        step: number of the step of training.
        wait: wait that takes long, or has ended in an error; None if there is none.
        failed: call that has failed since sites make different ones; empty if none has.
        waiting: threads that wait in an exchange, by their numbers.
    """

    step, failed = 0, ""
    wait: Wait | None = None

    def __init__(self) -> None:
        self.waiting: set[int] = set()

    def lacks(self, wait: Wait | None) -> bool:
        """Return whether this process has not begun an exchange of a group that it belongs to."""
        return wait is not None and wait.group in _groups and _groups[wait.group][wait.kind] < wait.number


own_place = OwnPlace()


def own_call() -> str:
    """Return the call that the main thread is in, with the line of the program, and the step."""
    frame = _main_frame()
    call = ""
    while frame is not None and not own_place.failed:
        if (frame.f_globals.get("__name__") or "").partition(".")[0] not in _LIBRARIES:
            return f"{call}{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}, step {own_place.step}"
        call, frame = f"{_name_of(frame)}() at ", frame.f_back
    return own_place.failed or "the end of its program"


def _main_frame() -> Any:
    main = threading.main_thread()
    if threading.current_thread() is main:
        return sys._getframe(1)
    # Python up to 3.11 may collect objects while it lists the frames, with a lock held that every ending thread takes:
    # a destructor that waits for a socket would never get the interpreter back.
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(main.ident or 0)
    finally:
        if collects:
            gc.enable()


def _name_of(frame: Any) -> str:
    name, inside = frame.f_code.co_name, frame.f_locals
    if name == "__init__":
        return type(inside.get("self")).__name__
    collective = inside.get("func") if frame.f_globals.get("__name__") == "torch.distributed.c10d_logger" else None
    return str(getattr(collective, "__name__", _NAMES.get(name, name)))


def tagged(item: Any) -> tuple[str, str, Any]:
    """Return an object to gather, with the function that gathers it and the call that this site is in."""
    frame: Any = sys._getframe(1)
    while (module := frame.f_globals.get("__name__") or "").startswith(_TRANSPORTS):
        frame = frame.f_back
    function = frame.f_code.co_name if module.startswith("dadplug.") else ""  # a program may have any
    return function, own_call(), item


def decode_tagged(item: Any) -> tuple[str, str, Any]:
    """Return what `tagged` has returned at another site.

    Raises:
        DamagedError: if it is anything else.
    """
    if not (isinstance(item, tuple) and [*map(type, item[:2])] == [str, str] and len(item) == 3):
        raise DamagedError("a site has sent an object without the call that gathers it")
    return item


def untagged(every: Mapping[int, tuple[str, str, Any]], sites: Any) -> dict[int, Any]:
    """Return objects that sites have tagged, by rank.

    Raises:
        MismatchError: at all sites, if they have not gathered them by the same call.
    """
    if len({function for function, _, _ in every.values()}) > 1:
        raise MismatchError(explain({rank: place for rank, (_, place, _) in every.items()}, sites))
    return {rank: item for rank, (_, _, item) in every.items()}


def explain(places: Mapping[int, str], sites: Any) -> str:
    """Return the message for sites that make different calls.

    Args:
        places: their calls, by rank.
        sites: the sites by name.
    """
    where = ", and ".join(f"{sites[rank]} is in {place}" for rank, place in sorted(places.items()) if place)
    return (
        f"{DIFFERENT}: {where}. Every site must make the calls that exchange something "
        "equally often and in the same order, with the same model; a site that has run out of data calls idle()"
    )
