"""The certificate authority of a project, and what the commands provision, request, sign, renew and revoke do with it.

The authority is a folder with its key, the certificates that it has issued and the revocations.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from ...errors import KitError
from ...support.files import PRIVATE, PUBLIC, write_file
from .files import (
    CA,
    CERTIFICATE,
    KEY,
    NEXT_KEY,
    POLICY,
    REVOKED,
    ROSTER,
    find_passphrase,
    forget_passphrase,
    is_encrypted,
    read_file,
    write_folder,
)
from .kits import (
    Certificate,
    Key,
    PublicKey,
    certificate_from_pem,
    certified_name,
    check_request,
    current_time,
    find_key,
    fingerprint,
    is_issued_by,
    key_from_pem,
    key_to_pem,
    make_authority,
    make_certificate,
    make_request,
    make_revocation_list,
    new_key,
    public_key_of,
    read_revocation_list,
    to_pem,
)
from .project import AUTHORITY, HUB, Policy, Project, Roster, canonical, check_days, check_name

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
            ROSTER: (found.roster.to_json(), PUBLIC),
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
        write_file(self.folder / ROSTER, roster.to_json())
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
        check_days("days", days)
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
        return read_revocation_list(self.folder, self.certificate)[0]

    def valid_certificates(self, name: str) -> list[Certificate]:
        """Return the certificates of a member that are neither expired nor revoked, the newest last."""
        now, revoked = current_time(), self.revoked()
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
        revoked, number = read_revocation_list(self.folder, self.certificate)
        entries = dict.fromkeys(serials, now) | revoked
        pem = to_pem(make_revocation_list(self.certificate, self.key, entries, number + 1, now))
        write_file(self.folder / REVOKED, pem)
        return pem


REQUEST = "request.pem"


def provision(found: Project, out: Path, now: datetime | None = None) -> list[str]:
    """Make a project's authority and the kits of the hub and all sites.

    If the authority exists, the sites that were added to the project get kits, as do those whose kit an interrupted
    call has not made. All other kits remain as they are, but for the roster: the hub's is replaced, and where `hub_at`
    or `sealed` has changed, those of all kits in the folder.

    Args:
        found: the project.
        out: folder of the kits.
        now: start of validity; None for the present.

    Returns:
        Names of the members for which kits were made.

    Raises:
        KitError: if there is nothing to make, or the project contradicts the authority.
        OSError: if a file cannot be written.
    """
    folder = out / AUTHORITY
    changed = True
    if folder.exists():
        authority = _load_authority(out)
        before = authority.roster
        trust_changed = (before.hub_at, before.sealed) != (found.roster.hub_at, found.roster.sealed)
        changed = trust_changed or before.sites != found.roster.sites
        if further := set(found.roster.hub_names) - set(authority.roster.hub_names):
            raise KitError(
                f"the hub's certificate has no name {min(further)}: use `renew hub --hub-name {min(further)}`"
            )
        roster = replace(found.roster, hub_names=authority.roster.hub_names)
        authority = authority.extended(roster, found.policies)
        kits = (HUB, *before.sites) if trust_changed else (HUB,)
        for kit in kits:
            _replace_if_present(out / kit, ROSTER, authority.roster.to_json())
    else:
        authority = Authority.create(folder, found, now)
    members = [name for name in (HUB, *found.roster.sites) if name not in found.own_keys]
    missing = [name for name in members if not authority.issued(name)]
    for name in missing:
        if (out / name).exists():
            raise KitError(f"{out / name} exists, but {folder} has not issued a certificate for it")
    if not missing and not changed:
        raise KitError(f"all members of {found.roster.project} have certificates already; `renew` makes new ones")
    for name in missing:
        _make_kit(authority, out / name, name, found.days, now)
    return missing


def request(folder: Path, name: str, project_name: str) -> tuple[Path, str]:
    """Make a key and a signing request at the site itself. Only the request has to leave it.

    In a folder that holds a kit already, the key is its next one: the kit works with the old one until the new
    certificate has replaced the old.

    Args:
        folder: folder of the kit to be; created if it does not exist.
        name: name of the site, or `HUB`.
        project_name: name of the project.

    Returns:
        Path of the request, and the fingerprint of its key.

    Raises:
        KitError: if a name is invalid, or a request has been made already.
        OSError: if a file cannot be written.
    """
    check_name(name, "site")
    check_name(project_name, "project")
    key = new_key()
    pem = to_pem(make_request(name, project_name, key))
    if not folder.exists():
        write_folder(folder, {KEY: (key_to_pem(key), PRIVATE), REQUEST: (pem, PUBLIC)})
    else:
        if not (folder / CERTIFICATE).exists():
            raise KitError(f"{folder} exists, and holds no certificate: send {folder / REQUEST}, or remove the folder")
        _finish_renewal(folder)
        if (folder / NEXT_KEY).exists():
            raise KitError(f"{folder / NEXT_KEY} waits for its certificate: send {folder / REQUEST}, or remove it")
        write_file(folder / REQUEST, pem)
        write_file(folder / NEXT_KEY, key_to_pem(key), PRIVATE)
    return folder / REQUEST, fingerprint(key.public_key())


def sign(out: Path, name: str, pem: bytes, days: int = Project.days, *, again: bool = False) -> tuple[Path, str]:
    """Sign a site's request, and make its kit without a key; the site adds its own.

    Args:
        out: folder of the kits, with the authority.
        name: the site that sent the request, or `HUB`.
        pem: content of the request.
        days: validity in days.
        again: whether the member may have another valid certificate, which remains valid. Otherwise a second request
            for a name is refused.

    Returns:
        Path of the kit, and the fingerprint of the key, which the site has to confirm.

    Raises:
        KitError: if the name or the proof of possession is wrong, or the name has a certificate already.
        OSError: if a file cannot be written.
    """
    authority = _load_authority(out, name)
    key = check_request(pem, name, authority.roster.project)
    if authority.valid_certificates(name) and not again:
        raise KitError(
            f"{name} has a valid certificate already. If this request is the site's own renewal, sign it with `--again`"
        )
    folder = out / name
    if (folder / KEY).exists() and key_from_pem(read_file(folder / KEY), KEY).public_key() != key:
        raise KitError(f"{folder} holds another key, made here; move it away first")
    _certify_kit(authority, folder, name, key, days)
    return folder, fingerprint(key)


def renew(
    out: Path,
    name: str,
    days: int | None = None,
    hub_names: tuple[str, ...] = (),
    now: datetime | None = None,
    *,
    with_key: bool = False,
) -> Path:
    """Renew the certificate of the hub or one site. No other kit changes; the old certificate remains valid.

    Args:
        out: folder of the kits, with the authority.
        name: `HUB` or the name of a site.
        days: validity in days; None for that of the certificate before.
        hub_names: further host names and addresses of the hub.
        now: start of validity; None for the present.
        with_key: whether to make a new key, too. Otherwise the key stays, and only the certificate has to be sent.

    Returns:
        Path of the kit. It has no key if the key was not made here.

    Raises:
        KitError: if the member has no certificate yet, or its key was revoked and is to stay.
        OSError: if a file cannot be written. The old kit is then as it was.
    """
    authority = _load_authority(out, name)
    if hub_names and name != HUB:
        raise KitError("host names are those of the hub; a site has none")
    if not (issued := authority.issued(name)):
        raise KitError(f"{name} has no certificate yet: use `provision` or `sign`")
    if hub_names:
        names = dict.fromkeys([*authority.roster.hub_names, *map(canonical, hub_names)])
        authority = authority.extended(replace(authority.roster, hub_names=tuple(names)))
    previous = max(1, (issued[-1].not_valid_after_utc - issued[-1].not_valid_before_utc).days)
    days = previous if days is None else days
    folder = out / name
    if not with_key:
        _certify_kit(authority, folder, name, _key_to_keep(authority, folder, issued[-1]), days, now)
    elif folder.exists():
        _renew_with_key(authority, folder, name, days, now)
    else:
        _make_kit(authority, folder, name, days, now)
    if hub_names:
        write_file(folder / ROSTER, authority.roster.to_json())
    return folder


def revoke(out: Path, name: str, serial: int | None = None) -> list[int]:
    """Revoke certificates, and put the new revocation list into the hub's kit.

    Args:
        out: folder of the kits, with the authority.
        name: `HUB` or the name of a site.
        serial: serial number of one certificate; None for all that the member has.

    Returns:
        Serial numbers that are revoked by this call.

    Raises:
        KitError: if there is nothing to revoke.
        OSError: if a file cannot be written.
    """
    authority = _load_authority(out, name)
    issued = [each.serial_number for each in authority.issued(name)]
    if not issued or serial not in (None, *issued):
        known = ", ".join(f"{each:x}" for each in issued) or "none"
        raise KitError(f"{name} has no such certificate; serial numbers of its certificates: {known}")
    before = authority.revoked()
    chosen = [each for each in (issued if serial is None else [serial]) if each not in before]
    pem = authority.revoke(chosen) if chosen else read_file(authority.folder / REVOKED)
    _replace_if_present(out / HUB, REVOKED, pem)  # also if an interrupted call has written the list only
    return chosen


def protect(folder: Path, passphrase: bytes | None) -> Path:
    """Give the key of a kit or of an authority another passphrase. What uses it meanwhile is not affected.

    Args:
        folder: the folder.
        passphrase: the passphrase; None for none.

    Returns:
        Path of the key.

    Raises:
        KitError: if there is no key, or its present passphrase is not known.
        OSError: if it cannot be written. The old file is then as it was.
    """
    path = folder / KEY
    if (folder / NEXT_KEY).exists():
        raise KitError(f"{folder / NEXT_KEY} waits for its certificate: give the key a passphrase after the renewal")
    write_file(path, key_to_pem(key_from_pem(read_file(path), str(path)), passphrase), PRIVATE)
    forget_passphrase(str(path))
    return path


def _load_authority(out: Path, member: str = HUB) -> Authority:
    """Read the authority, and record certificates of kits which an interrupted call has made and not recorded.

    Raises:
        KitError: if a name is neither that of the hub nor of a site.
    """
    authority = Authority.load(out / AUTHORITY)
    authority.check_member(member)
    for name in (HUB, *authority.roster.sites):
        if (out / name / CERTIFICATE).exists():
            authority.record(read_file(out / name / CERTIFICATE))
    return authority


def _make_kit(authority: Authority, folder: Path, name: str, days: int, now: datetime | None) -> None:
    key = new_key()
    certificate = authority.certify(name, key.public_key(), days, now)
    _write_kit(authority, folder, name, certificate, key)
    authority.record(certificate)


def _certify_kit(
    authority: Authority, folder: Path, name: str, key: PublicKey, days: int, now: datetime | None = None
) -> None:
    """Put a new certificate for a key into a kit, which is made without the key if it is not here."""
    certificate = authority.issue(name, key, days, now)
    if folder.exists():
        write_file(folder / CERTIFICATE, certificate)
    else:
        _write_kit(authority, folder, name, certificate)


def _write_kit(authority: Authority, folder: Path, name: str, certificate: bytes, key: Key | None = None) -> None:
    files = {
        CA: (to_pem(authority.certificate), PUBLIC),
        CERTIFICATE: (certificate, PUBLIC),
        REVOKED: (read_file(authority.folder / REVOKED), PUBLIC),
        ROSTER: (authority.roster.to_json(), PUBLIC),
    }
    if name != HUB:
        policy = authority.policy(name)
        files[POLICY] = (policy.text().encode(), PRIVATE if policy.proxy else PUBLIC)  # may hold a password
    if key is not None:
        files[KEY] = (key_to_pem(key), PRIVATE)
    write_folder(folder, files)


def _renew_with_key(authority: Authority, folder: Path, name: str, days: int, now: datetime | None) -> None:
    """Replace key and certificate of a kit such that it can be used after every single write."""
    _check_kit(authority, folder)
    if not (folder / KEY).exists():
        raise KitError(f"the key of {folder} was not made here: use `request` where it was, and `sign`")
    _finish_renewal(folder)
    key, path = new_key(), folder / KEY
    passphrase = find_passphrase(str(path)) if is_encrypted(read_file(path)) else None
    certificate = authority.issue(name, key.public_key(), days, now)
    write_file(folder / NEXT_KEY, key_to_pem(key, passphrase), PRIVATE)
    write_file(folder / CERTIFICATE, certificate)
    _finish_renewal(folder)


def _finish_renewal(folder: Path) -> None:
    """Rename a kit's next key if its certificate has come."""
    path = folder / CERTIFICATE
    if (folder / NEXT_KEY).exists():
        certificate = certificate_from_pem(read_file(path), str(path))
        if find_key(folder, certificate) == folder / NEXT_KEY:
            os.replace(folder / NEXT_KEY, folder / KEY)


def _key_to_keep(authority: Authority, folder: Path, newest: Certificate) -> PublicKey:
    """Return the public key of a member's certificate, from its kit if that is here."""
    certificate = _check_kit(authority, folder) if folder.exists() else newest
    if certificate.serial_number in authority.revoked():
        raise KitError(f"the certificate of {folder.name} is revoked: renew it with a new key (`--new-key`)")
    return public_key_of(certificate)


def _check_kit(authority: Authority, folder: Path) -> Certificate:
    """Return the certificate of a kit, after checking that the kit is one of this authority."""
    if read_file(folder / CA) != to_pem(authority.certificate):
        raise KitError(f"{folder} is not a kit of the authority in {authority.folder}")
    return certificate_from_pem(read_file(folder / CERTIFICATE), str(folder / CERTIFICATE))


def _replace_if_present(folder: Path, name: str, content: bytes) -> None:
    if folder.is_dir():
        write_file(folder / name, content)
