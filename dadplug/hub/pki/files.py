"""The files of a kit: names, folders that are complete or absent, what is read from them, and passphrases of keys."""

from __future__ import annotations

import getpass
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import KitError
from ...support.files import sync_folder, write_file

# The files of a kit.
CA, CERTIFICATE, KEY, REVOKED = "ca.pem", "certificate.pem", "key.pem", "revoked.pem"
ROSTER, POLICY = "roster.json", "policy.toml"
# A renewed key waits under this name until its certificate has replaced the old one, so that at any time one of the two
# keys fits the certificate.
NEXT_KEY = "key.next.pem"

_FOLDER = 0o700


def write_folder(folder: Path, files: Mapping[str, tuple[bytes, int]]) -> None:
    """Create a folder with files, of mode 0700. The folder appears once all files are on the disk.

    Args:
        folder: path of the folder; folders above it are created.
        files: content and mode of each file by its name.

    Raises:
        KitError: if the folder exists.
        OSError: if a file cannot be written.
    """
    if folder.exists():
        raise KitError(f"{folder} exists, and is not overwritten")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        os.chmod(temporary, _FOLDER)
        for name, (content, mode) in files.items():
            write_file(temporary / name, content, mode)
        os.rename(temporary, folder)  # fails if the folder was made meanwhile and is not empty
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(folder.parent)


def read_file(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        KitError: if it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise KitError(f"{path}: {error.strerror}") from error


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        KitError: if it cannot be read, or is not TOML.
        ImportError: on Python 3.10, if tomli is not installed.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError as error:
            raise ImportError("kits need tomli on Python 3.10: pip install 'dadplug[hub]'") from error
    content = read_file(path)
    try:
        return tomllib.loads(content.decode())
    except ValueError as error:  # of TOML and of UTF-8
        raise KitError(f"{path}: {error}") from error


def check_keys(table: Mapping[str, Any], known: tuple[str, ...], place: str) -> None:
    """Check that a table has no entry that would be ignored.

    Raises:
        KitError: if it has; the message lists the valid entries.
    """
    if unknown := sorted(set(table) - set(known)):
        raise KitError(f"{place}: unknown entry {unknown[0]!r}; valid ones are {', '.join(known)}")


VARIABLE = "DADPLUG_PASSPHRASE_FILE"
"""Environment variable with the path of a file, of which the first line is the passphrase."""
CREDENTIALS = "CREDENTIALS_DIRECTORY"
"""Environment variable of systemd with the folder of a service's credentials (`LoadCredential=`)."""
CREDENTIAL = "passphrase"
"""Name of the credential that holds a passphrase."""

_given: dict[str, bytes] = {}  # what was typed, by the key's path


def is_encrypted(pem: bytes) -> bool:
    """Return whether a key has a passphrase."""
    return b"ENCRYPTED" in pem


def find_passphrase(place: str) -> bytes:
    """Return the passphrase of a key: of the file that `VARIABLE` names, of the credential, or typed in a terminal.

    Args:
        place: path of the key.

    Raises:
        KitError: if there is none.
    """
    if path := os.environ.get(VARIABLE):
        return first_line(Path(path))
    if folder := os.environ.get(CREDENTIALS):
        credential = Path(folder) / CREDENTIAL
        if credential.exists():
            return first_line(credential)
    if place not in _given:
        if not sys.stdin.isatty():
            raise KitError(
                f"{place} has a passphrase: set {VARIABLE} to the path of a file with it, or start in a terminal"
            )
        _given[place] = getpass.getpass(f"passphrase of {place}: ").encode()
    return _given[place]


def first_line(path: Path) -> bytes:
    """Return the first line of a file with a passphrase.

    Raises:
        KitError: if it cannot be read, or is empty.
    """
    found = read_file(path).split(b"\n", 1)[0].rstrip(b"\r")
    if not found:
        raise KitError(f"{path}: the first line must be the passphrase, and is empty")
    return found


def forget_passphrase(place: str) -> None:
    """Forget what was typed for a key, which has got another passphrase."""
    _given.pop(place, None)
