"""How many losses a plan survives, and what becomes of candidates that survive fewer than was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from everstep.cluster import Cluster
from everstep.decision import Candidate
from everstep.plan import Plan
from everstep.planner.policies.pricing import no_answer
from everstep.planner.policies.situation import Situation
from everstep.planner.step.parts import Held, holders, holders_by_unit, kinds_of
from everstep.quantities import HostId, NodeId
from everstep.workload import Workload

LIKELY = 0.05
"""A chance that is worth a slower plan."""


def wary(situation: Situation) -> Situation:
    """As if two losses had to be survived, where after one another is likely before what it took is copied anew."""
    if situation.config.tolerate >= 2:
        return situation
    held = Held.of(situation.workload)
    fullest_bytes = max((held.held_bytes(layers) for layers in holders(situation.plan.placement)), default=0)
    copied_s = situation.switch_s + situation.cluster.link.seconds(fullest_bytes)
    if 1 - situation.gap.survival(copied_s) < LIKELY:
        return situation
    return replace(situation, config=replace(situation.config, tolerate=2))


def only_sturdy(situation: Situation, candidates: list[Candidate], *, asked: bool = True) -> list[Candidate]:
    """``candidates`` without those after which ``tolerate`` losses could take the last holder of a layer.

    Of two phases the second counts. If none is left they all stay, with a note that says what cannot be had and why; if it
    was not ``asked`` for, but follows from being wary, without one.
    """
    losses = situation.config.tolerate
    if not losses:
        return candidates
    workload, cluster = situation.workload, situation.cluster
    wrong = {
        index: too_few_holders(candidate.settled, workload, losses)
        for index, candidate in enumerate(candidates) if candidate.settled is not None
    }
    if not wrong:
        return candidates
    if all(wrong.values()):
        return candidates if not asked else [
            replace(candidate, note=f"{_any(losses, 'node')} cannot be survived: {wrong[index]}") if index in wrong
            else candidate for index, candidate in enumerate(candidates)
        ]
    found = []
    for index, candidate in enumerate(candidates):
        plan = candidate.settled
        if plan is None:
            found.append(candidate)
        elif wrong[index]:
            why = "" if asked else ", and that is likely before state is copied anew"
            found.append(no_answer(candidate.policy, f"{_any(losses, 'node')} would not be survived{why}: {wrong[index]}"))
        else:
            found.append(replace(candidate, note=_about_hosts(plan, workload, cluster, losses)) if asked else candidate)
    return found


def sturdy_words(plan: Plan, workload: Workload, cluster: Cluster, losses: int) -> str:
    """What to know of ``plan`` where any ``losses`` should be survived; empty: they are, of nodes and of hosts."""
    wrong = too_few_holders(plan, workload, losses) if losses else ""
    if wrong:
        return f"{_any(losses, 'node')} cannot be survived: {wrong}"
    return _about_hosts(plan, workload, cluster, losses) if losses else ""


def too_few_holders(plan: Plan, workload: Workload, losses: int, hosts: Mapping[NodeId, HostId] | None = None) -> str:
    """The layer that so many losses could take away: ``layer l3 has 1 holder``; empty where there is none.

    ``hosts``: where each node is, if it is hosts that are lost.
    """
    kinds = kinds_of(plan)
    members = [{hosts[node] if hosts else node for node in nodes} for nodes in kinds.values()]
    fewest, worst = losses + 1, ""
    for name, indices in holders_by_unit(list(kinds), workload).items():
        count = len(set[str]().union(*(members[index] for index in indices)))
        if count < fewest:
            fewest, worst = count, workload.layers[workload.units[name].layers[0]].name
    if not worst:
        return ""
    return f"layer {worst} {'is on' if hosts else 'has'} {_counted(fewest, 'host' if hosts else 'holder')}"


def _about_hosts(plan: Plan, workload: Workload, cluster: Cluster, losses: int) -> str:
    """What is to be said where several nodes share a host and so many hosts would take the last holder of a layer."""
    hosts = {node_id: node.host for node_id, node in cluster.nodes.items()}
    if len(set(hosts.values())) in (1, len(hosts)):
        return ""
    wrong = too_few_holders(plan, workload, losses, hosts)
    return f"survives {_any(losses, 'node')}, not {_any(losses, 'host')}: {wrong}" if wrong else ""


def _any(count: int, noun: str) -> str:
    return f"the loss of any {noun}" if count == 1 else f"the loss of any {count} {noun}s"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
