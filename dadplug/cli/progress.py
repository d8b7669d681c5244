"""Progress of a training run: one tqdm bar on a terminal, one line for each epoch elsewhere."""

from __future__ import annotations

import sys
from typing import Any


class RunProgress:
    """Progress of one run.

    If standard error is a terminal, it is a tqdm bar with the run's values as its postfix. Otherwise, as in a file or
    where tqdm is not installed, one line is printed to standard output after each epoch.

    Args:
        name: name of the run, the bar's description.
        epochs: number of epochs.
        steps: number of steps in an epoch.
        shown: whether this process shows the progress; of several sites only one should.

    Example:
        >>> progress = RunProgress("rankdad", epochs=10, steps=len(loader))
        >>> for epoch in range(10):
        ...     for inputs, targets in loader:
        ...         progress.step(loss=f"{train(inputs, targets):.4f}")
        ...     progress.end_epoch(accuracy=f"{evaluate():.4f}")
        >>> progress.close()
    """

    def __init__(self, name: str, epochs: int, steps: int, *, shown: bool = True) -> None:
        self.name, self.epochs, self.steps = name, epochs, steps
        self._shown = shown
        self._epoch = 0
        self._values: dict[str, str] = {}
        self._bar = _terminal_bar(name, epochs * steps) if shown else None

    def step(self, **values: str) -> None:
        """Advance by a step.

        Args:
            values: new values of the run, as text; the others remain.
        """
        self._values.update(values)
        if self._bar is not None:
            self._bar.set_postfix(self._postfix(min(self._epoch + 1, self.epochs)), refresh=False)
            self._bar.update()

    def end_epoch(self, **values: str) -> None:
        """End an epoch, whatever the number of steps that it has had.

        Args:
            values: new values of the run, as text; the others remain.
        """
        self._values.update(values)
        self._epoch += 1
        if self._bar is not None:
            self._bar.n = self._epoch * self.steps
            self._bar.set_postfix(self._postfix(self._epoch))
        elif self._shown:
            text = ", ".join(f"{name}={value}" for name, value in self._values.items())
            print(f"{self.name}: epoch {self._epoch}/{self.epochs}, {text}", flush=True)

    def close(self) -> None:
        """Leave the bar as it is, and the cursor in the next line."""
        if self._bar is not None:
            self._bar.close()

    def _postfix(self, epoch: int) -> dict[str, str]:
        return {"epoch": f"{epoch}/{self.epochs}", **self._values}


def _terminal_bar(name: str, total: int) -> Any:
    """Return a tqdm bar, or None if there is no terminal or no tqdm."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc=name, unit="step", dynamic_ncols=True)
