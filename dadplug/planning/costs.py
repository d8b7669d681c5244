"""Costs of a plan: the bytes that a site hands to the transport in a step, parameter by parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from ..exchange import Transport
from ..exchange.wire import wire_format
from ..methods import Method
from ..methods.base import GradientPath
from ..model_sync.structure import is_managed
from ..options import Options
from ..reducer import handler_type
from ..reducer.owners import Owners
from ..reducer.reducer import Reducer
from ..units.base import Unit
from ..units.factor import FactorUnit
from .plan import Plan, PlanRow


def dense_bytes(parameter: nn.Parameter, transport: Transport) -> int:
    """Return the bytes that a site sends for the all-reduce of a parameter's gradient."""
    return int(transport.ring * parameter.numel() * parameter.element_size())


class PayloadCosts:
    """Bytes of the payloads that a site hands to the transport in a step.

    Args:
        method: the method.
        options: the options.
        transport: the transport.
        reducer: the reducer, which has the rows and buckets of the last steps; None before the first step, when a
            batch of one row is assumed.
        owners: the sites that merge each unit that has an owner, by its name.
    """

    def __init__(
        self, method: Method, options: Options, transport: Transport, reducer: Reducer | None, owners: Owners
    ) -> None:
        self._method = method
        self._options = options
        self._transport = transport
        self._reducer = reducer
        self._owners = owners

    def plan(
        self, model: nn.Module, units: Sequence[Unit], paths: Mapping[str, str], reasons: Mapping[str, str]
    ) -> Plan:
        """Return the plan with its costs.

        Args:
            model: the model.
            units: the units.
            paths: the path of every parameter; one that is missing has been added since the plan was made.
            reasons: by name of a parameter, why it takes its path.
        """
        by_name = {name: unit for unit in units for name in unit.parameters}
        rows = []
        for name, parameter in model.named_parameters():
            if is_managed(parameter):
                continue
            unit = by_name.get(name)
            nbytes = 0 if unit is None else self._payload_bytes(unit, name)
            dense = 0 if unit is None else dense_bytes(parameter, self._transport)
            path, reason = paths.get(name), reasons.get(name, "")
            if path is None:  # the next step makes a new plan
                path, reason = GradientPath.ALLREDUCE, "added since the last step"
            rows.append(PlanRow(name, tuple(parameter.shape), path, nbytes, dense, reason))
        nodes = None if self._transport.nodes is None else self._transport.nodes.count
        return Plan(rows, self._options.mode, self._transport.world_size, nodes)

    def _payload_bytes(self, unit: Unit, name: str) -> int:
        """Return the bytes for one parameter of a unit."""
        if isinstance(unit, FactorUnit):
            return self._factor_bytes(unit, name)
        if self._reducer is not None:
            return self._reducer.sent_bytes(unit)
        wire = wire_format(self._options.wire, unit.lead.dtype)
        return handler_type(unit.path, self._transport).payload_bytes(unit, self._method, wire, self._transport)

    def _factor_bytes(self, unit: FactorUnit, name: str) -> int:
        rows = None if self._reducer is None else self._reducer.room(unit)
        transport, owner = self._transport, self._owners.get(unit.name)
        itemsize = wire_format(self._options.wire, unit.lead.dtype).itemsize
        rate, place = transport.copies * itemsize, (transport.rank, transport.world_size)
        if name == unit.bias:
            size = unit.parameters[name].numel()
            sent = self._method.traits.sends_bias and (rows is None or rows > 0)
            return sent * (rate * size if owner is None else itemsize * owner.numbers_of_bias(size, *place))
        if rows is None:
            rows = self._method.rows_sent(1 if owner is None else self._options.rank, *unit.shape)
        if owner is not None:
            return itemsize * owner.numbers_of_rows(rows, unit.widths, *place)
        return rate * rows * sum(unit.widths)
