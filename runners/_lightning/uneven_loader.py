"""Loader with which a site with fewer batches takes as many steps as the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...exchange import Transport
from ...model_sync.samples import takes_part
from ..delegating_loader import DelegatingLoader


class UnevenLoader(DelegatingLoader):
    """Loader that repeats its last batch in the steps in which its site does not participate.

    The strategy gives the repeated batches no weight.

    Args:
        loader: the site's own loader.
        own: number of its batches.
        steps: number of batches to yield, at least `own`.
    """

    _OWN = (*DelegatingLoader._OWN, "_own", "_steps")

    def __init__(self, loader: Any, own: int, steps: int) -> None:
        super().__init__(loader)
        self._own, self._steps = own, steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        batches, batch = iter(self._loader), None
        for step in range(self._steps):
            if takes_part(step, self._own, self._steps):
                batch = next(batches)
            yield batch


def compare_lengths(loader: Any, transport: Transport) -> tuple[int, int] | None:
    """Compare the lengths of all sites' loaders; all sites must call it.

    Args:
        loader: the site's own loader.
        transport: transport to the other sites.

    Returns:
        This site's number of batches and the largest number of any site; None if all sites have equally many.

    Raises:
        ValueError: if a site has no batches, or only some sites know how many they have.
    """
    try:
        own = len(loader)
    except (TypeError, NotImplementedError):
        own = -1
    lengths = transport.gather_objects(own)
    if len(set(lengths)) == 1:
        return None
    if min(lengths) < 1:
        found = ", ".join(f"site {site}: {'unknown' if n < 0 else n}" for site, n in enumerate(lengths))
        raise ValueError(
            f"sites need equally many training batches, or a known number each, at least one ({found}); a loader over "
            "an IterableDataset needs limit_train_batches=n where others' lengths are known"
        )
    return own, max(lengths)
