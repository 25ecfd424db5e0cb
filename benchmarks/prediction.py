"""What steps are predicted to take against what they take, over two dozen different plans on real processes.

    python benchmarks/prediction.py --table benchmarks/results/prediction.md      # three minutes on two cores

One run of `examples/tiny_gpt.py` over eight workers of this machine (real CPU), whose agent is told plan after plan: one to
eight of the workers compute, in pipelines of one length and of several, well and badly cut, rerouted as after losses, with
backward in one and split, with more slots for activations and without. Each change of plan is a real one, at a step
boundary, and moves state. Plans come in an order drawn from a seed, so that what the machine does meanwhile is not taken for
a plan's doing.

Two predictions for each plan, none of which has seen a step of it:

- *frozen*: layer times and the common ratio as measured in the first few plans alone, never corrected afterwards;
- *as in a run*: what the planner would have said when the plan began, having seen all plans before it, with the residual of its
  family (`planner/step/calibrate.py`).

Beside the step stands the processor time of all workers, which other work on the machine disturbs less, without ratio and
residual. It still grows with what else is in the caches: so it is also compared at the pace of the plan, multiplied by how much
slower forwards were than predicted. That is no prediction, but shows what of the error is the model's.

Beside them the load average and the share of both cores' time that anybody used. `--raw FILE` keeps what was measured, and
`--from FILE` judges it again without a run, as after a change of the cost model.

`--schedules` measures instead what better schedules are worth here: rerouted plans with the schedule that follows from them
and with the one that `planner/idle/improve.py` finds, in turn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from everstep.cluster import Cluster, Node
from everstep.controller import ClusterFacts, Controller
from everstep.decision import Candidate, Decision
from everstep.plan import Hop, Order, Plan, Route
from everstep.planner.idle.improve import improve
from everstep.planner.policies.routes import reroute
from everstep.planner.policies.situation import Situation
from everstep.planner.step.beside import Rest
from everstep.planner.step.calibrate import Calibration, calibrated, family_of
from everstep.planner.step.cost import shared_seconds, step_seconds
from everstep.planner.step.measure import measured
from everstep.quantities import HostId, NodeId
from everstep.schedule import Schedule
from everstep.telemetry.forecasts import layout
from everstep.workload import Workload

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "tiny_gpt.py"
WORKERS = 8
NUM_LAYERS, MICRO_BATCHES = 8, 8
NODES = tuple(NodeId(f"n{k}") for k in range(WORKERS))
WARM = 3
"""Steps of a plan that are not measured: caches and allocators get used to it."""
STEPS = 10
FIRST = 5
"""Plans that the frozen prediction learns from."""


# The plans.


def pipelines(cuts: Sequence[Sequence[int]], shares: Sequence[int], order: Order | None = None) -> Plan:
    """Pipelines over nodes in turn. ``cuts``: layers a stage, by pipeline; ``shares``: micro-batches of each."""
    nodes = iter(NODES)
    routes: list[Route] = []
    for sizes in cuts:
        assert sum(sizes) == NUM_LAYERS, sizes
        ends = list(itertools.accumulate(sizes))
        routes.append(tuple(Hop(next(nodes), end - size, end) for size, end in zip(sizes, ends, strict=True)))
    placement: dict[NodeId, tuple[int, ...]] = dict.fromkeys(NODES, ())
    placement |= {hop.node: tuple(hop.layers) for route in routes for hop in route}
    left = dict(enumerate(shares))
    taken: list[Route] = []
    while any(left.values()):
        for index in [index for index, share in left.items() if share]:
            taken.append(routes[index])
            left[index] -= 1
    assert len(taken) == MICRO_BATCHES, shares
    return Plan(num_layers=NUM_LAYERS, placement=placement, routes=tuple(taken), order=order or Order())


def after_losses(plan: Plan, lost: Sequence[int], workload: Workload) -> Plan:
    """``plan`` rerouted over who is left; the lost are there, and idle."""
    gone = {NodeId(f"n{k}") for k in lost}
    living = {node: Node(node_id=node) for node in NODES if node not in gone}
    (found,) = reroute(Situation(
        cluster=Cluster(nodes=living, host_cores={HostId("localhost"): 2}), workload=workload, plan=plan,
        lost=tuple(sorted(gone)), holds={node: workload.units_of(frozenset(plan.placement[node])) for node in living},
    ))
    assert found.plan is not None, found.reason
    placement = {node: found.plan.placement.get(node, ()) for node in NODES}
    return Plan(num_layers=NUM_LAYERS, placement=placement, routes=found.plan.routes, order=plan.order)


def all_plans(workload: Workload) -> list[Plan]:
    """Two dozen and more, in a fixed order."""
    split, roomy = Order(split=True), Order(extra_slots=2)
    both = Order(split=True, extra_slots=2)
    four, two, eight = (2, 2, 2, 2), (4, 4), (1,) * 8
    wide = pipelines([four, four], (4, 4))
    short = pipelines([two] * 4, (2,) * 4)
    return [
        pipelines([(8,)], (8,)), pipelines([(8,)] * 2, (4, 4)), pipelines([(8,)] * 4, (2,) * 4),
        pipelines([(8,)] * 8, (1,) * 8),
        pipelines([(8,)] * 3, (3, 3, 2)), pipelines([two], (8,)), pipelines([two], (8,), split), pipelines([two] * 2, (4, 4)),
        short, pipelines([two] * 4, (2,) * 4, split), pipelines([four], (8,)), pipelines([four], (8,), both), wide,
        pipelines([four, four], (4, 4), split), pipelines([four, four], (4, 4), roomy), pipelines([eight], (8,)),
        pipelines([eight], (8,), split), pipelines([eight], (8,), roomy), pipelines([(1, 5, 1, 1), four], (4, 4)),
        pipelines([(6, 2)], (8,)), pipelines([(3, 3, 2), (2, 2, 2, 1, 1)], (3, 5)), pipelines([(3, 3, 2), two], (5, 3)),
        pipelines([two, (8,)], (5, 3)), pipelines([(4, 2, 2), (8,), two, two], (3, 1, 2, 2)),
        after_losses(wide, [5], workload), after_losses(wide, [1, 6], workload), after_losses(short, [2], workload),
        after_losses(pipelines([four, four], (4, 4), both), [5], workload), after_losses(short, [0, 3, 6], workload),
        after_losses(pipelines([two] * 2, (4, 4)), [1], workload),
    ]


# The run.


@dataclass(frozen=True)
class Ran:
    """A plan, its steps after the warm ones with what nodes measured in each, and the machine meanwhile."""

    plan: Plan
    steps_s: tuple[float, ...]
    times: dict[str, dict[str, float]]
    """By node and action: the mean over steps."""
    load: float
    busy: float
    """The share of all cores' time in which they were not idle."""


