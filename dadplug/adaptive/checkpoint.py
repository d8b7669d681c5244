"""File with the progress of a training, checked when it is read, and the choice of the newest among the sites."""

from __future__ import annotations

import hashlib
import os
import secrets
import warnings
from pathlib import Path
from typing import Any

import torch

from ..errors import MismatchError
from ..exchange import Transport, codec
from ..hub.files import PRIVATE, write_file

VARIABLE = "DADPLUG_CHECKPOINT"  # the path, where the program gives none
_HEAD = b"dadplug progress 1\n"
_DIGEST_BYTES = 32


def path_of(checkpoint: str | os.PathLike[str] | None) -> Path | None:
    """Return the path of the checkpoint, from the argument or from the environment; None without."""
    given = os.environ.get(VARIABLE) if checkpoint is None else checkpoint
    return Path(given) if given else None


def write(path: Path, content: bytes) -> None:
    """Write a checkpoint; after an error the file is what it was before.

    Args:
        path: path of the file; its folder is created.
        content: the encoded state.

    Raises:
        OSError: if it cannot be written, for example to a full disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, _HEAD + hashlib.sha256(content).digest() + content, PRIVATE)


def read(path: Path) -> bytes | None:
    """Read what `write` has written; None if there is no file.

    Raises:
        ValueError: if the file is damaged, or cannot be read.
    """
    try:
        whole = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"checkpoint {path} cannot be read: {error.strerror}") from error
    content = whole[len(_HEAD) + _DIGEST_BYTES :]
    if whole[: len(_HEAD)] != _HEAD:
        raise ValueError(f"{path} is no checkpoint of remaining_epochs_until")
    if hashlib.sha256(content).digest() != whole[len(_HEAD) : len(_HEAD) + _DIGEST_BYTES]:
        raise ValueError(f"checkpoint {path} is damaged: it is not what was written")
    return content


def newest(path: Path | None, transport: Transport) -> tuple[str, dict[str, Any] | None]:
    """Read the newest checkpoint of all sites; all sites must call it.

    Args:
        path: path of this site's checkpoint; None if it has none.
        transport: the transport.

    Returns:
        The name of the run, and the state; None if no site has a checkpoint.

    Raises:
        ValueError: on all sites, if there are only damaged files.
        MismatchError: on all sites, if their files are of different runs.
        SiteError: if a site is gone or does not answer.
    """
    content, state, damage = None, None, None
    try:
        content = None if path is None else read(path)
        state = None if content is None else codec.decode(content)
    except ValueError as error:
        content, damage = None, str(error)
    fact = None
    if state is not None and content is not None:
        fact = (state["run"], state["serial"], hashlib.sha256(content).digest(), len(content))
    every = transport.gather_objects({"fact": fact, "damage": damage, "run": secrets.token_hex(8)})
    facts = {rank: each["fact"] for rank, each in enumerate(every) if each["fact"] is not None}
    damages = [each["damage"] for each in every if each["damage"] is not None]
    if not facts:
        if damages:
            raise ValueError(f"{damages[0]}; remove the file to begin anew")
        return every[0]["run"], None
    first = min(facts)
    for rank, (run, *_) in facts.items():
        if run != facts[first][0]:
            raise MismatchError(
                f"the checkpoints of {transport.sites[first]} and {transport.sites[rank]} are of different runs: "
                "remove the one that is not to be resumed"
            )
    if damage is not None:
        warnings.warn(f"{damage}; the checkpoint of another site is used", stacklevel=2)
    best = max(facts, key=lambda rank: facts[rank][1])  # the first of several
    if any(each["fact"] != facts[best] for each in every):
        content = _send(content if transport.rank == best else None, facts[best][3], transport)
        state = codec.decode(content)
    assert state is not None
    return state["run"], state


def _send(content: bytes | None, length: int, transport: Transport) -> bytes:
    """Send the bytes of one site to all: a sum to which the others, whose content is None, add nothing."""
    data = torch.zeros(length, dtype=torch.uint8, device=transport.device)
    if content is not None:
        data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    transport.all_reduce(data).wait()
    return data.cpu().numpy().tobytes()


def write_everywhere(path: Path | None, content: bytes, transport: Transport) -> None:
    """Write a checkpoint at each site that has a place for it; all sites must call it.

    Of the processes that torchrun starts on one machine, the first one writes.

    Args:
        path: path of this site's checkpoint; None if it has none.
        content: the encoded state.
        transport: the transport.

    Raises:
        OSError: on all sites, if none could write. If some could not, these warn, and training goes on.
        SiteError: if a site is gone or does not answer.
    """
    outcome = None
    if path is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            write(path, content)
            outcome = ""
        except OSError as error:
            outcome = f"checkpoint {path} cannot be written, the last one is left: {error.strerror}"
    outcomes = [each for each in transport.gather_objects(outcome) if each is not None]
    if "" not in outcomes:
        raise OSError(next(iter(outcomes), "no process has a path for the checkpoint"))
    if outcome:
        warnings.warn(outcome, RuntimeWarning, stacklevel=2)
