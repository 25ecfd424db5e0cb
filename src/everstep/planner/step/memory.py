"""Bytes that a plan needs on each node, counted along its schedule, and whether they fit.

State is held by whoever is placed on a layer, each unit once. Activations of a micro-batch are held from its forward on a
hop until the last backward there, so their peak follows from the order of actions and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import accumulate, cycle

from everstep.cluster import Cluster
from everstep.plan import Plan
from everstep.planner.remembered import Same, remembered
from everstep.planner.step.parts import Held, Part, alike, holders
from everstep.planner.step.schedules import order_of
from everstep.quantities import NodeId, human_bytes
from everstep.schedule import Kind, Schedule
from everstep.workload import Workload


def node_bytes(plan: Plan, workload: Workload, schedule: Schedule | None = None) -> dict[NodeId, int]:
    """Most bytes that each node of ``plan`` needs at once: state, gradient sums and activations."""
    schedule = order_of(plan) if schedule is None else schedule
    running = tuple(accumulate((layer.activation_bytes for layer in workload.layers), initial=0))
    freeing = Kind.WEIGHT if plan.order.split else Kind.BACKWARD
    found: dict[NodeId, int] = {}
    for node, order in schedule.items():
        held = peak = 0
        for action in order:
            if action.kind is Kind.FORWARD or action.kind is freeing:
                hop = plan.routes[action.micro_batch][action.hop]
                size = running[hop.end] - running[hop.first]
                held += size if action.kind is Kind.FORWARD else -size
                peak = max(peak, held)
        found[node] = peak
    return needed_bytes(plan, workload, found)


def needed_bytes(plan: Plan, workload: Workload, active_bytes: Mapping[NodeId, int]) -> dict[NodeId, int]:
    """The same where the peaks of activations are known already."""
    held = Held.of(workload)
    state = {layers: held.held_bytes(layers) for layers in holders(plan.placement)}
    return {node: state[layers] + active_bytes.get(node, 0) for node, layers in plan.placement.items()}


def rooms(plan: Plan, workload: Workload, caps: Mapping[NodeId, int | None]) -> dict[NodeId, int]:
    """``Plan.room`` for nodes that may use ``caps`` bytes: all that state leaves, but at most what keeps a node busy.

    That is, beside what 1F1B holds, a micro-batch for each hop of the longest route: with more nothing gets faster. None: not
    limited, and nothing is said about that node. A layer counts as the dearest of the node's hops does on average.
    """
    plain, others = alike(plan.routes)
    routes = [*(shape.routes[0] for shape in plain), *(route for part in others for route in part.routes)]
    longest = max(map(len, routes), default=0)
    same = Same(workload)
    found: dict[NodeId, int | None] = {}
    for shape in plain:
        hops = [(hop.first, hop.end) for hop in shape.routes[0]]
        placed = [plan.placement[node] for node in shape.nodes]
        capped = [caps.get(node) for node in shape.nodes]
        count = len(hops)
        if placed == placed[:count] * len(shape.routes) and capped == capped[:count] * len(shape.routes):
            each = _rooms_of(same, tuple(hops), tuple(placed[:count]), tuple(capped[:count]), longest)
            found.update(zip(shape.nodes, cycle(each), strict=False))
        else:
            for start in range(0, len(placed), count):
                own = slice(start, start + count)
                each = _rooms_of(same, tuple(hops), tuple(placed[own]), tuple(capped[own]), longest)
                found.update(zip(shape.nodes[own], each, strict=True))
    for part in others:
        found.update(_rooms_in(part, plan, workload, caps, longest))
    return {node: room for node, room in found.items() if room is not None}


@lru_cache(maxsize=1 << 10)
def _rooms_of(
    workload: Same[Workload], hops: tuple[tuple[int, int], ...], placed: tuple[tuple[int, ...], ...],
    caps: tuple[int | None, ...], longest: int,
) -> tuple[int | None, ...]:
    """By hop of a plain pipeline; ``placed``: what its nodes hold."""
    active = _active_bytes(workload.value)
    sizes = [((active[end] - active[first]) / (end - first), end - first) for first, end in hops]
    return tuple([
        _room(workload.value, placed[index], caps[index], layer_bytes, (len(hops) - index + longest) * layers)
        for index, (layer_bytes, layers) in enumerate(sizes)
    ])


def _rooms_in(
    part: Part, plan: Plan, workload: Workload, caps: Mapping[NodeId, int | None], longest: int,
) -> dict[NodeId, int | None]:
    """The same for the nodes of a part that is not plain."""
    active = _active_bytes(workload)
    most: dict[NodeId, int] = {}
    layer_bytes: dict[NodeId, float] = {}
    for route in part.routes:
        for index, hop in enumerate(route):
            layers = hop.end - hop.first
            most[hop.node] = max(most.get(hop.node, 0), (len(route) - index + longest) * layers)
            layer_bytes[hop.node] = max(layer_bytes.get(hop.node, 0.0), (active[hop.end] - active[hop.first]) / layers)
    return {
        node: _room(workload, plan.placement[node], caps.get(node), layer_bytes[node], enough) for node, enough in most.items()
    }


def _room(workload: Workload, layers: tuple[int, ...], cap: int | None, layer_bytes: float, enough: int) -> int | None:
    if cap is None or not layer_bytes:
        return None
    return max(0, min(enough, int((cap - Held.of(workload).held_bytes(layers)) / layer_bytes)))


@remembered(16)
def _active_bytes(workload: Workload) -> tuple[int, ...]:
    """Running sums over the layers."""
    return tuple(accumulate((layer.activation_bytes for layer in workload.layers), initial=0))


def caps_of(nodes: Iterable[NodeId], cluster: Cluster, worker_memory_bytes: int | None) -> dict[NodeId, int | None]:
    """``cap_bytes`` of each node."""
    least, most = _caps(cluster)
    if least == most:
        cap = min(least, float("inf") if worker_memory_bytes is None else worker_memory_bytes)
        return dict.fromkeys(nodes, None if cap == float("inf") else int(cap))
    return {node: cap_bytes(node, cluster, worker_memory_bytes) for node in nodes}


def have_one_cap(cluster: Cluster) -> bool:
    """Whether all nodes have the same memory."""
    least, most = _caps(cluster)
    return least == most


def cap_bytes(node: NodeId, cluster: Cluster, worker_memory_bytes: int | None) -> int | None:
    """What ``node`` may use: the smaller of its own memory and the limit set for all; None: not limited."""
    own = cluster.nodes[node].memory_bytes
    return min((cap for cap in (own, worker_memory_bytes) if cap is not None), default=None)


def overfull(needed: Mapping[NodeId, int], cluster: Cluster, worker_memory_bytes: int | None) -> str:
    """Why it does not fit, naming the node that lacks most: ``n3 needs 32.0 MB of 24.0 MB``; empty when it fits."""
    least, most = _caps(cluster)
    if worker_memory_bytes is not None:
        least, most = min(least, worker_memory_bytes), min(most, worker_memory_bytes)
    fullest = max(needed.values(), default=0)
    if fullest <= least:
        return ""
    if least == most:  # of nodes that are all alike the fullest lacks most
        worst = next(node for node, num_bytes in needed.items() if num_bytes == fullest)
        return f"{worst} needs {human_bytes(fullest)} of {human_bytes(least)}"
    words, lacking = "", 0
    for node, num_bytes in needed.items():
        cap = cap_bytes(node, cluster, worker_memory_bytes)
        if cap is not None and num_bytes - cap > lacking:
            lacking = num_bytes - cap
            words = f"{node} needs {human_bytes(num_bytes)} of {human_bytes(cap)}"
    return words


@remembered(16)
def _caps(cluster: Cluster) -> tuple[float, float]:
    """The least and the most memory of a node, infinite where it is not limited."""
    caps = {float("inf") if node.memory_bytes is None else node.memory_bytes for node in cluster.nodes.values()}
    return min(caps, default=float("inf")), max(caps, default=float("inf"))
