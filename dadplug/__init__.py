"""Distributed training methods for PyTorch, PyTorch Lightning and Catalyst.

Importing dadplug is cheap: torch, numba and the trainers load when something that needs them is first used.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

_root = Path(__file__).resolve().parent.parent
if (_root / "setup.cfg").is_file() and (_root / "hooks" / "__init__.py").is_file():
    # A source checkout keeps hooks, runners and callbacks beside this folder; an installed package holds them.
    __path__.append(str(_root))

from .exchange.dialers import DIALERS  # noqa: E402  (needs the path)
from .runners import register_strategies  # noqa: E402

register_strategies()  # so that a Lightning Trainer knows the modes by name


@DIALERS.register("kit")
def _dial_kit(folder: str, timeout: float) -> Any:
    return importlib.import_module(".hub.site.tunnel", __name__).dial_kit(folder, timeout)


if TYPE_CHECKING:
    from . import adapm as adapm
    from . import errors as errors
    from . import hogwild as hogwild
    from . import lowrank as lowrank
    from . import parameter_server as parameter_server
    from . import serving as serving
    from .adaptive import Accumulator, AdaptiveDataLoader, ElasticDataLoader, ElasticSampler, remaining_epochs_until
    from .adaptive.adaptive_loader import AdaScale
    from .callbacks.trackers import Tracker, track
    from .ddp import DistributedDataParallel
    from .errors import DadplugError, MismatchError, NonFiniteError, PrivacyError, ProcessFailedError, SiteError
    from .hogwild import Hogwild
    from .hub.connect import connect
    from .local_steps import LocalSGD
    from .parameter_server import ParameterServer
    from .privacy import DifferentialPrivacy, PoissonLoader
    from .reduction import GradientReduction
    from .runners import (
        AdaPMRunner,
        AdaPMStrategy,
        DADStrategy,
        DistributedRunner,
        HogwildRunner,
        HogwildStrategy,
        LocalSGDRunner,
        LocalSGDStrategy,
        ParameterServerRunner,
        ParameterServerStrategy,
    )
    from .runners.serving import serve
    from .tools.comparison import compare
    from .tools.tuning import tune

_LAZY = {
    "Accumulator": "adaptive",
    "AdaPMRunner": "runners",
    "AdaPMStrategy": "runners",
    "AdaScale": "adaptive.adaptive_loader",
    "AdaptiveDataLoader": "adaptive",
    "DADStrategy": "runners",
    "DadplugError": "errors",
    "DifferentialPrivacy": "privacy",
    "DistributedDataParallel": "ddp",
    "DistributedRunner": "runners",
    "ElasticDataLoader": "adaptive",
    "ElasticSampler": "adaptive",
    "GradientReduction": "reduction",
    "Hogwild": "hogwild",
    "HogwildRunner": "runners",
    "HogwildStrategy": "runners",
    "LocalSGD": "local_steps",
    "LocalSGDRunner": "runners",
    "LocalSGDStrategy": "runners",
    "MismatchError": "errors",
    "NonFiniteError": "errors",
    "ParameterServer": "parameter_server.server",
    "ParameterServerRunner": "runners",
    "ParameterServerStrategy": "runners",
    "PoissonLoader": "privacy",
    "PrivacyError": "errors",
    "ProcessFailedError": "errors",
    "SiteError": "errors",
    "Tracker": "callbacks.trackers",
    "audit": "tools.auditing",
    "compare": "tools.comparison",
    "connect": "hub.connect",
    "remaining_epochs_until": "adaptive",
    "serve": "runners.serving",
    "track": "callbacks.trackers",
    "tune": "tools.tuning",
}
_MODULES = (
    "accelerate",
    "adapm",
    "adaptive",
    "callbacks",
    "data",
    "errors",
    "hogwild",
    "hooks",
    "lowrank",
    "models",
    "nnunet",
    "parameter_server",
    "runners",
    "serving",
)

__all__ = [
    "Accumulator",
    "AdaPMRunner",
    "AdaPMStrategy",
    "AdaScale",
    "AdaptiveDataLoader",
    "DADStrategy",
    "DadplugError",
    "DifferentialPrivacy",
    "DistributedDataParallel",
    "DistributedRunner",
    "ElasticDataLoader",
    "ElasticSampler",
    "GradientReduction",
    "Hogwild",
    "HogwildRunner",
    "HogwildStrategy",
    "LocalSGD",
    "LocalSGDRunner",
    "LocalSGDStrategy",
    "MismatchError",
    "NonFiniteError",
    "ParameterServer",
    "ParameterServerRunner",
    "ParameterServerStrategy",
    "PoissonLoader",
    "PrivacyError",
    "ProcessFailedError",
    "SiteError",
    "Tracker",
    "adapm",
    "audit",
    "compare",
    "connect",
    "errors",
    "hogwild",
    "lowrank",
    "remaining_epochs_until",
    "serve",
    "serving",
    "track",
    "tune",
]


_DOCUMENTED = {
    "auditing": "tools.auditing",
    "comparison": "tools.comparison",
    "methods": "step.methods",
    "planning": "step.planning",
    "tuning": "tools.tuning",
}


class _Documented(ModuleType):
    """Module by an import path that the documentation names."""

    real: ModuleType

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class _DocumentedPaths(MetaPathFinder, Loader):
    """Import paths that the documentation names, for modules that lie in rooms."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        first, dot, inner = rest.partition(".")
        if package != __name__ or first not in _DOCUMENTED:
            return None
        return ModuleSpec(name, self, origin=f"{package}.{_DOCUMENTED[first]}{dot}{inner}", is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _Documented(spec.name)
        module.__path__ = []  # its modules are found here, too
        module.real = importlib.import_module(str(spec.origin))
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do: the module that it stands for has been executed."""


sys.meta_path.append(_DocumentedPaths())


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module 'dadplug' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY, *_MODULES])
