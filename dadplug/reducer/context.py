"""Context of bucket handlers: what the handlers of one reducer share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from ..exchange import Transport
from ..exchange.factor_buckets import FactorPayload
from ..exchange.wire import WireFormat, wire_format
from ..fused import Deferral
from ..methods import Method
from ..options import Options
from ..schedules import Decoding
from .faults import FaultLog
from .owners import Owners


@dataclass
class HandlerContext:
    """Common state of the handlers of a reducer.

    Attributes:
        transport: the transport.
        method: the method.
        options: the options.
        samples: returns the samples that this site's gradients stand for so far in the step.
        reference: samples of all sites in a step, about: sums are of gradients times samples over this number, which
            keeps them near the size of a gradient while the samples of the other sites are not known.
        positions: position of each unit in the step headers, by its name.
        owners: the sites that merge each unit that has an owner, by its name.
        faults: the faults of this site in the step.
        complete_payloads: payloads that have arrived in this step, with what the sites did not send, by name of the
            unit and rank; kept where methods recompute deltas from them.
        rotation: numbers by which handlers distribute work over the processes of a node, in the order in which the
            handlers are built.
        deferral: which weights' gradients may stay products in the step; None for those of none.
        decoding: sizes of the blocks in which gradients are formed, the same at all sites.
        checks_finite: whether gradients are checked for NaN and Inf, since these are an error or would damage state.
    """

    transport: Transport
    method: Method
    options: Options
    samples: Callable[[], int]
    reference: int
    positions: Mapping[str, int]
    owners: Owners = field(default_factory=dict)
    decoding: Decoding = field(default_factory=Decoding)
    faults: FaultLog = field(default_factory=FaultLog)
    complete_payloads: dict[str, list[FactorPayload]] = field(default_factory=dict)
    rotation: Iterator[int] = field(default_factory=itertools.count)
    deferral: Deferral | None = None
    checks_finite: bool = field(init=False)

    def __post_init__(self) -> None:
        keeps_state = self.method.traits.keeps_state or wire_format(self.options.wire).quantised
        self.checks_finite = self.options.check_finite or keeps_state

    def wire(self, dtype: torch.dtype) -> WireFormat:
        """Return the format in which gradients of parameters of a type are sent."""
        return wire_format(self.options.wire, dtype)
