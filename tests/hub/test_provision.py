"""Kits on the disk: their files, requests and signatures, renewal, revocation."""

import contextlib
import errno
import io
import itertools
import json
import os
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta

import hub_kits
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from hub_kits import PUBLIC, connects, contents, dial, meet
from support import refuses

from dadplug.errors import KitError
from dadplug.hub import Policy, Project, Roster
from dadplug.hub.pki import files as passphrases
from dadplug.hub.pki import provision
from dadplug.hub.pki.kits import Kit, current_time, fingerprint, key_to_pem, make_request, new_key, to_pem
from dadplug.hub.pki.project import split_address
from dadplug.hub.pki.provision import Authority
from dadplug.support.files import write_file
from dadplug.tools.cli.commands import main


def test_the_files_of_kits(kits):
    assert {path.name for path in kits.iterdir()} == {"authority", "hub", "a", "b"}
    assert {path.name for path in (kits / "hub").iterdir()} == PUBLIC | {"key.pem"}
    for site in ("a", "b"):
        assert {path.name for path in (kits / site).iterdir()} == PUBLIC | {"key.pem", "policy.toml"}
    keys = {path.parent.name: path.read_bytes() for path in kits.rglob("key.pem")}
    assert set(keys) == {"authority", "hub", "a", "b"}
    assert len(set(keys.values())) == 4
    for path in kits.rglob("*"):
        private = path.read_bytes().find(b"PRIVATE") >= 0 if path.is_file() else False
        assert private == (path.name == "key.pem")


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_file_modes_do_not_depend_on_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        kits = hub_kits.make(tmp_path / "kits")
    finally:
        os.umask(before)
    for path in kits.rglob("*"):
        expected = 0o700 if path.is_dir() else 0o600 if path.name == "key.pem" else 0o644
        assert path.stat().st_mode & 0o777 == expected, path


def test_a_kit_holds_its_name_slot_and_the_hubs_address(kits):
    hub, a, b = (Kit.load(kits / name) for name in ("hub", "a", "b"))
    assert (hub.is_hub, a.is_hub) == (True, False)
    assert (a.name, a.slot, b.name, b.slot) == ("a", 0, "b", 1)
    assert b.roster.address() == ("hub.example.org", 8470)
    assert hub.roster == a.roster == b.roster
    with pytest.raises(KitError, match="has no site 'hub'"):
        hub.slot
    a.check_dates()


def test_certificates_have_the_extensions_that_strict_verifiers_require(kits):
    authority, hub, site = Authority.load(kits / "authority"), Kit.load(kits / "hub"), Kit.load(kits / "a")
    ca = authority.certificate.extensions
    identifier = ca.get_extension_for_class(x509.SubjectKeyIdentifier).value
    basic = ca.get_extension_for_class(x509.BasicConstraints)
    assert (basic.critical, basic.value.ca, basic.value.path_length) == (True, True, 0)
    usage = ca.get_extension_for_class(x509.KeyUsage).value
    assert (usage.key_cert_sign, usage.crl_sign, usage.digital_signature) == (True, True, False)
    for kit, purpose in ((hub, "serverAuth"), (site, "clientAuth")):
        own = kit.certificate.extensions
        basic = own.get_extension_for_class(x509.BasicConstraints)
        assert (basic.critical, basic.value.ca) == (True, False)
        usage = own.get_extension_for_class(x509.KeyUsage).value
        assert (usage.key_cert_sign, usage.crl_sign, usage.digital_signature) == (False, False, True)
        assert [each._name for each in own.get_extension_for_class(x509.ExtendedKeyUsage).value] == [purpose]
        issuer = own.get_extension_for_class(x509.AuthorityKeyIdentifier).value
        assert issuer.key_identifier == identifier.digest
        assert own.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest != identifier.digest
    names = hub.certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["hub.example.org"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]


def test_dates_are_those_of_the_project(tmp_path):
    now = current_time()
    kits = hub_kits.make(tmp_path / "kits", now, days=30, authority_days=20)
    kit = Kit.load(kits / "a")
    assert kit.authority.not_valid_after_utc == now + timedelta(days=20)
    assert kit.certificate.not_valid_after_utc == now + timedelta(days=20)  # cut off at the authority's
    assert now - timedelta(days=1) < kit.certificate.not_valid_before_utc < now
    kit.check_dates(now)
    for other in (now - timedelta(days=1), now + timedelta(days=21)):
        with pytest.raises(KitError, match=r"is valid from .* this machine's clock says"):
            kit.check_dates(other)
    with pytest.raises(KitError, match="expired"):
        provision.renew(kits, "a", now=now + timedelta(days=21))


