"""Project files and rosters: what is accepted, and what a mistake is answered with."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dadplug.errors import KitError
from dadplug.hub import Policy, Project, Roster
from dadplug.hub.project import split_address

TEXT = """
name = "study"
hub = "Hub.Example.org:8470"
sites = ["berlin", "lyon"]
hub_at = "lyon"
hub_names = ["10.0.0.5", "2001:db8:0::1", "hub.example.org"]
days = 90
own_keys = ["lyon"]

[policy.lyon]
modes = ["rankdad", "dsgd"]
share_inputs = false
"""


def test_a_project_file(tmp_path):
    (tmp_path / "project.toml").write_text(TEXT)
    project = Project.load(tmp_path / "project.toml")
    names = ("hub.example.org", "10.0.0.5", "2001:db8::1")
    assert project.roster == Roster("study", "Hub.Example.org:8470", names, ("berlin", "lyon"), "lyon")
    assert (project.days, project.authority_days, project.own_keys) == (90, 3650, ("lyon",))
    assert project.policies == {"lyon": Policy(("rankdad", "dsgd"), share_inputs=False)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("days = 90", "day = 90"), "unknown entry 'day'; valid ones are name, hub, sites"),
        (("days = 90", "days = 0"), "days must be a whole number"),
        (("days = 90", "days = true"), "days must be a whole number"),
        (("Hub.Example.org:8470", "hub.example.org"), "hub must be HOST:PORT"),
        (("Hub.Example.org:8470", "hub.example.org:70000"), "hub must be HOST:PORT"),
        (("Hub.Example.org:8470", "https://hub.example.org:1"), "hub must be HOST:PORT"),
        (("Hub.Example.org:8470", "hub_1:80"), "neither a host name nor an IP address"),
        (("10.0.0.5", "10.0.0.500"), "neither a host name nor an IP address"),
        (('name = "study"', ""), "name is missing"),
        (('"study"', '"../study"'), "the name of a project must begin"),
        (('"study"', f'"{"s" * 49}"'), "up to 48"),
        (('["berlin", "lyon"]', "[]"), "at least one site"),
        (('["berlin", "lyon"]', '["lyon", "Lyon"]'), "must differ by more than"),
        (('["berlin", "lyon"]', '["lyon", "hub"]'), "cannot be called 'hub'"),
        (('["berlin", "lyon"]', '["lyon", "Authority"]'), "cannot be called 'Authority'"),
        (('["berlin", "lyon"]', '["lyon", "a/b"]'), "the name of a site must begin"),
        (('["berlin", "lyon"]', '["lyon", ".."]'), "the name of a site must begin"),
        (('["berlin", "lyon"]', '"lyon"'), "sites must be a list of texts"),
        (('["lyon"]', '["paris"]'), "has no site 'paris'"),
        (('hub_at = "lyon"', 'hub_at = "paris"'), "hub_at must name the site that runs the hub, got 'paris'"),
        (('hub_at = "lyon"', "hub_at = true"), "hub_at must be a text"),
        (('hub_at = "lyon"', "sealed = 1"), "sealed must be true or false"),
        (("policy.lyon", "policy.paris"), "has no site 'paris'"),
        (("share_inputs = false", "share_inputs = 0"), "policy.lyon: share_inputs must be true or false"),
        (("share_inputs = false", "share_input = false"), "policy.lyon: unknown entry 'share_input'"),
        (('["rankdad", "dsgd"]', '"dsgd"'), "policy.lyon: modes must be a list"),
        (("days = 90", "days = "), "Invalid value"),
    ],
)
def test_mistakes_in_a_project_file_are_explained(tmp_path, change, reason):
    assert change[0] in TEXT
    path = tmp_path / "project.toml"
    path.write_text(TEXT.replace(change[0], change[1], 1))
    with pytest.raises(KitError, match=f"project.toml: .*{reason}"):
        Project.load(path)


def test_a_missing_project_file_is_named(tmp_path):
    with pytest.raises(KitError, match=r"^[^:]*project.toml: No such file"):
        Project.load(tmp_path / "project.toml")


def test_addresses():
    assert split_address("[2001:DB8::1]:8470") == ("2001:db8::1", 8470)
    assert split_address("Hub.example.org:1") == ("hub.example.org", 1)


def test_a_roster_is_read_as_it_was_written(tmp_path):
    roster = Roster("study", "hub.example.org:8470", ("hub.example.org",), ("b", "a"))
    for each in (roster, replace(roster, hub_at="b"), replace(roster, sealed=True)):
        (tmp_path / "roster.json").write_bytes(each.to_json())
        assert Roster.load(tmp_path) == each
    (tmp_path / "roster.json").write_bytes(roster.to_json())
    assert Roster.load(tmp_path) == roster
    assert [roster.slot(site) for site in roster.sites] == [0, 1]
    found = json.loads(roster.to_json())
    found["sites"].reverse()
    (tmp_path / "roster.json").write_text(json.dumps(found))
    assert Roster.load(tmp_path) == roster  # the slot counts, not the position
    del found["hub_at"], found["sealed"]  # a roster of an older version
    (tmp_path / "roster.json").write_text(json.dumps(found))
    assert (Roster.load(tmp_path).hub_at, Roster.load(tmp_path).sealed) == (None, False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 2}, "has format 2"),
        ({"sites": [{"name": "a", "slot": 1}]}, "slots must be 0 to 0"),
        ({"sites": [{"name": "a", "slot": 0}, {"name": "b", "slot": 0}]}, "slots must be 0 to 1"),
        ({"sites": ["a"]}, "is not a roster"),
        ({"sites": 3}, "is not a roster"),
        ({"sites": [{"name": "../a", "slot": 0}]}, "the name of a site must begin"),
        ({"hub": "nowhere"}, "hub must be HOST:PORT"),
        ({"hub_names": None}, "is not a roster"),
        ({"hub_at": "b"}, "hub_at must name the site that runs the hub"),
        ({"hub_at": ["a"]}, "hub_at must name the site that runs the hub"),
        ({"sealed": "false"}, "sealed must be true or false"),
    ],
)
def test_a_damaged_roster_is_named(tmp_path, change, reason):
    roster = Roster("study", "hub.example.org:8470", ("hub.example.org",), ("a",))
    (tmp_path / "roster.json").write_text(json.dumps(json.loads(roster.to_json()) | change))
    with pytest.raises(KitError, match=f"roster.json.*{reason}"):
        Roster.load(tmp_path)