def busy_and_all() -> tuple[float, float]:
    """Ticks in which cores were busy, and all ticks, since the machine was started."""
    ticks = [float(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


class Scripted(Controller):
    """Answers with one plan after another, each as soon as enough steps of the one before were measured."""

    plans: Callable[[Workload], list[tuple[Plan, Schedule | None]]]
    steps: int
    ran: list[Ran]
    guess: Workload

    def start(self, view: Any, workload: Workload, *arguments: Any, **more: Any) -> Any:
        self._left = type(self).plans(workload)
        type(self).guess = workload
        self._begin()
        return super().start(view, workload, *arguments, **more)

    def _begin(self) -> None:
        self._steps: list[tuple[float, Mapping[NodeId, Mapping[str, float]]]] = []
        self._ticks = busy_and_all()

    def answer(
        self, view: Any, resolution: Any, lost: Any, joined: Any, cause: str, now_s: float, token: int, checkpoint: Any,
        rollbacks: Any = (), expected: Any = None,
    ) -> Any:
        assert not lost and not joined and not self.is_over, "nobody is lost here, and there are plans left"
        plan, schedule = self._left.pop(0)
        situation = self._situation(view, resolution, lost, joined, now_s, checkpoint)
        decision = Decision(
            cause=cause, view=view.number, step=situation.step, gap_s=situation.gap_s, chosen=0,
            candidates=(Candidate(policy="script", plan=plan),),
        )
        order = self._order(view, decision, resolution, situation, token, rollbacks, schedule)
        self._take(plan, situation.cluster, view, schedule)
        self._begin()
        return order, decision, ""

    @property
    def is_over(self) -> bool:
        return not self._left

    def observe(self, times: Mapping[NodeId, Mapping[str, float]], step_s: float) -> None:
        self._steps.append((step_s, times))
        if len(self._steps) == WARM:
            self._ticks = busy_and_all()
        if len(self._steps) != WARM + self.steps:
            return
        before, now = self._ticks, busy_and_all()
        assert self.plan is not None
        self.ran.append(Ran(
            self.plan, tuple(step_s for step_s, _ in self._steps[WARM:]), mean_times([t for _, t in self._steps[WARM:]]),
            os.getloadavg()[0], (now[0] - before[0]) / max(1.0, now[1] - before[1]),
        ))
        print(f"{len(self.ran)}: {layout(self.plan)}: {median(self.ran[-1].steps_s):.3f} s", file=sys.stderr, flush=True)
        if self.is_over:
            signal.raise_signal(signal.SIGINT)  # which ends a run in order

    def think(self) -> bool:
        return True

    @property
    def wish(self) -> str:
        return "the next plan" if len(self._steps) >= WARM + self.steps and not self.is_over else ""


def mean_times(steps: Sequence[Mapping[NodeId, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """By node and action over all steps."""
    found: dict[str, dict[str, list[float]]] = {}
    for times in steps:
        for node, actions in times.items():
            for action, seconds in actions.items():
                found.setdefault(node, {}).setdefault(action, []).append(seconds)
    return {node: {action: fmean(values) for action, values in actions.items()} for node, actions in found.items()}


def shuffled(num_plans: int) -> Callable[[Workload], list[tuple[Plan, Schedule | None]]]:
    """So many of all plans, in an order of their own."""
    def plans(workload: Workload) -> list[tuple[Plan, Schedule | None]]:
        found = all_plans(workload)
        random.Random(7).shuffle(found)
        return [(plan, None) for plan in found[:num_plans]]
    return plans


TURNS = 6
"""How often each of two schedules has its turn."""


def in_turn(workload: Workload) -> list[tuple[Plan, Schedule | None]]:
    """Rerouted plans, each with its own schedule and with a better one."""
    short = pipelines([(4, 4)] * 4, (2,) * 4)
    plans = [after_losses(short, lost, workload) for lost in ([1], [0, 5], [1, 2])]
    better = [improve(plan) for plan in plans]
    return [
        turn for plan, found in zip(plans, better, strict=True)
        for turn in [(plan, None), (found.plan, found.schedule)] * TURNS
    ]


def schedules(steps: int) -> str:
    """What better schedules are worth, as Markdown. The first plan of the run belongs to none."""
    ran, guess = measure(in_turn, steps)
    lines = ["| plan | gain on devices of their own | own schedule, s | better one, s | gain here |", "|---|---|---|---|---|"]
    for number, (plan, _) in enumerate(in_turn(guess)[::2 * TURNS]):
        turns = ran[1 + 2 * TURNS * number:][:2 * TURNS]
        own_s, better_s = (median(s for one in turns[first::2] for s in one.steps_s) for first in (0, 1))
        found = improve(plan)
        cells = [layout(plan), f"{1 - found.after_s / found.before_s:.1%}", f"{own_s:.4f}", f"{better_s:.4f}"]
        lines.append(f"| {' | '.join([*cells, f'{1 - better_s / own_s:+.1%}'])} |")
    return "\n".join(lines)


def measure(plans: Callable[[Workload], list[tuple[Plan, Schedule | None]]], steps: int) -> tuple[list[Ran], Workload]:
    """One run through ``plans``, after the one that the planner starts with."""
    from everstep.runtime import agent
    from everstep.telemetry import audit, runs

    Scripted.plans, Scripted.steps, Scripted.ran = staticmethod(plans), steps, []
    agent.Controller = Scripted  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as scratch:
        outcome = agent.run(agent.RunRequest(
            script=SCRIPT, arguments=("--steps", "100000"), workers=WORKERS, directory=Path(scratch) / "run",
            settings={"checkpoint": {"every_steps": 0}, "planner": {"worker_memory_bytes": 100_000_000}},
        ))
        assert outcome.outcome == "stopped", outcome.message
        problems = audit.audit(runs.read(outcome.directory)).problems
        assert not problems, problems
    return Scripted.ran, Scripted.guess


# What was predicted.


PREDICTIONS = {"frozen": "step, frozen", "online": "step, as in a run", "work": "processor time, as in a run",
               "even": "processor time, at the pace of the plan"}

@dataclass(frozen=True, kw_only=True)
class Row:
    """A plan. Errors are predicted / measured - 1; None where the prediction would have seen the plan."""

    layout: str
    family: str
    nodes: int
    hops: int
    measured_s: float
    worked_s: float
    """Processor time of all workers in a step."""
    work_s: float | None
    """What that was predicted to be, as in a run but for the common ratio and residuals."""
    even_s: float | None
    """The same, had forwards been predicted to be as slow as they were in this plan."""
    frozen_s: float | None
    online_s: float | None
    load: float
    busy: float

    def pair(self, which: str) -> tuple[float, float] | None:
        """What was predicted, and what it took."""
        predicted_s = getattr(self, f"{which}_s")
        return None if predicted_s is None else (predicted_s, self.worked_s if which in ("work", "even") else self.measured_s)

    def error(self, which: str) -> float | None:
        pair = self.pair(which)
        return pair and pair[0] / pair[1] - 1


def cluster() -> Cluster:
    """The workers as the controller sees them."""
    cores = len(os.sched_getaffinity(0))
    facts = ClusterFacts(host_cores={HostId("localhost"): cores})
    return Cluster(nodes={node: Node(node_id=node) for node in NODES}, host_cores=facts.host_cores, link=facts.link)


def judged(ran: Sequence[Ran], guess: Workload, first: int = FIRST) -> list[Row]:
    """Every plan with both predictions."""
    workload, calibration, rest, machine = guess, Calibration(), Rest(), cluster()
    frozen: tuple[Workload, Calibration] | None = None
    rows = []
    for number, one in enumerate(ran):
        took_s = median(one.steps_s)
        if number == first:
            frozen = workload, calibration
        work_s = len(os.sched_getaffinity(0)) * sum(shared_seconds(one.plan, workload, machine).values()) if number else None
        rows.append(Row(
            layout=layout(one.plan), family=str(family_of(one.plan)), nodes=len(one.plan.nodes) - len(one.plan.spares),
            hops=sum(map(len, one.plan.routes)), measured_s=took_s,
            worked_s=sum(actions["step"] for actions in one.times.values()),
            work_s=work_s, even_s=work_s and work_s * pace_of(one, workload),
            frozen_s=step_seconds(one.plan, calibrated(*frozen), machine) if frozen else None,
            online_s=calibration.seconds(step_seconds(one.plan, workload, machine), family_of(one.plan)) if number else None,
            load=one.load, busy=one.busy,
        ))
        for step_s in one.steps_s:
            times = {NodeId(node): actions for node, actions in one.times.items()}
            workload = measured(workload, times)
            rest = rest.after(one.plan, workload, times)
            workload = replace(workload, beside=rest.beside())
            calibration = calibration.after(step_s, step_seconds(one.plan, workload, machine), family_of(one.plan))
    return rows


def pace_of(one: Ran, workload: Workload) -> float:
    """How much slower a plan's forwards were than those that it was predicted with."""
    seen = {action: seconds for times in one.times.values() for action, seconds in times.items() if action.startswith("F:")}
    return sum(seen.values()) / sum(layer.forward_s for layer in workload.layers if f"F:{layer.name}" in seen)


def figures(rows: Sequence[Row], first: int = FIRST) -> dict[str, dict[str, float]]:
    """For each prediction: mean and worst error, and the share of pairs of plans that it puts in the right order."""
    found = {}
    for which in PREDICTIONS:
        pairs = [pair for pair in (row.pair(which) for row in rows[first:]) if pair]
        errors = [abs(predicted_s / took_s - 1) for predicted_s, took_s in pairs]
        ordered = [(a[0] < b[0]) == (a[1] < b[1]) for a, b in itertools.combinations(pairs, 2)]
        found[which] = {
            "plans": len(pairs), "mean_error": fmean(errors), "worst_error": max(errors),
            "pairs_in_order": fmean(ordered) if ordered else 1.0,
        }
    return found


def table(rows: Sequence[Row], command: str, steps: int, first: int) -> str:
    """Everything as Markdown."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return "\n".join([
        f"# Predicted and measured step times of {len(rows)} plans", "",
        f"`{command}` on {os.cpu_count()} cores ({platform.machine()}), real CPU, commit {commit}. `examples/tiny_gpt.py` over "
        f"{WORKERS} workers, {steps} steps a plan after {WARM} warm ones; medians. Errors are predicted against measured; the "
        f"first {first} plans are those that the frozen prediction learns from, and count in no figure.", "",
        "| prediction | plans | mean error | worst error | pairs of plans in the right order |", "|---|---|---|---|---|",
        *(
            f"| {PREDICTIONS[name]} | {f['plans']:.0f} | {f['mean_error']:.1%} | {f['worst_error']:.1%} "
            f"| {f['pairs_in_order']:.1%} |"
            for name, f in figures(rows, first).items()
        ), "",
        "| plan | computing | hops | step, s | frozen, s | error | as in a run, s | error | processor time, s | predicted, s "
        "| error | at its pace | load | cores busy |",
        f"|{'---|' * 14}",
        *map(_line, rows), "",
    ])


def _line(row: Row) -> str:
    cells = [row.layout, str(row.nodes), str(row.hops), f"{row.measured_s:.4f}"]
    for which in ("frozen", "online", "work", "even"):
        pair, error = row.pair(which), row.error(which)
        if which == "even":
            cells.append("" if error is None else f"{error:+.1%}")
            continue
        cells += [f"{row.worked_s:.4f}"] if which == "work" else []
        cells += ["", ""] if pair is None or error is None else [f"{pair[0]:.4f}", f"{error:+.1%}"]
    return f"| {' | '.join([*cells, f'{row.load:.1f}', f'{row.busy:.0%}'])} |"


def _kept(ran: Sequence[Ran], guess: Workload) -> bytes:
    return msgspec.json.encode({"ran": ran, "guess": guess})


class _Kept(msgspec.Struct):
    ran: list[Ran]
    guess: Workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=1000, help="so many at most, after the one that the planner starts with")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--table", type=Path, help="write a Markdown table here")
    parser.add_argument("--raw", type=Path, help="keep what was measured here")
    parser.add_argument("--from", dest="kept", type=Path, help="judge what was kept by --raw")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--schedules", action="store_true", help="measure what better schedules are worth instead")
    options = parser.parse_args()
    if options.schedules:
        print(schedules(options.steps))
        return
    if options.kept:
        kept = msgspec.json.decode(options.kept.read_bytes(), type=_Kept)
        ran, guess = kept.ran, kept.guess
    else:
        ran, guess = measure(shuffled(options.plans), options.steps)
    if options.raw:
        options.raw.write_bytes(_kept(ran, guess))
    first = min(FIRST, len(ran) // 2)
    rows = judged(ran, guess, first)
    if options.table:
        options.table.parent.mkdir(parents=True, exist_ok=True)
        command = " ".join(["python", "benchmarks/prediction.py", *sys.argv[1:]])
        options.table.write_text(table(rows, command, options.steps, first))
    if options.json:
        print(json.dumps({"figures": figures(rows, first), "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        print(table(rows, "", options.steps, first))


if __name__ == "__main__":
    main()