# Provisioning again.


def test_existing_kits_are_not_overwritten(kits):
    before = contents(kits)
    with pytest.raises(KitError, match="`renew` makes new ones"):
        hub_kits.make(kits)
    for wrong, reason in (
        ({"name": "other"}, "is the authority of study"),
        ({"hub": "elsewhere.org:1"}, "use `renew hub --hub-name elsewhere.org`"),
        ({"hub": "127.0.0.1:9", "hub_names": []}, "is the authority of study"),
        ({"sites": ["b", "a"]}, "slots are permanent"),
        ({"sites": ["a"]}, "slots are permanent"),
    ):
        with pytest.raises(KitError, match=reason):
            hub_kits.make(kits, **wrong)
    assert contents(kits) == before


def test_a_site_is_added_without_touching_other_sites(kits):
    before = contents(kits)
    hub_kits.make(kits, sites=["a", "b", "c"], policy={"c": {"modes": ["dsgd"]}})
    after = contents(kits)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"authority/roster.json", "hub/roster.json"}
    assert Kit.load(kits / "c").slot == 2
    assert Kit.load(kits / "c").policy == Policy(("dsgd",))
    assert connects(kits, "c")
    assert connects(kits, "a")


@pytest.mark.parametrize(("entry", "value"), [("hub_at", "b"), ("sealed", True)])
def test_a_change_of_what_the_hub_can_read_reaches_all_kits(kits, entry, value):
    before = contents(kits)
    hub_kits.make(kits, **{entry: value})
    after = contents(kits)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {f"{folder}/roster.json" for folder in ("authority", "hub", "a", "b")}
    assert {getattr(Kit.load(kits / name).roster, entry) for name in ("hub", "a", "b")} == {value}
    assert connects(kits)
    with pytest.raises(KitError, match="`renew` makes new ones"):
        hub_kits.make(kits, **{entry: value})


def test_an_existing_folder_that_is_no_kit_is_left_alone(tmp_path):
    (tmp_path / "kits" / "b").mkdir(parents=True)
    (tmp_path / "kits" / "b" / "thesis.txt").write_text("precious")
    with pytest.raises(KitError, match="exists, but"):
        hub_kits.make(tmp_path / "kits")
    assert contents(tmp_path / "kits" / "b") == {"thesis.txt": b"precious"}


# Requests and signatures.


@pytest.fixture
def requested(tmp_path):
    """Kits of a project whose site b makes its key itself, and the request of b."""
    kits = hub_kits.make(tmp_path / "kits", own_keys=["b"], policy={"b": {"share_inputs": False}})
    path, number = provision.request(tmp_path / "own", "b", "study")
    return kits, path, number


def install(kit, folder) -> None:
    """Copy a signed kit into the folder of its key, as a site does."""
    for path in kit.iterdir():
        write_file(folder / path.name, path.read_bytes())


def test_a_site_gets_a_kit_without_giving_its_key_away(requested):
    kits, path, number = requested
    assert not (kits / "b").exists()
    assert {each.name for each in path.parent.iterdir()} == {"key.pem", "request.pem"}
    assert (path.parent / "key.pem").stat().st_mode & 0o777 == 0o600
    assert b"PRIVATE" not in path.read_bytes()
    folder, confirmed = provision.sign(kits, "b", path.read_bytes())
    assert confirmed == number
    assert not any(b"PRIVATE" in each for each in contents(folder).values())
    with pytest.raises(KitError, match=r"key.pem is missing"):
        Kit.load(folder)
    install(folder, path.parent)
    kit = Kit.load(path.parent)
    assert fingerprint(kit.certificate.public_key()) == number
    assert kit.policy == Policy(None, share_inputs=False)
    hub, site = meet(Kit.load(kits / "hub"), dial(kit))
    with hub[0], site:
        assert hub[1] == "b"


