"""Catalyst engine of one site: Accelerate works as if alone, and dadplug communicates with the other sites.

It also merges the sites' metrics, for which stock Catalyst is patched while a runner trains, and splits data sets over
the sites.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from catalyst.core.engine import Engine
from catalyst.utils.torch import any2device
from torch.utils.data import BatchSampler, DataLoader

from ...errors import MismatchError
from ...exchange import Transport
from ...exchange.fields import checked
from ...exchange.handshake import gloo_interface
from ...exchange.restrictions import METRICS, declared
from ...exchange.status import describe
from ...reduction import GradientReduction
from ...support.environment import assign, environment
from ...support.files import replacing
from ...support.loaders import settings_of, with_batches
from ..loaders import DelegatingLoader, SiteSampler, data_to_split
from ..patches import METRICS_KIND, SharedPatch, merge_metrics, metrics_of_present_sites
from ..present import gather, metrics_transport, repeating

_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PMI_", "OMPI_", "MV2_", "MPI_")

_HASH_SEED = "PYTHONHASHSEED"
_REPLACED = ("forward", "_original_forward", "_is_accelerate_prepared")


# Modules that import `all_gather` by name. Catalyst's own sends all tensors through CUDA.
_GATHERING = ("_auc", "_classification", "_confusion_matrix", "_segmentation")
# Metrics with several gathers.
_REPEATED = (
    ("_auc", "AUCMetric"),
    ("_classification", "BinaryPrecisionRecallF1Metric"),
    ("_classification", "MulticlassPrecisionRecallF1SupportMetric"),
    ("_classification", "MultilabelPrecisionRecallF1SupportMetric"),
    ("_segmentation", "RegionBasedMetric"),
)


class SiteEngine(Engine):
    """Engine that uses no distributed function of Accelerate, and so works with every version of it.

    Args:
        transport: transport to the other sites, for everything but gradients.
        cpu: whether to use the CPU even if there is a GPU.
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``, as in Accelerate.
        split_data: whether to split the data set of the sites' loaders over the sites: True, False or ``"auto"``.

    Attributes:
        transport: transport for everything but gradients.
        reduction: gradient reduction of the model in training; None before it is built.
        steps_in_backward: whether a step ends with the backward pass; if not, the runner calls `end_step` later.
        loader_samples: number of samples of the current loader so far, on this site.
        own_metrics: metrics of the current loader at this site, of those that callbacks have averaged over the sites.
        seed: seed of the order of samples.
        splits: fingerprints of the data sets that are split over the sites, by the names of loaders; None for others.
    """

    # Those of the sites once it is built: Accelerate, which is to work as if alone, asks for them while it is built.
    process_index, num_processes, local_process_index, is_ddp, is_last_process = 0, 1, 0, False, True

    def __init__(
        self, transport: Transport, *, cpu: bool = False, mixed_precision: str = "no", split_data: bool | str = "auto"
    ) -> None:
        launcher = [name for name in os.environ if name.startswith(_LAUNCHER)]
        with environment(dict.fromkeys(launcher)):  # or Accelerate would start a process group of its own
            super().__init__(cpu=cpu or not torch.cuda.is_available(), mixed_precision=mixed_precision)
        self._split_data = split_data
        self._prepared: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.reduction: GradientReduction | None = None
        self.steps_in_backward = True
        self.loader_samples = 1
        self.own_metrics: dict[str, float] = {}
        self.seed = 0
        self.splits: dict[str, str | None] = {}
        self.transport = transport
        self.process_index, self.num_processes = transport.rank, transport.world_size
        self.is_ddp, self.is_last_process = transport.world_size > 1, transport.rank == transport.world_size - 1
        self.local_process_index = int(os.environ.get("LOCAL_RANK", "0"))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Patch those parts of stock Catalyst that do not work between sites, for the duration of a run.

        After an error the exit reason is posted to the other sites, and the connections to them are closed.
        """
        kept = {_HASH_SEED: os.environ.get(_HASH_SEED)}  # Catalyst sets it with each seed
        try:
            with environment(kept), metrics_of_present_sites(self.transport, _METRICS), gloo_interface():
                yield
        except BaseException as error:
            reason = describe(error)
            self.transport.sites.announce(reason)
            if self.reduction is not None:
                self.reduction.abort(reason)
            self.transport.close()
            raise
        finally:
            if self.reduction is not None:
                self.reduction.detach(discard=True)  # after an error or a stop some gradients are left
            while self._prepared:
                assign(*self._prepared.pop())

    @property
    def use_fp16(self) -> bool:
        """Whether half precision is on; newer versions of Accelerate have no such property."""
        return str(self.mixed_precision) == "fp16"

    @property
    def is_main_process(self) -> bool:
        """Whether this site prints: the first one that is present."""
        return self.num_processes == 1 or self.process_index == self.transport.rounds.lowest

    is_local_main_process = is_main_process

    @property
    def writes(self) -> bool:
        """Whether this site writes checkpoints: the first one, or all where any of them may leave."""
        return self.is_main_process or self.transport.rounds.elastic

    def local_main_process_first(self) -> Any:
        """Return an empty context: all sites run at the same time."""
        return nullcontext()

    main_process_first = local_main_process_first

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self.is_main_process:
            print(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        """Wait for all sites."""
        self.transport.gather_objects(None)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate the tensors of all sites along the first dimension."""
        own = tensor.detach().cpu()
        return torch.cat(gather(self.transport, own if own.dim() else own.reshape(1), 1)).to(tensor.device)

    def gather_for_metrics(self, input_data: Any, *args: Any, **kwargs: Any) -> Any:
        """Concatenate the tensors of all sites; no sample is repeated, so that none is dropped."""
        return self.gather(input_data)

    def mean_reduce_ddp_metrics(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Average the sites' metrics of a loader, weighted by their samples."""
        own = {name: float(value) for name, value in metrics.items()}
        self.own_metrics |= own
        with declared(METRICS):
            every = self.transport.gather_present((own, self.loader_samples))
        return merge_metrics([*checked(every, METRICS_KIND, "list of metrics", self.transport).values()])

    def prepare_data_loader(
        self, data_loader: Any, *args: Any, name: str = "loader", known: str | None = "", **kwargs: Any
    ) -> Any:
        """Split the data if all sites have the same data set, and move batches to the device.

        Args:
            data_loader: the loader.
            args: ignored.
            name: name of the loader, for messages.
            known: what `splits` is at the other sites, for a site that joins them in mid-training.
            kwargs: ignored.
        """
        loader, self.splits[name] = site_loader(data_loader, self._split_data, name, self.seed, self.transport, known)
        return self.on_device(loader)

    def on_device(self, loader: Any) -> Any:
        """Return a loader whose batches are on the device.

        Args:
            loader: the loader.
        """
        return loader if self.device.type == "cpu" else DeviceLoader(loader, self.device)

    def prepare_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Prepare a model; the attributes that Accelerate replaces are restored at the end of the run."""
        self._prepared.append((vars(model), {name: vars(model).get(name) for name in _REPLACED}))
        prepared: torch.nn.Module = super().prepare_model(model, *args, **kwargs)
        return prepared

    def backward(self, loss: torch.Tensor, *, fused: Sequence[torch.optim.Optimizer] = (), **kwargs: Any) -> None:
        """Run backward and synchronize the gradients with the other sites.

        Args:
            loss: the loss.
            fused: optimizers whose next steps apply gradients without forming them.
            kwargs: as in Accelerate.
        """
        super().backward(loss, **kwargs)
        if self.reduction is None or not self.reduction.syncing:
            return
        if fused:
            self.reduction.hold(*fused)
        else:
            self.reduction.synchronize()
        if self.steps_in_backward:
            self.end_step()

    def end_step(self) -> None:
        """Count a step of the reduction, where sites may leave and return."""
        if self.transport.rounds.elastic:
            self.transport.rounds.end_step()

    @property
    def sites(self) -> str:
        """Number of sites that are present, and of all; empty where all of them stay."""
        return f"{len(self.transport.rounds.present)}/{self.num_processes}" if self.transport.rounds.elastic else ""

    def save(self, obj: Any, f: Any, **kwargs: Any) -> None:
        """Write a file atomically, at the sites that write."""
        if self.writes:
            save_whole(obj, f)


def save_whole(item: Any, path: str | Path) -> None:
    """Write a file atomically: it is complete or does not exist."""
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")  # several sites of one machine may write it
    with replacing(path, partial, durable=False):
        torch.save(item, partial)


def plain(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that Accelerate has wrapped."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _gathering(original: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    """Replace the function by which Catalyst's metrics gather, for any device and any number of samples."""

    @functools.wraps(original)
    def all_gather(data: Any) -> list[Any]:
        transport = metrics_transport.get()
        return original(data) if transport is None else gather(transport, data)

    return all_gather


def _metric(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"catalyst.metrics.{module}"), name)


