"""A better schedule for the plan that is running, worked out in idle time and offered only where it pays.

The search is ``improve``, which counts neither reductions nor cores that nodes share; what it finds is priced with the whole
cost model before it is offered. It is not even begun where no schedule could be faster by ``LEAST_GAIN``, as on cores that
nodes share: there a step takes the host's work divided by its cores, in whatever order that is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from everstep.cluster import Cluster
from everstep.plan import Plan
from everstep.planner.idle.improve import improvements
from everstep.planner.layouts.search import Priced
from everstep.planner.routes.level import least_seconds
from everstep.planner.step.cost import shared_seconds, step_seconds
from everstep.planner.step.memory import cap_bytes, node_bytes, overfull
from everstep.schedule import Schedule
from everstep.workload import Workload

LEAST_GAIN = 0.01
"""Share of a step below which a schedule is not worth a change."""

ROUNDS_EACH = 4
"""Tries in one piece of the search: some milliseconds for a dozen nodes. Fewer where they have more than ``HOPS_EACH`` hops."""

HOPS_EACH = 1024

MOST_HOPS = 1024
"""A larger plan is left alone: one piece would hold up whoever searches, and with it the noticing of deaths, for too long."""


@dataclass(frozen=True, slots=True)
class Refined:
    """The plan with a better schedule; its routes may have changed, between nodes that hold the same layers."""

    answer: Priced
    schedule: Schedule
    before_s: float

    @property
    def gain(self) -> float:
        """The share of a step that is saved."""
        return 1 - self.answer.step_s / self.before_s


def refined(
    plan: Plan, workload: Workload, cluster: Cluster, worker_memory_bytes: int | None = None,
) -> Iterator[Refined | None]:
    """None after each piece of the search; at its end the best schedule, if it saves ``LEAST_GAIN`` and fits into memory."""
    before_s = step_seconds(plan, workload, cluster)
    windows = {node: frozenset(layers) for node, layers in plan.placement.items() if layers}
    speeds = {node: cluster.nodes[node].speed for node in windows}
    least_s = max(
        least_seconds(windows, workload, speeds, split=plan.order.split), 0.0,
        *shared_seconds(plan, workload, cluster).values(),
    )
    num_hops = sum(map(len, plan.routes))
    if plan.order.staggered or num_hops > MOST_HOPS or least_s > before_s * (1 - LEAST_GAIN):
        return
    caps = {node: cap_bytes(node, cluster, worker_memory_bytes) for node in plan.placement}
    tries = improvements(
        plan, workload, rounds_each=min(ROUNDS_EACH, max(1, HOPS_EACH // num_hops)), cluster=cluster,
        caps=caps if any(caps.values()) else None,
    )
    best = next(tries)
    for later in tries:
        best = later
        yield None
    answer = Priced(
        plan=best.plan, step_s=step_seconds(best.plan, workload, cluster, best.schedule),
        needed_bytes=node_bytes(best.plan, workload, best.schedule),
    )
    found = Refined(answer, best.schedule, before_s)
    if found.gain >= LEAST_GAIN and not overfull(answer.needed_bytes, cluster, worker_memory_bytes):
        yield found
