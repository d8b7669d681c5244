"""Loggers of the package: what dadplug has to say reaches a person without any set-up.

Messages go to standard error with the time, as long as the program has configured no logging of its own
(`logging.basicConfig` or a handler of the root logger); then they go where the program sends them. Less is said by
``logging.getLogger("dadplug").setLevel(logging.WARNING)``.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Container, Sequence

from ..errors import escaped

ROOT = "dadplug"
_FIRST_REMINDER, _LONGEST_REMINDER = 5.0, 3600.0  # seconds; each one comes after twice the time of the last


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


def span(seconds: float) -> str:
    """Return a length of time in words, in a unit that suits it."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"


def table(lines: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return the lines of a table in columns as wide as their widest cells, with a rule below the first line.

    Args:
        lines: cells of each line, those of its head first.
        right: columns of numbers, which are set to the right.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
    return [text[0], "-" * max(map(len, text)), *text[1:]]


class Troubles:
    """Warnings of what lasts: each is logged at once, again at growing intervals, and when it is over.

    Characters that cannot be printed, which another site may have sent, are escaped.

    Args:
        log: the logger.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._open: dict[object, tuple[float, float, float, str]] = {}  # since, when next, after which time, text

    def begin(self, key: object, text: str, changes: bool = False) -> None:
        """Warn of a trouble, unless it is known; a known one gets the text for its reminders.

        Args:
            key: what it is about.
            text: the warning.
            changes: whether a known trouble with another text is warned of, too.
        """
        now, text = time.monotonic(), escaped(text)
        since, due, wait, before = self._open.get(key, (now, now + _FIRST_REMINDER, _FIRST_REMINDER, ""))
        if key not in self._open or (changes and text != before):
            self._log.warning("%s", text)
        self._open[key] = since, due, wait, text

    def remind(self) -> None:
        """Warn again of the troubles that have lasted for so long; to be called about every second."""
        now = time.monotonic()
        for key, (since, due, wait, text) in list(self._open.items()):
            if now >= due:
                wait = min(2 * wait, _LONGEST_REMINDER)
                self._open[key] = since, now + wait, wait, text
                self._log.warning("for %s: %s", span(now - since), text)

    def end(self, key: object, text: str) -> None:
        """Log that a trouble is over, if it was known.

        Args:
            key: what it is about.
            text: the message.
        """
        if key in self._open:
            since, *_ = self._open.pop(key)
            self._log.warning("%s, after %s", text, span(time.monotonic() - since))
