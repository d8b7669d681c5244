"""Keys with a passphrase: of a file, of a credential, or typed; and keys that systemd gives a service."""

import io
import os

import hub_kits
import pytest

from dadplug.errors import KitError
from dadplug.hub.pki import files as passphrases
from dadplug.hub.pki import provision
from dadplug.hub.pki.kits import Kit
from dadplug.tools.cli.commands import main


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


def test_a_passphrase_is_typed_once(kits, monkeypatch):
    provision.protect(kits / "a", b"typed")
    asked = []
    monkeypatch.setattr(passphrases.sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(passphrases.getpass, "getpass", lambda text: asked.append(text) or "typed")
    assert hub_kits.connects(kits, "a")
    assert asked == [f"passphrase of {kits / 'a' / 'key.pem'}: "]
    answers = iter(["new", "different"])
    monkeypatch.setattr(passphrases.getpass, "getpass", lambda text: next(answers))
    assert main(["passphrase", str(kits / "a")]) == 1


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
