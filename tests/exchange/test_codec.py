"""Objects for other sites arrive complete, and arbitrary bytes raise nothing but a ValueError."""

from __future__ import annotations

import dataclasses
import enum
import pickle
import tracemalloc
from collections import Counter, OrderedDict, defaultdict
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dadplug.exchange import codec


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
@given(anything)
def test_what_is_encoded_comes_back(item):
    assert same(codec.decode(codec.encode(item)), item)


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
@given(anything, st.data())
def test_a_damaged_message_raises_value_errors_only(item, data):
    content = bytearray(codec.encode(item))
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


def test_a_pickle_is_not_run():
    class Harmful:
        def __reduce__(self):
            return print, ("run",)

    with pytest.raises(ValueError, match="damaged"):
        codec.decode(pickle.dumps(Harmful()))


@pytest.mark.parametrize(
    "item",
    [object(), print, defaultdict(int), slice(1), torch.eye(2).to_sparse(), np.array(["a"]), np.array([object()]), len],
)
def test_other_objects_are_refused_with_what_can_be_sent(item):
    with pytest.raises(TypeError, match=r"can be sent|cannot be sent"):
        codec.encode([{"key": item}])


def test_an_object_that_contains_itself_is_refused():
    item: list = []
    item.append(item)
    with pytest.raises(ValueError, match="contain themselves"):
        codec.encode(item)


def test_classes_are_made_only_where_they_are_registered():
    @dataclasses.dataclass(frozen=True)
    class Unknown:
        size: int

    with pytest.raises(TypeError, match=r"codec\.register"):
        codec.encode(Unknown(1))
    with pytest.raises(TypeError, match="only dataclasses"):
        codec.register(object)
    name = b"builtins.exec"
    with pytest.raises(ValueError, match="not registered here"):
        codec.decode(b"dadplug1R" + len(name).to_bytes(8, "little") + name + bytes(8))


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
