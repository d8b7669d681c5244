"""File with which a killed process of a site returns into a training with a parameter server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..errors import SiteError
from ..exchange import Transport
from ..parameter_server import ParameterServer
from ..parameter_server.server import ServerTransport
from ..support.files import PRIVATE, write_file


class ReturnFile:
    """File of one site: it exists while a training is under way, and after this site was lost in one.

    Args:
        path: the file; None where no site returns.

    Attributes:
        rank: rank of this site, if this process returns; else None.
        names: names of the sites by rank, if this process returns; else empty.
    """

    def __init__(self, path: str | Path | None) -> None:
        self._path = None if path is None else Path(path)
        self._address: str | None = None
        self.rank: int | None = None
        self.names: list[str] = []
        if self._path is not None and self._path.exists():
            try:
                content = json.loads(self._path.read_text())
                self._address, self.names = content["address"], content["sites"]
                self.rank = int(content["address"].rpartition("/")[2])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{self._path} is not a file of return_file=: remove it ({error})") from error

    def open_transport(self, device: torch.device, timeout: float, open_first: Callable[[], Transport]) -> Transport:
        """Open the transport of the trainer.

        Args:
            device: device of the model.
            timeout: seconds that a wait may take.
            open_first: opens that of a training's beginning.
        """
        if self.rank is not None:
            return ServerTransport.of_returning(self.rank, self.names, device, timeout)
        first = open_first()
        return first if self._path is None else ServerTransport(first, device, timeout)

    def build(self, transport: Any, fit: Any, *arguments: Any, **options: Any) -> ParameterServer:
        """Build the parameter server, in whose training this process returns if it does, and write the file.

        Args:
            transport: the transport of the trainer, if there are several sites.
            fit: state of the trainer, for sites that return; None where none does.
            arguments: positional arguments of `ParameterServer`.
            options: other arguments.

        Raises:
            SiteError: if the training cannot be reached; the file is removed then, since it may have ended.
            ValueError: if no site can return, since messages are sealed, or site 0 cannot listen.
        """
        state = None if fit is None else {"trainer": fit}
        try:
            server = ParameterServer(*arguments, state=state, in_trainer=True, rejoin=self._address, **options)
        except SiteError:
            if self.rank is not None:
                self.remove()
            raise
        if self._path is None or transport is None:
            return server
        transport.server = server
        if transport.world_size == 1:
            return server
        if not server.return_address:
            server.detach()
            raise ValueError(
                "no site can return where messages are sealed, or site 0 cannot listen: leave return_file out"
            )
        names = [transport.sites.name(rank) for rank in range(transport.world_size)]
        content = json.dumps({"address": server.return_address, "sites": names})
        write_file(self._path, content.encode(), PRIVATE)  # the address contains a secret
        return server

    def remove(self) -> None:
        """Remove the file: the training has ended."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
