"""Kits: the folders by which the hub and the sites of a project know each other."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import KitError
from .certificates import (
    Certificate,
    certificate_from_pem,
    certified_name,
    current_time,
    dates,
    is_issued_by,
    key_from_pem,
    read_revocation_list,
)
from .files import CA, CERTIFICATE, KEY, NEXT_KEY, POLICY, REVOKED, ROSTER, read_file
from .passphrases import CREDENTIALS
from .project import HUB, Policy, Roster


@dataclass(frozen=True)
class Kit:
    """A kit that has been read and checked.

    Attributes:
        folder: the folder.
        name: name of the site, or `HUB`.
        roster: members of the project.
        authority: certificate of the project's authority.
        certificate: certificate of this hub or site.
        key_file: path of its key.
        revoked: serial numbers that are no longer accepted.
        policy: local policy; a hub's kit has that which allows everything.
    """

    folder: Path
    name: str
    roster: Roster
    authority: Certificate
    certificate: Certificate
    key_file: Path
    revoked: frozenset[int]
    policy: Policy

    @property
    def slot(self) -> int:
        """Slot of this site, which is its rank.

        Raises:
            KitError: in a hub's kit.
        """
        return self.roster.slot(self.name)

    @property
    def is_hub(self) -> bool:
        """Whether this is the hub's kit."""
        return self.name == HUB

    @classmethod
    def load(cls, folder: str | Path) -> Kit:
        """Read a kit and check that its parts belong together. Dates are checked by `check_dates`.

        Args:
            folder: path of the kit.

        Raises:
            KitError: if a file is missing, damaged or contradicts another, or others can read the key.
            ImportError: if cryptography is not installed.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise KitError(f"{folder} is not a folder: a kit is one, made by `python -m dadplug provision`")
        authority, certificate = _certificates(folder)
        roster, name = Roster.load(folder), certified_name(certificate)
        if name != HUB:
            roster.slot(name)
        revoked, _ = read_revocation_list(read_file(folder / REVOKED), authority, str(folder / REVOKED))
        allowed = Policy() if name == HUB else Policy.load(_policy_file(folder))
        return cls(
            folder, name, roster, authority, certificate, find_key(folder, certificate), frozenset(revoked), allowed
        )

    def check_dates(self, now: datetime | None = None) -> None:
        """Check that the certificates are valid by this machine's clock, and not revoked as far as the kit knows.

        Args:
            now: time to check for; None for the present.

        Raises:
            KitError: if they are not.
        """
        now = now or current_time()
        for certificate in (self.certificate, self.authority):
            if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
                kind = "certificate" if certificate is self.certificate else "certificate authority"
                raise KitError(
                    f"the {kind} of {self.folder} is valid from {dates([certificate])}; this machine's clock says "
                    f"{now:%Y-%m-%d %H:%M} UTC"
                )
        if self.certificate.serial_number in self.revoked:
            raise KitError(f"the certificate of {self.folder} has been revoked")


SOON_DAYS = 30  # before its end, from which on a certificate is to be renewed
RENEW = "python -m dadplug renew"


def certificate_end(certificate: Mapping[str, Any]) -> datetime:
    """Return the end of a certificate, as `ssl.SSLSocket.getpeercert` returns it."""
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(certificate["notAfter"]), timezone.utc)


def days_left(end: datetime, now: datetime | None = None) -> int:
    """Return the number of whole days until a time; negative after it."""
    return (end - (now or current_time())).days


def renewal_warning(name: str, end: datetime) -> str:
    """Return a warning that a certificate of a project ends soon, with the command that renews it; empty if not.

    Args:
        name: name of the site, or `HUB`.
        end: its end.
    """
    days = days_left(end)
    if days >= SOON_DAYS:
        return ""
    return f"THE CERTIFICATE OF {name} ENDS IN {days} DAYS, on {end:%Y-%m-%d}: run `{RENEW} {name}`, and copy it"


class KitChange(NamedTuple):
    """Parts of a changed kit.

    Attributes:
        kit: the kit with all that can be applied; the rest is as before.
        refused: why the other parts are not applied; each text names its file.
    """

    kit: Kit
    refused: list[str]


class KitWatch:
    """Watch of a kit's files.

    Args:
        kit: the kit that has been read.
    """

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._seen = self._look()

    def changed(self) -> KitChange | None:
        """Read the kit again if one of its files has changed; otherwise return None.

        Each part is applied by itself: a damaged certificate does not keep a revocation from being applied.
        """
        seen = self._look()
        if seen == self._seen:
            return None
        self._seen = seen
        refused: list[str] = []
        kit = self._kit
        for apply in (_with_certificate, _with_revocations, _with_roster):
            try:
                kit = apply(kit)
            except (KitError, OSError) as error:
                refused.append(str(error))
        self._kit = kit
        return KitChange(kit, refused)

    def _look(self) -> list[tuple[int, int, int] | None]:
        found: list[tuple[int, int, int] | None] = []
        for name in (CA, CERTIFICATE, KEY, NEXT_KEY, REVOKED, ROSTER):
            try:
                state = (self._kit.folder / name).stat()
                found.append((state.st_ino, state.st_size, state.st_mtime_ns))
            except OSError:
                found.append(None)
        return found


def _certificates(folder: Path) -> tuple[Certificate, Certificate]:
    """Return the certificates of a kit's authority and of its member."""
    authority = certificate_from_pem(read_file(folder / CA), str(folder / CA))
    path = folder / CERTIFICATE
    certificate = certificate_from_pem(read_file(path), str(path))
    if not is_issued_by(certificate, authority):
        raise KitError(f"{path} is not signed by the authority of this kit")
    return authority, certificate


