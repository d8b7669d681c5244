"""A project's certificate authority: a folder with its key, the certificates that it has issued and the revocations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from ..errors import KitError
from . import project
from .certificates import (
    Certificate,
    Key,
    PublicKey,
    certificate_from_pem,
    certified_name,
    current_time,
    is_issued_by,
    key_from_pem,
    key_to_pem,
    make_authority,
    make_certificate,
    make_revocation_list,
    new_key,
    read_revocation_list,
    to_pem,
)
from .files import CA, KEY, PRIVATE, PUBLIC, REVOKED, read_file, write_file, write_folder
from .policy import Policy
from .project import HUB, Project, Roster

_ISSUED = ".issued.pem"  # SERIAL.issued.pem: the record of a certificate
_POLICY = ".policy.toml"  # SITE.policy.toml: the policy with which kits of a site are made


@dataclass(frozen=True)
class Authority:
    """The authority of a project, as its folder holds it.

    Attributes:
        folder: the folder, which only the operator of the project can read.
        certificate: certificate of the authority.
        key: key of the authority.
        roster: members of the project.
    """

    folder: Path
    certificate: Certificate
    key: Key
    roster: Roster

    @classmethod
    def create(cls, folder: Path, found: Project, now: datetime | None = None) -> Authority:
        """Make the folder of a new authority.

        Args:
            folder: path of the folder.
            found: the project.
            now: start of its validity; None for the present.

        Raises:
            KitError: if the folder exists.
            OSError: if it cannot be written.
        """
        now = now or current_time()
        key = new_key()
        name = found.roster.project
        certificate = make_authority(name, key, now, now + timedelta(days=found.authority_days))
        revoked = make_revocation_list(certificate, key, {}, 1, now)
        files = {
            CA: (to_pem(certificate), PUBLIC),
            KEY: (key_to_pem(key), PRIVATE),
            REVOKED: (to_pem(revoked), PUBLIC),
            project.FILE: (found.roster.to_json(), PUBLIC),
        }
        for site, allowed in found.policies.items():
            files[site + _POLICY] = (allowed.text().encode(), PUBLIC)
        write_folder(folder, files)
        return cls(folder, certificate, key, found.roster)

    @classmethod
    def load(cls, folder: Path) -> Authority:
        """Read the folder of an authority.

        Raises:
            KitError: if a file is missing or damaged.
        """
        if not folder.is_dir():
            raise KitError(f"{folder} does not exist: the authority's folder is needed, which `provision` makes")
        certificate = certificate_from_pem(read_file(folder / CA), str(folder / CA))
        key = key_from_pem(read_file(folder / KEY), str(folder / KEY))
        if key.public_key() != certificate.public_key():
            raise KitError(f"{folder / KEY} is not the key of {folder / CA}")
        return cls(folder, certificate, key, Roster.load(folder))

    def extended(self, roster: Roster, policies: Mapping[str, Policy] | None = None) -> Authority:
        """Return the authority with more sites or names of the hub, after writing its roster.

        Args:
            roster: the old members and new ones after them.
            policies: policies of new sites.

        Raises:
            KitError: if the project, the hub's address or the slot of a site changes.
        """
        before = self.roster
        if roster.project != before.project or roster.hub != before.hub:
            raise KitError(f"{self.folder} is the authority of {before.project} with the hub {before.hub}")
        if roster.sites[: len(before.sites)] != before.sites:
            sites = ", ".join(before.sites)
            raise KitError(f"slots are permanent: sites must begin with {sites}; new ones follow, and none is removed")
        if roster == before:
            return self
        for site, allowed in (policies or {}).items():
            if site not in before.sites:
                write_file(self.folder / (site + _POLICY), allowed.text().encode())
        write_file(self.folder / project.FILE, roster.to_json())
        return replace(self, roster=roster)

    def check_member(self, name: str) -> None:
        """Check that a name is that of the hub or of a site.

        Raises:
            KitError: if it is not.
        """
        if name != HUB:
            self.roster.slot(name)

    def policy(self, site: str) -> Policy:
        """Return the policy with which kits of a site are made. The site may have changed that of its own kit since.

        Raises:
            KitError: if its file is damaged.
        """
        path = self.folder / (site + _POLICY)
        return Policy.load(path) if path.exists() else Policy()

    def certify(self, name: str, key: PublicKey, days: int, now: datetime | None = None) -> bytes:
        """Return a certificate for the hub or a site, in PEM, which is not yet recorded.

        Args:
            name: `HUB` or the name of a site.
            key: its public key.
            days: validity in days, cut off at the authority's.
            now: start of its validity; None for the present.

        Raises:
            KitError: if the name is not part of the project, the authority has expired, or `days` is out of range.
        """
        self.check_member(name)
        project.check_days("days", days)
        now = now or current_time()
        if now >= self.certificate.not_valid_after_utc:
            raise KitError(f"the authority in {self.folder} expired on {self.certificate.not_valid_after_utc:%Y-%m-%d}")
        certificate = make_certificate(
            name, self.roster.project, key, self.certificate, self.key, now, now + timedelta(days=days),
            hub_names=self.roster.hub_names,
        )  # fmt: skip
        return to_pem(certificate)

    def record(self, pem: bytes) -> None:
        """Record a certificate, so that it can be revoked by its name. Certificates of others are left out.

        Raises:
            OSError: if the record cannot be written.
        """
        certificate = certificate_from_pem(pem, "the certificate")
        path = self.folder / f"{certificate.serial_number:040x}{_ISSUED}"
        if is_issued_by(certificate, self.certificate) and not path.exists():
            write_file(path, pem)

    def issue(self, name: str, key: PublicKey, days: int, now: datetime | None = None) -> bytes:
        """Return a certificate for the hub or a site, as `certify` does, and record it."""
        pem = self.certify(name, key, days, now)
        self.record(pem)
        return pem

    def issued(self, name: str) -> list[Certificate]:
        """Return the certificates of a member, the newest last; expired and revoked ones included."""
        paths = self.folder.glob(f"*{_ISSUED}")
        found = (certificate_from_pem(read_file(path), str(path)) for path in paths)
        return sorted(
            (each for each in found if certified_name(each) == name),
            key=lambda each: (each.not_valid_before_utc, each.not_valid_after_utc),
        )

    def revoked(self) -> dict[int, datetime]:
        """Return the dates of revocation by serial number."""
        return self._revocation_list()[0]

    def valid_certificates(self, name: str, now: datetime | None = None) -> list[Certificate]:
        """Return the certificates of a member that are neither expired nor revoked, the newest last."""
        now, revoked = now or current_time(), self.revoked()
        return [
            each for each in self.issued(name) if each.not_valid_after_utc > now and each.serial_number not in revoked
        ]

    def revoke(self, serials: Iterable[int], now: datetime | None = None) -> bytes:
        """Add certificates to the revocation list, and return the list in PEM.

        Args:
            serials: serial numbers; those that are revoked already keep their date.
            now: date of the revocation; None for the present.

        Raises:
            OSError: if the list cannot be written.
        """
        now = now or current_time()
        revoked, number = self._revocation_list()
        entries = dict.fromkeys(serials, now) | revoked
        pem = to_pem(make_revocation_list(self.certificate, self.key, entries, number + 1, now))
        write_file(self.folder / REVOKED, pem)
        return pem

    def _revocation_list(self) -> tuple[dict[int, datetime], int]:
        path = self.folder / REVOKED
        return read_revocation_list(read_file(path), self.certificate, str(path))
