"""Answers worked out before they are asked for: what to do if one node were lost next, for each node that could be.

Nodes at the same stage of pipelines that are alike are one case: the answer for one is the answer for the other with the
names of the two pipelines exchanged. What is kept are candidates with their costs; the score is taken when it happens,
because the expected gap and the age of the checkpoint are known only then. An answer is void when the plan or what nodes
hold is another, or when measured costs have moved by more than ``DRIFT`` since.

``prepared`` is a generator: whoever has time takes the next answer out of it, and may stop at any point.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from everstep.decision import Candidate
from everstep.plan import Hop, Plan, Route
from everstep.planner.cases import cases_of
from everstep.planner.policies.pricing import at_risk, valued
from everstep.planner.policies.situation import Situation
from everstep.planner.policies.table import propose
from everstep.quantities import NodeId
from everstep.workload import Workload

DRIFT = 0.1
"""Relative change of a layer's time beyond which answers and tables are worked out again."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The answer for the loss of ``node``, and of every node that stands for the same case."""

    node: NodeId
    situation: Situation
    candidates: tuple[Candidate, ...]
    risks: tuple[tuple[float, float], ...]
    """The share of nodes that would hold an only copy, by candidate: in its plan, and in the later one of two phases."""


def prepared(base: Situation) -> Iterator[Prepared]:
    """An answer for each different single loss in ``base``, where nobody is lost; the most numerous cases first."""
    cases = cases_of(base.plan, base.cluster)
    counts: dict[NodeId, int] = {}
    for node in cases.values():
        counts[node] = counts.get(node, 0) + 1
    for node in sorted(counts, key=lambda node: -counts[node]):
        if len(base.cluster.nodes) == 1:
            return
        lost = frozenset({node})
        situation = replace(
            base, cluster=base.cluster.without(lost), lost=(node,),
            holds={member: units for member, units in base.holds.items() if member != node},
        )
        candidates = propose(situation)
        risks = [(_risk(each.plan, base.workload), _risk(each.later, base.workload)) for each in candidates]
        yield Prepared(node, situation, tuple(candidates), tuple(risks))


def _risk(plan: Plan | None, workload: Workload) -> float:
    return at_risk(plan, workload) if plan is not None else 0.0


def answered(known: Prepared, node: NodeId, now: Situation) -> list[Candidate]:
    """The candidates of ``known`` for the loss of ``node``, scored for ``now``."""
    names = _exchange(now.plan, known.node, node)
    found = []
    for candidate, (risk, later_risk) in zip(known.candidates, known.risks, strict=True):
        if candidate.plan is None:
            found.append(candidate)
            continue
        stall_s, restore_step = candidate.stall_s, candidate.restore_step
        if candidate.way == "restore":
            stall_s -= max(0, known.situation.step - (candidate.restore_step or 0)) * candidate.step_s
            restore_step = now.checkpoint.step if now.checkpoint else 0
            stall_s += max(0, now.step - restore_step) * candidate.step_s
        found.append(valued(now, replace(
            candidate, plan=renamed(candidate.plan, names), later=candidate.later and renamed(candidate.later, names),
            stall_s=stall_s, restore_step=restore_step,
        ), risk=risk, later_risk=later_risk))
    return found


def _exchange(plan: Plan, one: NodeId, other: NodeId) -> Mapping[NodeId, NodeId]:
    """Names to change so that what was said about ``one`` is said about ``other``."""
    if one == other:
        return {}
    routes = {hop.node: route for route in {id(route): route for route in plan.routes}.values() for hop in route}
    if one not in routes:
        return {one: other, other: one}
    pairs = [(here.node, there.node) for here, there in zip(routes[one], routes[other], strict=True)]
    return {**dict(pairs), **{there: here for here, there in pairs}}


def renamed(plan: Plan, names: Mapping[NodeId, NodeId]) -> Plan:
    """``plan`` with nodes called by their new names."""
    if not names:
        return plan

    def hop_of(hop: Hop) -> Hop:
        if hop.node not in names and hop.shadow not in names:
            return hop
        shadow = names.get(hop.shadow, hop.shadow) if hop.shadow else None
        return Hop(names.get(hop.node, hop.node), hop.first, hop.end, shadow)

    changed: dict[int, Route] = {
        name: tuple([hop_of(hop) for hop in route]) for name, route in {id(route): route for route in plan.routes}.items()
    }
    return replace(
        plan, placement={names.get(node, node): layers for node, layers in plan.placement.items()},
        room={names.get(node, node): layers for node, layers in plan.room.items()},
        routes=tuple([changed[id(route)] for route in plan.routes]),
    )


def drift(before: Workload, now: Workload) -> float:
    """The largest relative change of a layer's time, or of what a step costs besides."""
    if before is now:
        return 0.0
    pairs = [(old.total_s, new.total_s) for old, new in zip(before.layers, now.layers, strict=True)]
    pairs.append((before.fixed_s, now.fixed_s))
    return max(abs(new - old) / old if old else float(new > 0) for old, new in pairs)
