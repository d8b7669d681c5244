"""Objects and tensors for other sites arrive complete, and arbitrary bytes raise nothing but a ValueError."""

import dataclasses
import enum
import math
import pickle
import sys
import tracemalloc
import zlib
from collections import Counter, OrderedDict, defaultdict
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import refuses

from dadplug.exchange import codec
from dadplug.exchange.wire import FORMATS, wire_format


@codec.register
@dataclasses.dataclass(frozen=True)
class Point:
    name: str
    values: tuple[float, ...]


@codec.register
class Pair(NamedTuple):
    left: object
    right: object


@codec.register
class Colour(enum.Enum):
    RED = "red"


@codec.register_family
@dataclasses.dataclass(frozen=True)
class Base:
    size: int


DTYPES = [*codec._TENSOR_TYPES.values()]
SHAPES = st.lists(st.integers(0, 4), max_size=3)


@st.composite
def tensors(draw):
    shape, dtype = draw(SHAPES), draw(st.sampled_from(DTYPES))
    flat = torch.randint(
        0, 2 if dtype is torch.bool else 256, (int(np.prod(shape)) * dtype.itemsize,), dtype=torch.uint8
    )
    return (flat != 0 if dtype is torch.bool else flat.view(dtype)).reshape(shape)


@st.composite
def arrays(draw):
    shape, dtype = draw(SHAPES), draw(st.sampled_from([*codec._ARRAY_TYPES.values()]))
    return np.random.default_rng(0).integers(0, 2, shape).astype(dtype)


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary()
    | st.sampled_from([*DTYPES, torch.device("cpu"), torch.device("cuda:1"), torch.Size([2, 3]), Colour.RED])
)  # fmt: skip
keys = st.text() | st.integers() | st.tuples(st.booleans(), st.binary())
anything = st.recursive(
    scalars | tensors() | arrays() | st.sampled_from([np.float32(0.1), np.int64(-3), np.bool_(True)]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, inner, max_size=4).map(Counter)
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
        | st.builds(Pair, inner, inner)
        | st.builds(Point, st.text(), inner)
    ),
    max_leaves=8,
)


def same(one, other) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return not one.numel() or torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, other)))
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return [*one] == [*other] and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Point):
        return same((one.name, one.values), (other.name, other.values))
    return one == other or repr(one) == repr(other)  # NaN


def decodes_or_raises(content) -> None:
    """Anything but a ValueError of the codec fails the test."""
    with suppress(codec.DamagedError):
        codec.decode(content)


@settings(deadline=None, max_examples=200)
@given(anything, st.booleans())
def test_what_is_encoded_comes_back(item, compact):
    assert same(codec.decode(codec.encode(item, compact)), item)


@settings(deadline=None, max_examples=500)
@given(st.binary(max_size=200))
@example(b"\x80\x04N.")
@example(pickle.dumps({"a": 1}))
@example(b"L" + (1 << 60).to_bytes(8, "little"))
@example(
    b"T" + (7).to_bytes(8, "little") + b"float32" + (2).to_bytes(8, "little") + b"\0" * 8 + b"\xff" * 8 + b"\0" * 8
)
@example(b"L" + (1).to_bytes(8, "little") * 100)
@example((b"L" + (1).to_bytes(8, "little")) * 2000)
@example(b"S" + (1).to_bytes(8, "little") + b"L" + (0).to_bytes(8, "little"))
@example(b"v" + (1).to_bytes(8, "little") + b"x")
def test_bytes_of_a_stranger_raise_value_errors_only(content):
    for whole in (content, b"dadplug1" + content):
        decodes_or_raises(whole)


@settings(deadline=None, max_examples=500)
@given(anything, st.data(), st.booleans())
def test_a_damaged_message_raises_value_errors_only(item, data, compact):
    content = bytearray(codec.encode(item, compact))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    decodes_or_raises(content)


