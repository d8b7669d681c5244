"""The interface of a runner between sites, as the adapted callbacks and checkpoint functions use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from ...reduction import GradientReduction
from .engine import SiteEngine


class SiteRunner(Protocol):
    """A Catalyst runner that trains one model between sites; see `DistributedRunner`."""

    engine: SiteEngine
    reduction: GradientReduction | None
    batch_metrics: dict[str, Any]
    is_train_loader: bool
    epoch_step: int
    num_epochs: int
    loader_key: str
    loader_batch_len: int
    model: Any

    @property
    def update_due(self) -> bool:
        """Whether the gradients of the current batch complete an update."""

    @property
    def micro_batches(self) -> int:
        """Number of batches of this site that the update of the current batch accumulates."""

    def take_part(self) -> None:
        """Take part in the other sites' step if this site has skipped its batch."""

    def step_optimizer(self, optimizer: Any) -> None:
        """Step an optimizer with the agreed gradients."""

    def load_states(self, states: list[Any]) -> None:
        """Restore this site's compressor state from those of all sites."""

    def clip_gradients(self, function: Any) -> Any:
        """Clip the agreed gradients by a function of the parameters; return what it returns."""

    def reduction_states(self) -> list[Any]:
        """Gather the compressor state of every site; all sites must call it."""

    def checkpoint_parts(self, *, saving: bool) -> dict[str, Any]:
        """Return the objects whose states a checkpoint holds, by Catalyst's names."""

    def load_shared(self, path: str | Path) -> dict[str, Any]:
        """Load a checkpoint of site 0 on all sites."""
