"""``everstep plan``: what would run on a cluster, and what would be done after a loss, without running anything."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from everstep import config as configuration
from everstep.catalog import files
from everstep.cli import output
from everstep.config import PlannerConfig
from everstep.decision import text as decision_text
from everstep.errors import ConfigError
from everstep.plan import Plan
from everstep.png import blank, save
from everstep.quantities import NodeId, human_bytes, human_seconds, parse_seconds
from everstep.records import to_builtins
from everstep.telemetry import grid
from everstep.workload import Workload

if TYPE_CHECKING:
    from everstep.planner.step.timeline import Timeline
    from everstep.planner.whatif import Need, WhatIf


def _shipped(kind: str) -> str:
    return ", ".join(files.names(kind))


def command(
    cluster: Annotated[str, typer.Option(metavar="CLUSTER", help=f"A TOML file, or a shipped one: {_shipped('cluster')}.")],
    workload: Annotated[str, typer.Option(metavar="WORKLOAD", help=f"A TOML file, or a shipped one: {_shipped('workload')}.")],
    lose: Annotated[str, typer.Option(
        metavar="NODES", help="What if these were lost: n3,n7, or host:NAME for all nodes of a host, or site:NAME.",
    )] = "",
    add: Annotated[int, typer.Option(min=0, max=100_000, metavar="COUNT", help="What if so many more joined.")] = 0,
    policy: Annotated[str, typer.Option(
        metavar="POLICY",
        help="Recover this way only, or as this system does; restore where that has no answer. "
        f"One of {', '.join(get_args(configuration.Policy))}.",
    )] = "auto",
    gap: Annotated[str, typer.Option(metavar="DURATION", help="Expected time to the next event: 10m.")] = "10m",
    tolerate: Annotated[int, typer.Option(
        min=0, metavar="COUNT", help="Any so many losses at once must leave a living holder of every layer.",
    )] = 0,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the schedule to this file.")] = None,
    as_json: output.AsJson = False,
) -> None:
    """Show the plan for a workload on a cluster, or the recovery that would be chosen if nodes were lost or joined.

    Nothing runs. What is shown: the plan as a grid (a row for each pipeline, layers by node, and how many micro-batches take
    it), a table of all recoveries with what each would cost and why it lost, memory by node, and the schedule of a step.
    """
    # Imported here: the search brings SciPy, which takes half a second, and no other command needs it.
    from everstep.planner.step.timeline import timeline
    from everstep.planner.whatif import nodes_named, running, what_if

    config = _config(policy, gap, tolerate)
    hardware, job = files.load_cluster(cluster), files.load_workload(workload)
    lost = nodes_named(lose, hardware)
    start = running(hardware, job, config) if lost or add else None
    answer, times_s = _timed(lambda: what_if(hardware, job, config, lose=lost, add=add, start=start))
    picture = timeline(answer.plan, job, answer.cluster)
    if png is not None:
        _draw(picture, png)
    if as_json:
        output.show(to_json(answer, job, times_s))
    else:
        output.say(text(answer, job, times_s, picture))


REPEATED = 20
"""So many times the decision is taken once more, to tell what it takes where tables and code are warm, as in a run."""

REPEATED_FOR_S = 0.3
"""For no longer than that."""


def _timed(decide: Callable[[], WhatIf]) -> tuple[WhatIf, list[float]]:
    """The answer, and the seconds that it took each time it was worked out, the first time first."""
    times_s: list[float] = []
    while not times_s or (len(times_s) <= REPEATED and sum(times_s[1:]) < REPEATED_FOR_S):
        began_s = time.perf_counter()
        answer = decide()
        times_s.append(time.perf_counter() - began_s)
    return answer, times_s


def _search_s(times_s: Sequence[float]) -> float:
    """The median of all but the first."""
    return statistics.median(times_s[1:] or times_s)


def _config(policy: str, gap: str, tolerate: int) -> PlannerConfig:
    """Raises ConfigError: no such policy (the nearest is named), or not a duration."""
    config = configuration.from_mapping({"planner.policy": policy}, source="--policy").planner
    try:
        gap_s = parse_seconds(gap)
    except ValueError as error:
        raise ConfigError(f"--gap {gap}: {error}") from error
    if not 0 < gap_s < float("inf"):
        raise ConfigError(f"--gap {gap}: want a duration above 0, for example 10m")
    return replace(config, gap_s=gap_s, tolerate=tolerate)


def to_json(answer: WhatIf, job: Workload, times_s: Sequence[float]) -> dict[str, Any]:
    """``chosen`` is an index into ``candidates``; what is infinite becomes null.

    ``search_s`` is for the decision, what runs before being known and tables warm; ``first_search_s`` for the first time.
    ``later`` is the plan that is switched to once its state has been copied behind training.
    """
    from everstep.planner.whatif import needs_of

    chosen = answer.chosen
    return {
        "cause": answer.decision.cause, "plan": to_builtins(answer.plan), "step_s": answer.step_s,
        "search_s": _search_s(times_s), "first_search_s": times_s[0],
        "candidates": [{key: getattr(candidate, key) for key in _CANDIDATE} for candidate in answer.candidates],
        "chosen": answer.decision.chosen, "way": chosen.way,
        "later": None if chosen.later is None else to_builtins(chosen.later),
        "before": {"plan": to_builtins(answer.before), "step_s": answer.before_step_s},
        "memory": [
            {
                "nodes": need.nodes, "state_bytes": need.state_bytes, "activation_bytes": need.active_bytes,
                "total_bytes": need.total_bytes, "cap_bytes": need.cap_bytes,
            }
            for need in needs_of(answer.plan, job, answer.cluster)
        ],
    }


_CANDIDATE = (
    "policy", "step_s", "stall_s", "value", "feasible", "reason", "note", "way", "moved_bytes", "peak_bytes", "later_step_s",
    "copy_s", "later_stall_s", "restore_step",
)


def text(answer: WhatIf, job: Workload, times_s: Sequence[float], picture: Timeline | None) -> str:
    """The plan before the event if there is one, the table of what was considered, the plan chosen, its memory and schedule."""
    from everstep.planner.step.timeline import text as timeline_text
    from everstep.planner.whatif import needs_of

    decision, chosen = answer.decision, answer.chosen
    parts = []
    if decision.cause != "start":
        parts.append(f"before: a step takes {human_seconds(answer.before_step_s)}\n{_grid(answer.before)}")
    parts.append(decision_text(decision))
    lost = frozenset(decision.lost)
    step = f"{human_seconds(answer.step_s)}{_overlap(answer, job, picture)}"
    parts.append(f"plan: a step takes {step}\n{_grid(answer.plan, lost)}")
    if chosen.later is not None:
        switch = f"{human_seconds(chosen.copy_s)} later, when its state has been copied behind training"
        parts.append(f"{switch}: a step takes {human_seconds(chosen.later_step_s)}\n{_grid(chosen.later, lost)}")
    parts.append(memory_text(needs_of(answer.plan, job, answer.cluster)))
    if picture is not None:
        busy = len(answer.plan.nodes) - len(answer.plan.spares)
        shown = f"the first {len(picture.nodes)} of {busy} nodes:\n" if len(picture.nodes) < busy else ""
        parts.append(shown + timeline_text(picture))
    parts.append(f"worked out in {human_seconds(_search_s(times_s))}, in {human_seconds(times_s[0])} when tables were cold")
    return "\n\n".join(parts)


def _overlap(answer: WhatIf, job: Workload, picture: Timeline | None) -> str:
    """What there would be to gain from reducing sums beside the work, where that is worth a word. Plans too large to be drawn
    are not looked at."""
    from everstep.planner.step.cost import overlapped_seconds, step_seconds
    from everstep.planner.step.schedules import order_of

    if picture is None or answer.plan.order.staggered:
        return ""
    overlapped_s = overlapped_seconds(answer.plan, job, answer.cluster, order_of(answer.plan))
    saved_s = step_seconds(answer.plan, job, answer.cluster) - overlapped_s
    if saved_s < 0.01 * answer.step_s:
        return ""
    return f" (sums come after the work; beside it they would save up to {human_seconds(saved_s)})"


def _grid(plan: Plan, lost: frozenset[NodeId] = frozenset(), most_lines: int = 40) -> str:
    lines = grid.text(grid.grid(plan, lost)).splitlines()
    if len(lines) > most_lines:
        lines = [*lines[:most_lines], f"and {len(lines) - most_lines} more"]
    return "\n".join(lines)


def memory_text(needs: list[Need], most_rows: int = 12) -> str:
    """A row for nodes that need the same, the fullest first."""
    from everstep.planner.whatif import runs

    rows = [("memory of", "layers", "state", "activations", "together", "of")]
    for need in needs[:most_rows]:
        rows.append((
            runs(need.nodes, most=4), _layers(need.layers), human_bytes(need.state_bytes), human_bytes(need.active_bytes),
            human_bytes(need.total_bytes), "-" if need.cap_bytes is None else human_bytes(need.cap_bytes),
        ))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *([f"and {len(needs) - most_rows} more"] if len(needs) > most_rows else [])])


def _layers(layers: tuple[int, ...]) -> str:
    """``0–3, 7``."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(f"{first}" if first == last else f"{first}–{last}" for first, last in runs) or "none"


def _draw(picture: Timeline | None, path: Path) -> None:
    """A bar for each action.

    Raises:
        ConfigError: the plan is too large to be drawn, or the file cannot be written.
    """
    if picture is None:
        raise ConfigError(f"--png {path}: a plan of so many actions cannot be drawn")
    colours = {"F": "#4c78a8", "B": "#f58518", "W": "#54a24b"}
    figure = blank(12, 0.6 + 0.35 * len(picture.nodes))
    axes = figure.add_subplot()
    for row, node in enumerate(picture.nodes):
        for letter, colour in colours.items():
            bars = [(start, end - start) for n, a, start, end in picture.spans if n == node and a.kind.value == letter]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.3,
                             label=letter if row == 0 and bars else None)
    axes.set_yticks(range(len(picture.nodes)), list(picture.nodes))
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)
    save(figure, path)

