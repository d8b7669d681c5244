"""The Catalyst engine of one site: Accelerate works as if alone, and dadplug speaks with the other sites."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from catalyst.core.engine import Engine

from ...exchange import Traffic, Transport, open_transport
from ...exchange.addresses import gloo_interface
from ...exchange.membership import describe
from ...reduction import GradientReduction
from .loaders import DeviceLoader, site_loader
from .metrics import merge_metrics
from .patches import patched_metrics

_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PMI_", "OMPI_", "MV2_", "MPI_")

_HASH_SEED = "PYTHONHASHSEED"
_REPLACED = ("forward", "_original_forward", "_is_accelerate_prepared")


class SiteEngine(Engine):
    """An engine that works with every version of Accelerate, since it asks it for nothing distributed.

    Args:
        cpu: whether to stay on the CPU where there is a GPU.
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``, as Accelerate has it.
        timeout: seconds after which a silent site counts as lost.
        split_data: whether the sites' loaders hold one data set that is to be split: True, False or ``"auto"``.
        process_group: the processes that are the sites.

    Attributes:
        transport: what speaks with the other sites, apart from gradients.
        reduction: the gradient reduction of the model in training, once there is one.
        loader_samples: tells how many samples this site has had from the current loader.
        seed: seed of the order of samples.
    """

    transport: Transport
    _place = 0, 1  # rank and number of sites; Accelerate, which is to work as if alone, asks for them while it is built

    def __init__(
        self,
        *,
        cpu: bool = False,
        mixed_precision: str = "no",
        timeout: float,
        split_data: bool | str = "auto",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        with _alone():
            super().__init__(cpu=cpu or not torch.cuda.is_available(), mixed_precision=mixed_precision)
        self._timeout = timeout
        self._split_data = split_data
        self._process_group = process_group
        self._prepared: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.reduction: GradientReduction | None = None
        self.loader_samples: Callable[[], int] = lambda: 1
        self.seed = 0
        self.transport = open_transport(process_group, Traffic(), torch.device("cpu"), timeout)
        self._place = self.transport.rank, self.transport.world_size

    @contextmanager
    def running(self) -> Iterator[None]:
        """Patch what stock Catalyst gets wrong between sites while a run lasts, however it ends.

        If it ends with an error, the other sites are told which, and the connections to them are closed.
        """
        hash_seed = os.environ.get(_HASH_SEED)
        try:
            with patched_metrics(self.transport), gloo_interface():
                yield
        except BaseException as error:
            self._leave(describe(error))
            raise
        finally:
            if self.reduction is not None:
                self.reduction.detach(discard=True)  # after an error or a stop some gradients are left
            _restore(os.environ, {_HASH_SEED: hash_seed})  # Catalyst sets it with each seed
            while self._prepared:
                _restore(*self._prepared.pop())

    def _leave(self, reason: str) -> None:
        self.transport.sites.announce(reason)
        if self.reduction is not None:
            self.reduction.abort(reason)
        self.transport.close()

    @property
    def use_fp16(self) -> bool:
        """Whether half precision is on; newer versions of Accelerate have no such property."""
        return str(self.mixed_precision) == "fp16"

    @property
    def is_ddp(self) -> bool:
        return self.num_processes > 1

    @property
    def process_index(self) -> int:
        return self._place[0]

    @property
    def local_process_index(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def num_processes(self) -> int:
        return self._place[1]

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.is_main_process

    @property
    def is_last_process(self) -> bool:
        return self.process_index == self.num_processes - 1

    def local_main_process_first(self) -> Any:
        """Sites take their steps together here, so that none goes first."""
        return nullcontext()

    main_process_first = local_main_process_first

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self.is_main_process:
            print(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        """Waits until all sites are here."""
        self.transport.gather_objects(None)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenates every site's tensor along the first dimension."""
        parts = self.transport.gather_objects(tensor.detach().cpu())
        return torch.cat([part.reshape(-1) if part.dim() == 0 else part for part in parts]).to(tensor.device)

    def gather_for_metrics(self, input_data: Any, *args: Any, **kwargs: Any) -> Any:
        """Concatenates every site's tensor; no sample is ever repeated, so that none is to be dropped."""
        return self.gather(input_data)

    def mean_reduce_ddp_metrics(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Merges the sites' metrics of a loader, each counting with its samples."""
        told = self.transport.gather_objects(({k: float(v) for k, v in metrics.items()}, self.loader_samples()))
        return merge_metrics(told)

    def prepare_data_loader(self, data_loader: Any, *args: Any, name: str = "loader", **kwargs: Any) -> Any:
        """Splits the data where it is one data set, and moves batches to the device."""
        loader = site_loader(data_loader, self._split_data, name, self.seed, self.transport)
        return loader if self.device.type == "cpu" else DeviceLoader(loader, self.device)

    def prepare_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Prepare a model, and remember what of it Accelerate replaces, to be put back at the end of the run."""
        self._prepared.append((vars(model), {name: vars(model).get(name) for name in _REPLACED}))
        return super().prepare_model(model, *args, **kwargs)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Runs backward and agrees on the gradients with the other sites."""
        super().backward(loss, **kwargs)
        if self.reduction is not None and self.reduction.syncing:
            self.reduction.synchronize()

    def save(self, obj: Any, f: Any, **kwargs: Any) -> None:
        """Writes a file at site 0, whole or not at all."""
        if self.is_main_process:
            save_whole(obj, f)


def save_whole(item: Any, path: str | Path) -> None:
    """Writes a file that is there whole or not at all, whatever happens meanwhile."""
    path = Path(path)
    partial = path.with_name(path.name + ".part")
    torch.save(item, partial)
    os.replace(partial, path)


def _restore(mapping: Any, before: dict[str, Any]) -> None:
    """Put values back that have been None where there were none."""
    for name, value in before.items():
        if value is None:
            mapping.pop(name, None)
        else:
            mapping[name] = value


@contextmanager
def _alone() -> Iterator[None]:
    """Hides what a launcher has said from Accelerate, which would start a process group of its own."""
    hidden = {name: value for name, value in os.environ.items() if name.startswith(_LAUNCHER)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)
