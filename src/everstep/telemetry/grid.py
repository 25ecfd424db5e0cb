"""A plan as a grid: a row for each pipeline, a cell for each stage, and who is spare or lost.

A node is at home in the route that gives it the most micro-batches; in any other it stands in for somebody, which the
grid shows as rerouted. Values first, then two renderings of them: text, and a table of ``rich``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from everstep.plan import Hop, Plan, Route
from everstep.quantities import NodeId, node_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One stage: ``node`` computes the layers ``first`` up to, not including, ``end``."""

    node: NodeId
    first: int
    end: int
    rerouted: bool

    def __str__(self) -> str:
        layers = f"{self.first}" if self.end - self.first == 1 else f"{self.first}–{self.end - 1}"
        return f"{self.node}{'*' if self.rerouted else ''} {layers}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One pipeline and how many micro-batches of a step go through it."""

    cells: tuple[Cell, ...]
    micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Rows of pipelines; spares compute nothing; ``lost`` are nodes that were in the run and are gone."""

    rows: tuple[Row, ...]
    spares: tuple[NodeId, ...]
    lost: tuple[NodeId, ...]


def grid(plan: Plan, lost: frozenset[NodeId] = frozenset()) -> Grid:
    """What ``plan`` looks like once ``lost`` are gone."""
    pipelines = plan.pipelines()
    homes = _homes(pipelines)
    rows = tuple(
        Row(cells=tuple(_cell(hop, homes[hop.node] != route) for hop in route), micro_batches=len(micro_batches))
        for route, micro_batches in pipelines.items()
    )
    return Grid(rows=rows, spares=plan.spares, lost=tuple(sorted(lost, key=node_number)))


def text(value: Grid) -> str:
    """Aligned lines: ``n0 0–3  n1 4–7  ×4``; a star marks a node that stands in for a lost one."""
    cells = [[*map(str, row.cells)] for row in value.rows]
    columns = max(map(len, cells), default=0)
    widths = [max(len(row[column]) for row in cells if column < len(row)) for column in range(columns)]
    lines = []
    for row, words in zip(value.rows, cells, strict=True):
        padded = [words[column].ljust(widths[column]) if column < len(words) else " " * widths[column]
                  for column in range(columns)]
        lines.append("  ".join([*padded, f"×{row.micro_batches}"]))
    return "\n".join([*lines, *_notes(value)])


def rich_table(value: Grid, most_rows: int = 16) -> Table:
    """The same for a terminal: at home in green, rerouted in yellow, lost in red."""
    table = Table.grid(padding=(0, 2))
    for row in value.rows[:most_rows]:
        words = [Text(str(cell), style="yellow" if cell.rerouted else "green") for cell in row.cells]
        gap = [Text("")] * (max(len(r.cells) for r in value.rows) - len(words))
        table.add_row(*words, *gap, Text(f"×{row.micro_batches}", style="dim"))
    if len(value.rows) > most_rows:
        table.add_row(Text(f"and {len(value.rows) - most_rows} more", style="dim"))
    if value.spares:
        table.add_row(Text(f"spare {_names(value.spares)}", style="cyan"))
    if value.lost:
        table.add_row(Text(f"lost {_names(value.lost)}", style="red"))
    return table


def _homes(pipelines: dict[Route, tuple[int, ...]]) -> dict[NodeId, Route]:
    homes: dict[NodeId, Route] = {}
    for route, micro_batches in pipelines.items():
        for hop in route:
            if hop.node not in homes or len(micro_batches) > len(pipelines[homes[hop.node]]):
                homes[hop.node] = route
    return homes


def _cell(hop: Hop, rerouted: bool) -> Cell:
    return Cell(node=hop.node, first=hop.first, end=hop.end, rerouted=rerouted)


def _notes(value: Grid) -> list[str]:
    notes = [("spare", value.spares), ("lost", value.lost)]
    return [f"{word}: {_names(nodes)}" for word, nodes in notes if nodes]


def _names(nodes: Sequence[NodeId]) -> str:
    return ", ".join(nodes)
