"""Checkpoints of one site that all sites load."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import torch

from ...exchange import Transport


def shared_checkpoint(path: str | Path, transport: Transport) -> dict[str, Any]:
    """Load a checkpoint of the first site that is present on all sites; all sites must call it.

    Args:
        path: path of the file at that site.
        transport: the transport.

    Raises:
        FileNotFoundError: on all sites, if that site does not have the file.
        ValueError: on all sites, if the file is damaged.
    """
    content = Path(path).read_bytes() if Path(path).is_file() else None
    digests = transport.gather_present(None if content is None else hashlib.sha256(content).hexdigest())
    first = next(iter(digests))
    if digests[first] is None:
        source = transport.sites[first]
        raise FileNotFoundError(f"checkpoint {path} is not at {source}, from which all sites load it")
    if any(digest != digests[first] for digest in digests.values()):
        content = transport.broadcast_bytes(content or b"")
    try:
        checkpoint: dict[str, Any] = torch.load(io.BytesIO(content or b""), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"checkpoint {path} is damaged, or no checkpoint: {error}") from error
    return checkpoint
