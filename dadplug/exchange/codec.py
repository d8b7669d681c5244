"""Objects that sites exchange at set-up and in checkpoints: plain data, tensors and registered classes.

Decoding runs no code that the sender chooses, as pickle would: a message can only make the types listed here. It reads
every size before it allocates anything, so that a message of n bytes takes memory of the order of n.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import DamagedError, escaped
from ..support.registry import Registry
from .restrictions import OBJECTS, declared

SITES_VERSION = 17
"""Version of what sites exchange with one another.

It rises with each change by which a site sends other bytes, or makes other bits of the same bytes, so that sites of
releases with one version train together, and others do not."""
_HEAD = b"dadplug1"
_DEPTH = 64  # levels of containers in containers
MAX_ITEMS = 1 << 23
"""Items that the containers of an object have at most: each takes some microseconds to read, and memory of its own."""
_NUMBER_BYTES = 1024  # of a whole number; Python does not print larger ones
_EQUAL_HASHES = 64  # keys with one hash in a container, whose time grows with the square of their number
_COMPACT_BYTES = 1 << 28
_SIZE = struct.Struct("<Q")
_FLOAT, _COMPLEX = struct.Struct("<d"), struct.Struct("<dd")
_SHARED = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
_OWN = "bfloat16 complex32 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"  # torch's
_ARRAY_TYPES = {name: np.dtype(name) for name in _SHARED.split()}
_TENSOR_TYPES = {name: getattr(torch, name) for name in f"{_SHARED} {_OWN}".split() if hasattr(torch, name)}
_TENSOR_NAMES = {dtype: name for name, dtype in _TENSOR_TYPES.items()}

_registered: Registry[str, type] = Registry("class", exact=True)
_families: list[type] = []

Class = TypeVar("Class", bound=type)


def register(cls: Class) -> Class:
    """Register a class, so that its instances can be sent; every site must do so. Usable as a decorator.

    Args:
        cls: a dataclass, a named tuple or an enumeration. Messages call it by its module and name.

    Raises:
        TypeError: if it is something else.
    """
    if not _sendable(cls):
        raise TypeError(f"only dataclasses, named tuples and enumerations can be registered, not {cls.__name__}")
    _registered.register(_name(cls))(cls)
    return cls


def register_family(cls: Class) -> Class:
    """Register a dataclass and all classes that derive from it, those of the future included."""
    _families.append(cls)
    return register(cls)


class _Parts(list[bytes]):
    """Parts of a message that is being encoded.

    Args:
        room: bytes of the tensors, at most, whose exponents are compressed.
    """

    def __init__(self, room: int) -> None:
        super().__init__([_HEAD])
        self.room, self.items = room, 0


def encode(item: Any, compact: bool = False) -> bytes:
    """Encode an object.

    Args:
        item: None, booleans, numbers, strings, bytes, ``torch.dtype``, ``torch.device``, ``torch.Size``, dense tensors,
            numpy arrays and scalars, registered classes, and lists, tuples, dictionaries and sets of these.
        compact: whether to compress exponents of float32 tensors, without loss, in the first 256 MB, for which it takes
            half a second. Weights and states of optimizers take some 0.83 of their bytes then; these depend on the
            version of zlib.

    Raises:
        TypeError: for other objects; the message says what can be sent.
        ValueError: if containers lie too deep in one another, or have too many items.
    """
    parts = _Parts(_COMPACT_BYTES if compact else 0)
    _encode(item, parts, 0)
    return b"".join(parts)


def decode(content: bytes | bytearray | memoryview) -> Any:
    """Decode what `encode` has made. Tensors and arrays are copies, on the CPU.

    Raises:
        DamagedError: for anything else, whatever the bytes are.
    """
    reader = _Reader(memoryview(content).cast("B"))
    try:
        if bytes(reader.take(len(_HEAD))) != _HEAD:
            raise ValueError("it does not begin as a message does")
        item = _decode(reader, 0)
    except Exception as error:  # a class that refuses its fields, a key without a hash
        raise DamagedError(f"a message from another site is damaged: {error}") from error
    if reader.left:
        raise DamagedError(f"a message from another site is damaged: {reader.left} bytes too many")
    return item


def _encode(item: Any, parts: _Parts, depth: int) -> None:
    if depth > _DEPTH:
        raise ValueError(f"objects of more than {_DEPTH} levels, or that contain themselves, cannot be sent")
    kind: Any = type(item)
    if kind in _PLAIN:
        tag, write = _PLAIN[kind]
        parts.append(tag)
        write(item, parts)
        return
    if kind in _CONTAINERS:
        parts.append(_CONTAINERS[kind])
        items: Iterable[Any] = [each for pair in item.items() for each in pair] if isinstance(item, dict) else item
        _encode_items(list(items), parts, depth)
    elif isinstance(item, Tensor):
        _encode_tensor(item, parts)
    elif isinstance(item, str) and not isinstance(item, enum.Enum):  # numpy's and torch's own kinds of strings
        _encode(str.__str__(item), parts, depth)
    elif isinstance(item, (np.ndarray, np.generic)):
        _encode_array(item, parts)
    elif _registered_as(name := _name(kind)) is kind:
        parts.append(b"R")
        _write_bytes(name.encode(), parts)
        _encode_items(_fields_of(item), parts, depth)
    else:
        raise TypeError(
            f"an object of type {name} cannot be sent to other sites. What can be sent: None, numbers, strings, "
            "bytes, dense tensors, arrays of numbers, lists, tuples, dictionaries and sets of these; dataclasses, "
            "named tuples and enumerations after dadplug.exchange.codec.register(TheClass) on every site"
        )


def _encode_items(items: list[Any], parts: _Parts, depth: int) -> None:
    parts.items += len(items)
    if parts.items > MAX_ITEMS:
        raise ValueError(f"objects of more than {MAX_ITEMS} items cannot be sent: put numbers into tensors or arrays")
    parts.append(_SIZE.pack(len(items)))
    for each in items:
        _encode(each, parts, depth + 1)


def _write_bytes(content: bytes, parts: list[bytes]) -> None:
    parts += [_SIZE.pack(len(content)), content]


def _write_number(number: int, parts: list[bytes]) -> None:
    content = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    if len(content) > _NUMBER_BYTES:
        raise TypeError(f"a whole number of {len(content)} bytes cannot be sent to other sites")
    _write_bytes(content, parts)


def _write_type(dtype: torch.dtype, parts: list[bytes]) -> None:
    if dtype not in _TENSOR_NAMES:
        raise TypeError(f"tensors of type {dtype} cannot be sent to other sites")
    _write_bytes(_TENSOR_NAMES[dtype].encode(), parts)


def _encode_tensor(tensor: Tensor, parts: _Parts) -> None:
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise TypeError(f"a tensor of layout {tensor.layout} on {tensor.device} cannot be sent: make it a dense one")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if plain.dtype is torch.float32 and 0 < plain.nbytes <= parts.room:
        parts.room -= plain.nbytes
        parts.append(b"P")
        _write_shape(plain.shape, parts)
        _write_planes(plain.reshape(-1).view(torch.uint8).numpy(), parts)
        return
    parts.append(b"T")
    _write_type(plain.dtype, parts)
    _write_shape(plain.shape, parts)
    _write_bytes(plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"", parts)


def _write_planes(content: Any, parts: list[bytes]) -> None:
    """Write the lower 16 bits of all numbers, the next 8 bits, and the upper 8 bits, compressed.

    The upper bits, sign and most of the exponent, are the only ones that compress; bytes of one value do not follow one
    another, so that a code by frequency alone (Huffman) is as small as others, and some 20 times as fast.
    """
    _write_bytes(content.view("<u2")[::2].tobytes(), parts)
    _write_bytes(content[2::4].tobytes(), parts)
    code = zlib.compressobj(1, wbits=-zlib.MAX_WBITS, strategy=zlib.Z_HUFFMAN_ONLY)
    _write_bytes(code.compress(content[3::4].tobytes()) + code.flush(), parts)


def _encode_array(array: Any, parts: list[bytes]) -> None:
    if array.dtype.newbyteorder("=") not in _ARRAY_TYPES.values():
        raise TypeError(f"numpy arrays of type {array.dtype} cannot be sent to other sites")
    plain = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
    parts.append(b"A" if isinstance(array, np.ndarray) else b"G")
    _write_bytes(array.dtype.name.encode(), parts)
    _write_shape(plain.shape, parts)
    _write_bytes(plain.tobytes(), parts)


def _write_shape(shape: Iterable[int], parts: list[bytes]) -> None:
    sizes = list(shape)
    parts += [_SIZE.pack(len(sizes)), *(_SIZE.pack(size) for size in sizes)]


class _Reader:
    """A position in a message; nothing is read, and nothing allocated, past its end."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._place = self._items = 0

    @property
    def left(self) -> int:
        return len(self._content) - self._place

    def take(self, count: int) -> memoryview:
        if count > self.left:
            raise ValueError(f"it ends {count - self.left} bytes too early")
        self._place += count
        return self._content[self._place - count : self._place]

    def size(self) -> int:
        return int(_SIZE.unpack(self.take(_SIZE.size))[0])

    def count(self, least: int) -> int:
        """Read a number of items that take so many bytes each, at least."""
        count = self.size()
        if count * least > self.left:
            raise ValueError(f"{count} items do not fit into {self.left} bytes")
        return count

    def items(self) -> int:
        """Read the number of items of a container."""
        count = self.count(1)
        self._items += count
        if self._items > MAX_ITEMS:
            raise ValueError(f"more than {MAX_ITEMS} items")
        return count

    def content(self) -> memoryview:
        return self.take(self.size())

    def text(self) -> str:
        return str(self.content(), "utf-8")


