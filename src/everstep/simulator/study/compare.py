"""Several policies on the same traces: samples, and who would have been best in hindsight."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from everstep.cluster import Cluster
from everstep.errors import InfeasibleError
from everstep.planner.step.cost import SWITCH_S
from everstep.quantities import human_bytes
from everstep.simulator.study.player import Costs, Player
from everstep.simulator.study.policies import Policy
from everstep.simulator.study.rules import SINGLES, Rules, named
from everstep.simulator.study.times import FAMILIES, Family, Job, Times, even_bounds
from everstep.simulator.study.world import Outcome, Truth, play
from everstep.trace import Trace
from everstep.workload import Workload

MOST_STAGES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy over all traces."""

    samples: float
    """A trace, on average."""
    goodput: float
    """Samples a second."""
    fse: float
    """Rate by survivors / N × the rate without failures."""
    stall_s: float
    regret: float
    """1 - samples by those of the best single policy, trace by trace, then averaged; negative: better than that."""
    worst_regret: float
    decisions: Mapping[str, int]
    """How often what was chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Rows by policy, and every single outcome."""

    rows: Mapping[str, Row]
    outcomes: Mapping[str, Sequence[Outcome]]

    def ratio(self, over: str, under: str) -> float:
        """Samples of ``over`` by those of ``under``, all traces together."""
        return sum(each.samples for each in self.outcomes[over]) / sum(each.samples for each in self.outcomes[under])


def compare(
    traces: Sequence[Trace], players: Sequence[Player[Any]], costs: Costs, *, singles: Sequence[Player[Any]] = (),
    gap_s: float | None = None, num_nodes: int | None = None, truth_of: Callable[[int], Truth] = lambda seed: Truth(),
) -> Report:
    """``players`` and ``singles``, those that regret is against, on every trace; ``truth_of`` by index of the trace."""
    everybody = {each.name: each for each in (*singles, *players)}
    played = [numbered(trace) for trace in traces]
    outcomes = {
        name: [
            play(trace, each, costs, truth=truth_of(index), gap_s=gap_s, num_nodes=num_nodes)
            for index, trace in enumerate(played)
        ]
        for name, each in everybody.items()
    }
    against = [each.name for each in singles] or list(everybody)
    best = [max(outcomes[name][index].samples for name in against) for index in range(len(traces))]
    return Report(rows={name: _row(found, best) for name, found in outcomes.items()}, outcomes=outcomes)


def numbered(trace: Trace) -> Trace:
    """The same with nodes called n0, n1, … in the order in which they come."""
    comers = dict.fromkeys((*trace.nodes, *(name for change in trace.changes for name in change.joined)))
    names = {name: f"n{index}" for index, name in enumerate(comers)}
    return replace(
        trace, nodes=tuple(names[node] for node in trace.nodes),
        changes=tuple(
            replace(each, lost=tuple(names[node] for node in each.lost), joined=tuple(names[node] for node in each.joined))
            for each in trace.changes
        ),
    )


def _row(found: Sequence[Outcome], best: Sequence[float]) -> Row:
    regrets = [1 - each.samples / most if most else 0.0 for each, most in zip(found, best, strict=True)]
    elapsed_s = sum(each.elapsed_s for each in found)
    return Row(
        samples=mean(each.samples for each in found), goodput=sum(each.samples for each in found) / elapsed_s,
        fse=mean(each.fse for each in found), stall_s=mean(each.stall_s for each in found), regret=mean(regrets),
        worst_regret=max(regrets),
        decisions=dict(Counter(taken.words for each in found for taken in each.decisions).most_common()),
    )


def by_forms(rules: Sequence[Rules], times: Mapping[Family, Times]) -> list[Policy]:
    """Players by closed forms."""
    return [Policy(each, times[each.family]) for each in rules]


def singles_of(family: Family, knows_gap: bool | None = None) -> list[Rules]:
    """The policies that ``auto`` chooses among, each alone, in one schedule family."""
    found = [named(name, family) for name in SINGLES]
    return found if knows_gap is None else [replace(each, knows_gap=knows_gap) for each in found]


def all_times(job: Job) -> dict[Family, Times]:
    return {family: Times(job, family) for family in FAMILIES}


def placed_anew(trace: Trace, seed: int) -> Trace:
    """The same trace with its first nodes in another order, so that others are hit; seed 0 leaves it as it is."""
    nodes = list(trace.nodes)
    if seed:
        random.Random(seed).shuffle(nodes)
    return replace(trace, nodes=tuple(nodes))


def job_of(cluster: Cluster, workload: Workload, num_stages: int | None = None) -> Job:
    """What a cluster and a workload are at this level.

    The grid has ``num_stages``, or is the fastest of those that fit and have two of every stage.

    Raises:
        InfeasibleError: no grid fits; ``rejected`` says why, by number of stages.
    """
    work_s = tuple(layer.total_s for layer in workload.layers)
    caps = [node.memory_bytes for node in cluster.nodes.values() if node.memory_bytes is not None]
    cap = min(caps, default=None)
    rejected: dict[str, str] = {}
    found: list[tuple[float, Job]] = []
    most = min(MOST_STAGES, workload.num_layers, max(1, len(cluster.nodes) // 2))
    wanted = range(1, most + 1) if num_stages is None else range(num_stages, min(num_stages, most) + 1)
    for stages in wanted:
        bounds = even_bounds(work_s, stages)
        needed = max(
            workload.held_bytes(set(range(first, end)))
            + (stages - index) * sum(layer.activation_bytes for layer in workload.layers[first:end])
            for index, (first, end) in enumerate(bounds)
        )
        if cap is not None and needed > cap:
            rejected[f"{stages} stages"] = f"a stage needs {human_bytes(needed)} of {human_bytes(cap)}"
            continue
        pipelines = max(1, len(cluster.nodes) // stages)
        step_s = max(
            -(-workload.num_micro_batches // pipelines) * sum(work_s[first:end])
            + sum(layer.forward_s for layer in workload.layers[:first])
            for first, end in bounds
        )
        found.append((step_s, Job(
            forward_s=tuple(layer.forward_s for layer in workload.layers), work_s=work_s, num_stages=stages,
            num_micro_batches=workload.num_micro_batches, batch=workload.batch,
            layer_bytes=tuple(workload.held_bytes({layer}) for layer in range(workload.num_layers)),
        )))
    if not found:
        words = "; ".join(f"{tried}: {why}" for tried, why in rejected.items()) or f"want 1 to {most} stages"
        raise InfeasibleError(f"no grid with two of every stage fits: {words}", rejected)
    return min(found, key=lambda each: each[0])[1]


def move_seconds(job: Job, cluster: Cluster, workload: Workload) -> float:
    """What a re-partition takes if each node receives the state of the fullest stage over its link."""
    fullest = max(
        sum(workload.units[name].state_bytes for name in workload.units_of(set(range(first, end))))
        for first, end in even_bounds(job.work_s, job.num_stages)
    )
    return SWITCH_S + cluster.link.seconds(fullest)
