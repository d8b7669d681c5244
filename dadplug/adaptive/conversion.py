"""Adaptive loaders in place of the loaders that a program gives a trainer."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from .adaptive_loader import AdaptiveDataLoader

_SAME = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator")


def adaptive_loader(loader: Any, sites: int, seed: int, sampler: Any = None) -> AdaptiveDataLoader:
    """Return a loader of the same data with the same batches at first, whose batch can change.

    Args:
        loader: the loader of each site; its batch size is that of one site.
        sites: number of sites.
        seed: seed of the order.
        sampler: sampler of the order, before it was divided over the sites; that of the loader where None.

    Raises:
        ValueError: if it is no DataLoader, or a sampler decides about its batches.
    """
    if isinstance(loader, AdaptiveDataLoader):
        return loader
    if not isinstance(loader, DataLoader):
        raise ValueError(f"the batch of one DataLoader can follow goodput, not that of a {type(loader).__name__}")
    if type(loader.batch_sampler) not in (BatchSampler, type(None)) or loader.batch_size is None:
        raise ValueError(
            "the training loader's batches are those of a sampler: give its DataLoader a batch_size instead"
        )
    sampler = loader.sampler if sampler is None else sampler
    shuffle = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source)
    order: dict[str, Any] = {"shuffle": shuffle}
    if not shuffle and type(sampler) is not SequentialSampler:
        order = {"sampler": sampler}
    options = {name: getattr(loader, name) for name in _SAME}
    if loader.num_workers:
        options |= {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    return AdaptiveDataLoader(
        loader.dataset, loader.batch_size * sites, **order, seed=seed, drop_last=loader.drop_last, **options
    )
