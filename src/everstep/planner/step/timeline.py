"""A picture of a step: a line for each node, time to the right, what the node does at each moment, and idleness as dots."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.cluster import Cluster
from everstep.plan import Plan
from everstep.planner.step.cost import Span, action_spans
from everstep.planner.step.schedules import order_of
from everstep.quantities import NodeId, human_seconds
from everstep.schedule import Kind
from everstep.workload import Workload

MOST_ACTIONS = 20_000
"""A plan with more is not drawn: nobody could read it."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each node does what in a full step; reductions and updates, which follow, are not drawn."""

    nodes: tuple[NodeId, ...]
    spans: tuple[Span, ...]

    @property
    def end_s(self) -> float:
        return max((end_s for _, _, _, end_s in self.spans), default=0.0)


def timeline(plan: Plan, workload: Workload, cluster: Cluster, most_nodes: int = 16) -> Timeline | None:
    """The first ``most_nodes`` nodes that compute. None: the plan has too many actions to be drawn."""
    if 3 * sum(map(len, plan.routes)) > MOST_ACTIONS:
        return None
    idle = set(plan.spares)
    nodes = tuple(node for node in plan.nodes if node not in idle)[:most_nodes]
    shown = set(nodes)
    spans = action_spans(plan, workload, cluster, order_of(plan))
    return Timeline(nodes, tuple(span for span in spans if span[0] in shown))


def text(picture: Timeline, width: int = 96) -> str:
    """``F`` forward, ``B`` backward, ``W`` weight gradients; a moment shows what takes most of it."""
    if not picture.end_s:
        return ""
    moment_s = picture.end_s / width
    label = max(len(node) for node in picture.nodes)
    lines = []
    for node in picture.nodes:
        filled_s: list[dict[str, float]] = [{} for _ in range(width)]
        for member, action, start_s, end_s in picture.spans:
            if member != node:
                continue
            for moment in range(int(start_s / moment_s), min(width, int(end_s / moment_s) + 1)):
                shared_s = min(end_s, (moment + 1) * moment_s) - max(start_s, moment * moment_s)
                kind = _LETTERS[action.kind]
                filled_s[moment][kind] = filled_s[moment].get(kind, 0.0) + max(0.0, shared_s)
        lines.append(f"{node.ljust(label)} {''.join(_letter(found, moment_s) for found in filled_s)}")
    return "\n".join([*lines, f"{' ' * label} 0 to {human_seconds(picture.end_s)}"])


_LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.WEIGHT: "W"}


def _letter(found: dict[str, float], moment_s: float) -> str:
    idle_s = moment_s - sum(found.values())
    most = max(found, key=lambda letter: found[letter], default=".")
    return "." if most == "." or found[most] < idle_s else most
