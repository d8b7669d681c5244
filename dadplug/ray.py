"""Lightning inside ray.train: `RayDADStrategy`, the strategy that Ray's ``prepare_trainer`` accepts.

Plain loops need nothing from here. Ray starts the processes and their process group, so `dadplug.GradientReduction` and
`dadplug.DistributedDataParallel` work in the training function of a ``ray.train.torch.TorchTrainer`` as they are.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .hub import current_connection
from .options import Options
from .runners._lightning import packages_in_use, strategy_base
from .support.signature import takes_keywords_of

if TYPE_CHECKING:
    from .runners._lightning.strategies import DADStrategyBase as RayDADStrategy

    _Strategy = RayDADStrategy
else:
    _Strategy = object  # comes behind it, in the class that is derived

__all__ = ["RayDADStrategy"]

_RAY = "ray.train.lightning"  # module with Ray's strategies, which derive from those of one of Lightning's packages
_DECIDED_BY_RAY = ("parallel_devices", "process_group_backend", "start_method")


def __getattr__(name: str) -> Any:
    if name != "RayDADStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _derive()


@functools.cache
def _packages_before() -> list[str]:
    """Return the packages of Lightning that the program had imported at the first call, before Ray imported its own."""
    return packages_in_use() if _RAY not in sys.modules else []


@functools.cache
def _derive() -> Any:
    """Derive the class from `dadplug.DADStrategy` and from Ray's strategy for DDP, as ``prepare_trainer`` asks for.

    Raises:
        ImportError: if Ray or Lightning is not installed.
        RuntimeError: if the program uses another package of Lightning than Ray does.
    """
    before = _packages_before()
    try:
        import ray.train.lightning as ray_lightning
    except ImportError as error:
        raise ImportError(
            f"RayDADStrategy needs Ray Train and Lightning ({error}): pip install 'dadplug[ray,lightning]'"
        ) from error
    parent = ray_lightning.RayDDPStrategy
    own = parent.__mro__[1].__module__.partition(".strategies")[0]
    if before == ["pytorch_lightning"] and own != "pytorch_lightning":
        raise RuntimeError(
            f"ray.train uses the package {own}, which is installed, and this program has imported pytorch_lightning: "
            f"import {own} in its place, or uninstall lightning"
        )
    base = strategy_base("DADStrategy")
    members = {"__doc__": _StrategyInRay.__doc__, "__module__": __name__, "__qualname__": "RayDADStrategy"}
    return type("RayDADStrategy", (_StrategyInRay, base, parent), members)


class _StrategyInRay(_Strategy):
    """`dadplug.DADStrategy` in the training function of a ``ray.train.torch.TorchTrainer``; for Lightning's Trainer.

    Ray starts the processes and the process group. Gradients, accumulation, clipping, evaluation and checkpoints are
    those of `dadplug.DADStrategy`. ``ray.train.lightning.prepare_trainer``, ``RayLightningEnvironment`` and
    ``RayTrainReportCallback`` go with it, as with Ray's own ``RayDDPStrategy``, in whose place it stands. The package
    of Lightning is the one that Ray uses: ``lightning`` if it is installed, else ``pytorch_lightning``.

    Args:
        mode: name of a method, such as ``"dsgd"``, ``"dad"`` or ``"rankdad"``.
        fused: as in `dadplug.DADStrategy`.
        arguments: options of the gradient reduction, see `dadplug.options.Options`; ``accelerator``,
            ``checkpoint_io`` and ``precision_plugin`` of ``DDPStrategy``. Devices, backend and start of the processes
            are those of ``ScalingConfig`` and ``TorchConfig``.

    Attributes:
        options: the options of the gradient reduction.
        reduction: the `dadplug.GradientReduction` of the last fit; None before it.

    Raises:
        RuntimeError: outside of the training function of a ``TorchTrainer``.
        ValueError: if the mode, an option or its value is not valid, or is Ray's to decide.

    Example:
        >>> def train(config):
        ...     trainer = pl.Trainer(
        ...         strategy=RayDADStrategy(mode="rankdad"),
        ...         plugins=[RayLightningEnvironment()],
        ...         callbacks=[RayTrainReportCallback()],
        ...         devices="auto",
        ...     )
        ...     prepare_trainer(trainer).fit(module, loader)
        >>> TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()
    """

    cluster_environment: Any

    @takes_keywords_of(Options)
    def __init__(self, mode: str = "rankdad", *, fused: bool = False, **arguments: Any) -> None:
        _check_in_training_function()
        if given := [name for name in _DECIDED_BY_RAY if arguments.get(name) is not None]:
            raise ValueError(
                f"{given[0]} is decided by Ray: leave it out, and set ScalingConfig or TorchConfig of the TorchTrainer"
            )
        super().__init__(mode, fused=fused, **arguments)
        if arguments.get("cluster_environment") is None:
            self.cluster_environment = None  # that of the trainer's plugins, which prepare_trainer checks

    @property
    def root_device(self) -> torch.device:
        """Device that Ray has given to this worker."""
        from ray.train.torch import get_device

        device: torch.device = get_device()
        return device

    def setup_environment(self) -> None:
        """Check that the trainer has its place from Ray.

        Raises:
            RuntimeError: if it has not, and would train alone, or if another process group has replaced that of Ray.
        """
        from ray.train.lightning import RayLightningEnvironment

        if not isinstance(self.cluster_environment, RayLightningEnvironment):
            found = type(self.cluster_environment).__name__
            raise RuntimeError(
                f"RayDADStrategy has its place from {found}, not from Ray: pass plugins=[RayLightningEnvironment()] of "
                "ray.train.lightning to the Trainer, and call prepare_trainer(trainer)"
            )
        environment, connection = self.cluster_environment, current_connection()
        if dist.is_initialized() and (connection is not None or dist.get_world_size() != environment.world_size()):
            raise RuntimeError(
                "the process group is not that of Ray, but one of dadplug.connect(...) or of the program: use "
                "dadplug.DADStrategy, without plugins and prepare_trainer"
            )
        super().setup_environment()


def _check_in_training_function() -> None:
    """Raise RuntimeError outside of the training function of a TorchTrainer."""
    import ray.train

    try:
        size = ray.train.get_context().get_world_size()
    except (RuntimeError, DeprecationWarning):  # raised by Ray Train v2, the latter in a function of Ray Tune
        size = None
    if size is None:  # of Ray Train v1
        raise RuntimeError(
            "RayDADStrategy works inside the training function of a ray.train.torch.TorchTrainer: build the strategy "
            "and the Trainer there, or use dadplug.DADStrategy outside of Ray"
        )
