"""Base of the attacks: what an attack is given, what it returns, and the registry of all attacks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...registry import Registry
from ..capture import Observation

RECOVERED = 0.95
"""Similarity from which a sample counts as recovered."""


@dataclass(eq=False)
class Result:
    """Result of an attack.

    Attributes:
        attack: name of the attack.
        layer: name of the weight that it used; empty for all of them.
        target: what it recovers: ``"data"``, ``"activations"``, ``"labels"`` or ``"membership"``.
        similarity: mean over samples, by `measure`.
        measure: ``"correlation"``, ``"token accuracy"``, ``"label accuracy"`` or ``"AUC"``.
        chance: the similarity without any observation.
        scores: similarity of each sample, of shape (samples,); empty where there is none by sample.
        pictures: reconstructions in the shape of the data; None without.
        psnr: peak signal-to-noise ratio in dB, mean over samples; None unless the data are pictures.
        ssim: structural similarity, mean over samples; None unless the data are pictures.
        note: what a reader has to know; empty for nothing.
        seconds: duration.
    """

    attack: str
    layer: str
    target: str
    similarity: float
    measure: str
    chance: float
    scores: Tensor = field(default_factory=lambda: torch.empty(0))
    pictures: Tensor | None = None
    psnr: float | None = None
    ssim: float | None = None
    note: str = ""
    seconds: float = 0.0

    @property
    def recovered(self) -> float:
        """Share of the samples that are recovered, from 0 to 1; of labels and members, the gain over chance."""
        if self.target in ("data", "activations"):
            return float((self.scores >= RECOVERED).float().mean()) if len(self.scores) else 0.0
        return max(0.0, (self.similarity - self.chance) / (1 - self.chance)) if self.chance < 1 else 0.0


class Budget:
    """Time that attacks may take.

    Args:
        seconds: time limit.
        clock: returns the time in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._end - self._clock())

    def part(self, share: float) -> Budget:
        """Return a budget of a share of the time that is left."""
        return Budget(self.left * share, self._clock)

    def rounds(self) -> Iterator[int]:
        """Count until the time is over, once at least."""
        number = 0
        while number == 0 or self.left > 0:
            yield number
            number += 1


class Attack(ABC):
    """An attack on one layer's message, or on the messages of a step together.

    A new one is a subclass in a file of its own with `register_attack`, imported in this folder's `__init__.py`.
    """

    name: ClassVar[str]
    """Name in reports; `register_attack` sets it."""
    source: ClassVar[str] = ""
    """Publication."""
    whole: ClassVar[bool] = False
    """Whether it uses the messages of all layers together; `applies` and `run` get no layer then."""
    share: ClassVar[float] = 0.1
    """Share of the time left that one run may take."""
    slow: ClassVar[bool] = False
    """Whether it is left out where remedies are tried, since it takes long, and `span` recovers as much or more."""

    @abstractmethod
    def applies(self, seen: Observation, view: Any) -> str:
        """Return why the attack does not apply; empty where it does.

        Args:
            seen: what the observer has seen.
            view: the layer; None for attacks on all layers together.
        """

    @abstractmethod
    def run(self, seen: Observation, view: Any, budget: Budget) -> Result:
        """Attack, and judge the reconstruction.

        Args:
            seen: what the observer has seen.
            view: the layer; None for attacks on all layers together.
            budget: time limit.
        """


ATTACKS: Registry[str, Attack] = Registry("attack")
"""Attacks by name, in the order in which they run."""


def register_attack(name: str) -> Callable[[type[Attack]], type[Attack]]:
    """Register an attack under a name; a class decorator."""

    def decorate(attack: type[Attack]) -> type[Attack]:
        attack.name = name
        ATTACKS.register(name)(attack())
        return attack

    return decorate
