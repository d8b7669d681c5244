"""Request of one site for the end of a step."""

from __future__ import annotations

from dataclasses import dataclass

from ..fused import Deferral
from .attached import AttachedGradients


@dataclass(frozen=True)
class StepRequest:
    """Request of one site for the end of a step.

    Attributes:
        step: number of the step.
        stop: whether to ask all sites to stop after it.
        attached: gradients that the reducer does not send, and that are checked with those that it sends.
        admits: whether sites that come may join in this step.
        noise_every: as in `StepHeader`.
        settings: as in `StepHeader`.
        digest: as in `StepHeader`.
        deferral: which weights' gradients may stay products, if all sites say so; takes these products.
    """

    step: int
    stop: bool = False
    attached: AttachedGradients | None = None
    admits: bool = True
    noise_every: int = 0
    settings: int = 0
    digest: int = 0
    deferral: Deferral | None = None