def _decode(reader: _Reader, depth: int) -> Any:
    if depth > _DEPTH:
        raise ValueError(f"more than {_DEPTH} levels")
    tag = bytes(reader.take(1))
    if tag not in _READERS:
        raise ValueError(f"unknown tag {tag!r}")
    return _READERS[tag](reader, depth)


def _items(reader: _Reader, depth: int) -> list[Any]:
    return [_decode(reader, depth + 1) for _ in range(reader.items())]


def _read_dictionary(reader: _Reader, depth: int) -> dict[Any, Any]:
    items = _items(reader, depth)
    return dict(zip(_keys(items[::2]), items[1::2], strict=True))


def _keys(items: list[Any]) -> list[Any]:
    """Check the keys of a container, before it compares those with one hash."""
    if len(items) > _EQUAL_HASHES and max(Counter(map(hash, items)).values()) > _EQUAL_HASHES:
        raise ValueError(f"more than {_EQUAL_HASHES} of {len(items)} keys have one hash")
    return items


def _read_number(reader: _Reader, depth: int) -> int:
    content = reader.content()
    if len(content) > _NUMBER_BYTES:
        raise ValueError(f"a whole number of {len(content)} bytes")
    return int.from_bytes(content, "little", signed=True)


def _read_size(reader: _Reader, depth: int) -> torch.Size:
    items = _items(reader, depth)
    if not all(type(item) is int for item in items):
        raise ValueError("a torch.Size holds whole numbers")
    return torch.Size(items)


