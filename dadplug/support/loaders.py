"""Loaders whose batches are drawn by another one than their sampler: for all trainings that deal batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from .refusals import refuse

_SETTINGS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
)


class WrappedLoader:
    """Loader whose attributes are those of another loader, but for those that it sets itself.

    Args:
        loader: the other loader.
    """

    _OWN: ClassVar[tuple[str, ...]] = ("_loader",)
    """Names of attributes that the other loader does not have."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self._OWN:  # not set yet while a copy is built
            raise AttributeError(name)
        return getattr(self._loader, name)


class DrawnBatches:
    """Sampler of batches from a function.

    Args:
        draw: returns the batches of an epoch as lists of indices.
    """

    def __init__(self, draw: Callable[[], Iterator[list[int]]]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[list[int]]:
        return self._draw()


def with_batches(loader: DataLoader[Any], batches: Iterable[list[int]]) -> DataLoader[Any]:
    """Return a loader like another one, which reads other batches.

    Args:
        loader: the other loader.
        batches: indices of the samples of each batch.
    """
    return DataLoader(loader.dataset, batch_sampler=batches, **settings_of(loader))


def settings_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments with which a loader was made, but for those that decide about its batches."""
    settings = {name: getattr(loader, name) for name in _SETTINGS}
    if loader.num_workers:
        settings |= {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    return settings


def check_loader(loader: Any, by: str = "Hogwild!") -> None:
    """Raise TypeError or ValueError if the batches of a loader cannot be dealt.

    Args:
        loader: the loader.
        by: who deals them, for messages.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"batches of a DataLoader can be dealt, not of {type(loader).__name__}")
    refuse(
        (
            isinstance(loader.dataset, IterableDataset),
            "an IterableDataset has no order that could be dealt: use a data set with a length and indices",
        ),
        (
            loader.batch_sampler is None,
            "the loader makes no batches (batch_size=None): give it a batch_size or a batch_sampler",
        ),
    )
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1 for sampler in samplers):
        raise ValueError(
            f"the loader has a DistributedSampler, which splits the data already: leave it out, since {by} deals "
            "the batches of the whole data set"
        )
