"""Logs of JSON lines that are read while another process writes them."""

import base64
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class LineLog:
    """A log of JSON lines that another process writes; each line is parsed once."""

    def __init__(self, path: Path) -> None:
        self._path, self._place = path, 0
        self._lines: list[Any] = []

    def read(self) -> list[Any]:
        """Return what the whole lines hold; of the last one only the beginning may be there."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._place)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._place += len(whole)
            self._lines += map(json.loads, whole.splitlines())
        return self._lines

    def last_number(self, key: str) -> int:
        """Return what the last whole line with a key holds there. -1 if none has it."""
        return next((line[key] for line in reversed(self.read()) if key in line), -1)


def packed(values: Tensor) -> str:
    """Return the numbers of a tensor as text that takes much less time than a list of them."""
    return base64.b64encode(values.double().numpy().tobytes()).decode()


def unpacked(text: str) -> Tensor:
    """Return the numbers of `packed`, as float64."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float64)
