"""Messages that msgspec structs declare: types and ranges of all fields are checked while a message is decoded.

Decoding runs no code that the sender chooses. Lists have a largest length, so that none is made that is larger than
what arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from msgspec import Meta, MsgspecError, Struct
from msgspec.msgpack import Decoder
from msgspec.structs import replace

from ..errors import escaped

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
# What others compute with may be added to without leaving the range of `Count`.
MOST_MS = 1 << 40
Milliseconds = Annotated[int, Meta(ge=0, le=MOST_MS)]
Slot = Annotated[int, Meta(ge=0, lt=1 << 16)]
LONGEST_TEXT = 2000
Text = Annotated[str, Meta(max_length=LONGEST_TEXT)]
Slots = Annotated[tuple[Slot, ...], Meta(max_length=1 << 16)]
Counts = Annotated[tuple[Count, ...], Meta(max_length=1 << 16)]
Texts = Annotated[tuple[Text, ...], Meta(max_length=1 << 16)]
Decoded = TypeVar("Decoded")


def decode(
    decoder: Decoder[Decoded], body: bytes | bytearray | memoryview, what: str, error: Callable[[str], Exception]
) -> Decoded:
    """Decode a message, and check types and ranges of its fields. Its texts can be printed, see `escaped`.

    Args:
        decoder: decoder of messages of its kind.
        body: the message, whatever its bytes are.
        what: what it is, for the error.
        error: makes the error to raise for anything else of its text, which states the field.
    """
    try:
        message: Decoded = _printable(decoder.decode(body))
    except (MsgspecError, UnicodeDecodeError, RecursionError) as found:
        raise error(f"a damaged {what}: {found}") from found
    return message


def _printable(value: Any) -> Any:
    """Return a value of a message with all texts in it escaped."""
    if isinstance(value, str):
        return escaped(value)[:LONGEST_TEXT]
    if type(value) is tuple and value and isinstance(value[0], str):
        return tuple(map(_printable, value))
    if not isinstance(value, Struct):
        return value
    fields = {name: getattr(value, name) for name in value.__struct_fields__}
    changed = {name: new for name, old in fields.items() if (new := _printable(old)) != old}
    return replace(value, **changed) if changed else value
