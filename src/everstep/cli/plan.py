"""``everstep plan``: what would run on a cluster, and what would be done after a loss, without running anything."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everstep import config as configuration
from everstep.catalog import files
from everstep.cli import output
from everstep.decision import text as decision_text
from everstep.errors import ConfigError
from everstep.quantities import NodeId, human_seconds, parse_seconds
from everstep.records import to_builtins
from everstep.telemetry import grid

if TYPE_CHECKING:
    from everstep.planner.timeline import Timeline
    from everstep.planner.whatif import WhatIf


def command(
    cluster: Annotated[str, typer.Option(help="A TOML file, or a shipped one by name, such as cluster-8.")],
    workload: Annotated[str, typer.Option(help="A TOML file, or a shipped one by name, such as workload-tiny-gpt.")],
    lose: Annotated[str, typer.Option(metavar="NODES", help="What if these were lost: n3,n7.")] = "",
    add: Annotated[int, typer.Option(min=0, help="What if so many more joined.")] = 0,
    policy: Annotated[str | None, typer.Option(help="Consider only this recovery.")] = None,
    gap: Annotated[str | None, typer.Option(metavar="DURATION", help="Expected time to the next event: 10m.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the schedule to this file.")] = None,
    as_json: output.AsJson = False,
) -> None:
    """Show the plan for a workload on a cluster, or the recovery that would be chosen if nodes were lost or joined."""
    # Imported here: the search brings SciPy, which takes half a second, and no other command needs it.
    from everstep.planner.timeline import timeline
    from everstep.planner.whatif import running, what_if, with_newcomers

    lost = tuple(NodeId(name.strip()) for name in lose.split(",") if name.strip())
    config = configuration.from_mapping({} if policy is None else {"planner.policy": policy}, source="--policy").planner
    hardware, job = files.load_cluster(cluster), files.load_workload(workload)
    began_s = time.perf_counter()
    start = running(hardware, job, config)
    if lost or add:
        began_s = time.perf_counter()
    answer = what_if(hardware, job, config, lose=lost, add=add, gap_s=_seconds(gap), start=start)
    search_s = time.perf_counter() - began_s
    picture = timeline(answer.plan, job, with_newcomers(hardware, add)[0])
    if png is not None:
        _draw(picture, png)
    if as_json:
        output.show(to_json(answer, search_s))
    else:
        output.say(text(answer, lost, search_s, picture))


def to_json(answer: WhatIf, search_s: float) -> dict[str, Any]:
    """``chosen`` is an index into ``candidates``; ``search_s`` is for the decision, what runs before being known. What is
    infinite becomes null."""
    return {
        "plan": to_builtins(answer.plan), "step_s": answer.step_s, "search_s": search_s,
        "candidates": [
            {key: getattr(candidate, key) for key in ("policy", "step_s", "stall_s", "value", "feasible", "reason")}
            for candidate in answer.candidates
        ],
        "chosen": answer.decision.chosen,
    }


def text(answer: WhatIf, lost: tuple[NodeId, ...], search_s: float, picture: Timeline | None) -> str:
    """The plan before the event if there is one, the table of what was considered, the plan chosen and its schedule."""
    from everstep.planner.timeline import text as timeline_text

    parts = []
    if answer.decision.cause != "start":
        parts.append(f"before: a step takes {human_seconds(answer.before_step_s)}\n{grid.text(grid.grid(answer.before))}")
    parts.append(decision_text(answer.decision))
    parts.append(f"plan: a step takes {human_seconds(answer.step_s)}\n{grid.text(grid.grid(answer.plan, frozenset(lost)))}")
    if picture is not None:
        parts.append(timeline_text(picture))
    parts.append(f"worked out in {human_seconds(search_s)}")
    return "\n\n".join(parts)


def _draw(picture: Timeline | None, path: Path) -> None:
    """A bar for each action.

    Raises:
        ConfigError: the plan is too large to be drawn, or the file cannot be written.
    """
    if picture is None:
        raise ConfigError(f"--png {path}: a plan of so many actions cannot be drawn")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colours = {"F": "#4c78a8", "B": "#f58518", "W": "#54a24b"}
    figure = Figure(figsize=(12, 0.6 + 0.35 * len(picture.nodes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row, node in enumerate(picture.nodes):
        for letter, colour in colours.items():
            bars = [(start, end - start) for n, a, start, end in picture.spans if n == node and a.kind.value == letter]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.3,
                             label=letter if row == 0 and bars else None)
    axes.set_yticks(range(len(picture.nodes)), list(picture.nodes))
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(loc="upper right", ncols=3)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--png {path}: cannot be written: {error}") from error


def _seconds(gap: str | None) -> float | None:
    try:
        return None if gap is None else parse_seconds(gap)
    except ValueError as error:
        raise ConfigError(f"--gap {gap}: {error}") from error
