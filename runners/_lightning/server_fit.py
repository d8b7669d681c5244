"""A fit of Lightning with a parameter server, in which sites leave and return."""

from __future__ import annotations

from typing import Any

from .elastic_fit import ElasticFit


class ServerFit(ElasticFit):
    """One fit, whose state is that of a step of site 0. The optimizer's state is part of the server's."""

    _option = "return_file"

    def _optimizer_states(self) -> list[Any] | None:
        return None
