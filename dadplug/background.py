"""A task that runs beside the training thread."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundTask:
    """Task in a thread of its own, from now on; the program ends after it.

    Args:
        run: the task; most of it must run without the GIL.
        name: name of the thread.
    """

    def __init__(self, run: Callable[[], None], name: str) -> None:
        self._run = run
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name=name)
        self._thread.start()

    def _main(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Wait for the end of the task, and raise the error that it has raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
