"""What a plan costs: the bytes that a site hands to the transport, parameter by parameter."""

from __future__ import annotations

from torch import nn

from ..exchange import Transport
from ..exchange.wire import wire_format
from ..model_sync.structure import is_managed
from ..reducer import DenseHandler, handler_type
from ..units.factor import FactorUnit
from .plan import Plan, PlanRow
from .planner import Planner


def make_plan(planner: Planner) -> Plan:
    """Tells which parameter takes which path, and what it costs; final after the first step."""
    rows = []
    transport, options = planner.transport, planner.options
    by_name = {name: unit for unit in planner.units for name in unit.parameters}
    for name, parameter in planner.model.named_parameters():
        if is_managed(parameter):
            continue
        unit, nbytes = by_name.get(name), dense_bytes(parameter, transport)
        dense = nbytes
        if unit is None:
            nbytes = dense = 0
        elif isinstance(unit, FactorUnit):
            nbytes = _factor_bytes(planner, unit, name)
        elif planner.reducer is not None and planner.settled:
            nbytes = planner.reducer.sent_bytes(unit)
        else:
            kind = handler_type(unit.path, transport)
            assert issubclass(kind, DenseHandler)
            nbytes = kind.payload_bytes(unit, planner.method, wire_format(options.wire, unit.lead.dtype), transport)
        reason = planner.reasons.get(name) or planner.notices.get(name, "")
        path = planner.paths.get(name)
        if path is None:  # the next step plans anew
            path, reason = "allreduce", "added since the last step"
        rows.append(PlanRow(name, tuple(parameter.shape), path, nbytes, dense, reason))
    machines = None if transport.machines is None else transport.machines.count
    return Plan(rows, options.mode, transport.world_size, machines)


def dense_bytes(parameter: nn.Parameter, transport: Transport) -> int:
    """Tells what the all-reduce of a parameter's gradient takes."""
    return int(transport.ring * parameter.numel() * parameter.element_size())


def _factor_bytes(planner: Planner, unit: FactorUnit, name: str) -> int:
    copies = planner.transport.copies
    size = wire_format(planner.options.wire, unit.lead.dtype).itemsize
    if name != unit.name:
        rows = planner.reducer.room(unit) if planner.reducer is not None and planner.settled else None
        sends = planner.method.sends_bias and (rows is None or rows > 0)
        return copies * size * unit.parameters[name].numel() * sends
    if planner.reducer is not None and planner.settled:
        rows = planner.reducer.room(unit)
    else:
        rows = planner.method.rows_sent(1, *unit.shape)
    return copies * size * rows * sum(unit.widths)
