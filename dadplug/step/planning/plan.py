"""Plan of an exchange: the path of every parameter, the bytes that it costs, and what these expose of the data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from torch import nn

from ...exchange import Transport
from ...options import Options
from ...support.logs import table
from ..methods import Method
from ..methods.base import GradientPath
from ..model_sync.structure import is_managed
from ..reducer import handler_type
from ..reducer.owners import Owners
from ..reducer.reducer import Reducer
from ..units.base import Unit
from ..units.factor import FactorUnit

_ONE_ROW = (
    "before the first step: the bytes of factors are those of one row a layer, while a step sends one for each row of "
    "its batch; print the plan again after a step"
)
RAW, RECOVERABLE, AGGREGATED, PRIVATE = "raw inputs", "recoverable", "aggregated", "private"


def exposure(
    path: str, shape: tuple[int, ...], *, fed_by_data: bool, rows: int, sent: int | None, private: bool
) -> str:
    """Return how far a parameter's messages expose data: one word, by a rule that needs no attack.

    With n the rows of a layer's input in a step, and k the rows that are sent for it:

    | what is sent | class |
    | --- | --- |
    | anything, made by a differentially private mechanism | private |
    | rows as they are, of a layer that is fed by data, or of a table | raw inputs |
    | rows as they are, of any other layer | recoverable |
    | low-rank factors with k >= n, whose span holds each row | recoverable |
    | a gradient of a matrix, whole or by selected elements, with n up to its smaller side: same span | recoverable |
    | all else: fewer mixtures than rows, sums over more rows than the matrix has dimensions, vectors | aggregated |

    Where n is not known it is taken to be the samples of a step, which is the least that it can be, and 1 before the
    first step. The attacks of `dadplug.audit` measure what the classes mean for a model and its data.

    Args:
        path: the path of its gradient.
        shape: shape of the parameter.
        fed_by_data: whether its layer's input is data, or row numbers.
        rows: rows of the layer's input in a step, or samples where these are not known.
        sent: rows that are sent; None where a gradient is.
        private: whether gradients are made by a differentially private mechanism.

    Returns:
        One of the four classes; empty for a parameter that is not trained, or private.
    """
    if path in (GradientPath.FROZEN, GradientPath.PRIVATE):
        return ""
    if private:
        return PRIVATE
    if path in (GradientPath.FACTORS, GradientPath.ACTIVATIONS):
        return RAW if fed_by_data else RECOVERABLE
    if sent is not None:
        return RECOVERABLE if sent >= rows else AGGREGATED
    if len(shape) < 2:
        return AGGREGATED
    return RECOVERABLE if rows <= min(shape[0], math.prod(shape[1:])) else AGGREGATED


@dataclass(frozen=True)
class PlanRow:
    """Row of one parameter in the plan.

    Attributes:
        parameter: name of the parameter.
        shape: its shape.
        path: the path of its gradient, equal to a string such as ``"allreduce"``, ``"factors"`` or ``"private"``; see
            `dadplug.step.methods.base.GradientPath`.
        bytes: predicted payload that this site hands to the transport in a step for this parameter, in bytes. Where
            it depends on the rows of a batch, it is for those of the last steps; before the first it is for one row,
            and for the largest rank of low-rank factors.
        dense_bytes: payload of an all-reduce of its gradient, in bytes.
        reason: why it takes this path, where that is not what the method does with every layer; else empty. All that a
            method other than dsgd all-reduces has a reason.
        exposure: what its messages show of the data, see `dadplug.step.planning.plan.exposure`.
    """

    parameter: str
    shape: tuple[int, ...]
    path: str
    bytes: int
    dense_bytes: int
    reason: str = ""
    exposure: str = ""


class Plan(Sequence[PlanRow]):
    """Sequence of the rows of all parameters of a model, in the model's order. Prints as a table.

    Args:
        rows: one row a parameter.
        mode: name of the method.
        world_size: number of sites.
        nodes: number of nodes that they are on, under hierarchical groups; then bytes are those that a site
            sends to other nodes.
        remarks: further lines, below the table.
    """

    def __init__(
        self,
        rows: Sequence[PlanRow],
        mode: str,
        world_size: int,
        nodes: int | None = None,
        remarks: Sequence[str] = (),
    ) -> None:
        self._rows = tuple(rows)
        self.remarks = tuple(remarks)
        self.mode = mode
        self.world_size = world_size
        self.nodes = nodes

    def with_remarks(self, remarks: Sequence[str]) -> Plan:
        """Return the plan with further lines.

        Args:
            remarks: the lines, which follow those that the plan has.
        """
        return Plan(self._rows, self.mode, self.world_size, self.nodes, (*self.remarks, *remarks))

    @property
    def bytes(self) -> int:
        """Predicted payload of a site in one step, in bytes."""
        return sum(row.bytes for row in self._rows)

    @property
    def dense_bytes(self) -> int:
        """Payload of a site in one step if every gradient were all-reduced, in bytes."""
        return sum(row.dense_bytes for row in self._rows)

    @overload
    def __getitem__(self, index: int) -> PlanRow: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[PlanRow]: ...

    def __getitem__(self, index: int | slice) -> PlanRow | Sequence[PlanRow]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[PlanRow]:
        return iter(self._rows)

    def __str__(self) -> str:
        head = ("parameter", "shape", "path", "bytes a step", "dense bytes", "data", "")
        body = [
            (
                row.parameter,
                " x ".join(map(str, row.shape)) or "scalar",
                row.path,
                f"{row.bytes:,}",
                f"{row.dense_bytes:,}",
                row.exposure,
                row.reason,
            )
            for row in self._rows
        ]
        fewer = f"{self.dense_bytes / self.bytes:.1f} times fewer" if self.bytes else ""
        body.append(("total", "", "", f"{self.bytes:,}", f"{self.dense_bytes:,}", "", fewer))
        sites, where = f"{self.world_size} sites", ""
        if self.nodes is not None:
            sites, where = f"{sites} on {self.nodes} nodes", " for other nodes"
        head_line = f"mode {self.mode}, {sites}, payload a site hands to the transport{where}"
        return "\n".join([head_line, *table([head, *body], right=(3, 4)), *self.remarks])


def dense_bytes(parameter: nn.Parameter, transport: Transport) -> int:
    """Return the bytes that a site sends for the all-reduce of a parameter's gradient."""
    return int(transport.ring * parameter.numel() * parameter.element_size())


