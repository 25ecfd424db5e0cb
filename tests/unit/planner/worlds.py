"""Small clusters, workloads and plans to plan for, and a second, slower way to tell what a schedule takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from everstep.cluster import Cluster, Link, Node
from everstep.plan import Hop, Order, Plan, Route
from everstep.quantities import HostId, NodeId, UnitName
from everstep.schedule import Kind, Schedule, needs
from everstep.workload import LayerCost, Unit, Workload

FREE_LINK = Link(alpha_s=0.0, bytes_per_s=1e30)


def node(number: int) -> NodeId:
    return NodeId(f"n{number}")


def cluster_of(
    num_nodes: int, *, cores: int | None = None, link: Link = FREE_LINK, memory_bytes: int | None = None,
) -> Cluster:
    """Nodes ``n0``, ``n1``, … of one host."""
    nodes = {node(k): Node(node_id=node(k), memory_bytes=memory_bytes) for k in range(num_nodes)}
    return Cluster(nodes=nodes, host_cores={HostId("localhost"): cores}, link=link)


def workload_of(
    num_layers: int, num_micro_batches: int, *, seconds: Sequence[float] = (), optimizer_s: float = 0.0,
    state_bytes: int = 30, gradient_bytes: int = 10, activation_bytes: int = 1, output_bytes: int = 0, fixed_s: float = 0.0,
) -> Workload:
    """Layers ``l0``, ``l1``, …: F takes ``seconds`` (1 where left out), each half of backward the same."""
    times = list(seconds) or [1.0] * num_layers
    layers = tuple(
        LayerCost(
            name=f"l{index}", forward_s=times[index], backward_input_s=times[index], backward_weight_s=times[index],
            optimizer_s=optimizer_s, activation_bytes=activation_bytes, output_bytes=output_bytes,
        )
        for index in range(num_layers)
    )
    units = {
        UnitName(f"l{index}"): Unit(
            name=UnitName(f"l{index}"), layers=(index,), parameter_bytes=gradient_bytes, state_bytes=state_bytes,
            gradient_bytes=gradient_bytes,
        )
        for index in range(num_layers)
    }
    return Workload(layers=layers, units=units, num_micro_batches=num_micro_batches, fixed_s=fixed_s, measured=True)


def grid_plan(
    num_pipelines: int, num_stages: int, micro_batches_each: int, *, order: Order | None = None,
    lost: Sequence[tuple[int, int]] = (),
) -> Plan:
    """Plain pipelines of one layer a stage. ``lost`` places (pipeline, stage) are taken over by their peers in turn."""
    placement = {
        node(d * num_stages + s): (s,) for d in range(num_pipelines) for s in range(num_stages) if (d, s) not in lost
    }
    turns: dict[tuple[int, int], int] = {}
    routes: list[Route] = []
    for micro_batch in range(num_pipelines * micro_batches_each):
        home = micro_batch % num_pipelines
        hops = []
        for s in range(num_stages):
            d = home
            if (home, s) in lost:
                peers = [peer for peer in range(num_pipelines) if (peer, s) not in lost]
                turn = turns.get((home, s), 0)
                turns[home, s] = turn + 1
                d = peers[turn % len(peers)]
            hops.append(Hop(node(d * num_stages + s), s, s + 1))
        routes.append(tuple(hops))
    return Plan(num_layers=num_stages, placement=placement, routes=tuple(routes), order=order or Order())


@st.composite
def plans(draw: st.DrawFn, max_layers: int = 5, max_micro_batches: int = 7) -> Plan:
    """Any plan: pipelines with cuts of their own, some holders more, and routes that wander over whoever holds a layer."""
    num_layers = draw(st.integers(1, max_layers))
    placement: dict[NodeId, set[int]] = {}
    homes: list[Route] = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(1, num_layers - 1), max_size=3))) if num_layers > 1 else []
        hops = []
        for first, end in zip([0, *cuts], [*cuts, num_layers], strict=True):
            member = node(len(placement))
            placement[member] = set(range(first, end))
            hops.append(Hop(member, first, end))
        homes.append(tuple(hops))
    for member in list(placement):
        if draw(st.booleans()):
            placement[member] |= draw(st.sets(st.integers(0, num_layers - 1), max_size=2))
    if draw(st.booleans()):
        placement[node(len(placement))] = set()
    routes = []
    for _ in range(draw(st.integers(1, max_micro_batches))):
        wandering = _wander(draw, placement, num_layers)
        routes.append(wandering or draw(st.sampled_from(homes)))
    order = Order(split=draw(st.booleans()), extra_slots=draw(st.integers(0, 2)))
    return Plan(
        num_layers=num_layers, placement={member: tuple(sorted(layers)) for member, layers in placement.items()},
        routes=tuple(routes), order=order,
    )


def _wander(draw: st.DrawFn, placement: Mapping[NodeId, set[int]], num_layers: int) -> Route | None:
    hops: list[Hop] = []
    position = 0
    while position < num_layers:
        visited = {hop.node for hop in hops}
        able = [member for member, layers in placement.items() if position in layers and member not in visited]
        if not able:
            return None
        member = draw(st.sampled_from(able))
        end = position + 1
        while end in placement[member] and draw(st.booleans()):
            end += 1
        hops.append(Hop(member, position, end))
        position = end
    return tuple(hops)


def slow_makespan_s(
    schedule: Schedule, plan: Plan, seconds: Mapping[Kind, float], message_s: float = 0.0,
) -> float:
    """Seconds until the last action ends, one second at a time: at each the actions that may begin do. Whole seconds only.

    ``seconds`` is by kind and layer; for a fused backward it is that of both halves.
    """
    done_at: dict[object, float] = {}
    position = dict.fromkeys(schedule, 0)
    free_at = dict.fromkeys(schedule, 0.0)
    now = 0.0
    while any(position[member] < len(order) - ("R" in map(str, order)) for member, order in schedule.items()):
        for member, order in schedule.items():
            if position[member] == len(order) or free_at[member] > now or order[position[member]].kind is Kind.REDUCE:
                continue
            action = order[position[member]]
            route = plan.routes[action.micro_batch]
            arrived = all(
                need in done_at and done_at[need] + (message_s if need.hop != action.hop else 0.0) <= now
                for need in needs(action, len(route))
            )
            if arrived:
                free_at[member] = done_at[action] = now + seconds[action.kind] * len(route[action.hop].layers)
                position[member] += 1
        now += 1.0
        assert now < 10_000, "the schedule never ends"
    return max(free_at.values())
