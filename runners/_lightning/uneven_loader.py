"""Gives sites with different numbers of batches equally many steps, for trainers that know nothing of idle sites."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...exchange import Transport
from ...model_sync.uneven_inputs import has_turn


class TurnLoader:
    """A loader that says its last batch once more in the steps in which its site has no turn.

    The strategy gives those no weight. Everything else about the loader stays reachable, and settable, through this.

    Args:
        loader: the site's own loader.
        own: number of its batches.
        steps: number of batches to give.
    """

    def __init__(self, loader: Any, own: int, steps: int) -> None:
        vars(self).update(_loader=loader, _own=own, _steps=steps)

    def __len__(self) -> int:
        return int(self._steps)

    def __iter__(self) -> Iterator[Any]:
        batches, batch = iter(self._loader), None
        for step in range(self._steps):
            if has_turn(step, self._own, self._steps):
                batch = next(batches)
            yield batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in vars(self):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)


def agree_on_steps(loader: Any, transport: Transport) -> tuple[int, int] | None:
    """Compare the lengths of all sites' loaders; all sites must call it.

    Args:
        loader: the site's own loader.
        transport: the transport.

    Returns:
        This site's number of batches and the largest of all; None where there is nothing to even out.

    Raises:
        ValueError: if some site has no batches, or only some know how many they have.
    """
    try:
        own = len(loader)
    except (TypeError, NotImplementedError):
        own = -1
    lengths = transport.gather_objects(own)
    if len(set(lengths)) == 1:
        return None
    if min(lengths) < 1:
        told = ", ".join(f"site {site}: {'unknown' if n < 0 else n}" for site, n in enumerate(lengths))
        raise ValueError(
            f"sites need equally many training batches, or a known number each, at least one ({told}); a loader over "
            "an IterableDataset needs limit_train_batches=n where others' lengths are known"
        )
    return own, max(lengths)