def _read_shape(reader: _Reader, itemsize: int) -> tuple[list[int], memoryview]:
    """Read a shape and the bytes that fill it, so many for each element."""
    shape = [reader.size() for _ in range(reader.count(_SIZE.size))]
    content = reader.content()
    nbytes = itemsize
    for size in shape:
        nbytes *= size
    if nbytes != len(content) or max(shape, default=0) >= 1 << 62 or len(shape) > _DEPTH:
        raise ValueError(f"{len(content)} bytes do not fill a shape of {shape}")
    return shape, content


def _read_tensor(reader: _Reader, depth: int) -> Tensor:
    dtype = _TENSOR_TYPES[reader.text()]
    shape, content = _read_shape(reader, dtype.itemsize)
    if not len(content):
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return (flat != 0 if dtype is torch.bool else flat.view(dtype)).reshape(shape)


def _read_planes(reader: _Reader, depth: int) -> Tensor:
    shape, low = _read_shape(reader, 2)
    middle, code = reader.content(), zlib.decompressobj(-zlib.MAX_WBITS)
    high = code.decompress(reader.content(), len(middle) + 1)
    if not (code.eof and len(low) == 2 * len(middle) == 2 * len(high)):
        raise ValueError(f"{len(low)}, {len(middle)} and {len(high)} bytes are not those of one tensor")
    content = np.empty(4 * len(middle), np.uint8)
    content.view("<u2")[::2] = np.frombuffer(low, "<u2")
    content[2::4], content[3::4] = np.frombuffer(middle, np.uint8), np.frombuffer(high, np.uint8)
    return torch.from_numpy(content.view(np.float32)).reshape(shape)


