"""The hub's part of the store: operations as torch's own stores have them, and bounds of what a site can fill."""

import itertools

import pytest
from msgspec.msgpack import encode

from dadplug.errors import FrameError
from dadplug.hub.server import store as hub_store
from dadplug.hub.server.store import REPLIES, Reply, Request, Store
from dadplug.hub.wire.messages import PIECE_BYTES

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


def test_the_number_of_a_reply_is_that_of_its_request():
    assert answer(Store(), "num_keys", number=77).number == 77


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


def test_garbage_is_refused():
    with pytest.raises(FrameError):
        Store().handle(0, b"\0" * 40)
