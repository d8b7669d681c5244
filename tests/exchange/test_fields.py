"""Objects that sites state: one of another type, or a count that is not possible, is named at all sites."""

from dataclasses import dataclass
from io import BytesIO
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import support
import torch
import torch.distributed as dist
from dadplug.runners import exchanges, loaders, patches, present
from numpy.typing import NDArray
from torch import nn

import dadplug
from dadplug.adaptive import adaptive_loader, epochs
from dadplug.errors import DadplugError
from dadplug.exchange import codec, group_transport
from dadplug.exchange.fields import fits, minority
from dadplug.exchange.handshake import reachable_address
from dadplug.exchange.rounds import Rounds
from dadplug.exchange.transport import Transport
from dadplug.parameter_server.replica import LoggedOptimizer
from dadplug.step.model_sync import sameness


class Pair(NamedTuple):
    name: str
    sizes: list[int] | None


@dataclass
class Report:
    pairs: dict[str, Pair]
    seconds: float


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (1, int, True),
        (True, int, False),
        (1, float, True),
        (1.0, int, False),
        (1 << 63, int, False),
        (1 << 64, float, False),
        ("x", str | None, True),
        (None, str | None, True),
        ([], str | None, False),
        ([1, 2], list[int], True),
        ([1, "2"], list[int], False),
        ((1, 2), list[int], False),
        ((1, "a"), tuple[int, str], True),
        ((1,), tuple[int, str], False),
        ((1, 2, 3), tuple[int, ...], True),
        ({"a": 1}, dict[str, int], True),
        ({"a": None}, dict[str, int], False),
        ({"a": None}, dict[str, Any], True),
        (torch.zeros(2), torch.Tensor, True),
        ([np.zeros(2)], list[NDArray[np.int8]], True),
        (Report({"a": Pair("x", None)}, 1), Report, True),
        (Report({"a": Pair("x", [None])}, 1), Report, False),
        (Report({"a": ("x", None)}, 1), Report, False),
        (Report([], 1), Report, False),
    ],
)
def test_types_of_what_has_arrived(value, kind, expected):
    assert fits(value, kind) is expected


def test_only_more_than_half_of_the_sites_make_the_others_a_minority():
    assert minority({0: "a", 1: "b", 2: "a"}) == [1]
    assert minority({0: "a", 1: "b"}) == minority({0: "a", 1: "b", 2: "c"}) == []


LIES = [None, [1], {"a": 1}, "x", -1, (1, 2), 1e308, {"a": [1]}, [torch.zeros(2)]]


@support.at_sites(2)
@pytest.mark.parametrize("mode", ["rankdad", "edad", "dsgd"])
def test_what_a_site_states_at_set_up_is_checked(mode: str) -> None:
    gather, refused = group_transport.gather_objects, set()
    for place in range(6):
        for number, lie in enumerate(LIES):
            calls = 0

            def gathered(item, *rest, place=place, lie=lie):
                nonlocal calls
                calls += 1
                changed = (*item[:2], lie) if calls == place + 1 and dist.get_rank() else item
                return gather(changed, *rest)

            group_transport.gather_objects = gathered
            try:
                norm = nn.Tanh() if mode == "edad" else nn.BatchNorm1d(5)
                model = nn.Sequential(nn.Linear(6, 5), norm, nn.Linear(5, 4))
                reduction = dadplug.GradientReduction(model, mode)
                model(torch.randn(8, 6)).square().sum().backward()
                reduction.synchronize()
                reduction.average_buffers()
                reduction.first_difference()
                reduction.detach()
            except (DadplugError, ValueError) as error:
                if "site 1" not in str(error) and "sites" not in str(error):
                    raise AssertionError((place, lie, error)) from error
                refused.add((place, number))
            finally:
                group_transport.gather_objects = gather
    assert len(refused) > 20, refused


class OneLies:
    """Transport of two sites, of which the other one sends what a test has set."""

    sites, world_size, rank, site_rank = ("site 0 (a)", "site 1 (b)"), 2, 0, 0
    gather_objects, rounds = Transport.gather_objects, Rounds(2)

    def __init__(self, lie: Any) -> None:
        self.lie = lie

    def gather_present(self, item: Any) -> dict[int, Any]:
        return {0: item, 1: self.lie}

    def close(self) -> None:
        pass


def agree_on_fused(transport: Any) -> None:
    model = nn.Linear(2, 2)
    LoggedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model).agree_on_fused(transport, True)


