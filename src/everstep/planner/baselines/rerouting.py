"""Published systems that keep the layout after a loss, on plans: plain rerouting, ReCycle, torchft.

All are for pipelines that are cut alike; where they are not, none has an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from everstep.decision import Candidate
from everstep.plan import Hop, Plan, Route
from everstep.planner.baselines.grids import NOT_ALIKE, cuts_of, one_more
from everstep.planner.policies.pricing import candidate_of, copied_behind, no_answer
from everstep.planner.policies.roles import heal, normalize
from everstep.planner.policies.routes import keep, placement_of, reroute, shrink, without_lost_shadows
from everstep.planner.policies.situation import Situation, available, is_broken
from everstep.planner.step.cost import is_shared
from everstep.quantities import NodeId, node_number


def called(policy: str, candidates: list[Candidate]) -> list[Candidate]:
    """``candidates`` under another name, with their own in the words."""
    return [
        replace(each, policy=policy, reason=" ".join(filter(None, [each.policy, each.reason]))) if each.feasible
        else replace(each, policy=policy, reason=f"{each.policy}: {each.reason}") for each in candidates
    ]


def plain_reroute(situation: Situation) -> list[Candidate]:
    """The failed stage's micro-batches go round-robin to its peers, and nothing else changes (equations 12 and 13).

    A newcomer fills a hole, or stays a spare.
    """
    if not is_broken(situation):
        return called("plain-reroute", [*keep(situation), *heal(situation)])
    plan = in_turn(situation)
    if isinstance(plan, str):
        return [no_answer("plain-reroute", plan)]
    return [candidate_of(situation, "plain-reroute", plan, "now")]


def in_turn(situation: Situation) -> Plan | str:
    """The plan before with each lost hop given to the peers of its stage in turn; or why it cannot be."""
    if cuts_of(situation.plan) is None:
        return NOT_ALIKE
    can = available(situation)
    peers: dict[tuple[int, int], list[NodeId]] = {}
    turns: dict[NodeId, int] = {}
    routes: list[Route] = []
    for route in situation.plan.routes:
        hops = []
        for hop in route:
            if can.get(hop.node, frozenset()).issuperset(hop.layers):
                hops.append(hop)
                continue
            stage = (hop.first, hop.end)
            if stage not in peers:
                peers[stage] = _peers(situation.plan, hop, can)
            if not peers[stage]:
                return f"nobody is left at the stage of {hop.node}"
            turns[hop.node] = turns.get(hop.node, -1) + 1
            peer = peers[stage][turns[hop.node] % len(peers[stage])]
            if any(other.node == peer for other in (*route, *hops)):
                return f"a micro-batch would visit {peer} twice"
            hops.append(replace(hop, node=peer, shadow=None))
        routes.append(route if hops == list(route) else tuple(hops))
    plan = replace(situation.plan, routes=tuple(routes), placement=placement_of(can, situation.nodes))
    return without_lost_shadows(plan)


def _peers(plan: Plan, lost: Hop, can: Mapping[NodeId, frozenset[int]]) -> list[NodeId]:
    """Who computes the stage of ``lost`` in another pipeline, and lives."""
    busy = {hop.node for route in plan.pipelines() for hop in route if (hop.first, hop.end) == (lost.first, lost.end)}
    return sorted((node for node in busy if can.get(node, frozenset()).issuperset(lost.layers)), key=node_number)


def recycle(situation: Situation) -> list[Candidate]:
    """Rerouting into bubbles, with split backward where nodes have devices of their own; and a node that changes its role
    where losses sit where they hurt most. Updates are staggered if the run's are. A newcomer fills a hole. Stages stay whole.
    """
    situation = replace(situation, passes_on=False)
    if cuts_of(situation.plan) is None:
        return [no_answer("recycle", NOT_ALIKE)]
    if not is_broken(situation):
        return called("recycle", [*keep(situation), *heal(situation)])
    found = reroute(situation)
    plan = found[0].plan
    if plan is not None and not plan.order.split and not is_shared(situation.cluster):
        split = replace(plan, order=replace(plan.order, split=True))
        found.append(candidate_of(situation, "reroute", split, "now", "with split backward"))
    return called("recycle", [*found, *normalize(situation), *heal(situation)])


def torchft(situation: Situation) -> list[Candidate]:
    """A replica that met who is gone is dropped; it comes back when there are enough nodes for a whole one."""
    if is_broken(situation):
        return called("torchft", shrink(situation))
    (now,) = called("torchft", keep(situation))
    cuts = cuts_of(situation.plan)
    plan = one_more(situation, now.plan, cuts) if cuts and now.plan is not None else None
    if plan is None:
        return [now]
    whole = candidate_of(situation, "torchft", plan, "blocking", "one more replica")
    if "behind" in situation.ways and whole.way == "blocking" and whole.feasible:
        return [now, copied_behind(situation, "torchft", now, whole)]
    return [now, whole]