_METRICS = [
    SharedPatch(functools.partial(importlib.import_module, f"catalyst.metrics.{name}"), "all_gather", _gathering)
    for name in _GATHERING
] + [SharedPatch(functools.partial(_metric, module, name), "compute", repeating) for module, name in _REPEATED]


def site_loader(
    loader: Any, split: bool | str, name: str, seed: int, transport: Transport, known: str | None = ""
) -> tuple[Any, str | None]:
    """Split a loader's data over the sites, or return the loader unchanged; all sites must call it together.

    Args:
        loader: loader of this site.
        split: True: split the data set, which is the same on all sites; False: do not, since each site has its own;
            ``"auto"``: split it if it is the same on all sites.
        name: name of the loader, for messages.
        seed: seed of the order of samples.
        transport: transport to the other sites.
        known: what the other sites have got, for a site that joins them in mid-training: the fingerprint of the data
            set that they have split, or None.

    Returns:
        The loader, and the fingerprint of the data set if it is split.

    Raises:
        MismatchError: if `split` is True and the data sets differ, or `split` differs between sites.
    """
    if transport.world_size == 1:
        return loader, None
    own = data_to_split(loader, split, name, transport.gather_objects, known)
    return loader if own is None else _split(loader, transport.rank, transport.world_size, seed), own


