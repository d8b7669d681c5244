"""Local policies: what they allow, and that programs cannot loosen them."""

import dataclasses
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import hub_kits
import pytest
import support
import torch
from running_hub import running_hub
from support import free_port, refuses
from torch import nn

from dadplug import DifferentialPrivacy, GradientReduction, LocalSGD
from dadplug.errors import KitError, PolicyError
from dadplug.exchange.factory import SingleSite
from dadplug.exchange.restrictions import impose_restrictions, lift_restrictions
from dadplug.hub import Policy, Roster
from dadplug.hub.pki.kits import Kit
from dadplug.hub.pki.project import KitRestrictions
from dadplug.options import Options

STRICT = Policy(("rankdad", "dsgd"), share_inputs=False)


def test_a_policy_refuses_everything_else():
    dad, auto = ({"mode": mode, "share_inputs": False} for mode in ("dad", "auto"))
    refuses(
        (lambda: STRICT.check(Options(**dad)), "does not allow mode='dad'; allowed: 'rankdad', 'dsgd'"),
        (lambda: STRICT.check(Options(**auto)), "does not allow mode='auto'"),
        (lambda: STRICT.check(Options(mode="rankdad")), "requires share_inputs=False, got share_inputs=True"),
        (lambda: Policy(()).check(Options()), "does not allow mode='rankdad'; allowed: none"),
        (
            lambda: Policy(require_privacy=True).check(Options()),
            "policy of this site's kit has require_privacy = true",
        ),
        (
            lambda: Policy(require_privacy=True).check(Options(privacy=DifferentialPrivacy(0.0, expected_batch=4))),
            "with noise to dadplug.GradientReduction",
        ),
        *(  # only the value False counts as False
            (partial(STRICT.check, SimpleNamespace(mode="dsgd", share_inputs=value)), "requires share_inputs=False")
            for value in (None, 0, "")
        ),
        error=PolicyError,
    )


def _step(rows, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 40))
    reduction = GradientReduction(model, **options)
    try:
        model(torch.randn(rows, 40)).square().mean().backward()
        reduction.synchronize()
        return model[0].weight.grad
    finally:
        reduction.detach(discard=True)


@pytest.mark.parametrize(
    ("options", "allowed", "refused"),
    [
        ({"mode": "rankdad", "rank": 4}, 16, 15),
        ({"mode": "powersgd", "rank": 4}, 16, 15),
        ({"mode": "rankdad", "rank": 1}, 4, 3),
    ],
    ids=str,
)
def test_a_policy_limits_the_rank_by_the_rows_of_a_batch(impose, options, allowed, refused):
    impose(Policy(max_rank_share=0.25))
    assert _step(allowed, **options).any()
    with pytest.raises(PolicyError, match=r"policy of this site's kit has max_rank_share = 0.25: of \d+ rows"):
        _step(refused, **options)


def test_a_policy_limits_the_rank_of_gradients_without_factors_by_the_samples(impose):
    impose(Policy(max_rank_share=0.25))
    for samples in (16, 15):
        model = nn.LSTM(20, 30)
        reduction = GradientReduction(model, rank=4)
        with reduction.samples(samples):
            model(torch.randn(samples, 5, 20))[0].square().mean().backward()
        if samples == 15:
            with pytest.raises(PolicyError, match="3 may be sent, and 4 would be"):
                reduction.synchronize()
        else:
            reduction.synchronize()
            assert {row.exposure for row in reduction.plan} == {"aggregated"}
        reduction.detach(discard=True)


def test_a_policy_on_rank_refuses_rows_and_allows_sums(impose):
    impose(Policy(max_rank_share=0.5))
    assert _step(2, mode="dsgd").any()
    with pytest.raises(PolicyError, match="4 may be sent, and 8 would be"):
        _step(8, mode="dad")


def test_a_program_cannot_loosen_a_policy(tmp_path):
    kits = hub_kits.make(tmp_path / "kits", policy={"a": {"modes": ["rankdad"], "share_inputs": False}})
    kit = Kit.load(kits / "a")
    for change in ({"modes": None}, {"modes": ("dad",)}, {"share_inputs": True}):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(kit.policy, *change.popitem())
    with pytest.raises(dataclasses.FrozenInstanceError):
        kit.policy = Policy()
    with pytest.raises(AttributeError):
        kit.policy.modes.append("dad")
    with pytest.raises(PolicyError):
        kit.policy.check(Options(mode="dad"))
    (kits / "a" / "policy.toml").unlink()  # no policy is not a policy that allows everything
    with pytest.raises(KitError, match=r"policy.toml"):
        Kit.load(kits / "a")
    assert Kit.load(kits / "b").policy == Policy()


