"""Projects: their hub and sites, as in project.toml and as every kit holds them, and the policies of the sites."""

from __future__ import annotations

import ipaddress
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import KitError, PolicyError
from ...exchange.restrictions import Restricted
from ...support.refusals import refuse
from ...support.signature import Check, number, valid
from .files import ROSTER, check_keys, read_file, read_toml
from .proxies import DIRECT, Proxy


def _are_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value)


_TRUTH = valid("true or false", lambda value: isinstance(value, bool))
_CHECKS = {  # of entries of a policy; all others are true or false
    "modes": valid('a list such as ["dsgd", "rankdad"]', _are_texts),
    "max_rank_share": number("a number above 0 and up to 1", lambda share: 0 < share <= 1),
    "rate_limit": number("a positive number of Mbit/s", lambda rate: 0 < rate <= 1e6),
    "hub_timeout": number("a positive number of seconds", lambda seconds: 0 < seconds <= sys.float_info.max),
}
_DAYS = number("a whole number of days from 1 to 36500", lambda days: isinstance(days, int) and 0 < days <= 36500)


def _check(check: Check, name: str, value: object, place: str = "") -> None:
    """Check the value of an entry; raise KitError if it is not valid."""
    try:
        check(name, value)
    except ValueError as error:
        raise KitError(f"{place}{error}") from None


_BEGIN, _END = "begin", "end"  # entries around those of a policy file, which show that it has not been cut
_RESTRICTIONS = ("require_privacy", "modes", "share_inputs", "max_rank_share")  # of what methods send