class PayloadCosts:
    """Bytes of the payloads that a site hands to the transport in a step.

    Args:
        method: the method.
        options: the options.
        transport: the transport.
        reducer: the reducer, which has the rows and buckets of the last steps; None before the first step, when one
            row and the largest rank are assumed.
        owners: the sites that merge each unit that has an owner, by its name.
        samples: samples of the site that has most in a step.
    """

    def __init__(
        self,
        method: Method,
        options: Options,
        transport: Transport,
        reducer: Reducer | None,
        owners: Owners,
        samples: int = 1,
    ) -> None:
        self._samples = samples
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
            shape = tuple(parameter.shape)
            rows.append(PlanRow(name, shape, path, nbytes, dense, reason, self._exposure(unit, path, shape)))
        nodes = None if self._transport.nodes is None else self._transport.nodes.count
        by_rows = any(row.path in (GradientPath.FACTORS, GradientPath.ACTIVATIONS) for row in rows)
        remarks = [_ONE_ROW] if by_rows and self._reducer is None else []
        return Plan(rows, self._options.mode, self._transport.world_size, nodes, remarks)

    def _payload_bytes(self, unit: Unit, name: str) -> int:
        """Return the bytes for one parameter of a unit."""
        if isinstance(unit, FactorUnit):
            return self._factor_bytes(unit, name)
        if self._reducer is not None:
            return self._reducer.sent_bytes(unit)
        wire = unit.wire(self._options)
        return handler_type(unit.path, self._transport).payload_bytes(unit, self._method, wire, self._transport)

    def _exposure(self, unit: Unit | None, path: str, shape: tuple[int, ...]) -> str:
        private = self._options.privacy is not None
        fed, count, sent = False, self._samples, None
        if isinstance(unit, FactorUnit):
            table = unit.form is not None and bool(unit.form.table_rows)
            fed, count = unit.fed_by_data or table, max(unit.last_rows, 1)
            if path == GradientPath.LOWRANK:
                sent = self._method.rows_sent(min(self._method.most_sent(unit.name, count), count), *unit.shape)
        elif path == GradientPath.POWERSGD:
            sent = self._options.largest_rank
        return exposure(path, shape, fed_by_data=fed, rows=count, sent=sent, private=private)

    def _factor_bytes(self, unit: FactorUnit, name: str) -> int:
        rows = None if self._reducer is None else self._reducer.room(unit)
        transport, owner = self._transport, self._owners.get(unit.name)
        wire = unit.wire(self._options)
        itemsize, place = wire.itemsize, (transport.rank, 1 + transport.copies)
        rate = transport.copies * itemsize
        if name == unit.bias:
            size = unit.parameters[name].numel()
            sent = self._method.traits.sends_bias and (rows is None or rows > 0)
            return sent * (rate * size if owner is None else itemsize * owner.numbers_of_bias(size, *place))
        if rows is None:
            most = self._options.largest_rank if unit.path == GradientPath.LOWRANK else 1
            rows = self._method.rows_sent(most, *unit.shape)
        if owner is not None:
            return itemsize * owner.numbers_of_rows(rows, unit.widths, *place)
        return rate * rows * sum(map(wire.row_size, unit.widths))
