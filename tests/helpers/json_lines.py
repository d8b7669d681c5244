"""Logs of JSON lines that are read while another process writes them."""

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[Any]:
    """Return what the whole lines of a log hold; of the last one only the beginning may be there."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def last_number(path: Path, key: str) -> int:
    """Return what the last whole line with a key holds there; no other line is parsed. -1 if none has it."""
    text = path.read_text() if path.exists() else ""
    lines = reversed(text[: text.rfind("\n") + 1].splitlines())
    return next((json.loads(line)[key] for line in lines if f'"{key}": ' in line), -1)