def test_a_request_is_for_its_name_and_project_and_proves_the_key(requested, tmp_path):
    kits, path, _ = requested
    pem = path.read_bytes()
    stranger = make_request("b", "study", ec.generate_private_key(ec.SECP192R1()))
    swapped = x509.load_pem_x509_csr(pem).public_bytes(Encoding.DER)
    key = x509.load_pem_x509_csr(pem).public_key().public_numbers().x.to_bytes(32, "big")
    other = new_key().public_key().public_numbers()
    forged = swapped.replace(key, other.x.to_bytes(32, "big"))
    y = x509.load_pem_x509_csr(pem).public_key().public_numbers().y.to_bytes(32, "big")
    forged = x509.load_der_x509_csr(forged.replace(y, other.y.to_bytes(32, "big")))
    for name, wrong, reason in (
        ("a", pem, "the request is for 'b', not for 'a'"),
        ("c", pem, "has no site 'c'"),
        ("b", pem.replace(b"M", b"N"), "not a signing request"),
        ("b", b"", "not a signing request"),
        ("b", to_pem(make_request("b", "other", new_key())), "not for the project study"),
        ("b", to_pem(stranger), "must be on the curve P-256"),
        ("b", to_pem(forged), "not signed by the key that it is for"),
    ):
        with pytest.raises(KitError, match=reason):
            provision.sign(kits, name, wrong)
    assert not (kits / "b").exists()
    assert Authority.load(kits / "authority").issued("b") == []


def test_a_second_request_for_a_name_is_not_signed_unasked(requested, tmp_path):
    kits, path, _ = requested
    provision.sign(kits, "b", path.read_bytes())
    before = contents(kits)
    refuses(
        (
            lambda: provision.sign(kits, "b", to_pem(make_request("b", "study", new_key()))),
            "b has a valid certificate already",
        ),
        (
            lambda: provision.sign(kits, "a", to_pem(make_request("a", "study", new_key())), again=True),
            "holds another key",
        ),
        error=KitError,
    )
    assert contents(kits) == before


def test_a_site_renews_with_a_key_of_its_own(requested):
    kits, path, number = requested
    own = path.parent
    install(provision.sign(kits, "b", path.read_bytes())[0], own)
    _, second = provision.request(own, "b", "study")
    assert second != number
    assert Kit.load(own).key_file.name == "key.pem"  # the old one works until the new certificate is there
    with pytest.raises(KitError, match="waits for its certificate"):
        provision.request(own, "b", "study")
    folder, _ = provision.sign(kits, "b", path.read_bytes(), again=True)
    write_file(own / "certificate.pem", (folder / "certificate.pem").read_bytes())
    assert Kit.load(own).key_file.name == "key.next.pem"
    assert fingerprint(Kit.load(own).certificate.public_key()) == second
    hub, site = meet(Kit.load(kits / "hub"), dial(Kit.load(own)))
    with hub[0], site:
        assert hub[1] == "b"
    provision.request(own, "b", "study")  # puts the second key into the place of the first
    assert Kit.load(own).key_file.name == "key.pem"


def test_requests_do_not_overwrite_keys(tmp_path):
    path, _ = provision.request(tmp_path / "own", "b", "study")
    before = contents(path.parent)
    with pytest.raises(KitError, match="holds no certificate"):
        provision.request(tmp_path / "own", "b", "study")
    assert contents(path.parent) == before


# Renewal and revocation.


@pytest.mark.parametrize("with_key", [False, True])
@pytest.mark.parametrize("name", ["a", "hub"])
def test_renewal_leaves_all_other_files_as_they_are(kits, name, with_key):
    (kits / "a" / "policy.toml").write_text('modes = ["rankdad"]\n')
    before, old = contents(kits), Kit.load(kits / name)
    provision.renew(kits, name, days=700, with_key=with_key)
    after, new = contents(kits), Kit.load(kits / name)
    changed = {each for each in before if before[each] != after[each]}
    assert changed == {f"{name}/certificate.pem"} | ({f"{name}/key.pem"} if with_key else set())
    assert set(after) - set(before) == {f"authority/{new.certificate.serial_number:040x}.issued.pem"}
    assert new.certificate.not_valid_after_utc > old.certificate.not_valid_after_utc
    assert (new.certificate.public_key() == old.certificate.public_key()) != with_key
    assert (kits / name / "key.pem").stat().st_mode & 0o777 == 0o600
    assert connects(kits)


