"""Units of systemd for hub and sites: few rights, a restart after failures, and the key as a credential."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import KitError
from .pki.files import CREDENTIAL, KEY, POLICY
from .pki.kits import Kit

_HOMES = ("/home", "/root", "/run/user")

# What services of both kinds may not do: see systemd.exec(5).
_HARDENED = {
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "PrivateTmp": "yes",
    "ProtectKernelTunables": "yes",
    "ProtectKernelModules": "yes",
    "ProtectKernelLogs": "yes",
    "ProtectControlGroups": "yes",
    "ProtectClock": "yes",
    "ProtectHostname": "yes",
    "ProtectProc": "invisible",
    "RestrictNamespaces": "yes",
    "RestrictRealtime": "yes",
    "RestrictSUIDSGID": "yes",
    "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX",
    "LockPersonality": "yes",
    "RemoveIPC": "yes",
    "SystemCallArchitectures": "native",
    "SystemCallFilter": "@system-service",
    "SystemCallErrorNumber": "EPERM",
    "UMask": "0077",
}


@dataclass(frozen=True)
class Service:
    """Unit of systemd of one kit.

    Args:
        kit: the kit, at the place from which the service will read it.
        command: program and arguments of a site's training; of a hub further arguments of `python -m dadplug hub`.
        user: user that it runs as; empty for one that systemd makes while it runs (`DynamicUser=`).
        passphrase: file with the passphrase of the key, which only root need be able to read; None without one.
        devices: whether the service may use devices, such as GPUs.

    Raises:
        KitError: if a site's program is missing.
    """

    kit: Kit
    command: Sequence[str] = ()
    user: str = ""
    passphrase: Path | None = None
    devices: bool = False
    program: list[str] = field(init=False)

    def __post_init__(self) -> None:
        if self.kit.is_hub:
            program = [sys.executable, "-m", "dadplug", "hub", str(self._folder), *self.command]
        else:
            found = shutil.which(self.command[0]) if self.command else None
            if found is None:
                raise KitError(
                    f"the service of site {self.kit.name} needs the program that trains, after --, such as "
                    f"-- python /srv/train.py {self._folder}"
                )
            program = [os.path.abspath(found), *self.command[1:]]
        object.__setattr__(self, "program", program)

    @property
    def _folder(self) -> Path:
        return self.kit.folder.resolve()

    @property
    def name(self) -> str:
        """Name of the unit, without its suffix."""
        project = self.kit.roster.project
        return f"dadplug-hub-{project}" if self.kit.is_hub else f"dadplug-site-{project}-{self.kit.name}"

    def text(self) -> str:
        """Return the content of the unit's file."""
        who = "hub" if self.kit.is_hub else f"site {self.kit.name}"
        lines = (
            [
                f"# Written by `python -m dadplug service {self._folder}`.",
                f"# Changes belong into `systemctl edit {self.name}`, proxies into /etc/default/{self.name}.",
                *_section("Unit", {
                    "Description": f"dadplug: {who} of the project {self.kit.roster.project}",
                    "Wants": "network-online.target",
                    "After": "network-online.target time-sync.target",
                    "StartLimitIntervalSec": "600",
                    "StartLimitBurst": "20",
                }),
                *_section("Service", self._service()),
                *_section("Install", {"WantedBy": "multi-user.target"}),
            ]
        )  # fmt: skip
        return "\n".join(lines) + "\n"

    def _service(self) -> dict[str, str]:
        entries = {
            "Type": "exec",
            "ExecStart": " ".join(map(_quoted, self.program)),
            "Restart": "on-failure",
            "RestartSec": "2" if self.kit.is_hub else "5",
            "TimeoutStopSec": "30",
            "StateDirectory": self.name,
            "CacheDirectory": self.name,
            "LogsDirectory": self.name,
            "WorkingDirectory": f"%S/{self.name}",
            "Environment": f"PYTHONUNBUFFERED=1 HOME=%S/{self.name} NUMBA_CACHE_DIR=%C/{self.name}",
            "EnvironmentFile": f"-/etc/default/{self.name}",
            "LimitNOFILE": "4096",
        }
        entries |= {"User": self.user, "Group": self.user} if self.user else {"DynamicUser": "yes"}
        entries["LoadCredential"] = "\n".join(f"{name}:{path}" for name, path in self._credentials().items())
        entries |= _HARDENED | self._places()
        if not self.devices:
            entries |= {"PrivateDevices": "yes", "DevicePolicy": "closed"}
        if self.kit.is_hub:  # training compiles code
            entries["MemoryDenyWriteExecute"] = "yes"
        rights = "CAP_NET_BIND_SERVICE" if self.kit.is_hub and self.kit.roster.address()[1] < 1024 else ""
        return entries | {"CapabilityBoundingSet": rights, "AmbientCapabilities": rights}

    def _credentials(self) -> dict[str, Path]:
        """Return the files that systemd hands over, which only root need be able to read, by their names."""
        found = {KEY: self.kit.key_file.resolve()}
        policy = self._folder / POLICY
        if policy.exists() and not policy.stat().st_mode & 0o004:
            found[POLICY] = policy
        if self.passphrase is not None:
            found[CREDENTIAL] = self.passphrase.resolve()
        return found

    def _places(self) -> dict[str, str]:
        """Return what of the homes of users is visible: nothing, or the parts that the service needs."""
        package = Path(__file__).resolve().parents[2]
        needed = [sys.prefix, sys.base_prefix, str(package), str(self._folder)]
        needed += [str(Path(each).resolve()) for each in self.command if each.startswith("/")]
        inside = sorted({each for each in needed if each.startswith(tuple(f"{home}/" for home in _HOMES))})
        if not inside:
            return {"ProtectHome": "yes"}
        return {"ProtectHome": "tmpfs", "BindReadOnlyPaths": " ".join(map(_quoted, inside))}

    def steps(self, path: Path) -> list[str]:
        """Return what an administrator has to do to install the unit.

        Args:
            path: file of the unit.
        """
        steps = [
            f"chmod 755 {shlex.quote(str(self._folder))}  # its key stays readable by root only, and is handed over"
        ]
        if self.user:
            steps = [f"chown -R {self.user} {shlex.quote(str(self._folder))}"]
        if self.program[0].startswith("/root/") and self.user != "root":
            steps.append(f"# {self.program[0]} is below /root, which other users cannot read: install it in /opt")
        return [
            *steps,
            f"install -m 644 {shlex.quote(str(path))} /etc/systemd/system/",
            f"systemctl daemon-reload && systemctl enable --now {self.name}",
            f"journalctl -u {self.name} -f",
        ]


def _section(name: str, entries: Mapping[str, str]) -> list[str]:
    """Return the lines of a section; a value of several lines is an entry for each."""
    return ["", f"[{name}]", *(f"{key}={line}" for key, value in entries.items() for line in value.split("\n"))]


def _quoted(argument: str) -> str:
    """Return an argument as `ExecStart=` reads it."""
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    plain = escaped == argument and argument and not any(each.isspace() or each in ";'" for each in argument)
    return argument if plain else f'"{escaped}"'