def _with_certificate(kit: Kit) -> Kit:
    """Return a kit with the certificate and key of its folder."""
    authority, certificate = _certificates(kit.folder)
    if certified_name(certificate) != kit.name:
        raise KitError(f"{kit.folder / CERTIFICATE} is that of {certified_name(certificate)}, not of {kit.name}")
    key = find_key(kit.folder, certificate)
    found = replace(kit, authority=authority, certificate=certificate, key_file=key)
    if certificate != kit.certificate or authority != kit.authority:
        found.check_dates()
    return found


def _with_revocations(kit: Kit) -> Kit:
    """Return a kit with the revocations of its folder."""
    path = kit.folder / REVOKED
    revoked, _ = read_revocation_list(read_file(path), kit.authority, str(path))
    return replace(kit, revoked=frozenset(revoked))


def _with_roster(kit: Kit) -> Kit:
    """Return a kit with the roster of its folder, which may have further sites."""
    roster, old, path = Roster.load(kit.folder), kit.roster, kit.folder / ROSTER
    if roster.project != old.project:
        raise KitError(f"{path} is one of the project {roster.project}, not of {old.project}")
    if roster.sites[: len(old.sites)] != old.sites:
        raise KitError(f"{path}: sites have been removed, renamed or moved, and slots are permanent")
    if roster.hub != old.hub:
        raise KitError(f"{path}: the address of the hub has changed: a hub uses it when it is started again")
    return replace(kit, roster=roster)


def _policy_file(folder: Path) -> Path:
    """Return the path of a kit's policy, which is a credential of systemd where this user cannot read the kit's."""
    credential = Path(os.environ.get(CREDENTIALS, "")) / POLICY
    own = folder / POLICY
    return credential if own.exists() and not os.access(own, os.R_OK) and credential.is_absolute() else own


def find_key(folder: Path, certificate: Certificate) -> Path:
    """Return the path of the key that fits the certificate of a kit: in the kit, or a credential of systemd.

    Raises:
        KitError: if there is none, or other users can read it.
    """
    paths = [folder / name for name in (KEY, NEXT_KEY) if os.access(folder / name, os.R_OK)]
    credentials = os.environ.get(CREDENTIALS)
    if credentials and (Path(credentials) / KEY).exists():
        paths.append(Path(credentials) / KEY)
    if not paths:
        if (folder / KEY).exists():
            raise KitError(f"{folder / KEY} cannot be read by this user")
        raise KitError(f"{folder / KEY} is missing: copy the certificate to where `request` made the key")
    for path in paths:
        if key_from_pem(read_file(path), str(path)).public_key() == certificate.public_key():
            break
    else:
        raise KitError(f"{paths[0]} is not the key of {folder / CERTIFICATE}")
    # systemd gives the service's user the right to read a credential by an entry of an access control list.
    others = 0o007 if str(path.parent) == credentials else 0o077
    if os.name == "posix" and path.stat().st_mode & others:
        raise KitError(f"{path} can be read by other users: chmod 600 {path}")
    return path