def _read_array(reader: _Reader, depth: int) -> Any:
    dtype = _ARRAY_TYPES[reader.text()]
    shape, content = _read_shape(reader, dtype.itemsize)
    if dtype.kind == "b":
        return (np.frombuffer(content, np.uint8) != 0).reshape(shape)
    return np.frombuffer(bytearray(content), dtype.newbyteorder("<")).astype(dtype, copy=False).reshape(shape)


def _read_registered(reader: _Reader, depth: int) -> Any:
    name = reader.text()
    cls: Any = _registered_as(name)
    if cls is None:
        raise ValueError(f"class {name} is not registered here")
    values = _items(reader, depth)
    names = _field_names(cls)
    return cls(*values) if names is None else cls(**dict(zip(names, values, strict=True)))


def _sendable(cls: type) -> bool:
    named_tuple = issubclass(cls, tuple) and hasattr(cls, "_fields")
    return dataclasses.is_dataclass(cls) or named_tuple or issubclass(cls, enum.Enum)


def _fields_of(item: Any) -> list[Any]:
    names = _field_names(type(item))
    if names is not None:
        return [getattr(item, name) for name in names]
    return [item.value] if isinstance(item, enum.Enum) else list(item)


def _field_names(cls: Any) -> list[str] | None:
    """Return the names of a dataclass's fields; None for other classes."""
    return [field.name for field in dataclasses.fields(cls) if field.init] if dataclasses.is_dataclass(cls) else None


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _registered_as(name: str) -> type | None:
    if name not in _registered:
        for family in _families:
            for cls in _derived(family):
                _registered.register(_name(cls))(cls)
    return _registered.get(name)


def _derived(cls: Any) -> Iterable[type]:
    for each in cls.__subclasses__():
        yield each
        yield from _derived(each)


_PLAIN: dict[type, tuple[bytes, Callable[[Any, list[bytes]], None]]] = {
    type(None): (b"N", lambda item, parts: None),
    bool: (b"B", lambda item, parts: parts.append(b"\1" if item else b"\0")),
    int: (b"i", _write_number),
    float: (b"f", lambda item, parts: parts.append(_FLOAT.pack(item))),
    complex: (b"c", lambda item, parts: parts.append(_COMPLEX.pack(item.real, item.imag))),
    str: (b"s", lambda item, parts: _write_bytes(item.encode(), parts)),
    bytes: (b"b", _write_bytes),
    bytearray: (b"b", lambda item, parts: _write_bytes(bytes(item), parts)),
    torch.dtype: (b"t", _write_type),
    torch.device: (b"v", lambda item, parts: _write_bytes(str(item).encode(), parts)),
}
_CONTAINERS = {
    list: b"L",
    tuple: b"U",
    dict: b"D",
    OrderedDict: b"O",
    Counter: b"C",
    set: b"S",
    frozenset: b"Z",
    torch.Size: b"H",
}
_READERS: dict[bytes, Callable[[_Reader, int], Any]] = {
    b"N": lambda reader, depth: None,
    b"B": lambda reader, depth: bool(reader.take(1)[0]),
    b"i": _read_number,
    b"f": lambda reader, depth: _FLOAT.unpack(reader.take(_FLOAT.size))[0],
    b"c": lambda reader, depth: complex(*_COMPLEX.unpack(reader.take(_COMPLEX.size))),
    b"s": lambda reader, depth: reader.text(),
    b"b": lambda reader, depth: bytes(reader.content()),
    b"t": lambda reader, depth: _TENSOR_TYPES[reader.text()],
    b"v": lambda reader, depth: torch.device(reader.text()),
    b"L": _items,
    b"U": lambda reader, depth: tuple(_items(reader, depth)),
    b"D": _read_dictionary,
    b"O": lambda reader, depth: OrderedDict(_read_dictionary(reader, depth)),
    b"C": lambda reader, depth: Counter(_read_dictionary(reader, depth)),
    b"S": lambda reader, depth: set(_keys(_items(reader, depth))),
    b"Z": lambda reader, depth: frozenset(_keys(_items(reader, depth))),
    b"H": _read_size,
    b"T": _read_tensor,
    b"P": _read_planes,
    b"A": _read_array,
    b"G": lambda reader, depth: _read_array(reader, depth)[()],
    b"R": _read_registered,
}


