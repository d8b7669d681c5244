"""Loggers of the package: what dadplug has to say reaches a person without any set-up.

Messages go to standard error with the time, as long as the program has configured no logging of its own
(`logging.basicConfig` or a handler of the root logger); then they go where the program sends them. Less is said by
``logging.getLogger("dadplug").setLevel(logging.WARNING)``.
"""

from __future__ import annotations

import logging
import sys

ROOT = "dadplug"


class _Console(logging.Handler):
    """Handler that writes to the present standard error while the root logger has no handlers."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # a closed pipe or file: a message is no reason to end a training
            pass


def get_logger(name: str) -> logging.Logger:
    """Return a logger of the package, and see to it that its messages are shown.

    Args:
        name: name of the module, below "dadplug".
    """
    root = logging.getLogger(ROOT)
    if not any(isinstance(handler, _Console) for handler in root.handlers):
        console = _Console()
        console.setFormatter(logging.Formatter("%(asctime)s dadplug: %(message)s", "%H:%M:%S"))
        root.addHandler(console)
        if root.level == logging.NOTSET:
            root.setLevel(logging.INFO)
    return logging.getLogger(name)