@dataclass(frozen=True)
class Policy:
    """The options that a site allows. The site's administrator sets them in its kit; a program cannot change them.

    Attributes:
        modes: modes that are allowed; None allows all.
        share_inputs: False requires the option `share_inputs=False`.
        encrypt_local: whether messages to a hub in the same machine are encrypted, too.
        max_rank_share: largest number of rows that are sent of a layer, as a share of the rows of its input; 1 allows
            all. A private gradient has no such limit.
        require_privacy: True requires differential privacy, the option `privacy`, with noise.
        allow_pickle: whether functions of torch.distributed may unpickle what arrives over the hub: then each other
            site, and the hub where messages are not sealed, can run programs at this site.
        proxy: address of the proxy that connections to the hub go through, see `dadplug.hub.pki.proxies.Proxy.parse`;
            `dadplug.hub.pki.proxies.DIRECT` for none, and empty for that of the environment.
        rate_limit: megabits per second that this site sends at most; None without a limit.
        hub_timeout: seconds after which this site gives up a hub that is away; None for those of the run.
    """

    modes: tuple[str, ...] | None = None
    share_inputs: bool = True
    encrypt_local: bool = False
    max_rank_share: float = 1.0
    require_privacy: bool = False
    allow_pickle: bool = False
    proxy: str = field(default="", repr=False)  # may hold a password
    rate_limit: float | None = None
    hub_timeout: float | None = None

    def check(self, options: Restricted) -> None:
        """Check the options of a reduction.

        Args:
            options: options to check.

        Raises:
            PolicyError: if one of them is not allowed.
        """
        if self.modes is not None and options.mode not in self.modes:
            allowed = ", ".join(map(repr, self.modes)) or "none"
            raise PolicyError(f"the policy of this site's kit does not allow mode={options.mode!r}; allowed: {allowed}")
        if not self.share_inputs and options.share_inputs is not False:
            raise PolicyError(
                f"the policy of this site's kit requires share_inputs=False, got share_inputs={options.share_inputs!r}"
            )
        if self.require_privacy and not getattr(getattr(options, "privacy", None), "noise_multiplier", 0.0):
            raise PolicyError(
                "the policy of this site's kit has require_privacy = true: pass privacy=DifferentialPrivacy(...) with "
                f"noise to dadplug.GradientReduction; mode={options.mode!r} without it is refused"
            )

    @cached_property
    def restriction(self) -> str:
        """Line by which it restricts what methods send, and so forbids all that no method sends; empty without one."""
        names = [name for name in _RESTRICTIONS if getattr(self, name) != getattr(Policy, name)]
        lines = (line for line in self.text().splitlines() if line.split(" = ")[0] in names)
        return next(lines, "")

    def check_bytes(self, nbytes: int, most: int | None) -> None:
        """Check what leaves this site in an exchange that is not one of a method.

        Args:
            nbytes: bytes that would be sent.
            most: bytes that are allowed where a policy restricts methods; None for an exchange that is not.

        Raises:
            PolicyError: if it is not allowed.
        """
        if self.restriction and (most is None or nbytes > most):
            bound = "collectives of the program's own are refused" if most is None else f"{most} bytes are allowed"
            raise PolicyError(
                f"the policy of this site's kit has {self.restriction}: {bound}, and {nbytes} bytes would leave the "
                "site as they are. Train by dadplug, and exchange small results by its gather_objects(); nothing has "
                "been sent"
            )

    @classmethod
    def parse(cls, table: Mapping[str, Any], place: str) -> Policy:
        """Build a policy from the entries of a TOML table.

        Args:
            table: entries with the names of the attributes, all optional.
            place: file or table, for messages.

        Raises:
            KitError: if an entry is unknown or has a wrong type.
        """
        check_keys(table, tuple(each.name for each in fields(cls)), place)
        check_proxy(table.get("proxy", ""), place)
        for name, value in table.items():
            if name != "proxy":
                _check(_CHECKS.get(name, _TRUTH), name, value, f"{place}: ")
        found: dict[str, Any] = {name: tuple(value) if name == "modes" else value for name, value in table.items()}
        return cls(**found)

    @classmethod
    def load(cls, path: Path) -> Policy:
        """Read a policy file.

        Args:
            path: path of the file.

        Raises:
            KitError: if the file is missing or damaged: a kit without a policy does not allow everything.
        """
        table = read_toml(path)
        if not table or (_BEGIN in table) != (_END in table):
            lost = "entries" if not table else "last lines" if _BEGIN in table else "first lines"
            raise KitError(
                f"{path} has lost its {lost}, and would allow more than the site does. Restore the file; where nothing "
                f"is missing, let it begin with `{_BEGIN} = 1` and end with `{_END} = 1`"
            )
        entries = "|".join((_BEGIN, *(each.name for each in fields(cls))))
        if found := re.search(rf"#.*\w.*({entries}) = .*", read_file(path).decode()):
            raise KitError(
                f"{path}: the entry {found[1]} stands behind other words in a comment, as where the end of a line is "
                f"lost: {found[0][-80:]!r}. Write it in a line of its own, or leave it out of the comment"
            )
        return cls.parse({name: table[name] for name in table if name not in (_BEGIN, _END)}, str(path))

    def text(self) -> str:
        """Return the policy as the content of a kit's policy file."""
        modes = (
            "# modes = []"
            if self.modes is None
            else f"modes = [{', '.join(json.dumps(mode, ensure_ascii=False) for mode in self.modes)}]"
        )
        return (
            "# Local policy of this site. Options of training that it does not allow are refused.\n"
            "# The first and the last entry show that no line is lost: write others between them.\n"
            f"{_BEGIN} = 1\n"
            '# modes: the modes that are allowed, such as ["dsgd", "rankdad"]; without this entry all are.\n'
            f"{modes}\n"
            "# share_inputs: false requires share_inputs=False, so that layers fed by raw data send no factors.\n"
            f"share_inputs = {str(self.share_inputs).lower()}\n"
            "# encrypt_local: true encrypts messages to a hub in the same machine, too; by default they are not.\n"
            f"encrypt_local = {str(self.encrypt_local).lower()}\n"
            "# max_rank_share: most rows that are sent of a layer, such as 0.25 of those of its input; 1 allows all.\n"
            f"max_rank_share = {self.max_rank_share!r}\n"
            "# require_privacy: true refuses runs without differential privacy.\n"
            f"require_privacy = {str(self.require_privacy).lower()}\n"
            "# allow_pickle: true lets torch.distributed unpickle what arrives: other sites can run programs here.\n"
            f"allow_pickle = {str(self.allow_pickle).lower()}\n"
            "# proxy: HTTP proxy on the way to the hub, http://HOST:PORT or http://USER:PASSWORD@HOST:PORT,\n"
            '# or "direct" for none. Without this entry the environment counts: HTTPS_PROXY and NO_PROXY.\n'
            f"{_line('proxy', self.proxy or None, 'http://proxy.example.org:3128')}"
            "# rate_limit: megabits per second that this site sends at most; without this entry there is no limit.\n"
            f"{_line('rate_limit', self.rate_limit, 100)}"
            "# hub_timeout: seconds after which this site gives up a hub that is away, in place of the run's.\n"
            f"{_line('hub_timeout', self.hub_timeout, 86400)}"
            f"{_END} = 1\n"
        )


