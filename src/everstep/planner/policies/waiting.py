"""Waiting for somebody who is known to be back within seconds: a flapping link, a replacement that is on its way."""

from __future__ import annotations

from dataclasses import replace

from everstep.decision import Candidate
from everstep.planner.policies.pricing import CANNOT, candidate_of, no_answer, valued
from everstep.planner.policies.routes import in_places, rerouted
from everstep.planner.policies.situation import Situation, available
from everstep.quantities import NodeId, UnitName, human_seconds, node_number


def wait(situation: Situation) -> list[Candidate]:
    """Nothing changes until all who are expected are there; then the plan before goes on, with them in it.

    Who is expected under another name than any in the plan takes the place of somebody lost. Who does not keep its state
    gets it first. The candidate's plan names nodes that are not there yet.
    """
    if not situation.expected:
        return [no_answer("wait", "nobody is expected")]
    if "wait" not in situation.ways:
        return [no_answer("wait", CANNOT["wait"])]
    then = _when_all_are_there(situation)
    places = _places(situation)
    before = in_places(situation.plan, places)
    can = {**available(then), **{
        node: frozenset(before.placement[node]) for node in situation.expected if node in before.placement
    }}
    plan = rerouted(then, before, can)
    if isinstance(plan, str):
        return [no_answer("wait", f"with who is expected, {plan}")]
    found = candidate_of(then, "wait", plan, "blocking")
    if not found.feasible:
        return [found]
    awaited_s = max(situation.expected.values())
    names = ", ".join(sorted(situation.expected, key=node_number))
    return [valued(situation, replace(
        found, way="wait", stall_s=awaited_s + found.stall_s, reason=f"{names} expected in {human_seconds(awaited_s)}",
    ))]


def _when_all_are_there(situation: Situation) -> Situation:
    """With who is expected among the living. What is not known of them is taken to be as with another node."""
    like = next(iter(situation.cluster.nodes.values()))
    nodes = {**{node: replace(like, node_id=node) for node in situation.expected}, **situation.cluster.nodes}
    nothing = {node: frozenset[UnitName]() for node in situation.expected}
    return replace(
        situation, cluster=replace(situation.cluster, nodes=nodes), holds={**nothing, **situation.holds}, expected={},
    )


def _places(situation: Situation) -> dict[NodeId, NodeId]:
    """Who comes into whose place: those whom the plan does not know take places of who is gone for good."""
    plan = situation.plan
    gone = [node for node in plan.nodes if node not in situation.cluster.nodes and node not in situation.expected]
    new = [node for node in sorted(situation.expected, key=node_number) if node not in plan.placement]
    return dict(zip(gone, new, strict=False))
