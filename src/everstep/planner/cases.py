"""Losses that come to the same: nodes at the same stage of pipelines that are alike."""

from __future__ import annotations

from everstep.cluster import Cluster
from everstep.plan import Plan
from everstep.planner.step.cost import is_shared
from everstep.planner.step.parts import parts
from everstep.quantities import NodeId


def cases_of(plan: Plan, cluster: Cluster) -> dict[NodeId, NodeId]:
    """By node, the node whose loss is the same case: itself, or one at the same stage of a pipeline that is alike."""
    shared = is_shared(cluster)
    first: dict[tuple[object, ...], NodeId] = {}
    found: dict[NodeId, NodeId] = {}

    def likeness(node: NodeId) -> tuple[object, ...]:
        here = cluster.nodes[node]
        return (here.speed, here.memory_bytes, here.host if shared else "", plan.placement[node])

    for part in parts(plan):
        if not part.is_plain:
            found |= {node: node for node in part.nodes}
            continue
        (route,), (members,) = part.routes, part.micro_batches
        shape = (len(members), tuple((hop.first, hop.end, *likeness(hop.node)) for hop in route))
        for index, hop in enumerate(route):
            found[hop.node] = first.setdefault((*shape, index), hop.node)
    for node in plan.placement:
        if node not in found:
            found[node] = first.setdefault(("idle", *likeness(node)), node)
    return found
