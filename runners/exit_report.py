"""Take a reduction off its model at the end of a run, however the run has ended."""

from __future__ import annotations

import inspect

from dadplug import GradientReduction


def detach(reduction: GradientReduction) -> None:
    """Detach a reduction; gradients that no optimizer has used, after an error or a stop, are dropped."""
    if "discard" in inspect.signature(reduction.detach).parameters:
        reduction.detach(discard=True)  # type: ignore[call-arg]
    else:
        reduction.detach()
