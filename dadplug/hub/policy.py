"""The local policy of a site: what options of training its kit allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..errors import KitError, PolicyError
from .files import check_keys, read_toml

FILE = "policy.toml"


class Restricted(Protocol):
    """The options that a policy restricts: `dadplug.options.Options` or an object with the same attributes."""

    @property
    def mode(self) -> str:
        """Method of agreement."""

    @property
    def share_inputs(self) -> bool:
        """Whether factors of layers that are fed by raw data leave the site."""


@dataclass(frozen=True)
class Policy:
    """The options that a site allows. The site's administrator sets them in its kit; a program cannot change them.

    Attributes:
        modes: modes that are allowed; None allows all.
        share_inputs: False requires the option `share_inputs=False`.
        encrypt_local: whether messages to a hub in the same machine are encrypted, too.
    """

    modes: tuple[str, ...] | None = None
    share_inputs: bool = True
    encrypt_local: bool = False

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

    @classmethod
    def parse(cls, table: Mapping[str, Any], place: str) -> Policy:
        """Build a policy from the entries of a TOML table.

        Args:
            table: the entries `modes`, `share_inputs` and `encrypt_local`, all optional.
            place: file or table, for messages.

        Raises:
            KitError: if an entry is unknown or has a wrong type.
        """
        check_keys(table, ("modes", "share_inputs", "encrypt_local"), place)
        modes, share_inputs = table.get("modes"), table.get("share_inputs", True)
        encrypt_local = table.get("encrypt_local", False)
        if modes is not None and not (isinstance(modes, list) and all(isinstance(mode, str) for mode in modes)):
            raise KitError(f'{place}: modes must be a list such as ["dsgd", "rankdad"], got {modes!r}')
        if not isinstance(share_inputs, bool):
            raise KitError(f"{place}: share_inputs must be true or false, got {share_inputs!r}")
        if not isinstance(encrypt_local, bool):
            raise KitError(f"{place}: encrypt_local must be true or false, got {encrypt_local!r}")
        return cls(None if modes is None else tuple(modes), share_inputs, encrypt_local)

    @classmethod
    def load(cls, path: Path) -> Policy:
        """Read a policy file.

        Args:
            path: path of the file.

        Raises:
            KitError: if the file is missing or damaged: a kit without a policy does not allow everything.
        """
        return cls.parse(read_toml(path), str(path))

    def text(self) -> str:
        """Return the policy as the content of a kit's policy file."""
        modes = "# modes = []" if self.modes is None else f"modes = [{', '.join(map(_quoted, self.modes))}]"
        return (
            "# Local policy of this site. Options of training that it does not allow are refused.\n"
            '# modes: the modes that are allowed, such as ["dsgd", "rankdad"]; without this entry all are.\n'
            f"{modes}\n"
            "# share_inputs: false requires share_inputs=False, so that layers fed by raw data send no factors.\n"
            f"share_inputs = {str(self.share_inputs).lower()}\n"
            "# encrypt_local: true encrypts messages to a hub in the same machine, too; by default they are not.\n"
            f"encrypt_local = {str(self.encrypt_local).lower()}\n"
        )


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
