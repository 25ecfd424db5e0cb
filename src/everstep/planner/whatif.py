"""What would be done if nodes were lost or came: the planner's answer without a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from everstep.cluster import Cluster, Node
from everstep.config import PlannerConfig, Policy
from everstep.decision import Candidate, Decision
from everstep.errors import ConfigError
from everstep.plan import Plan
from everstep.planner import objective
from everstep.planner.first import Split, first_plan
from everstep.planner.parts import units_by_layers
from everstep.planner.policies.situation import CheckpointInfo, Situation
from everstep.planner.policies.table import decide
from everstep.quantities import NodeId, UnitName, node_number
from everstep.workload import Workload

REDO_STEPS = 25
"""How long ago the last checkpoint was, in steps: half the default interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The plan before, and what would follow. Without losses and newcomers the decision is the one of the start."""

    before: Plan
    before_step_s: float
    decision: Decision

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
) -> WhatIf:
    """The first plan for ``cluster``, then the decision if ``lose`` were lost and ``add`` nodes joined, all at once.

    ``gap_s`` and ``policy`` replace those of ``config``. The last checkpoint is taken to be ``REDO_STEPS`` steps old.
    ``start``: what runs, where the caller has it already from ``running``.

    Raises:
        ConfigError: a lost node is not in the cluster, or none would be left.
        InfeasibleError: no plan fits, before or after; ``rejected`` says why.
    """
    config = replace(config, gap_s=gap_s if gap_s is not None else config.gap_s, policy=policy or config.policy)
    unknown = [node for node in lose if node not in cluster.nodes]
    if unknown:
        raise ConfigError(f"{', '.join(unknown)} not in the cluster; nodes are {_few(tuple(cluster.nodes))}")
    start = running(cluster, workload, config, split=split) if start is None else start
    before, before_step_s = start.plan, start.candidate.step_s
    if not lose and not add:
        return WhatIf(before=before, before_step_s=before_step_s, decision=start)
    after, joined = with_newcomers(cluster, add)
    after = after.without(frozenset(lose))
    if not after.nodes:
        raise ConfigError("no node would be left")
    situation = Situation(
        cluster=after, workload=workload, plan=before, holds=_holds(before, workload, after), lost=lose, joined=joined,
        step=REDO_STEPS, checkpoint=CheckpointInfo(step=0, path="checkpoint"), gap_s=config.gap_s, config=config,
        redo_steps=REDO_STEPS,
    )
    candidates, chosen = decide(situation)
    events = [f"{_few(nodes)} {word}" for nodes, word in ((lose, "lost"), (joined, "joined")) if nodes]
    decision = Decision(
        cause="; ".join(events), view=2, step=situation.step, lost=lose, gap_s=config.gap_s,
        candidates=objective.explained(candidates, chosen), chosen=chosen,
    )
    return WhatIf(before=before, before_step_s=before_step_s, decision=decision)


def _few(nodes: tuple[NodeId, ...], most: int = 32) -> str:
    more = f" and {len(nodes) - most} more" if len(nodes) > most else ""
    return ", ".join(nodes[:most]) + more


def with_newcomers(cluster: Cluster, count: int) -> tuple[Cluster, tuple[NodeId, ...]]:
    """``count`` more nodes like the last one, numbered on."""
    like = cluster.nodes[max(cluster.nodes, key=node_number)]
    names = [NodeId(f"n{node_number(like.node_id) + number}") for number in range(1, count + 1)]
    nodes: dict[NodeId, Node] = {**cluster.nodes, **{name: replace(like, node_id=name) for name in names}}
    return replace(cluster, nodes=nodes), tuple(names)


def _holds(plan: Plan, workload: Workload, cluster: Cluster) -> Mapping[NodeId, frozenset[UnitName]]:
    units = units_by_layers([(), *plan.placement.values()], workload)
    return {node: units[plan.placement.get(node, ())] for node in cluster.nodes}