@pytest.mark.parametrize("tag", [b"L", b"U", b"D", b"S", b"s", b"b", b"i", b"T", b"A", b"R", b"H"])
@pytest.mark.parametrize("size", [1 << 31, 1 << 62, (1 << 64) - 1])
def test_sizes_are_checked_before_anything_is_allocated(tag, size):
    head = (7).to_bytes(8, "little") + b"float32" if tag in b"TA" else b""
    tracemalloc.start()
    with pytest.raises(ValueError, match="a message from another site is damaged"):
        codec.decode(b"dadplug1" + tag + head + size.to_bytes(8, "little") * 3 + b"\0" * 64)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_exponents_compress_and_every_bit_comes_back():
    bits = torch.cat([torch.randint(-(1 << 31), 1 << 31, (4096,)), torch.tensor([0, 1, -1, 0x7F800001, -(1 << 31)])])
    for item in (bits.to(torch.int32).view(torch.float32), torch.randn(7, 900), torch.randn(60, 1000).square() * 1e-8):
        content = codec.encode([item], compact=True)
        assert torch.equal(codec.decode(content)[0].view(torch.int32), item.view(torch.int32))
    assert len(content) < 0.85 * len(codec.encode([item]))
    assert codec.encode(item.double(), compact=True) == codec.encode(item.double())


@pytest.mark.parametrize("count", [0, 1, 1 << 24], ids=["no tensor", "another size", "memory"])
def test_exponents_of_another_size_are_refused_before_they_take_memory(count):
    code = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    parts = [b"\0" * 8, b"\0" * 4, code.compress(b"\0" * count) + code.flush()]
    content = b"".join(len(each).to_bytes(8, "little") + each for each in parts)
    tracemalloc.start()
    with pytest.raises(ValueError, match="are not those of one tensor"):
        codec.decode(b"dadplug1P" + (1).to_bytes(8, "little") + (4).to_bytes(8, "little") + content)
    assert tracemalloc.get_traced_memory()[1] < 200_000
    tracemalloc.stop()


@pytest.mark.parametrize("kind", [set, frozenset, dict.fromkeys, Counter])
def test_keys_with_one_hash_are_refused_since_they_take_a_time_that_grows_with_their_square(kind):
    content = codec.encode(kind([number * sys.hash_info.modulus for number in range(100)]))
    with pytest.raises(ValueError, match="keys have one hash"):
        codec.decode(content)


def test_objects_of_too_many_items_are_refused_at_both_ends(monkeypatch):
    items = [[[]] * 40, dict.fromkeys(range(20), ())]  # 2 + 40 + 40
    content = codec.encode(items)
    monkeypatch.setattr(codec, "MAX_ITEMS", 82)
    assert codec.decode(codec.encode(items)) == items
    monkeypatch.setattr(codec, "MAX_ITEMS", 81)
    refuses(
        (lambda: codec.encode(items), "more than 81 items"),
        (lambda: codec.decode(content), "more than 81 items"),
    )


def test_other_objects_are_neither_sent_nor_made():
    @dataclasses.dataclass(frozen=True)
    class Unknown:
        size: int

    class Harmful:
        def __reduce__(self):
            return print, ("run",)

    arrays = torch.eye(2).to_sparse(), np.array(["a"]), np.array([object()])
    others = (object(), print, defaultdict(int), slice(1), *arrays, len)
    whole = b"dadplug1i" + (2500).to_bytes(8, "little") + b"\1" * 2500
    name, itself = b"builtins.exec", []
    itself.append(itself)
    refuses(
        *((partial(codec.encode, [{"key": item}]), r"can be sent|cannot be sent", TypeError) for item in others),
        (lambda: codec.encode(1 << 20_000), "cannot be sent", TypeError),
        (lambda: codec.encode(Unknown(1)), r"codec\.register", TypeError),
        (lambda: codec.encode(itself), "contain themselves"),
        (lambda: codec.register(object), "only dataclasses", TypeError),
        (lambda: codec.decode(pickle.dumps(Harmful())), "damaged"),
        (lambda: codec.decode(whole), "a whole number of 2500 bytes"),
        (
            lambda: codec.decode(b"dadplug1R" + len(name).to_bytes(8, "little") + name + bytes(8)),
            "not registered here",
        ),
    )