def _line(name: str, value: object, example: object) -> str:
    """Return an entry of a policy file; a comment with an example if it has no value."""
    return f"# {name} = {json.dumps(example)}\n" if value is None else f"{name} = {json.dumps(value)}\n"


def check_proxy(value: object, place: str) -> str:
    """Return the entry `proxy` of a file.

    Raises:
        KitError: if it is malformed.
    """
    if not isinstance(value, str):
        raise KitError(f'{place}: proxy must be a text, such as "http://proxy.example.org:3128"')
    if value not in ("", DIRECT):
        Proxy.parse(value, place)
    return value


HUB = "hub"
AUTHORITY = "authority"
_FORMAT = 1
_ENTRIES = (
    *("name", "hub", "sites", "hub_at", "sealed", "hub_names"),
    *("days", "authority_days", "own_keys", "proxy", "policy"),
)
_LONGEST = 48  # of a common name in a certificate: 64, with a word after it


@dataclass(frozen=True)
class Roster:
    """The members of a project. All kits of a project hold the same one, but for sites that were added later.

    Attributes:
        project: name of the project.
        hub: address that sites connect to, as HOST:PORT.
        hub_names: host names and addresses in the hub's certificate; the host of `hub` is the first.
        sites: names of the sites. A site's position is its slot, which is its rank, for good.
        hub_at: name of the site that runs the hub; None where a third party does. The hub decrypts what it passes on.
        sealed: whether sites encrypt payloads for each other, so that the hub cannot read them.
    """

    project: str
    hub: str
    hub_names: tuple[str, ...]
    sites: tuple[str, ...]
    hub_at: str | None = None
    sealed: bool = False

    def __post_init__(self) -> None:
        check_name(self.project, "project")
        split_address(self.hub)
        for name in self.hub_names:
            _check_host(name)
        _check_sites(self.sites)
        refuse(
            (
                self.hub_at is not None and self.hub_at not in self.sites,
                f"hub_at must name the site that runs the hub, got {self.hub_at!r}",
            ),
            (not isinstance(self.sealed, bool), f"sealed must be true or false, got {self.sealed!r}"),
            error=KitError,
        )

    def slot(self, site: str) -> int:
        """Return the slot of a site, from 0.

        Args:
            site: name of the site.

        Raises:
            KitError: if the site is not part of the project.
        """
        if site not in self.sites:
            raise KitError(f"{self.project} has no site {site!r}; its sites are {', '.join(self.sites)}")
        return self.sites.index(site)

    def address(self) -> tuple[str, int]:
        """Return host and port of the hub."""
        return split_address(self.hub)

    def to_json(self) -> bytes:
        """Return the content of a kit's roster file."""
        members = asdict(self) | {"sites": [{"name": name, "slot": slot} for slot, name in enumerate(self.sites)]}
        return (json.dumps({"format": _FORMAT} | members, indent=2) + "\n").encode()

    @classmethod
    def load(cls, folder: Path) -> Roster:
        """Read the roster of a kit.

        Args:
            folder: path of the kit.

        Raises:
            KitError: if the file is missing or damaged.
        """
        path = folder / ROSTER
        try:
            found = json.loads(read_file(path))
            if found["format"] != _FORMAT:
                raise KitError(f"{path} has format {found['format']!r}; this version of dadplug reads {_FORMAT}")
            check_keys(found, ("format", *(each.name for each in fields(cls))), str(path))
            sites = sorted(found["sites"], key=lambda site: int(site["slot"]))
            if [site["slot"] for site in sites] != list(range(len(sites))):
                raise KitError(f"{path}: slots must be 0 to {len(sites) - 1}, each once")
            names = tuple(str(site["name"]) for site in sites)
            hub_names = tuple(map(str, found["hub_names"]))
            sealed = found.get("sealed", False)
            return cls(str(found["project"]), str(found["hub"]), hub_names, names, found.get("hub_at"), sealed)
        except KitError as error:
            raise error if str(path) in str(error) else KitError(f"{path}: {error}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise KitError(f"{path} is not a roster: {error!r}") from error


@dataclass(frozen=True)
class Project:
    """Contents of a project file.

    Attributes:
        roster: project, hub and sites.
        days: validity of the certificates of hub and sites.
        authority_days: validity of the certificate authority.
        own_keys: sites that make their key themselves (`request` and `sign`), and `hub` if the hub does.
        policies: local policies by site; other sites allow everything.
    """

    roster: Roster
    days: int = 365
    authority_days: int = 3650
    own_keys: tuple[str, ...] = ()
    policies: Mapping[str, Policy] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Project:
        """Read a project file.

        Args:
            path: path of the file.

        Raises:
            KitError: if the file is missing or an entry is missing, unknown or invalid.
        """
        table = read_toml(path)
        try:
            return cls.parse(table)
        except KitError as error:
            raise KitError(f"{path}: {error}") from error

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> Project:
        """Build a project from the entries of a project file.

        Args:
            table: the entries.

        Raises:
            KitError: if an entry is missing, unknown or invalid.
        """
        check_keys(table, _ENTRIES, "the project")
        name, hub = _entry(table, "name"), _entry(table, "hub")
        names = dict.fromkeys([split_address(hub)[0], *map(canonical, _texts(table, "hub_names", ()))])
        hub_at = _entry(table, "hub_at") if "hub_at" in table else None
        roster = Roster(name, hub, tuple(names), _texts(table, "sites", None), hub_at, table.get("sealed", False))
        own_keys = _texts(table, "own_keys", ())
        policies = _entry(table, "policy", dict, {})
        for each in own_keys:
            if each != HUB:
                roster.slot(each)
        for site in policies:
            roster.slot(site)
        parsed = {site: Policy.parse(entries, f"policy.{site}") for site, entries in policies.items()}
        if proxy := check_proxy(table.get("proxy", ""), "the project"):
            common = {site: parsed.get(site, Policy()) for site in roster.sites}
            parsed = {site: replace(each, proxy=each.proxy or proxy) for site, each in common.items()}
        days, authority_days = table.get("days", cls.days), table.get("authority_days", cls.authority_days)
        check_days("days", days)
        check_days("authority_days", authority_days)
        return cls(roster, days, authority_days, own_keys, parsed)


def split_address(address: str, name: str = "hub") -> tuple[str, int]:
    """Return host and port of HOST:PORT; an IPv6 address is in brackets.

    Args:
        address: the text.
        name: what an error calls it.

    Raises:
        KitError: if it is not of this form.
    """
    found = re.fullmatch(r"(\[[^\[\]]+\]|[^:\[\]]+):(\d{1,5})", address)
    if not found or not 0 < int(found[2]) < 65536:
        raise KitError(f"{name} must be HOST:PORT, such as hub.example.org:8470 or [2001:db8::1]:8470, got {address!r}")
    host = canonical(found[1].strip("[]"))
    _check_host(host)
    return host, int(found[2])


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a text denotes, or None for a host name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def check_name(name: str, kind: str) -> None:
    """Check the name of a project or a site, which becomes part of certificates and the name of a folder.

    Raises:
        KitError: if it is empty, too long, or has other characters than letters, digits, ``.``, ``_`` and ``-``.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or len(name) > _LONGEST:
        raise KitError(
            f"the name of a {kind} must begin with a letter or digit and have up to {_LONGEST} letters (a-z), digits, "
            f"'.', '_' or '-', got {name!r}"
        )


def _check_sites(sites: Sequence[str]) -> None:
    if not sites:
        raise KitError("sites must name at least one site")
    seen: dict[str, str] = {}  # folders with names that differ by case are one folder on some systems
    for site in sites:
        check_name(site, "site")
        if site.lower() in (HUB, AUTHORITY):
            raise KitError(f"a site cannot be called {site!r}: that is the name of another folder of kits")
        if site.lower() in seen:
            raise KitError(f"sites {seen[site.lower()]!r} and {site!r} must differ by more than upper and lower case")
        seen[site.lower()] = site


def _check_host(host: str) -> None:
    if ip_address(host):
        return
    labels = host.split(".")
    valid = all(re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", label) for label in labels)
    if not valid or len(host) > 253 or labels[-1].isdigit():
        raise KitError(f"{host!r} is neither a host name nor an IP address")


def canonical(host: str) -> str:
    """Return a host name or address in the form in which certificates hold it."""
    found = ip_address(host)
    return str(found) if found else host.lower()


def _entry(table: Mapping[str, Any], name: str, kind: type = str, default: Any = None) -> Any:
    value = table.get(name, default)
    refuse(
        (value is None, f"{name} is missing"),
        (not isinstance(value, kind), f"{name} must be a {'table' if kind is dict else 'text'}, got {value!r}"),
        error=KitError,
    )
    return value


def _texts(table: Mapping[str, Any], name: str, default: tuple[str, ...] | None) -> tuple[str, ...]:
    value = _entry(table, name, object, default)
    _check(valid('a list of texts, such as ["a", "b"]', _are_texts), name, value)
    return tuple(value)


def check_days(name: str, value: object) -> None:
    """Check a number of days.

    Raises:
        KitError: if it is not a whole number from 1 to 36500.
    """
    _check(_DAYS, name, value)


@dataclass(frozen=True, eq=False)
class KitRestrictions:
    """Restrictions of one connection to a hub.

    Attributes:
        policy: policy of the site's kit.
        roster: members of the project.
    """

    policy: Policy
    roster: Roster

    def check(self, options: Restricted, *, sends_factors: bool) -> None:
        """Check the options of a reduction.

        Args:
            options: the options.
            sends_factors: whether the mode sends layers' inputs and gradients of outputs, compressed or not.

        Raises:
            PolicyError: if one of the options is not allowed.
        """
        self.policy.check(options)
        if sends_factors and self.roster.hub_at is None and not self.roster.sealed:
            raise PolicyError(
                f"mode={options.mode!r} sends factors of gradients, which the hub of {self.roster.project} could read: "
                "it decrypts what it passes on, and a third party runs it. Choose a mode without factors, such as "
                "dsgd or topk, or add sealed = true to the project file, so that sites encrypt for each other; if a "
                'site runs the hub, add hub_at = "NAME OF THE SITE". Then repeat `provision`, and copy roster.json to '
                "all kits"
            )

    def check_bytes(self, nbytes: int, most: int) -> None:
        """Check what leaves the site in an exchange that is not one of a method; see `Policy.check_bytes`."""
        self.policy.check_bytes(nbytes, most)

    def check_rank(self, name: str, sent: int, rows: int) -> None:
        """Check how many rows leave this site for those of a layer's input.

        Args:
            name: name of the weight.
            sent: number of rows that would be sent.
            rows: number of rows of the layer's input in the step.

        Raises:
            PolicyError: if these are more than the share that is allowed.
        """
        share = self.policy.max_rank_share
        if sent > share * rows:
            raise PolicyError(
                f"the policy of this site's kit has max_rank_share = {share:g}: of {rows} rows of the layer of "
                f"{name!r}, {int(share * rows)} may be sent, and {sent} would be. Lower rank=, or take a larger batch; "
                "nothing of the layer has been sent"
            )
