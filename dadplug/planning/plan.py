"""Which parameter takes which path, and what it will cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PlanRow:
    """One parameter's row in the plan.

    Attributes:
        parameter: name of the parameter.
        shape: its shape.
        path: ``"allreduce"``, ``"factors"``, ``"activations"`` for one whose deltas are recomputed, ``"lowrank"``, or
            ``"frozen"`` for one that is not trained.
        bytes: payload that this site is predicted to hand to the transport in a step for this parameter. Where it
            depends on the rows of a batch, it is for those of the last steps, and for a single row before the first.
        dense_bytes: what the all-reduce of its gradient would take.
        reason: why it takes this path, where that is not what the method does with every layer.
    """

    parameter: str
    shape: tuple[int, ...]
    path: str
    bytes: int
    dense_bytes: int
    reason: str = ""


class Plan(Sequence[PlanRow]):
    """The rows of all parameters of a model, in the model's order. Prints as a table.

    Args:
        rows: one row a parameter.
        mode: name of the method.
        world_size: number of sites.
        nodes: number of nodes that they are on, under hierarchical groups; then bytes are those that a site
            sends to other nodes.
    """

    def __init__(self, rows: Sequence[PlanRow], mode: str, world_size: int, nodes: int | None = None) -> None:
        self._rows = tuple(rows)
        self.mode = mode
        self.world_size = world_size
        self.nodes = nodes

    @property
    def bytes(self) -> int:
        """Predicted payload of a site in one step, in bytes."""
        return sum(row.bytes for row in self._rows)

    @property
    def dense_bytes(self) -> int:
        """Payload of a site in one step if every gradient were all-reduced, in bytes."""
        return sum(row.dense_bytes for row in self._rows)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
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
        return f"mode {self.mode}, {sites}, payload a site hands to the transport{where}\n" + "\n".join(lines)
