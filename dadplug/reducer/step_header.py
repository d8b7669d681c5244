"""Step header: information about a step that a site sends to all others, so that they can interpret its payloads.

Faults, NaN or Inf in gradients and chains whose deltas cannot be recomputed, are reported in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from ..errors import MismatchError, NonFiniteError
from ..exchange import Gather, PeerNames, Transport
from ..exchange.factor_buckets import finite
from ..units.base import Unit


class Fault(IntEnum):
    """Kind of a fault, as it is sent in a step header."""

    NONE = 0
    ACTIVATIONS = 1
    """NaN or Inf in the activations of a layer."""
    DELTAS = 2
    """NaN or Inf in the deltas of a layer."""
    GRADIENT = 3
    """NaN or Inf in a gradient that autograd has formed."""
    CHAIN_BROKEN = 4
    """Deltas that the other sites cannot recompute."""
    ATTACHED = 5
    """NaN or Inf in a gradient that the reduction does not send."""
    MERGED = 6
    """NaN or Inf in the merged gradient of finite ones; never sent, since all sites find it."""


class FaultLog:
    """Faults of this site in the present step.

    Attributes:
        entries: kind and name of the unit, in the order in which they were found.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[Fault, str]] = []

    def record(self, fault: Fault, unit: Unit) -> None:
        """Record a fault of a unit."""
        self.entries.append((fault, unit.name))

    def check_gradient(self, unit: Unit) -> None:
        """Record a fault if ``.grad`` of a unit's leading parameter holds NaN or Inf."""
        gradient = unit.lead.grad
        if gradient is not None and not finite(gradient):
            self.record(Fault.GRADIENT, unit)

    def drop(self, unit: Unit) -> None:
        """Drop the faults of a unit, whose gradient has been discarded."""
        self.entries = [entry for entry in self.entries if entry[1] != unit.name]

    def clear(self) -> None:
        """Forget the step."""
        self.entries.clear()

    @property
    def first(self) -> tuple[Fault, str]:
        """The fault to report: that which comes first in the forward pass, if it is one of activations.

        Backward reaches the layers in the reverse order. Without a fault of activations, the first that backward
        reached.
        """
        activations = [entry for entry in self.entries if entry[0] == Fault.ACTIVATIONS]
        return activations[-1] if activations else self.entries[0]


_HEAD = 11  # integers before those of the units
_PRESENT, _DENSE, _VOID = 1, 2, 4  # bits of a unit's flags


@dataclass
class StepHeader:
    """Header of one site for one step.

    Attributes:
        step: number of the step.
        version: version of the plan, which changes when parameters are frozen or freed.
        samples: samples that the site's gradients stand for.
        stop: whether the site asks all to stop after this step.
        fault: kind of the fault to report; `Fault.NONE` for none.
        culprit: index of the unit at fault; for `Fault.ATTACHED`, of the attached parameter.
        finite: whether no gradient of the site holds NaN or Inf, as far as that has been checked.
        noise_every: number of steps after which the site asks all to estimate the noise of the gradient; 0 for never.
        deferred: digest of the weights whose gradients the site would not form, see `dadplug.fused.Deferral`; 0 for
            none.
        settings: digest of the optimizers' settings in the last step; 0 for none.
        digest: of the first batch, or of the weights, see `dadplug.model_sync.sameness`; 0 for none.
        present: by unit, whether the site has a gradient for it.
        dense: by unit, whether the site has a gradient for it that its bucket does not carry; with a handler that can
            repeat its exchange, whether the unit's payload is void, since its gradient has changed.
        void: by unit, whether the rows that its bucket carries have been discarded since.
        extra_rows: by unit, rows that its bucket had no room for, or that came late; 0 for a dense unit.
    """

    step: int
    version: int
    samples: int
    stop: bool = False
    fault: Fault = Fault.NONE
    culprit: int = 0
    finite: bool = True
    noise_every: int = 0
    deferred: int = 0
    settings: int = 0
    digest: int = 0
    present: list[bool] = field(default_factory=list)
    dense: list[bool] = field(default_factory=list)
    void: list[bool] = field(default_factory=list)
    extra_rows: list[int] = field(default_factory=list)

    @classmethod
    def idle(cls, step: int, version: int, units: int, void: bool = False) -> StepHeader:
        """Return the header of a site that contributes nothing to a step.

        Args:
            step: number of the step.
            version: version of the plan.
            units: number of units.
            void: whether the site has sent payloads before it left.
        """
        none = [False] * units
        return cls(step, version, 0, present=none, dense=none, void=[void] * units, extra_rows=[0] * units)

    def pack(self) -> list[int]:
        """Return the header as integers: 11 of the step, then flags and rows of the units."""
        flags = [
            _PRESENT * present + _DENSE * dense + _VOID * void
            for present, dense, void in zip(self.present, self.dense, self.void, strict=True)
        ]
        head = [self.step, self.version, self.samples, self.stop, self.fault, self.culprit, self.finite]
        return [*map(int, head), self.noise_every, self.deferred, self.settings, self.digest, *flags, *self.extra_rows]

    @classmethod
    def unpack(cls, integers: Sequence[int]) -> StepHeader:
        """Return the header that `pack` has made integers of."""
        units = (len(integers) - _HEAD) // 2
        flags, extra = integers[_HEAD : _HEAD + units], list(integers[_HEAD + units :])
        present, dense, void = ([bool(flag & bit) for flag in flags] for bit in (_PRESENT, _DENSE, _VOID))
        step, version, samples, stop, fault, culprit, finite, noise, *digests = integers[:_HEAD]
        head = step, version, samples, bool(stop), Fault(fault), culprit, bool(finite), noise
        deferred, settings, digest = digests
        return cls(*head, deferred, settings, digest, present, dense, void, extra)