def test_a_kit_that_was_sent_away_is_renewed_without_its_key_and_with_its_policy(tmp_path):
    kits = hub_kits.make(tmp_path / "kits", policy={"a": {"modes": ["rankdad"]}})
    (kits / "a").rename(tmp_path / "a")
    provision.renew(kits, "a")
    assert not (kits / "a" / "key.pem").exists()
    write_file(tmp_path / "a" / "certificate.pem", (kits / "a" / "certificate.pem").read_bytes())
    hub, site = meet(Kit.load(kits / "hub"), dial(Kit.load(tmp_path / "a")))
    with hub[0], site:
        assert hub[1] == "a"
    with pytest.raises(KitError, match="was not made here"):
        provision.renew(kits, "a", with_key=True)
    (kits / "a").rename(tmp_path / "without-key")
    provision.renew(kits, "a", with_key=True)
    assert Kit.load(kits / "a").policy == Policy(("rankdad",))


def test_renewal_of_what_does_not_exist_is_an_error(kits, tmp_path):
    refuses(
        (lambda: provision.renew(kits, "c"), "has no site 'c'"),
        (lambda: provision.renew(kits, "a", hub_names=("a.example.org",)), "host names are those of the hub"),
        (lambda: provision.renew(tmp_path, "a"), "the authority's folder is needed"),
        error=KitError,
    )
    others = hub_kits.make(tmp_path / "others")
    (kits / "a").rename(tmp_path / "a")
    (others / "a").rename(kits / "a")
    for with_key in (False, True):
        with pytest.raises(KitError, match="is not a kit of the authority"):
            provision.renew(kits, "a", with_key=with_key)


def test_revocation_is_by_serial_number_and_lasts(kits):
    first = Kit.load(kits / "a").certificate.serial_number
    provision.renew(kits, "a")
    second = Kit.load(kits / "a").certificate.serial_number
    assert provision.revoke(kits, "a", first) == [first]
    assert Kit.load(kits / "hub").revoked == {first}
    assert connects(kits)  # with the second
    assert provision.revoke(kits, "a") == [second]
    assert provision.revoke(kits, "a") == []
    assert Kit.load(kits / "hub").revoked == {first, second}
    assert not connects(kits)
    refuses(
        (lambda: provision.renew(kits, "a"), "is revoked: renew it with a new key"),
        (lambda: provision.revoke(kits, "b", first), "no such certificate"),
        error=KitError,
    )
    (kits / "a" / "revoked.pem").write_bytes((kits / "hub" / "revoked.pem").read_bytes())
    with pytest.raises(KitError, match="has been revoked"):
        Kit.load(kits / "a").check_dates()


def test_a_revocation_list_must_be_the_authoritys(kits, tmp_path):
    others = hub_kits.make(tmp_path / "others")
    (kits / "hub" / "revoked.pem").write_bytes((others / "hub" / "revoked.pem").read_bytes())
    with pytest.raises(KitError, match=r"revoked.pem is not signed by the authority of this kit"):
        Kit.load(kits / "hub")


# Kits that are incomplete, damaged or put together from several


@pytest.mark.parametrize("name", sorted(PUBLIC | {"key.pem", "policy.toml"}))
def test_a_missing_or_damaged_file_is_named(kits, name):
    path = kits / "a" / name
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + b"\xff")
    with pytest.raises(KitError, match=name):
        Kit.load(kits / "a")
    path.unlink()
    with pytest.raises(KitError, match=name):
        Kit.load(kits / "a")


def test_a_key_that_others_can_read_is_refused(kits):
    (kits / "a" / "key.pem").chmod(0o640)
    with pytest.raises(KitError, match=r"can be read by other users: chmod 600"):
        Kit.load(kits / "a")


def test_parts_of_different_kits_do_not_make_one(kits, tmp_path):
    for name, reason in (("key.pem", "is not the key of"), ("certificate.pem", "is not the key of")):
        content = (kits / "a" / name).read_bytes()
        write_file(kits / "a" / name, (kits / "b" / name).read_bytes(), 0o600)
        with pytest.raises(KitError, match=reason):
            Kit.load(kits / "a")
        write_file(kits / "a" / name, content, 0o600)
    others = hub_kits.make(tmp_path / "others")
    (kits / "a" / "ca.pem").write_bytes((others / "a" / "ca.pem").read_bytes())
    refuses(
        (lambda: Kit.load(kits / "a"), r"certificate.pem is not signed by the authority"),
        (lambda: Kit.load(kits / "c"), "is not a folder"),
        error=KitError,
    )
    assert b"PRIVATE" in key_to_pem(new_key())


# Project files and rosters: what is accepted, and what a mistake is answered with


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
        ({"sealee": True}, "unknown entry 'sealee'"),
    ],
)
def test_a_damaged_roster_is_named(tmp_path, change, reason):
    roster = Roster("study", "hub.example.org:8470", ("hub.example.org",), ("a",))
    (tmp_path / "roster.json").write_text(json.dumps(json.loads(roster.to_json()) | change))
    with pytest.raises(KitError, match=f"roster.json.*{reason}"):
        Roster.load(tmp_path)


