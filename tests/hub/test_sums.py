"""Sums of the hub: exact, in the order of slots, whatever the order of arrival."""

import os
import random

import numpy as np
import pytest
import torch
from running_hub import running_hub, together
from support import refuses

from dadplug.errors import FrameError
from dadplug.hub.server.run import Sums, add
from dadplug.hub.wire.messages import CODES, Drop, Head, Kind

SLOTS = (0, 1, 2)


def content(tensor: torch.Tensor) -> bytearray:
    return bytearray(tensor.contiguous().view(torch.uint8).numpy())


def tensor(content: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=dtype)


def summands(dtype: torch.dtype, count: int = 3, size: int = 1000) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return [torch.randn(size, generator=generator, dtype=torch.float64).mul(100).to(dtype) for _ in range(count)]
    return [torch.randint(0, 100, (size,), generator=generator).to(dtype) for _ in range(count)]


def piece(
    slot: int, body: bytes | bytearray, exchange: int = 5, offset: int = 0, tag: int = 0
) -> tuple[Head, bytes | bytearray]:
    return Head(Kind.SUMMAND, slot, 3, exchange, offset, len(body), tag), body


@pytest.mark.parametrize("dtype", list(CODES))
def test_elements_are_added_in_the_order_of_slots(dtype):
    a, b, c = summands(dtype)
    if dtype in (torch.bfloat16, torch.float16):
        expected = (a.float() + b.float() + c.float()).to(dtype)
    else:
        expected = a + b + c
    found = tensor(add([content(each) for each in (a, b, c)], dtype), dtype)
    assert torch.equal(found, expected)
    if dtype.is_floating_point and dtype.itemsize > 2:
        assert not torch.equal(a + (b + c), expected), "the order has to matter in this test"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_elements_of_16_bits_are_rounded_once_and_keep_special_values(dtype):
    one, half = torch.ones(1, dtype=dtype), torch.tensor([torch.finfo(dtype).eps / 2], dtype=dtype)
    assert tensor(add([content(one), content(half), content(half)], dtype), dtype) == 1 + torch.finfo(dtype).eps
    special = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=dtype)
    found = tensor(add([content(special), content(torch.ones(3, dtype=dtype))], dtype), dtype)
    assert torch.equal(found.nan_to_num(7), special.nan_to_num(7))


def test_integers_wrap_around():
    assert add([bytearray(b"\xff"), bytearray(b"\x02")], torch.uint8) == b"\x01"


def test_the_order_of_arrival_does_not_matter():
    arrivals = [piece(slot, content(each), 5, 4000 * part) for part in (0, 1) for slot, each in enumerate(pieces(part))]
    results = set()
    for seed in range(20):
        order = list(arrivals)
        random.Random(seed).shuffle(order)
        sums = Sums(3)
        found = [frame for head, body in order if (frame := sums.add(head, body, SLOTS)) is not None]
        assert len(found) == 2
        assert sums.nbytes == [0, 0, 0]
        assert not sums._waiting
        results.add(tuple(sorted(found)))
    [(first, second)] = results
    head = Head.unpack(first[:32])
    assert head == Head(Kind.SUM, 0, 3, 5, head.offset, 4000)
    assert first != second


def pieces(part: int) -> list[torch.Tensor]:
    return [each[1000 * part :][:1000] for each in summands(torch.float32, size=2000)]


def test_pieces_of_the_same_place_are_added_first_to_first():
    sums = Sums(2)
    for value in (1, 2, 3):
        assert sums.add(*piece(0, bytearray([value]), tag=6), (0, 1)) is None
    found = [sums.add(*piece(1, bytearray([value]), tag=6), (0, 1)) for value in (10, 20, 30)]
    assert [frame[-1] for frame in found] == [11, 22, 33]


def test_summands_that_do_not_fit_are_refused():
    sums = Sums(2)
    refuses(
        (lambda: sums.add(*piece(0, b"1234", tag=99), (0, 1)), "unknown type of elements, number 99"),
        (lambda: sums.add(*piece(0, b"123"), (0, 1)), "3 bytes at byte 0 are no summands of type"),
        error=FrameError,
    )
    for body, tag in ((b"12345678", 0), (b"1234", 5)):
        sums.add(*piece(0, b"1234"), (0, 1))
        with pytest.raises(FrameError, match=r"of site 0, .* of site 1"):
            sums.add(*piece(1, body, tag=tag), (0, 1))


def test_sites_that_are_ahead_are_not_read_and_what_waits_is_bounded():
    sums = Sums(2, limit=1000)
    for offset in range(0, 1200, 100):
        sums.add(*piece(0, bytes(100), 5, offset), (0, 1))
    assert sums.is_ahead(0)
    assert not sums.is_ahead(1)
    for offset in range(0, 900, 100):
        sums.add(*piece(1, bytes(100), 6, offset), (0, 1))
    with pytest.raises(FrameError, match="more than 2000 bytes of summands wait"):
        sums.add(*piece(1, bytes(100), 6, 900), (0, 1))


def test_the_hub_sends_sums_to_all_sites(tmp_path):
    with running_hub(tmp_path / "kits", sites=("a", "b", "c")) as hub:
        sites = together(hub, "abc")
        contents = [np.frombuffer(os.urandom(400_000), np.int64) for _ in sites]
        for site, content in zip(reversed(sites), contents):
            site.send(Kind.SUMMAND, content.tobytes(), exchange=9, tag=CODES[torch.int64])
        for site in sites:
            assert np.array_equal(np.frombuffer(site.message(400_000, Kind.SUM), np.int64), sum(contents))
        sites[0].send(Kind.SUMMAND, b"123", exchange=9)
        assert sites[1].action(Drop).reason == "3 bytes at byte 0 are no summands of type torch.float32"
