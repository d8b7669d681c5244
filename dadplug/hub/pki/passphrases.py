"""Passphrases of keys: where they come from, and keys that get one."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path

from ...errors import KitError
from .files import read_file

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
