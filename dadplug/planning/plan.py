"""Plan of an exchange: the path of every parameter, and the bytes that it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload


@dataclass(frozen=True)
class PlanRow:
    """Row of one parameter in the plan.

    Attributes:
        parameter: name of the parameter.
        shape: its shape.
        path: the path of its gradient, equal to a string such as ``"allreduce"``, ``"factors"`` or ``"frozen"``; see
            `dadplug.methods.base.GradientPath`.
        bytes: predicted payload that this site hands to the transport in a step for this parameter, in bytes. Where
            it depends on the rows of a batch, it is for those of the last steps, and for one row before the first.
        dense_bytes: payload of an all-reduce of its gradient, in bytes.
        reason: why it takes this path, where that is not what the method does with every layer; else empty.
    """

    parameter: str
    shape: tuple[int, ...]
    path: str
    bytes: int
    dense_bytes: int
    reason: str = ""


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
        head = ("parameter", "shape", "path", "bytes a step", "dense bytes", "")
        body = [
            (
                row.parameter,
                " x ".join(map(str, row.shape)) or "scalar",
                row.path,
                f"{row.bytes:,}",
                f"{row.dense_bytes:,}",
                row.reason,
            )
            for row in self._rows
        ]
        fewer = f"{self.dense_bytes / self.bytes:.1f} times fewer" if self.bytes else ""
        body.append(("total", "", "", f"{self.bytes:,}", f"{self.dense_bytes:,}", fewer))
        widths = [max(len(line[column]) for line in [head, *body]) for column in range(len(head))]
        lines = []
        for line in [head, *body]:
            cells = [
                cell.rjust(width) if column in (3, 4) else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        lines.insert(1, "-" * max(map(len, lines)))
        sites, where = f"{self.world_size} sites", ""
        if self.nodes is not None:
            sites, where = f"{sites} on {self.nodes} nodes", " for other nodes"
        head_line = f"mode {self.mode}, {sites}, payload a site hands to the transport{where}"
        return "\n".join([head_line, *lines, *self.remarks])