GATHERS = {
    "own type": lambda each: each.gather_objects(1.5, float, "loss"),
    "tensors of metrics": lambda each: present.gather(each, torch.zeros(2)),
    "tensors of one shape": lambda each: present.gather(each, torch.zeros(2), 0),
    "decisions": lambda each: present.gather(each, True),
    "lengths": lambda each: loaders.compare_lengths([1, 2], each),
    "split data": lambda each: loaders.data_to_split([1, 2], True, "train", each.gather_objects),
    "nodes": lambda each: reachable_address(each.gather_objects),
    "weights": lambda each: sameness.take_over(each, 1, sameness.tensors_of(nn.Linear(2, 2))),
    "fused steps": agree_on_fused,
}


HARMFUL = "no data\r\x1b[2J\x1b]0;title\x07"
TEXTS = {
    "problem": (HARMFUL, lambda each: sameness.raise_problems("", each)),
    "failure": (HARMFUL, lambda each: adaptive_loader._gather(lambda: 1.0, float, each)),
    "checkpoint": ((None, HARMFUL, "x"), lambda each: epochs._newest(None, each)),
    "outcome": (HARMFUL, lambda each: epochs._write_everywhere(None, b"", each)),
    "refusal": (None, lambda each: codec.decode_objects([(1, codec.encode(codec.Refusal(HARMFUL)))], None)),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_other_sites_in_errors_act_on_no_terminal(name: str) -> None:
    lie, call = TEXTS[name]
    with pytest.raises(Exception, match=r"no data\\r\\x1b\[2J") as found:
        call(OneLies(lie))
    assert str(found.value).isprintable()


@pytest.mark.parametrize("length", [-1, 1 << 62])
def test_the_length_of_another_sites_checkpoint_is_checked(length: int) -> None:
    with pytest.raises(DadplugError, match=r"site 1 \(b\) announces"):
        epochs._newest(None, OneLies((("run", 1, b"", length), None, "x")))


@pytest.mark.parametrize("name", GATHERS)
@pytest.mark.parametrize("lie", [{"a": 1}, ["x", [None]], torch.zeros(3, 3), torch.zeros(2).to(torch.cfloat)], ids=repr)
def test_an_object_of_another_type_names_its_site(name: str, lie: Any) -> None:
    if name == "tensors of metrics" and isinstance(lie, torch.Tensor):
        return
    with pytest.raises(dadplug.errors.MismatchError, match=r"site 1 \(b\)"):
        GATHERS[name](OneLies(lie))


@pytest.mark.parametrize("lie", [np.zeros(2), np.float64(1.0), frozenset({1}), codec.Refusal("no")], ids=repr)
def test_no_state_of_a_site_makes_a_checkpoint_unreadable(lie: Any) -> None:
    own = {"step": 1, "errors": {"weight": torch.zeros(2)}, "choice": (1.0, None)}
    states = exchanges.plain_states([own, {**own, "method": [lie]}, None])
    assert states == [own, None, None]
    torch.save(states, file := BytesIO())
    assert len(torch.load(BytesIO(file.getvalue()), weights_only=True)) == 3


def test_metrics_of_a_site_may_have_any_value() -> None:
    wild = ({"x": 1e308, "x/std": -1e308}, -3)
    assert patches.merge_metrics([({"x": 1.0, "x/std": 1.0}, 4), wild]).keys() == {"x", "x/std"}
    assert fits(wild, patches.METRICS_KIND)
    assert not fits(({"x": "1"}, 3), patches.METRICS_KIND)


def test_names_of_metrics_act_on_no_terminal() -> None:
    own = {"x\033[2J\n": 1.0}
    found = {**patches.merge_metrics([(own, 1)]), **patches.metrics_by_site({0: (own, 1)}, OneLies.sites)}
    assert len(found) == 2
    assert all(map(str.isprintable, found))


def test_a_tensor_of_another_shape_is_left_out_where_sites_may_leave() -> None:
    left_out = []
    transport = OneLies(None)
    transport.sites = (*OneLies.sites, "site 2 (c)")
    transport.rounds = SimpleNamespace(elastic=True, leave_out=lambda rank, error: left_out.append((rank, str(error))))
    transport.gather_present = lambda item: {0: item, 1: torch.zeros(3), 2: item}
    assert present.all_gather(transport, torch.ones(2), False).tolist() == [[1.0, 1.0]] * 2
    assert [rank for rank, _ in left_out] == [1]
    assert "site 1 (b) has sent an invalid value" in left_out[0][1]