def test_classes_that_derive_from_a_family_are_known():
    @dataclasses.dataclass(frozen=True)
    class Derived(Base):
        shape: tuple[int, ...]

    assert codec.decode(codec.encode({Derived(1, (2, 3))})) == {Derived(1, (2, 3))}


def test_parameters_and_views_come_as_plain_tensors():
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    for tensor in (weight, weight.T, weight[:, 1], torch.complex(weight, weight).conj().detach()):
        back = codec.decode(codec.encode(tensor))
        assert type(back) is torch.Tensor
        assert torch.equal(back, tensor.detach())
        back.add_(1)  # its memory is its own
    big_endian = np.arange(3, dtype=">i4")
    assert (codec.decode(codec.encode(big_endian)) == big_endian).all()


# Wire formats: what is encoded is decoded with the error that the format has, and by the type of the tensors


ROUNDING = {"fp32": 0.0, "bf16": 2**-8, "int8": 0.51 / 127}


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decoded_rows_are_as_near_as_the_format_allows(name, dtype):
    wire, rows = wire_format(name, dtype), random(3, 50, dtype=dtype)
    payload = wire.encode(rows)
    assert payload.shape == (3, wire.row_size(50))
    assert payload.dtype == wire.dtype
    largest = rows.abs().amax(1, keepdim=True)
    assert ((wire.decode(payload) - rows).abs() <= ROUNDING[name] * largest).all()


@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_encoding_says_what_is_decoded_and_what_rounding_takes(name, dtype):
    wire, rows = wire_format(name, dtype), random(4, 33).to(dtype)
    payload, (rounded, rest) = wire.encode(rows), torch.empty(2, 4, 33, dtype=dtype)
    out = torch.empty_like(payload)
    assert wire.encode(rows, out, rounded, rest) is out
    assert torch.equal(out, payload)
    assert torch.equal(rounded, wire.decode(payload).to(dtype))
    assert torch.equal(rest, rows - rounded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("name", ROUNDING)
def test_tensors_of_16_bits_or_integers_are_sent_as_they_are(name, dtype):
    assert wire_format(name, dtype).dtype == dtype
    assert not wire_format(name, dtype).quantised


@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize(("count", "width"), [(0, 1), (1, 1), (511, 511), (512, 512), (768, 384), (1300, 434)])
def test_flat_tensors_are_encoded_by_equal_blocks_of_512_at_most(name, count, width):
    wire, values = wire_format(name), random(count)
    payload = wire.encode_flat(values)
    assert payload.shape == (wire.flat_size(count),)
    assert len(payload) <= count + 6 * -(-count // 512)  # four bytes of a scale, and padding
    assert payload.dtype == wire.dtype
    found = wire.decode_flat(payload, count)
    expected = [wire.decode(wire.encode(block[None]))[0] for block in values.split(width)]
    assert torch.equal(found, torch.cat(expected))


def test_a_quantised_row_with_nan_is_decoded_as_nan():
    rows = random(2, 8)
    rows[1, 3] = math.inf
    wire = wire_format("int8")
    back = wire.decode(wire.encode(rows))
    assert back[1].isnan().all()
    assert back[0].isfinite().all()


def test_rows_without_elements_need_no_scale():
    wire = wire_format("int8")
    assert wire.row_size(0) == 0
    assert wire.decode(wire.encode(torch.empty(3, 0))).shape == (3, 0)


def test_formats_are_those_of_the_option():
    assert list(FORMATS) == list(ROUNDING)
    with pytest.raises(ValueError, match=r"unknown wire format 'fp8'; valid ones are fp32, bf16, int8"):
        wire_format("fp8")