class HeaderExchange:
    """Exchange of step headers between all sites.

    Args:
        units: number of units.
        transport: the transport.
    """

    def __init__(self, units: int, transport: Transport) -> None:
        self._transport = transport
        self._units = units
        size = _HEAD + 2 * units
        self._gather: Gather = transport.gather([size] * transport.world_size, torch.int64)

    def post(self) -> None:
        """Prepare to receive."""
        self._gather.post()

    def send(self, header: StepHeader) -> None:
        """Send this site's header."""
        self._gather.payload.copy_(torch.tensor(header.pack(), dtype=torch.int64))
        self._gather.launch()

    def receive(self) -> list[StepHeader]:
        """Wait for the headers of all sites.

        Returns:
            The headers, by rank; those of absent sites are the ones of idle sites.

        Raises:
            MismatchError: if the sites are not at the same step of the same plan.
        """
        sites, absent = self._transport.sites, self._transport.absent
        headers = {
            rank: StepHeader.unpack(integers.tolist())
            for rank, integers in enumerate(self._gather.wait())
            if rank not in absent
        }
        lowest, first = next(iter(headers.items()))
        for rank, other in headers.items():
            if other.step != first.step:
                raise MismatchError(
                    f"{sites[lowest]} is at step {first.step} and {sites[rank]} at step {other.step}: every site must "
                    "call synchronize() equally often; a site that has run out of data calls idle()"
                )
            if other.version != first.version:
                raise MismatchError(
                    f"in step {other.step}, {sites[rank]} trains other parameters than {sites[lowest]}: freeze and "
                    "free parameters on all sites in the same step"
                )
        idle = StepHeader.idle(first.step, first.version, self._units)
        return [headers.get(rank, idle) for rank in range(self._transport.world_size)]


_MESSAGES = {
    Fault.ACTIVATIONS: "the input of the layer of {!r}, the first in the forward pass: look at the data, or at a layer "
    "before it that has no factors",
    Fault.DELTAS: "the loss's gradient at the output of the layer of {!r}, the first that backward reached: the loss "
    "itself is probably not finite",
    Fault.GRADIENT: "the gradient of {!r}, the first that backward reached",
    Fault.ATTACHED: "the gradient of rows of {!r}",
}


def raise_fault(
    headers: Sequence[StepHeader], units: Sequence[str], sites: PeerNames, others: Sequence[str] = ()
) -> None:
    """Raise the error that a step header reports, the same on every site.

    Args:
        headers: the headers of all sites, by rank.
        units: names of the units.
        sites: the sites by name.
        others: names of attached parameters, which no unit sends.

    Raises:
        NonFiniteError: if some site's gradients hold NaN or Inf.
        RuntimeError: if a layer's deltas cannot be recomputed.
    """
    for rank, header in enumerate(headers):
        if not header.fault:
            continue
        name = (others if header.fault == Fault.ATTACHED else units)[header.culprit]
        if header.fault == Fault.CHAIN_BROKEN:
            raise RuntimeError(
                f"step {header.step}: mode 'edad' cannot recompute the gradient of {name!r} of {sites[rank]}: the "
                "layer behind it had its weight changed, or its gradient alone cleared, between backward() and "
                "synchronize(). Use mode='dad'. No gradient has been changed by this step"
            )
        if header.fault == Fault.MERGED:
            raise NonFiniteError(
                f"step {header.step}: the gradients of all sites are finite, but merging those of {name!r} leaves the "
                "range of its type. No parameter has been changed by this step. Scale the loss, or pass merge='all'"
            )
        raise NonFiniteError(
            f"step {header.step}: NaN or Inf at {sites[rank]}, in {_MESSAGES[header.fault].format(name)}. No parameter "
            "has been changed by this step. (Under a GradScaler this is normal: pass check_finite=False.)"
        )