@pytest.mark.parametrize(
    "policy",
    [
        Policy(),
        STRICT,
        Policy(()),
        Policy(('with "quotes" \\',), share_inputs=True),
        Policy(max_rank_share=0.25, require_privacy=True),
    ],
)
def test_a_policy_is_read_as_it_was_written(tmp_path, policy):
    (tmp_path / "policy.toml").write_text(policy.text())
    assert Policy.load(tmp_path / "policy.toml") == policy


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("mode = ['dsgd']", "unknown entry 'mode'; valid ones are modes, share_inputs"),
        ("modes = 'dsgd'", "modes must be a list"),
        ("modes = [1]", "modes must be a list"),
        ("share_inputs = 'no'", "share_inputs must be true or false"),
        ("share_inputs = False", "Invalid value"),
        ("encrypt_local = 0", "encrypt_local must be true or false"),
        *(
            (f"max_rank_share = {share}", "max_rank_share must be a number above 0 and up to 1")
            for share in ("0", "-1", "1.5", "'half'", "true")
        ),
    ],
)
def test_mistakes_in_a_policy_are_explained(tmp_path, text, reason):
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(KitError, match=f"policy.toml: .*{reason}"):
        Policy.load(tmp_path / "policy.toml")


def test_a_policy_that_is_empty_or_cut_is_refused(tmp_path):
    path, strict = tmp_path / "policy.toml", Policy(("rankdad",), share_inputs=False, require_privacy=True)
    lines = strict.text().splitlines(keepends=True)
    for kept in range(len(lines)):
        path.write_text("".join(lines[:kept]))
        with pytest.raises(KitError, match=r"policy.toml has lost its (entries|last lines)"):
            Policy.load(path)
        path.write_text("".join(lines[kept + 1 :]))
        if kept >= lines.index("begin = 1\n"):
            with pytest.raises(KitError, match=r"policy.toml has lost its (entries|first lines)"):
                Policy.load(path)
    for place in [place for place, each in enumerate("".join(lines)) if each == "\n"]:  # one bit of a line's end
        for end in "*J":
            path.write_text("".join(lines)[:place] + end + "".join(lines)[place + 1 :])
            with suppress(KitError):
                assert Policy.load(path) == strict
    path.write_text("".join(line for line in lines if not line.startswith(("begin", "end"))))  # of dadplug 0.3.0
    assert Policy.load(path) == strict


# Restrictions of a kit, as every reduction of a process that is connected to a hub meets them


MEMBER = Roster("study", "hub.example.org:8470", ("hub.example.org",), ("a", "b"), "a")
THIRD_PARTY = Roster("study", "hub.example.org:8470", ("hub.example.org",), ("a", "b"))
SEALED = replace(THIRD_PARTY, sealed=True)
FACTOR_MODES = ("dad", "edad", "rankdad", "auto")
OTHER_MODES = ("dsgd", "powersgd", "topk")


@pytest.fixture
def impose():
    """Function that puts restrictions into force until the end of the test."""
    imposed = []

    def put(policy: Policy, roster: Roster = MEMBER) -> KitRestrictions:
        imposed.append(KitRestrictions(policy, roster))
        impose_restrictions(imposed[-1])
        return imposed[-1]

    yield put
    for each in imposed:
        lift_restrictions(each)


@pytest.fixture
def sent(monkeypatch):
    """Names of the functions of the transport by which anything leaves this site, as they are called."""
    called = []
    for name in ("gather", "all_reduce", "broadcast", "broadcast_bytes", "gather_objects"):
        plain = getattr(SingleSite, name)

        def record(*args, name=name, plain=plain, **kwargs):
            called.append(name)
            return plain(*args, **kwargs)

        monkeypatch.setattr(SingleSite, name, record)
    return called


def network():
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def step(reduction):
    reduction.model(torch.ones(2, 4)).sum().backward()
    reduction.synchronize()


