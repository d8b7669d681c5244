"""First messages between a site and the service of sequencers at the hub, and the settings of a sequencer.

Nothing of them is trusted: messages have a largest size, the codec runs no code that the sender chooses, and the types
and ranges of all fields are checked.
"""

from __future__ import annotations

import math
import socket
import struct
from typing import Any, NamedTuple

from ..errors import DamagedError, MessageError
from ..exchange import codec
from ..hub.blocking import read_exactly, write_all
from .rules import Rules, check_deal, make_rules

VERSION = 1  # of these messages and of the frames that follow them
KEY_CHARACTERS = 32
_SIZE = struct.Struct("<4sI")
_MAGIC = b"DSEQ"
_MOST = 1 << 16  # bytes of a message
_LARGEST = 1 << 40  # bytes of a contribution
_LONGEST = 86400.0  # seconds


class Settings(NamedTuple):
    """Settings of a sequencer, the same at all sites.

    Attributes:
        workers: ranks of the sites that contribute.
        rules: fields of `Rules`, by name.
        deal: option of that name.
        in_trainer: whether a site returns in the midst of a phase only.
        limit: bytes of the largest message.
        site_timeout: seconds of silence after which a site counts as lost.
        timeout: seconds that the start may take.
    """

    workers: tuple[int, ...]
    rules: dict[str, Any]
    deal: str
    in_trainer: bool
    limit: int
    site_timeout: float
    timeout: float

    def make_rules(self) -> Rules:
        """Return the rules of the sequencer."""
        return make_rules(**self.rules)


def check_settings(found: Any, world_size: int) -> Settings:
    """Return settings that were received, with types and ranges of all fields checked.

    Args:
        found: the fields in their order.
        world_size: number of sites.

    Raises:
        MessageError: if one of them is not valid.
    """
    try:
        settings = Settings(*found)
        settings.make_rules()
        check_deal(settings.deal)
        workers = list(settings.workers)
        fine = (
            bool(workers)
            and all(type(rank) is int and 0 <= rank < world_size for rank in workers)
            and workers == sorted(set(workers))
            and settings.make_rules().quorum <= len(workers)
            and type(settings.in_trainer) is bool
            and type(settings.limit) is int
            and 0 < settings.limit <= _LARGEST
            and all(_is_time(each) for each in (settings.site_timeout, settings.timeout))
        )
    except (TypeError, ValueError) as error:
        raise MessageError(f"the settings of a sequencer are not valid: {error}") from error
    if not fine:
        raise MessageError(f"the settings of a sequencer are out of range: {settings}")
    return settings._replace(workers=tuple(workers))


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 < value <= _LONGEST


def write(connected: socket.socket, message: Any) -> None:
    """Send a message.

    Args:
        connected: a socket with a timeout.
        message: what the codec takes.
    """
    body = codec.encode(message)
    write_all(connected, _SIZE.pack(_MAGIC, len(body)) + body)


def read(connected: socket.socket) -> Any:
    """Receive a message.

    Args:
        connected: a socket with a timeout.

    Raises:
        MessageError: if it is none.
        OSError: if none arrives in time.
    """
    magic, size = _SIZE.unpack(read_exactly(connected, _SIZE.size))
    if magic != _MAGIC or size > _MOST:
        raise MessageError("what arrives is no message of a sequencer's service")
    try:
        return codec.decode(read_exactly(connected, size))
    except DamagedError as error:
        raise MessageError(str(error)) from error
