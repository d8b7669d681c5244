"""Records of a training's progress: a pass over data, an accumulator's sums, the place of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(eq=False)
class Pass:
    """A pass of a loader over its data set.

    Attributes:
        epoch: number of the epoch.
        recorded: whether checkpoints contain the position in this pass. They do not for passes outside of epochs, and
            not for passes that begin within a batch of another one.
        over: whether the pass had ended before the program was restarted.
        used: for each data set by its source, the number of samples that have been used and the length.
        steps: number of batches that have been used since the pass began in this process.
        common_steps: number of batches that every site has in this pass.
        within_batch: whether the program is at work on a batch.
        pending: source and number of used samples after that batch; None once it has been counted.
    """

    epoch: int
    recorded: bool
    over: bool = False
    used: dict[str, list[int]] = field(default_factory=dict)
    steps: int = 0
    common_steps: int = 0
    within_batch: bool = False
    pending: tuple[str, int] | None = None


@dataclass(eq=False)
class Statistics:
    """State of one accumulator.

    Attributes:
        results: the sums over sites.
        updates: what this site has added since the last synchronization.
        history: results of the synchronizations that a restarted program repeats: within the epoch, and outside.
        repeated: how many of each this process has gone through.
        restored: whether the state is that of a checkpoint.
    """

    results: dict[Any, Any]
    updates: dict[Any, Any] = field(default_factory=dict)
    history: dict[str, list[dict[Any, Any]]] = field(default_factory=lambda: {"epoch": [], "outside": []})
    repeated: dict[str, int] = field(default_factory=lambda: {"epoch": 0, "outside": 0})
    restored: bool = False

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Replace the state by one that a checkpoint contains."""
        self.results, self.history = saved["results"], saved["history"]
        self.updates.clear()
        self.restored = True


@dataclass
class Target:
    """Place of a checkpoint in the program; a restarted program repeats the code before it.

    Attributes:
        epoch: number of finished epochs.
        loop: number of the recorded pass in the epoch, from 0; -1 at the begin of an epoch.
        used: as in `Pass`.
        statistics: states of accumulators by name.
    """

    epoch: int
    loop: int
    used: dict[str, list[int]]
    statistics: dict[str, Any]

    def is_in(self, until: int) -> bool:
        """Return whether the place is in a loop over the epochs until a number, or at its end."""
        return self.epoch < until or (self.epoch == until and self.loop == -1)


def add(sums: dict[Any, Any], updates: Mapping[Any, Any]) -> None:
    """Add numbers or tensors to the sums under the same keys; tensors are moved to the CPU."""
    for key, value in updates.items():
        value = value.cpu() if isinstance(value, Tensor) else value
        sums[key] = sums[key] + value if key in sums else value
