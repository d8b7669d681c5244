"""Local policies: what they allow, and that programs cannot loosen them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import hub_kits
import pytest

from dadplug.errors import KitError, PolicyError
from dadplug.hub import Policy
from dadplug.hub.kits import Kit
from dadplug.options import Options

STRICT = Policy(("rankdad", "dsgd"), share_inputs=False)


def test_a_policy_allows_what_it_names():
    Policy().check(Options())
    STRICT.check(Options(mode="dsgd", share_inputs=False))
    STRICT.check(Options(mode="rankdad", share_inputs=False))
    Policy(("dad",)).check(Options(mode="dad"))


@pytest.mark.parametrize(
    ("policy", "options", "reason"),
    [
        (STRICT, {"mode": "dad", "share_inputs": False}, r"does not allow mode='dad'; allowed: 'rankdad', 'dsgd'"),
        (STRICT, {"mode": "auto", "share_inputs": False}, "does not allow mode='auto'"),
        (STRICT, {"mode": "rankdad"}, "requires share_inputs=False, got share_inputs=True"),
        (Policy(()), {}, "does not allow mode='rankdad'; allowed: none"),
    ],
)
def test_a_policy_refuses_everything_else(policy, options, reason):
    with pytest.raises(PolicyError, match=reason):
        policy.check(Options(**options))


def test_only_the_value_false_counts_as_false():
    for value in (None, 0, ""):
        with pytest.raises(PolicyError, match="requires share_inputs=False"):
            STRICT.check(SimpleNamespace(mode="dsgd", share_inputs=value))


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


@pytest.mark.parametrize("policy", [Policy(), STRICT, Policy(()), Policy(('with "quotes" \\',), share_inputs=True)])
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
    ],
)
def test_mistakes_in_a_policy_are_explained(tmp_path, text, reason):
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(KitError, match=f"policy.toml: .*{reason}"):
        Policy.load(tmp_path / "policy.toml")
