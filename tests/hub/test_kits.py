"""Kits that are incomplete, damaged or put together from several."""

from __future__ import annotations

import hub_kits
import pytest
from hub_kits import PUBLIC

from dadplug.errors import KitError
from dadplug.hub.certificates import key_to_pem, new_key
from dadplug.hub.files import write_file
from dadplug.hub.kits import Kit


@pytest.fixture
def kits(tmp_path):
    return hub_kits.make(tmp_path / "kits")


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
    with pytest.raises(KitError, match=r"certificate.pem is not signed by the authority"):
        Kit.load(kits / "a")
    with pytest.raises(KitError, match="is not a folder"):
        Kit.load(kits / "c")
    assert b"PRIVATE" in key_to_pem(new_key())