def test_every_flipped_bit_of_a_kit_is_named_or_changes_nothing(kits):
    def state(kit: Kit) -> object:
        certificates = [to_pem(each) for each in (kit.authority, kit.certificate)]
        return kit.roster.sealed, kit.revoked, kit.key_file, certificates

    for name in ("ca.pem", "certificate.pem", "revoked.pem"):
        path = kits / "a" / name
        content, expected = path.read_bytes(), state(Kit.load(kits / "a"))
        for place in range(0, 8 * len(content), 43):
            changed = bytearray(content)
            changed[place // 8] ^= 1 << place % 8
            path.write_bytes(changed)
            with contextlib.suppress(KitError):
                assert state(Kit.load(kits / "a")) == expected, place
        path.write_bytes(content)


# Interruptions while kits are written: a full disk, or the end of the process between two writes


class Interruption(BaseException):
    """The end of the process."""


def interrupt(monkeypatch, error: BaseException, after: int) -> list[int]:
    """Let the calls that write to the disk fail from one of them on. Returns their count so far."""
    count = [0]

    def limited(function):
        def call(*args, **kwargs):
            count[0] += 1
            if count[0] > after:
                raise error
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "replace", "rename"):
        monkeypatch.setattr(os, name, limited(getattr(os, name)))
    return count


def interruptions(monkeypatch, error: BaseException, operation: Callable[[], object]) -> Iterator[int]:
    """Interrupt an operation at one write after another, until it comes to its end; yield after each interruption."""
    for after in itertools.count():
        with monkeypatch.context() as patch:
            interrupt(patch, error, after)
            try:
                operation()
                return
            except (OSError, Interruption):
                pass
        yield after


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), Interruption()], ids=["full", "end"]
)
@pytest.mark.parametrize("with_key", [False, True])
def test_an_interrupted_renewal_leaves_a_kit_that_works(kits, monkeypatch, error, with_key):
    before = contents(kits / "a")
    for after in interruptions(monkeypatch, error, lambda: provision.renew(kits, "a", with_key=with_key)):
        kit = Kit.load(kits / "a")
        ssl.create_default_context().load_cert_chain(kits / "a" / "certificate.pem", kit.key_file)
        assert set(contents(kits / "a")) - set(before) <= {"key.next.pem"}
        if after == 0:
            assert contents(kits / "a") == before
    assert after >= (7 if with_key else 5)
    assert set(contents(kits / "a")) == PUBLIC | {"key.pem", "policy.toml"}
    assert connects(kits)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), Interruption()], ids=["full", "end"]
)
def test_interrupted_provisioning_makes_whole_kits_or_none_and_can_be_repeated(tmp_path, monkeypatch, error):
    for after in range(0, 120, 5):
        kits = tmp_path / str(after)
        with monkeypatch.context() as patch:
            count = interrupt(patch, error, after)
            with contextlib.suppress(OSError, Interruption):
                hub_kits.make(kits)
            interrupted = count[0] > after
        whole = [name for name in ("hub", "a", "b") if (kits / name).exists()]
        assert [Kit.load(kits / name).name for name in whole] == whole
        if interrupted:
            hub_kits.make(kits)
        assert {path.name for path in kits.iterdir()} == {"authority", "hub", "a", "b"}
        assert connects(kits)
        issued = {each.certificate.serial_number for each in map(Kit.load, (kits / "hub", kits / "a", kits / "b"))}
        authority = Authority.load(kits / "authority")
        recorded = {each.serial_number for name in ("hub", "a", "b") for each in authority.issued(name)}
        assert issued == recorded
    assert not interrupted


def test_an_interrupted_revocation_can_be_repeated(kits, monkeypatch):
    revoking = interruptions(monkeypatch, Interruption(), lambda: provision.revoke(kits, "a"))
    others = [connects(kits, "b") for _ in revoking]
    assert all(others)
    assert len(others) >= 3
    assert not connects(kits)


# Keys with a passphrase: of a file, of a credential, or typed; and keys that systemd gives a service


