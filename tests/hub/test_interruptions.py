"""Interruptions while kits are written: a full disk, or the end of the process between two writes."""

from __future__ import annotations

import contextlib
import errno
import os
import ssl

import hub_kits
import pytest
from hub_kits import PUBLIC, connects, contents

from dadplug.hub import provision
from dadplug.hub.kits import Kit
from dadplug.hub.provision import Authority


@pytest.fixture
def kits(tmp_path):
    return hub_kits.make(tmp_path / "kits")


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


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), Interruption()], ids=["full", "end"]
)
@pytest.mark.parametrize("with_key", [False, True])
def test_an_interrupted_renewal_leaves_a_kit_that_works(kits, monkeypatch, error, with_key):
    for after in range(100):
        before = contents(kits / "a")
        with monkeypatch.context() as patch:
            interrupt(patch, error, after)
            try:
                provision.renew(kits, "a", with_key=with_key)
                break
            except (OSError, Interruption):
                pass
        kit = Kit.load(kits / "a")
        ssl.create_default_context().load_cert_chain(kits / "a" / "certificate.pem", kit.key_file)
        left = {name for name in contents(kits / "a") if name not in before}
        assert left <= {"key.next.pem"}
        if after == 0:
            assert contents(kits / "a") == before
    assert after >= (8 if with_key else 6)
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
    for after in range(10):
        with monkeypatch.context() as patch:
            interrupt(patch, Interruption(), after)
            try:
                provision.revoke(kits, "a")
                break
            except Interruption:
                pass
        assert connects(kits, "b")
    assert after >= 3
    assert not connects(kits)
