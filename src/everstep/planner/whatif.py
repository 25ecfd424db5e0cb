"""What would be done if nodes were lost or came: the planner's answer without a run."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from everstep.cluster import Cluster, Node
from everstep.config import PlannerConfig, Policy
from everstep.decision import Candidate, Decision, Way
from everstep.errors import ConfigError
from everstep.plan import Plan
from everstep.planner import objective
from everstep.planner.first import Split, first_plan
from everstep.planner.policies.situation import CheckpointInfo, Situation
from everstep.planner.policies.table import decide
from everstep.planner.step.memory import cap_bytes
from everstep.planner.step.pace import pace
from everstep.planner.step.parts import Held, units_by_layers
from everstep.quantities import HostId, NodeId, SiteId, UnitName, node_number
from everstep.workload import Workload

REDO_STEPS = 25
"""How long ago the last checkpoint was, in steps: half the default interval."""

ALL_WAYS: frozenset[Way] = frozenset(get_args(Way))


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The plan before, and what would follow. Without losses and newcomers the decision is the one of the start."""

    before: Plan
    before_step_s: float
    decision: Decision
    cluster: Cluster
    """After the event."""

    @property
    def plan(self) -> Plan:
        return self.decision.plan

    @property
    def step_s(self) -> float:
        return self.decision.candidate.step_s

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self.decision.candidates

    @property
    def chosen(self) -> Candidate:
        return self.decision.candidate


def running(cluster: Cluster, workload: Workload, config: PlannerConfig, *, split: Split = "auto") -> Decision:
    """The first plan for ``cluster``: what would run before anything happens.

    Raises:
        InfeasibleError: no plan fits; ``rejected`` says why.
    """
    return first_plan(tuple(cluster.nodes), workload, cluster, config, split=split, redo_steps=REDO_STEPS)


def what_if(
    cluster: Cluster, workload: Workload, config: PlannerConfig, *, lose: tuple[NodeId, ...] = (), add: int = 0,
    gap_s: float | None = None, policy: Policy | None = None, split: Split = "auto", start: Decision | None = None,
    ways: frozenset[Way] = ALL_WAYS,
) -> WhatIf:
    """The first plan for ``cluster``, then the decision if ``lose`` were lost and ``add`` nodes joined, all at once.

    ``gap_s`` and ``policy`` replace those of ``config``. The last checkpoint is taken to be ``REDO_STEPS`` steps old.
    ``start``: what runs, where the caller has it already from ``running``. ``ways``: how a plan may be reached.

    Raises:
        ConfigError: a lost node is not in the cluster, or none would be left.
        InfeasibleError: no plan fits, before or after; ``rejected`` says why.
    """
    config = replace(config, gap_s=gap_s if gap_s is not None else config.gap_s, policy=policy or config.policy)
    unknown = [node for node in lose if node not in cluster.nodes]
    if unknown:
        raise ConfigError(f"{', '.join(unknown)} not in the cluster; nodes are {runs(tuple(cluster.nodes))}")
    start = running(cluster, workload, config, split=split) if start is None else start
    before, before_step_s = start.plan, start.candidate.step_s
    if not lose and not add:
        return WhatIf(before=before, before_step_s=before_step_s, decision=start, cluster=cluster)
    after, joined = with_newcomers(cluster, add)
    after = after.without(frozenset(lose))
    if not after.nodes:
        raise ConfigError("no node would be left")
    situation = Situation(
        cluster=after, workload=workload, plan=before, holds=_holds(before, workload, after), lost=lose, joined=joined,
        step=REDO_STEPS, checkpoint=CheckpointInfo(step=0, path="checkpoint"), gap_s=config.gap_s, config=config,
        redo_steps=REDO_STEPS, ways=ways,
    )
    candidates, chosen = decide(situation)
    events = [f"{named(lose, cluster)} lost"] if lose else []
    events += [f"{runs(joined)} joined"] if joined else []
    decision = Decision(
        cause="; ".join(events), view=2, step=situation.step, lost=lose, gap_s=config.gap_s,
        candidates=objective.explained(candidates, chosen), chosen=chosen,
    )
    return WhatIf(before=before, before_step_s=before_step_s, decision=decision, cluster=after)


