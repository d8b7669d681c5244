"""History of the hub's steps: which one is open, from which position training started, and which frames are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .actions import Position


class History:
    """Closed steps of one life.

    Args:
        life: number of the life.
        step: the last closed step.

    Attributes:
        life: number of the life.
        step: the last closed step.
        attempt: number of the open step's attempt.
    """

    def __init__(self, life: int, step: int) -> None:
        self.life, self.step, self.attempt = life, step, 0
        self._base = Position(life, step)  # that this life started from
        self._oldest = step + 1  # step whose frames are kept

    @property
    def position(self) -> Position:
        """Position of a site that has closed the last step."""
        return Position(self.life, self.step)

    @property
    def open_step(self) -> int:
        """Number of the step that closes next."""
        return self.step + 1

    def start(self, positions: Sequence[Position]) -> Position:
        """Start from the highest position of the sites, and return it: that with the most sites, of several.

        Args:
            positions: those of the connected sites.
        """
        counts = Counter(positions)
        self._base = max(counts, key=lambda position: (position.step, counts[position], position.life))
        self.step, self.attempt = self._base.step, 0
        self._oldest = self.open_step
        return self._base

    def close(self, kept_steps: int) -> None:
        """Close the open step.

        Args:
            kept_steps: number of closed steps whose frames are kept.
        """
        self.step, self.attempt = self.open_step, 0
        self._oldest = max(self._oldest, self.open_step - kept_steps)

    def forget(self, step: int) -> None:
        """Take note that the frames of a step, and of those before, are no longer kept."""
        self._oldest = max(self._oldest, min(step, self.step) + 1)

    def continued(self, position: Position) -> Position | None:
        """Return the position in this life of a site that can go on by the frames that are kept.

        Args:
            position: its position.

        Returns:
            The position; None if the site needs a state.
        """
        life, step = (self.life, self._base.step) if position == self._base else position
        follows = life == self.life and step + 1 >= self._oldest and (step > 0 or self.step == 0)
        return Position(life, step) if follows else None
