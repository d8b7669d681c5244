"""The hub's part of the store: operations as torch's own stores have them, and bounds of what a site can fill."""

import itertools
import os
import random

import numpy as np
import pytest
import torch
from msgspec.msgpack import encode
from running_hub import together
from support import refuses

from dadplug.errors import FrameError
from dadplug.hub.server import store as hub_store
from dadplug.hub.server.run import Sums, add
from dadplug.hub.server.store import REPLIES, Reply, Request, Store
from dadplug.hub.wire.messages import CODES, PIECE_BYTES, Drop, Head, Kind

numbers = itertools.count(1)


def ask(store, slot, operation, *keys, values=(), amount=0, number=None):
    """Send a request; return the replies by slot."""
    request = Request(next(numbers) if number is None else number, operation, keys, values, amount)
    return [(receiver, REPLIES.decode(reply)) for receiver, reply in store.handle(slot, encode(request))]


def answer(store, *arguments, **settings):
    """Send a request of site 0; return the only reply."""
    [(receiver, reply)] = ask(store, 0, *arguments, **settings)
    assert receiver == 0
    return reply


def test_values_are_set_and_read():
    store = Store()
    answer(store, "set", "a", "b", values=(b"1", b"2"))
    answer(store, "set", "a", values=(b"3",))
    assert answer(store, "get", "b", "a").values == (b"2", b"3")
    assert answer(store, "num_keys").amount == 2
    assert [answer(store, "check", *keys).amount for keys in (("a",), ("a", "c"), ())] == [1, 0, 1]


def test_numbers_are_added():
    store = Store()
    assert [answer(store, "add", "n", amount=amount).amount for amount in (5, 0, -7)] == [5, 5, -2]
    assert answer(store, "get", "n").values == (b"-2",)
    answer(store, "set", "text", values=(b"no number",))
    answer(store, "set", "large", values=(b"18446744073709551615",))
    assert "2**64" in answer(store, "add", "large", amount=1).error
    assert "'text' is no number" in answer(store, "add", "text", amount=1).error


def test_compare_set_is_that_of_tcp_store():
    store = Store()
    assert answer(store, "compare_set", "k", values=(b"x", b"new")).values == (b"x",)  # absent: nothing is set
    assert answer(store, "check", "k").amount == 0
    assert answer(store, "compare_set", "k", values=(b"", b"first")).values == (b"first",)
    assert answer(store, "compare_set", "k", values=(b"wrong", b"second")).values == (b"first",)
    assert answer(store, "compare_set", "k", values=(b"first", b"second")).values == (b"second",)


def test_append_and_delete():
    store = Store()
    answer(store, "append", "k", values=(b"ab",))
    answer(store, "append", "k", values=(b"c",))
    assert answer(store, "get", "k").values == (b"abc",)
    assert [answer(store, "delete", "k").amount for _ in range(2)] == [1, 0]
    assert answer(store, "check", "k").amount == 0


def test_get_and_wait_are_answered_when_the_last_key_is_there():
    store = Store()
    assert ask(store, 1, "get", "a", "b", number=10) == []
    assert ask(store, 2, "wait", "b", number=20) == []
    assert [slot for slot, _ in ask(store, 0, "set", "a", values=(b"1",))] == [0]
    replies = ask(store, 0, "add", "b", amount=4, number=30)
    assert replies == [(0, Reply(30, amount=4)), (1, Reply(10, (b"1", b"4"))), (2, Reply(20))]
    assert [slot for slot, _ in ask(store, 0, "add", "b", amount=1)] == [0]  # once


@pytest.mark.parametrize("operation", ["append", "compare_set"])
def test_every_operation_that_sets_a_key_wakes_up_those_that_wait(operation):
    store = Store()
    ask(store, 1, "wait", "k")
    values = (b"", b"v")[-1 if operation == "append" else 0 :]
    assert [slot for slot, _ in ask(store, 0, operation, "k", values=values)] == [0, 1]


def test_requests_that_wait_end_with_a_cancel_or_a_new_process():
    store = Store()
    ask(store, 1, "get", "k", number=1)
    ask(store, 1, "get", "k", number=2)
    ask(store, 2, "get", "k", number=1)
    assert ask(store, 1, "cancel", amount=2) == []
    assert [slot for slot, _ in ask(store, 2, "hello")] == [2]
    replies = ask(store, 0, "set", "k", values=(b"v",))
    assert [(slot, reply.number) for slot, reply in replies[1:]] == [(1, 1)]


def test_a_store_holds_so_many_bytes_and_no_more():
    store = Store(limit=3000)
    stored = sum(not answer(store, "set", f"{number:4}", values=(b"x" * 400,)).error for number in range(100))
    assert stored == 3000 // (400 + 4 + 100)
    assert "full" in answer(store, "append", "   0", values=(b"x" * 500,)).error
    answer(store, "append", "   0", values=(b"x" * 400,))
    assert "full" in answer(store, "add", "new", amount=1).error
    assert answer(store, "get", "   0").values == (b"x" * 800,)
    answer(store, "delete", "   0")
    assert not answer(store, "set", "new", values=(b"x" * 400,)).error


def test_a_value_and_a_reply_fit_into_a_frame():
    store = Store()
    large = b"x" * (PIECE_BYTES // 2)
    assert "takes 65520 at most" in answer(store, "set", "k", values=(large + b"x",)).error
    answer(store, "set", "k", values=(large,))
    assert "takes 65520 at most" in answer(store, "append", "k", values=(b"x",)).error
    assert "too large for one reply" in answer(store, "get", "k", "k").error
    assert answer(store, "get", "k").values == (large,)


def test_a_site_cannot_leave_any_number_of_requests_waiting():
    store = Store()
    for _ in range(hub_store.MAX_WAITING):
        assert ask(store, 1, "wait", "k") == []
    assert "too many" in ask(store, 1, "wait", "k")[0][1].error
    assert ask(store, 2, "wait", "k") == []


@pytest.mark.parametrize(
    "request_",
    [
        Request(1, "drop"),
        Request(1, "set", ("a",)),
        Request(1, "set", (), (b"v",)),
        Request(1, "add", ()),
        Request(1, "add", ("a", "b")),
        Request(1, "delete", ()),
        Request(1, "compare_set", ("a",), (b"v",)),
        Request(1, "get", ("a",), (b"v",)),
        Request(1, "get", (1,)),
        Request(1, "get", "a"),
        Request(1, ["get"]),
        Request(1, "set", ("a",), ("v",)),
        Request("1", "num_keys"),
        Request(1, "add", ("a",), (), 1 << 63),
        Request(1, "add", ("a",), (), 1.5),
        Reply(1),
        "text",
    ],
)
def test_what_is_no_request_is_refused(request_):
    with pytest.raises(FrameError):
        Store().handle(0, encode(request_))


# Sums of the hub: exact, in the order of slots, whatever the order of arrival

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


def test_the_hub_sends_sums_to_all_sites(hub_of_three):
    sites = together(hub_of_three, "abc")
    contents = [np.frombuffer(os.urandom(400_000), np.int64) for _ in sites]
    for site, content in zip(reversed(sites), contents):
        site.send(Kind.SUMMAND, content.tobytes(), exchange=9, tag=CODES[torch.int64])
    for site in sites:
        assert np.array_equal(np.frombuffer(site.message(400_000, Kind.SUM), np.int64), sum(contents))
    sites[0].send(Kind.SUMMAND, b"123", exchange=9)
    assert sites[1].action(Drop).reason == "3 bytes at byte 0 are no summands of type torch.float32"