def test_a_reduction_that_the_policy_does_not_allow_sends_nothing(impose, sent):
    strict = impose(Policy(("dsgd",), share_inputs=False))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for options in ({"mode": "rankdad", "share_inputs": False}, {"mode": "dsgd"}, {}):
        with pytest.raises(PolicyError):
            GradientReduction(network(), **options)
    assert not sent
    step(GradientReduction(network(), mode="dsgd", share_inputs=False))
    assert sent
    sent.clear()
    lift_restrictions(strict)
    impose(Policy(require_privacy=True))
    refuses(
        (lambda: GradientReduction(model, mode="dsgd"), "require_privacy = true"),
        (lambda: LocalSGD(model, optimizer), "require_privacy = true"),
        error=PolicyError,
    )
    assert not sent


@pytest.mark.parametrize("changed", [{"mode": "dad"}, {"share_inputs": True}])
def test_options_that_are_changed_later_are_checked_again(impose, changed):
    reduction = GradientReduction(network(), mode="rankdad", share_inputs=False)
    impose(Policy(("rankdad",), share_inputs=False))
    for name, value in changed.items():
        object.__setattr__(reduction.options, name, value)  # what no program should do
    with pytest.raises(PolicyError):
        step(reduction)


def test_a_new_plan_is_checked(impose):
    reduction = GradientReduction(network(), mode="dsgd")
    step(reduction)
    impose(Policy(("rankdad",)))
    next(iter(reduction.model.parameters())).requires_grad_(False)
    with pytest.raises(PolicyError, match="allowed: 'rankdad'"):
        step(reduction)


@pytest.mark.parametrize("mode", FACTOR_MODES)
def test_factors_do_not_pass_a_hub_of_a_third_party(impose, sent, mode):
    impose(Policy(), THIRD_PARTY)
    with pytest.raises(PolicyError, match="a third party runs it") as refused:
        GradientReduction(network(), mode=mode)
    assert "hub_at" in str(refused.value)
    assert not sent


def test_gradients_pass_a_hub_of_a_third_party_and_factors_that_of_a_member_or_sealed(impose):
    third = impose(Policy(), THIRD_PARTY)
    for mode in OTHER_MODES:
        step(GradientReduction(network(), mode=mode))
    lift_restrictions(third)
    for roster in (MEMBER, SEALED):
        found = impose(Policy(), roster)
        for mode in (*FACTOR_MODES, *OTHER_MODES):
            step(GradientReduction(network(), mode=mode))
        lift_restrictions(found)


def test_restrictions_of_several_connections_hold_together(impose):
    first, second = impose(Policy(("dsgd", "dad"))), impose(Policy(("dsgd", "topk")))
    for mode in ("dad", "topk"):
        with pytest.raises(PolicyError):
            GradientReduction(network(), mode=mode)
    GradientReduction(network(), mode="dsgd")
    lift_restrictions(first)
    lift_restrictions(first)
    GradientReduction(network(), mode="topk")
    lift_restrictions(second)
    GradientReduction(network(), mode="rankdad")


PROGRAM = """
import sys, torch, dadplug
from torch import nn
dadplug.connect(kit=sys.argv[1], timeout=200)
dadplug.GradientReduction(nn.Linear(4, 4), mode="dsgd", share_inputs=False)
dadplug.GradientReduction(nn.Linear(4, 4), mode="rankdad", share_inputs=False)
print("trains")
"""


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"policy": {"a": {"modes": ["dsgd"]}}}, "the policy of this site's kit does not allow mode='rankdad'"),
        ({}, ""),
    ],
)
def test_programs_meet_the_policy_of_their_kit(tmp_path, entries, reason):
    (tmp_path / "site.py").write_text(PROGRAM)
    hub_kits.make(tmp_path / "kits", hub=f"127.0.0.1:{free_port()}", hub_names=[], **entries)
    with running_hub(tmp_path / "kits") as hub:
        commands = [[str(tmp_path / "site.py"), str(hub.kits / name)] for name in "ab"]
        refused, other = support.run_programs(commands)
    assert (refused.status, other.status) == ((1, 1) if reason else (0, 0)), refused.errors + other.errors
    assert ("trains" in refused.output) == ("trains" in other.output) == (not reason)
    assert f"PolicyError: {reason}" in refused.errors or not reason
    assert f"site 0 (a) is gone: PolicyError: {reason}" in other.errors or not reason