@pytest.fixture
def kits(tmp_path, monkeypatch):
    for name in (passphrases.VARIABLE, passphrases.CREDENTIALS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(passphrases, "_given", {})
    monkeypatch.setattr("sys.stdin", io.StringIO())
    (tmp_path / "secret").write_text("correct horse\nsecond line\n")
    return hub_kits.make(tmp_path / "kits")


def test_kits_with_a_passphrase_connect(kits, tmp_path, monkeypatch, capsys):
    for name in ("a", "hub"):
        assert main(["passphrase", str(kits / name), "--file", str(tmp_path / "secret")]) == 0
        assert b"ENCRYPTED" in (kits / name / "key.pem").read_bytes()
        assert (kits / name / "key.pem").stat().st_mode & 0o777 == 0o600
    with pytest.raises(KitError, match=r"key.pem has a passphrase: set DADPLUG_PASSPHRASE_FILE"):
        Kit.load(kits / "a")
    monkeypatch.setenv(passphrases.VARIABLE, str(tmp_path / "secret"))
    assert hub_kits.connects(kits, "a")
    assert hub_kits.connects(kits, "b")  # whose key has none
    (tmp_path / "secret").write_text("wrong\n")
    with pytest.raises(KitError, match=r"cannot be decrypted: the passphrase is wrong"):
        Kit.load(kits / "a")
    (tmp_path / "secret").write_text("\n")
    with pytest.raises(KitError, match=r"the first line must be the passphrase"):
        Kit.load(kits / "a")


def test_a_passphrase_stays_with_a_renewal_and_can_be_removed(kits, tmp_path, monkeypatch):
    provision.protect(kits / "a", b"one")
    (tmp_path / "secret").write_text("one")
    monkeypatch.setenv(passphrases.VARIABLE, str(tmp_path / "secret"))
    before = (kits / "a" / "key.pem").read_bytes()
    provision.renew(kits, "a", with_key=True)
    assert b"ENCRYPTED" in (kits / "a" / "key.pem").read_bytes() != before
    assert Kit.load(kits / "a").name == "a"
    assert main(["passphrase", str(kits / "a"), "--remove"]) == 0
    assert b"ENCRYPTED" not in (kits / "a" / "key.pem").read_bytes()
    monkeypatch.delenv(passphrases.VARIABLE)
    assert Kit.load(kits / "a").name == "a"


def test_the_authority_can_have_a_passphrase(kits, tmp_path, monkeypatch, capsys):
    provision.protect(kits / "authority", b"one")
    assert main(["renew", "a", "--out", str(kits)]) == 1
    assert "has a passphrase" in capsys.readouterr().err
    (tmp_path / "secret").write_text("one")
    monkeypatch.setenv(passphrases.VARIABLE, str(tmp_path / "secret"))
    assert main(["renew", "a", "--out", str(kits)]) == 0


def test_a_passphrase_is_typed_once(kits, monkeypatch, capsys):
    provision.protect(kits / "a", b"typed")
    asked = []
    monkeypatch.setattr(passphrases.sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(passphrases.getpass, "getpass", lambda text: asked.append(text) or "typed")
    assert hub_kits.connects(kits, "a")
    assert asked == [f"passphrase of {kits / 'a' / 'key.pem'}: "]
    answers = iter(["new", "different"])
    monkeypatch.setattr(passphrases.getpass, "getpass", lambda text: next(answers))
    assert main(["passphrase", str(kits / "a")]) == 1
    monkeypatch.setattr(passphrases.getpass, "getpass", lambda text: input(text))  # without a terminal
    monkeypatch.setattr(passphrases.sys, "stdin", io.StringIO())
    assert main(["passphrase", str(kits / "a")]) == 1
    assert "no terminal to type the passphrase in: give --file" in capsys.readouterr().err


def test_a_service_gets_its_key_as_a_credential(kits, tmp_path, monkeypatch):
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    os.replace(kits / "a" / "key.pem", credentials / "key.pem")
    (credentials / "key.pem").chmod(0o440)  # what an access control list looks like
    with pytest.raises(KitError, match=r"key.pem is missing"):
        Kit.load(kits / "a")
    monkeypatch.setenv(passphrases.CREDENTIALS, str(credentials))
    assert Kit.load(kits / "a").key_file == credentials / "key.pem"
    assert hub_kits.connects(kits, "a")
    (credentials / "key.pem").chmod(0o444)
    with pytest.raises(KitError, match="can be read by other users"):
        Kit.load(kits / "a")
    (credentials / "key.pem").chmod(0o400)
    (credentials / "passphrase").write_text("unused")
    assert Kit.load(kits / "a").name == "a"
