"""Recoveries in which single nodes change what they hold: a healthy one its role, an idle one takes one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from everstep.decision import Candidate
from everstep.plan import Plan, Route
from everstep.planner import objective
from everstep.planner.policies.pricing import candidate_of, no_answer
from everstep.planner.policies.routes import over_the_living, rerouted, with_slots
from everstep.planner.policies.situation import Situation, available, route_work_s
from everstep.planner.step.parts import grouped
from everstep.planner.step.schedules import streams
from everstep.quantities import NodeId, SiteId, node_number


def normalize(situation: Situation) -> list[Candidate]:
    """One healthy node changes its role, from where losses hurt least to where they hurt most.

    Proposed only where its new peers would then still have at least as much to do as those it leaves.
    """
    found = loads(situation)
    if isinstance(found, str):
        return [no_answer("normalize", found)]
    plan, load_s = found
    groups = _by_role(situation, plan, load_s)
    if len(groups) < 2:
        return [no_answer("normalize", "all nodes have the same role")]
    busiest = max(groups, key=lambda role: _mean(groups[role], load_s))
    others = [role for role, nodes in groups.items() if role != busiest and role[1] == busiest[1] and len(nodes) > 1]
    if not others:
        return [no_answer("normalize", "no role could spare a node")]
    calmest = min(others, key=lambda role: _mean(groups[role], load_s) / (1 - 1 / len(groups[role])))
    here, there = groups[busiest], groups[calmest]
    relieved_s = _mean(here, load_s) * len(here) / (len(here) + 1)
    burdened_s = _mean(there, load_s) * len(there) / (len(there) - 1)
    if relieved_s < burdened_s * (1 - objective.NOISE):
        return [no_answer("normalize", "losses sit where they hurt least")]
    node = min(there, key=lambda node: (load_s[node], node_number(node)))
    return [with_roles(situation, "normalize", {node: busiest[0]})]


def heal(situation: Situation) -> list[Candidate]:
    """Idle nodes, newcomers among them, take the layers whose holders have most to do."""
    found = loads(situation)
    if isinstance(found, str):
        return [no_answer("heal", found)]
    plan, load_s = found
    idle = [node for node in situation.usable if not load_s[node]]
    if not idle:
        return [no_answer("heal", "no node is idle")]
    groups = _by_role(situation, plan, load_s)
    total_s = {role: sum(load_s[node] for node in nodes) for role, nodes in groups.items()}
    even = {role: len(nodes) for role, nodes in groups.items()}
    roles: dict[NodeId, tuple[int, ...]] = {}
    for node in idle:
        here = {role: total_s[role] / even[role] for role in even if role[1] == _site_of(situation, node)}
        busiest = max(here, key=lambda role: here[role], default=None)
        if busiest is None or here[busiest] <= min(here.values()) * (1 + objective.NOISE):
            continue  # there is no hole to fill
        even[busiest] += 1
        roles[node] = busiest[0]
    if not roles:
        return [no_answer("heal", "there is no hole to fill")]
    return [with_roles(situation, "heal", roles)]


def loads(situation: Situation) -> tuple[Plan, dict[NodeId, float]] | str:
    """The plan with routes over the living, and the seconds of work that each node has in it."""
    return situation.remembered("loads", lambda: _loads_of(situation))


def _loads_of(situation: Situation) -> tuple[Plan, dict[NodeId, float]] | str:
    plan = over_the_living(situation)
    if isinstance(plan, str):
        return plan
    load_s = dict.fromkeys(situation.nodes, 0.0)
    found = grouped(plan.routes)
    for route, members in zip(found.routes, found.micro_batches, strict=True):
        for hop, hop_s in zip(route, route_work_s(situation, route), strict=True):
            load_s[hop.node] += len(members) * hop_s
    return plan, load_s


_Role = tuple[tuple[int, ...], SiteId | None]
"""What a node holds, and its site where there are several: nobody helps at another."""


def _by_role(situation: Situation, plan: Plan, load_s: Mapping[NodeId, float]) -> dict[_Role, list[NodeId]]:
    found: dict[_Role, list[NodeId]] = {}
    for node, layers in plan.placement.items():
        if load_s[node]:
            found.setdefault((layers, _site_of(situation, node)), []).append(node)
    return found


def _site_of(situation: Situation, node: NodeId) -> SiteId | None:
    return situation.cluster.nodes[node].site if situation.cluster.site_links else None


def _mean(nodes: Sequence[NodeId], load_s: Mapping[NodeId, float]) -> float:
    return sum(load_s[node] for node in nodes) / len(nodes)


def with_roles(situation: Situation, policy: str, roles: Mapping[NodeId, tuple[int, ...]]) -> Candidate:
    """Nodes hold other layers than before, and what peers do for others is shared out anew."""
    can = dict(available(situation)) | {node: frozenset(layers) for node, layers in roles.items()}
    plan = rerouted(situation, replace(situation.plan, routes=at_home(situation.plan.routes)), can)
    if isinstance(plan, str):
        return no_answer(policy, plan)
    return candidate_of(situation, policy, with_slots(situation, plan), "blocking")


def at_home(routes: tuple[Route, ...]) -> tuple[Route, ...]:
    """``routes`` without the hops at which nodes help in others' streams."""
    stream = dict(zip(map(id, routes), streams(routes), strict=True))
    by_object = {id(route): route for route in routes}
    visits: dict[tuple[NodeId, NodeId], int] = {}
    for name, count in Counter(map(id, routes)).items():
        for hop in by_object[name]:
            pair = (hop.node, stream[name])
            visits[pair] = visits.get(pair, 0) + count
    most: dict[NodeId, int] = {}
    home: dict[NodeId, NodeId] = {}
    for (node, there), count in visits.items():
        if count > most.get(node, 0):
            most[node], home[node] = count, there
    left: dict[int, Route] = {}
    for name, route in by_object.items():
        hops = tuple([hop for hop in route if home[hop.node] == stream[name]])
        left[name] = route if len(hops) == len(route) else hops
    return tuple([left[name] for name in map(id, routes)])