_LOADED = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


def is_plain(item: Any) -> bool:
    """Return whether torch loads an object from a file with ``weights_only=True``; from a message others come, too."""
    if type(item) in (dict, OrderedDict, Counter):
        item = [*item, *item.values()]
    return (
        isinstance(item, Tensor)
        or type(item) in _LOADED
        or (type(item) in (list, tuple, set) and all(map(is_plain, item)))
    )


MAX_BYTES = 1 << 34  # of what is sent of tensors, whose sizes follow from the model
MAX_OBJECT_BYTES = 1 << 30  # of one process's object, such as metrics or predictions


@register
class Refusal(NamedTuple):
    """Placeholder of an object that cannot be sent.

    Attributes:
        reason: the reason.
    """

    reason: str


def gather_objects(
    item: Any,
    group: dist.ProcessGroup | None = None,
    wait: Callable[[dist.Work], object] = dist.Work.wait,
    name: Callable[[int], str] = "process {}".format,
) -> list[Any]:
    """Gather an object from every process; all processes of the group must call it together.

    Args:
        item: what `dadplug.exchange.codec.encode` takes.
        group: the process group; the default one where None.
        wait: waits for a piece of work.
        name: returns the name of a process, for messages.

    Returns:
        The objects, by rank.

    Raises:
        TypeError: in all processes, if the object of one cannot be sent.
        ValueError: if another process has sent something that is no such object.
    """
    own, refusal = encode_object(item)
    only_gpus = str(dist.get_backend(group)) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if only_gpus else torch.device("cpu")
    count = dist.get_world_size(group)
    size = torch.tensor([len(own)], dtype=torch.int64, device=device)
    sizes = [torch.zeros_like(size) for _ in range(count)]
    with declared(OBJECTS):
        work = dist.all_gather(sizes, size, group=group, async_op=True)
    wait(work)
    lengths = [int(each) for each in sizes]
    check_lengths(lengths, name)
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    every = [torch.empty_like(padded) for _ in range(count)]
    with declared(OBJECTS):
        work = dist.all_gather(every, padded, group=group, async_op=True)
    wait(work)
    contents = (part[:length].cpu().numpy().data for part, length in zip(every, lengths, strict=True))
    return decode_objects(enumerate(contents), refusal, name)


def encode_object(item: Any) -> tuple[bytes, Exception | None]:
    """Encode this process's object.

    Args:
        item: what `dadplug.exchange.codec.encode` takes.

    Returns:
        What to send to the others, and the error if the object cannot be sent.
    """
    try:
        return encode(item), None
    except (TypeError, ValueError) as error:
        return encode(Refusal(str(error))), error


def check_lengths(
    lengths: Iterable[int], name: Callable[[int], str] = "process {}".format, most: int = MAX_OBJECT_BYTES
) -> None:
    """Check the sizes in bytes that processes announce, before memory is allocated by them.

    Args:
        lengths: the sizes, by rank.
        name: returns the name of a process, for messages.
        most: largest size.

    Raises:
        DamagedError: if one is out of range.
    """
    for rank, length in enumerate(lengths):
        if not 0 <= length <= most:
            raise DamagedError(f"{name(rank)} announces an object of {length} bytes: there may be {most} at most")


def decode_objects(
    contents: Iterable[tuple[int, bytes | memoryview]],
    refusal: Exception | None,
    name: Callable[[int], str] = "process {}".format,
) -> list[Any]:
    """Decode the objects of all processes.

    Args:
        contents: what they have sent, each with its rank.
        refusal: the error of this process's own object, if it could not be sent.
        name: returns the name of a process, for messages.

    Raises:
        TypeError: if the object of one could not be sent.
        DamagedError: if one has sent something that is no such object.
    """
    objects = []
    for rank, content in contents:
        try:
            objects.append(decode(content))
        except DamagedError as error:
            raise DamagedError(f"{name(rank)}: {error}") from error
        if isinstance(objects[-1], Refusal):
            why = escaped(str(objects[-1].reason))
            raise TypeError(f"{name(rank)} has an object that cannot be gathered: {why}") from refusal
    return objects
