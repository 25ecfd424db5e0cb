"""``everstep simulate``: recovery policies against a trace of failures, on pretend time."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from everstep.catalog import files
from everstep.catalog.trace_files import load_trace
from everstep.cli import output
from everstep.errors import ConfigError
from everstep.quantities import human_seconds, parse_seconds

if TYPE_CHECKING:
    from everstep.cluster import Cluster
    from everstep.simulator.study.compare import Report
    from everstep.simulator.study.hazards import Hazard
    from everstep.simulator.study.player import Player
    from everstep.simulator.study.times import Family, Job
    from everstep.trace import Trace
    from everstep.workload import Workload


class GapModel(StrEnum):
    """How policies come by the expected time to the next change."""

    OWN = "own"
    HISTORY = "history"
    KNOWN = "known"


class Model(StrEnum):
    """What plays."""

    PLANNER = "planner"
    FORMS = "closed-form"


class Schedules(StrEnum):
    """The family of schedules of all policies but those that are published with another."""

    FUSED = "fused"
    SPLIT = "split"
    STAGGERED = "staggered"


def command(
    trace: Annotated[str, typer.Option(help="A file, a shipped trace such as p3, or a hazard: exponential, bursty, lemons.")],
    cluster: Annotated[str, typer.Option(help="A TOML file, or a shipped one by name, such as cluster-32.")],
    workload: Annotated[str, typer.Option(help="A TOML file, or a shipped one by name, such as workload-gpt-124m.")],
    policy: Annotated[str, typer.Option(metavar="P[,P]", help="Which policies, or all.")] = "auto",
    gap_model: Annotated[GapModel, typer.Option(
        help="Expected time to the next change: each policy's own way, all from history, or all told the mean.",
    )] = GapModel.OWN,
    seeds: Annotated[int, typer.Option(min=1, help="Draws of a hazard, or orders of the first nodes of a trace.")] = 1,
    gap: Annotated[str | None, typer.Option(
        metavar="DURATION", help="Mean time between the losses of a hazard; 10m if left out.",
    )] = None,
    losses: Annotated[int | None, typer.Option(min=1, help="Losses of a hazard; 10 if left out.")] = None,
    move: Annotated[str | None, typer.Option(
        metavar="DURATION", help="Time to move the state of a re-partition; from bytes and links if left out.",
    )] = None,
    stages: Annotated[int | None, typer.Option(min=1, help="Stages of the grid; the fastest that fits if left out.")] = None,
    schedules: Annotated[Schedules, typer.Option(help="Family of schedules.")] = Schedules.SPLIT,
    model: Annotated[Model, typer.Option(
        help="The planner itself, or rules of our own and closed forms of step times, for systems that it cannot play.",
    )] = Model.PLANNER,
    png: Annotated[Path | None, typer.Option(help="Draw a picture into this file.")] = None,
    as_json: output.AsJson = False,
) -> None:
    """Play recovery policies against a trace of failures, and compare what each would have trained."""
    # Imported here: they bring NumPy and SciPy, and no other command needs them.
    from everstep.simulator.study import picture
    from everstep.simulator.study.compare import compare, job_of, move_seconds
    from everstep.simulator.study.hazards import HAZARDS
    from everstep.simulator.study.player import Costs
    from everstep.simulator.study.roster import fastest_grid

    is_drawn = trace in HAZARDS and not Path(trace).is_file()
    for option, given in (("--gap", gap), ("--losses", losses)):
        if given is not None and not is_drawn:
            raise ConfigError(f"{option} {given}: is of a hazard ({', '.join(HAZARDS)}), and {trace} is a recorded trace")
    gap_s, wanted_move_s = _seconds("--gap", gap or "10m"), None if move is None else _seconds("--move", move)
    if gap_s == 0:
        raise ConfigError(f"--gap {gap}: want more than 0")
    hardware, job_file = files.load_cluster(cluster), files.load_workload(workload)
    family: Family = schedules.value
    knows = {GapModel.OWN: None, GapModel.HISTORY: False, GapModel.KNOWN: True}[gap_model]
    if stages is not None and stages > job_file.num_layers:
        raise ConfigError(f"--stages {stages}: {workload} has {job_file.num_layers} layers, and a stage takes at least one")
    if model is Model.PLANNER and stages is None:
        stages = fastest_grid(hardware, job_file)
    job = job_of(hardware, job_file, stages)
    move_s = move_seconds(job, hardware, job_file) if wanted_move_s is None else wanted_move_s
    if model is Model.PLANNER:
        names = _names(policy, _seats())
        chosen, singles = _planned(names, hardware, job_file, job.num_stages, family, wanted_move_s, knows)
        fewest = job.num_stages
    else:
        names = _names(policy, _rules())
        chosen, singles, fewest = _by_forms(names, job, family, knows)
    traces = _traces(trace, len(hardware.nodes), fewest, seeds, gap_s, losses or 10)
    report = compare(
        traces, chosen, Costs(move_s=move_s, keep_progress=model is Model.PLANNER), singles=singles,
        num_nodes=len(hardware.nodes),
        gap_s=gap_s if is_drawn else None,
    )
    if png is not None:
        picture.draw(replace(
            report, rows={name: report.rows[name] for name in names},
            outcomes={name: report.outcomes[name] for name in names},
        ), traces, png)
    if as_json:
        output.show(to_json(report, names))
    else:
        depth = "1 stage" if job.num_stages == 1 else f"{job.num_stages} stages"
        what, took_s = ("stage", move_s / 2) if model is Model.PLANNER and move else ("re-partition", move_s)
        moved = f"moving a {what} takes {human_seconds(took_s)}"
        output.say(text(report, names, traces, f"grid of {depth}, {schedules.value} schedules, {moved}"))


def to_json(report: Report, shown: Sequence[str]) -> dict[str, Any]:
    """By policy, averages over seeds; ``decisions`` counts what was chosen, over all seeds together."""
    return {
        name: {
            key: getattr(report.rows[name], key) for key in ("samples", "goodput", "fse", "stall_s", "regret", "decisions")
        }
        for name in shown
    }


def text(report: Report, shown: Sequence[str], traces: Sequence[Trace], grid: str) -> str:
    """What was played, and a line a policy, the most samples first."""
    one = traces[0]
    head = (
        f"{one.name}: {len(one.nodes)} nodes, {one.num_losses} losses, {one.num_joins} joins in {human_seconds(one.end_s)}"
        f"{f' (first of {len(traces)} seeds)' if len(traces) > 1 else ''}\n{grid}"
    )
    rows = [("policy", "samples", "samples/s", "FSE", "stall", "regret", "decisions")]
    for name in sorted(shown, key=lambda each: -report.rows[each].samples):
        row = report.rows[name]
        most = ", ".join(f"{count} {what}" for what, count in list(row.decisions.items())[:3])
        rows.append((
            name, f"{row.samples:,.0f}", f"{row.goodput:.2f}", f"{row.fse:.3f}", human_seconds(row.stall_s),
            f"{row.regret * 100:+.1f} %", most,
        ))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([head, "", *lines, "", "regret: against the best single policy in hindsight; below 0: better than that"])


def _planned(
    names: Sequence[str], hardware: Cluster, workload: Workload, num_stages: int, family: Family, move_s: float | None,
    knows_gap: bool | None,
) -> tuple[list[Player[Any]], list[Player[Any]]]:
    """The planner plays ``names``, and the single policies."""
    from everstep.simulator.study.roster import SINGLES, table_of

    table = table_of(hardware, workload, num_stages, move_s)
    return [*table.seated(names, family, knows_gap)], [*table.seated(SINGLES, family, knows_gap)]


def _by_forms(
    names: Sequence[str], job: Job, family: Family, knows_gap: bool | None,
) -> tuple[list[Player[Any]], list[Player[Any]], int]:
    """The same by closed forms, and the fewest nodes that hold the model."""
    from everstep.simulator.study.compare import all_times, by_forms, singles_of
    from everstep.simulator.study.rules import named

    times = all_times(job)
    rules = [named(name, family) for name in names]
    if knows_gap is not None:
        rules = [replace(each, knows_gap=knows_gap) for each in rules]
    return [*by_forms(rules, times)], [*by_forms(singles_of(family, knows_gap), times)], times[family].shortest


def _seats() -> list[str]:
    from everstep.simulator.study.roster import SEATS

    return list(SEATS)


def _rules() -> list[str]:
    from everstep.simulator.study.rules import RULES

    return list(RULES)


def _names(names: str, known: Sequence[str]) -> list[str]:
    wanted = list(known) if names == "all" else [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
            raise ConfigError(f"--policy: no policy {name!r}{hint}")
    if not wanted:
        raise ConfigError("--policy: want at least one policy")
    return list(dict.fromkeys(wanted))


def _traces(name: str, num_nodes: int, fewest: int, seeds: int, gap_s: float, losses: int) -> list[Trace]:
    from everstep.simulator.study.compare import placed_anew
    from everstep.simulator.study.hazards import HAZARDS, draw

    try:
        if name in HAZARDS and not Path(name).is_file():
            hazard = cast("Hazard", name)
            return [
                draw(hazard, num_nodes=num_nodes, num_losses=losses, gap_s=gap_s, seed=seed) for seed in range(seeds)
            ]
        recorded = load_trace(name).folded(num_nodes).beginning_with(min(num_nodes, fewest))
    except ValueError as error:
        raise ConfigError(f"--trace {name}: {error}") from error
    if recorded.end_s <= 0:
        raise ConfigError(f"--trace {name}: want a trace with some time in it: nothing changes after there are {fewest} nodes")
    return [placed_anew(recorded, seed) for seed in range(seeds)]


def _seconds(option: str, value: str) -> float:
    try:
        return parse_seconds(value)
    except ValueError as error:
        raise ConfigError(f"{option} {value}: {error}") from error