def _split(loader: DataLoader[Any], rank: int, world_size: int, seed: int) -> DataLoader[Any]:
    batches: Any = loader.batch_sampler
    if type(batches) is BatchSampler:
        samples = SiteSampler(batches.sampler, rank, world_size, seed)
        return with_batches(loader, BatchSampler(samples, batches.batch_size, batches.drop_last))
    if batches is not None:  # a sampler of whole batches, which are not to be torn apart
        return with_batches(loader, SiteSampler(batches, rank, world_size, seed))
    samples = SiteSampler(loader.sampler, rank, world_size, seed)
    return DataLoader(loader.dataset, batch_size=None, sampler=samples, **settings_of(loader))


def begin_epoch(loader: Any, name: str, epoch: int, transport: Transport) -> int:
    """Set the epoch of a loader's sampler, and compute the number of steps; all sites must call it together.

    Returns:
        The largest number of batches of any site.

    Raises:
        MismatchError: if the sites have drawn different orders.
    """
    batches = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    sampler = next((each for each in samplers if isinstance(each, SiteSampler)), None)
    if sampler is not None:
        sampler.set_epoch(epoch)
    digest = None if sampler is None else hashlib.sha256(repr(sampler.order).encode()).hexdigest()
    own = len(loader), digest
    by_site = checked(transport.gather_present(own), tuple[int, str | None], "epoch", transport).values()
    if len({order for _, order in by_site}) > 1:
        raise MismatchError(
            f"the sampler of loader {name!r} gives every site another order, so that the data cannot be split: let it "
            "depend on the seeds of torch, numpy or random, or split the data beforehand and pass split_data=False"
        )
    return int(max(batches for batches, _ in by_site))


class DeviceLoader(DelegatingLoader):
    """Loader whose batches are moved to a device.

    Args:
        loader: the loader.
        device: the device.
    """

    _OWN = (*DelegatingLoader._OWN, "_device")

    def __init__(self, loader: Any, device: torch.device) -> None:
        super().__init__(loader)
        self._device = device

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield any2device(batch, self._device)

    def __len__(self) -> int:
        return len(self._loader)
