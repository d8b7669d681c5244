"""Generators of Gaussian noise that no site can predict or repeat: never saved, never shared."""

from __future__ import annotations

import math
import os
import secrets

import torch
from torch import Tensor

_PARTS = 4  # normal numbers in the sum that is one number of secure noise


class NoiseSource:
    """Source of Gaussian noise that the operating system seeds.

    A source is not part of a checkpoint: a run that is resumed has another one, since noise that is used twice cancels.

    Args:
        secure: whether all numbers come from the operating system's cryptographic generator. They are then sums of
            several normal numbers, so that the gaps between floating-point numbers reveal less (arXiv:2107.10138).
    """

    def __init__(self, secure: bool) -> None:
        self.secure = secure
        self._generators: dict[torch.device, torch.Generator] = {}

    def __reduce__(self) -> tuple[type[NoiseSource], tuple[bool]]:
        return NoiseSource, (self.secure,)

    def add_to(self, sums: Tensor, deviation: float) -> Tensor:
        """Add noise to a tensor in place, and return it.

        Args:
            sums: the tensor.
            deviation: the standard deviation.
        """
        if not deviation:
            return sums
        if self.secure:
            return sums.add_(_secure_normal(sums.numel()).view(sums.shape).to(sums), alpha=deviation)
        noise = torch.empty_like(sums).normal_(generator=self._generator(sums.device))
        return sums.add_(noise, alpha=deviation)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
            self._generators[device].manual_seed(secrets.randbits(63))
        return self._generators[device]


def _secure_normal(count: int) -> Tensor:
    """Draw normal numbers by Box and Muller's transform of random bytes, in float64."""
    total = torch.zeros(count, dtype=torch.float64)
    for _ in range(_PARTS):
        raw = torch.frombuffer(bytearray(os.urandom(16 * ((count + 1) // 2))), dtype=torch.int64)
        uniform = ((raw >> 11) & ((1 << 53) - 1)).double().add_(0.5).mul_(2.0**-53)
        radius, angle = (-2 * uniform[::2].log()).sqrt(), 2 * math.pi * uniform[1::2]
        total += torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]
    return total / math.sqrt(_PARTS)
