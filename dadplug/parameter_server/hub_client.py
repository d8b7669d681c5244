"""A site's connection to the sequencer at its hub, at the start and after a return."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence

from ..errors import MessageError, SiteError
from ..exchange import Transport
from ..exchange.transport import StreamToHub
from ..model_sync.sameness import raise_problems
from . import hub_messages as messages
from .holder import Holder, at_hub
from .hub_messages import KEY_CHARACTERS, Settings
from .options import ServerOptions

HUB_PLACE = "hub:"  # before the folder of the kit, in addresses of sequencers at a hub


def start_at_hub(
    transport: Transport,
    stream: StreamToHub,
    options: ServerOptions,
    workers: Sequence[int],
    limit: int,
    in_trainer: bool,
) -> tuple[socket.socket, Holder, str]:
    """Start the sequencer at the hub; all sites must call it together.

    Args:
        transport: the transport.
        stream: this site's stream to the hub.
        options: the options.
        workers: ranks of the sites that contribute.
        limit: bytes of the largest message.
        in_trainer: whether sites return in the midst of a phase only.

    Returns:
        The connection to the sequencer, its holder, and the address for sites that return, without the rank.

    Raises:
        ValueError: at all sites, if the hub does not start it.
        SiteError: if the hub or a site is lost.
    """
    key = transport.gather_objects(secrets.token_hex(KEY_CHARACTERS // 2))[0]
    rules = options.rules._asdict()
    times = options.site_timeout, options.timeout
    settings = Settings(tuple(workers), rules, options.deal, in_trainer, limit, *times)
    problem = ""
    holder = at_hub(stream.hub, stream.check)
    try:
        stream.connected.settimeout(options.timeout)
        messages.write(stream.connected, (messages.VERSION, key, tuple(settings)))
        transport.gather_objects(None)  # a site that is lost here is named at once
        problem = _read_answer(stream.connected)[0]
    except OSError as error:
        problem = f"{stream.hub} has no sequencer for parameter servers, or is lost: {error}"
    raise_problems(problem, transport)
    return stream.connected, holder, f"{HUB_PLACE}{transport.dialed_by}/{key}"


def return_to_hub(stream: StreamToHub, key: str, timeout: float) -> tuple[Holder, list[str]]:
    """Return into a training whose sequencer is at the hub.

    Args:
        stream: this site's stream to the hub.
        key: key of the training.
        timeout: seconds that it may take.

    Returns:
        The holder of the sequencer, and the names of the sites.

    Raises:
        SiteError: if there is no such training.
        OSError: if the hub does not answer.
    """
    stream.connected.settimeout(timeout)
    messages.write(stream.connected, (messages.VERSION, key, None))
    problem, names = _read_answer(stream.connected)
    if problem:
        raise SiteError(f"the training at {stream.hub} cannot be reached: {problem}")
    return at_hub(stream.hub, stream.check), names


def _read_answer(connected: socket.socket) -> tuple[str, list[str]]:
    """Return the problem that the hub has found, and the names of the sites."""
    answer = messages.read(connected)
    if type(answer) is not tuple or len(answer) != 2 or not isinstance(answer[0], str):
        raise MessageError("the answer of the hub is damaged")
    problem, names = answer
    if type(names) is not list or not all(type(name) is str for name in names):
        raise MessageError("the answer of the hub is damaged")
    return problem, names