def nodes_named(text: str, cluster: Cluster) -> tuple[NodeId, ...]:
    """``n3,host:h1,site:west``: a node, all of a host, all of a site, each node once.

    Raises:
        ConfigError: a host or a site is not in the cluster.
    """
    hosts, sites = cluster.hosts(), cluster.sites()
    found: dict[NodeId, None] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        kind, colon, name = word.partition(":")
        if not colon:
            found[NodeId(word)] = None
        elif kind == "host":
            found |= dict.fromkeys(_known(name.strip(), hosts, "host"))
        elif kind == "site":
            found |= dict.fromkeys(_known(name.strip(), sites, "site"))
        else:
            raise ConfigError(f"{word}: want a node such as n3, host:NAME or site:NAME")
    return tuple(found)


def _known(
    name: str, groups: Mapping[HostId, Sequence[NodeId]] | Mapping[SiteId, Sequence[NodeId]], kind: str,
) -> Sequence[NodeId]:
    by_name: dict[str, Sequence[NodeId]] = {str(known): nodes for known, nodes in groups.items()}
    if name not in by_name:
        near = difflib.get_close_matches(name, list(by_name), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"no {kind} {name!r} in the cluster; {kind}s are {_few(list(by_name))}{hint}")
    return by_name[name]


def named(nodes: Sequence[NodeId], cluster: Cluster) -> str:
    """``host h1 (n8–n15), n3``: sites and hosts that are gone with all of their several nodes by name."""
    rest = dict.fromkeys(nodes)
    words = []
    groups = [(f"site {site}", members) for site, members in cluster.sites().items()]
    groups += [(f"host {host}", members) for host, members in cluster.hosts().items()]
    for name, members in groups:
        if 1 < len(members) < len(cluster.nodes) and all(node in rest for node in members):
            words.append(f"{name} ({runs(members)})")
            for node in members:
                del rest[node]
    return ", ".join([*words, *([runs(tuple(rest))] if rest else [])])


def runs(nodes: Sequence[NodeId], most: int = 12) -> str:
    """``n0–n7, n9``: neighbours together, two as two; ``and 3 more`` where there are many."""
    found: list[list[NodeId]] = []
    for node in sorted(nodes, key=node_number):
        if found and node_number(node) == node_number(found[-1][-1]) + 1:
            found[-1].append(node)
        else:
            found.append([node])
    words = [word for each in found for word in ([f"{each[0]}–{each[-1]}"] if len(each) > 2 else each)]
    return _few(words, most)


def _few(words: Sequence[str], most: int = 12) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What nodes that are alike need of their memory while a step is computed."""

    nodes: tuple[NodeId, ...]
    layers: tuple[int, ...]
    state_bytes: int
    """Parameters, optimizer state and gradient sums."""
    active_bytes: int
    """Activations at their peak."""
    cap_bytes: int | None
    """What there is. None: not limited."""

    @property
    def total_bytes(self) -> int:
        return self.state_bytes + self.active_bytes


def needs_of(plan: Plan, workload: Workload, cluster: Cluster, worker_memory_bytes: int | None = None) -> list[Need]:
    """Memory by node, alike nodes together, the fullest first."""
    active = pace(plan, workload, cluster).active_bytes
    held = Held.of(workload)
    alike: dict[tuple[tuple[int, ...], int, int | None], list[NodeId]] = {}
    for node, layers in plan.placement.items():
        key = (layers, active.get(node, 0), cap_bytes(node, cluster, worker_memory_bytes))
        alike.setdefault(key, []).append(node)
    found = [
        Need(
            nodes=tuple(sorted(nodes, key=node_number)), layers=layers, state_bytes=held.held_bytes(layers),
            active_bytes=active_bytes, cap_bytes=cap,
        )
        for (layers, active_bytes, cap), nodes in alike.items()
    ]
    return sorted(found, key=lambda need: (-need.total_bytes, node_number(need.nodes[0])))


def with_newcomers(cluster: Cluster, count: int) -> tuple[Cluster, tuple[NodeId, ...]]:
    """``count`` more nodes like the last one, numbered on."""
    like = cluster.nodes[max(cluster.nodes, key=node_number)]
    names = [NodeId(f"n{node_number(like.node_id) + number}") for number in range(1, count + 1)]
    nodes: dict[NodeId, Node] = {**cluster.nodes, **{name: replace(like, node_id=name) for name in names}}
    return replace(cluster, nodes=nodes), tuple(names)


def _holds(plan: Plan, workload: Workload, cluster: Cluster) -> Mapping[NodeId, frozenset[UnitName]]:
    units = units_by_layers([(), *plan.placement.values()], workload)
    return {node: units[plan.placement.get(node, ())] for node in cluster.nodes}
