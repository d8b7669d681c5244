"""The members of Lightning's ``DDPStrategy`` that the strategies use, for type checking only.

The strategies are written once for both of Lightning's packages, and so before it is known which ``DDPStrategy`` they
derive from. At run time nothing imports this module.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor


class DDPInterface:
    """The part of ``DDPStrategy`` that `SiteStrategy` and the strategies rely on."""

    cluster_environment: Any
    lightning_module: Any
    optimizers: Any
    checkpoint_io: Any
    precision_plugin: Any
    parallel_devices: Any
    accelerator: Any
    model: Any
    world_size: int
    global_rank: int
    local_rank: int
    pre_backward: Callable[[Tensor], None]
    post_backward: Callable[[Tensor], None]
    lr_scheduler_configs: list[Any]
    _layer_sync: Any
    _start_method: str

    @property
    def root_device(self) -> torch.device:
        raise NotImplementedError

    def __init__(
        self,
        accelerator: Any,
        parallel_devices: Any,
        cluster_environment: Any,
        checkpoint_io: Any,
        precision_plugin: Any,
        process_group_backend: str | None,
        start_method: str,
        timeout: timedelta,
    ) -> None: ...

    def _configure_launcher(self) -> None: ...

    def setup_environment(self) -> None: ...

    def setup(self, trainer: Any) -> None: ...

    def setup_optimizers(self, trainer: Any) -> None: ...

    def teardown(self) -> None: ...

    def on_exception(self, exception: BaseException) -> None: ...

    def model_to_device(self) -> None: ...

    def setup_precision_plugin(self) -> None: ...

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        raise NotImplementedError

    def process_dataloader(self, dataloader: Any) -> Any:
        raise NotImplementedError

    def on_train_start(self) -> None: ...

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None: ...

    def on_train_end(self) -> None: ...

    def on_validation_start(self) -> None: ...

    def load_optimizer_state_dict(self, checkpoint: Any) -> None: ...

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        raise NotImplementedError

    def lightning_module_state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None: ...

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        raise NotImplementedError

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None: ...

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError

    def remove_checkpoint(self, filepath: Any) -> None: ...

    def barrier(self, *args: Any, **kwargs: Any) -> None: ...

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        raise NotImplementedError

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        raise NotImplementedError

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        raise NotImplementedError
