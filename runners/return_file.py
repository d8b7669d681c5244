"""File with which a killed process of a site returns into a training with a parameter server."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..errors import SiteError
from ..exchange import Transport
from ..parameter_server import ParameterServer
from ..parameter_server.server import ServerTransport


class ReturnFile:
    """File of one site: it exists while a training is under way, and after this site was lost in one.

    Args:
        path: the file.

    Attributes:
        rank: rank of this site, if this process returns; else None.
        names: names of the sites by rank, if this process returns; else empty.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._address: str | None = None
        self.rank: int | None = None
        self.names: list[str] = []
        if self._path.exists():
            try:
                content = json.loads(self._path.read_text())
                self._address, self.names = content["address"], content["sites"]
                self.rank = int(content["address"].rpartition("/")[2])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{self._path} is not a file of return_file=: remove it ({error})") from error

    @property
    def returns(self) -> bool:
        """Whether this process returns into a training."""
        return self._address is not None

    def open_transport(
        self, device: torch.device, timeout: float, open_first: Callable[[], Transport]
    ) -> ServerTransport:
        """Open the transport of the trainer.

        Args:
            device: device of the model.
            timeout: seconds that a wait may take.
            open_first: opens that of a training's beginning.
        """
        if self.rank is not None:
            return ServerTransport.of_returning(self.rank, self.names, device, timeout)
        first = open_first()
        return ServerTransport(first, device, timeout)

    def build(self, transport: ServerTransport, fit: Any, *arguments: Any, **options: Any) -> ParameterServer:
        """Build the parameter server, in whose training this process returns if it does, and write the file.

        Args:
            transport: the transport of the trainer.
            fit: state of the trainer, for sites that return.
            arguments: positional arguments of `ParameterServer`.
            options: other arguments.

        Raises:
            SiteError: if the training cannot be reached; the file is removed then, since it may have ended.
            ValueError: if no site can return, since messages are sealed, or site 0 cannot listen.
        """
        state = {"trainer": fit}
        try:
            server = ParameterServer(*arguments, state=state, in_trainer=True, rejoin=self._address, **options)
        except SiteError:
            if self.returns:
                self.remove()
            raise
        transport.server = server
        if transport.world_size == 1:
            return server
        if not server.return_address:
            server.detach()
            raise ValueError(
                "no site can return where messages are sealed, or site 0 cannot listen: leave return_file out"
            )
        names = [transport.sites.name(rank) for rank in range(transport.world_size)]
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        partial.touch(0o600)  # the address contains a secret
        partial.write_text(json.dumps({"address": server.return_address, "sites": names}))
        os.replace(partial, self._path)
        return server

    def remove(self) -> None:
        """Remove the file: the training has ended."""
        self._path.unlink(missing_ok=True)
