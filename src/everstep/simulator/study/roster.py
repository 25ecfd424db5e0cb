"""Who plays with the planner in the loop, on which ground.

The job of the studies is a grid of pipelines of equal layers without messages, whose times and state are made to measure: a
fused step without failures takes ten seconds, and moving the state of one stage to one node takes half of tau.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from everstep.cluster import Cluster, Link, Node
from everstep.config import PlannerConfig
from everstep.config import Policy as PolicyName
from everstep.errors import InfeasibleError
from everstep.plan import Order
from everstep.planner.layouts.search import priced
from everstep.planner.step.cost import READ_BYTES_PER_S
from everstep.planner.step.memory import overfull
from everstep.quantities import NodeId, UnitName
from everstep.simulator.study.planned import Ground, Planned, slower
from everstep.simulator.study.player import Costs
from everstep.simulator.study.times import FAMILIES, Family, equal_layers
from everstep.workload import LayerCost, Unit, Workload


def order_of(family: Family, num_stages: int) -> Order:
    """Schedules with enough activation slots: one more for each stage of the grid; staggered ones need two."""
    if family == "fused":
        return Order()
    is_staggered = family == "staggered"
    return Order(split=True, extra_slots=num_stages * (2 if is_staggered else 1), staggered=is_staggered)


def equal_ground(
    family: Family, costs: Costs, *, micro_batches: int = 8, num_pipelines: int = 8, num_stages: int = 4, num_layers: int = 32,
    copies: int = 1,
) -> Ground:
    """The job of the studies; ``micro_batches`` of each pipeline.

    Under no plan does a node hold more state than one of the grid (``copies`` 1), but while state is copied behind training it
    may; activations weigh nothing, so slots cost nothing. A stage is loaded from a checkpoint in ``costs.restore_s``.
    """
    job = equal_layers(
        num_layers=num_layers, num_pipelines=num_pipelines, num_stages=num_stages, micro_batches=micro_batches,
    )
    state_bytes = round(READ_BYTES_PER_S * costs.restore_s * num_stages / num_layers)
    names = [UnitName(f"layer{index}") for index in range(num_layers)]
    workload = Workload(
        layers=tuple(
            LayerCost(
                name=name, forward_s=forward_s, backward_input_s=(work_s - forward_s) / 2,
                backward_weight_s=(work_s - forward_s) / 2,
            )
            for name, forward_s, work_s in zip(names, job.forward_s, job.work_s, strict=True)
        ),
        units={
            name: Unit(name=name, layers=(index,), parameter_bytes=0, state_bytes=state_bytes)
            for index, name in enumerate(names)
        },
        num_micro_batches=job.num_micro_batches, measured=True,
    )
    nodes = {NodeId(f"n{number}"): Node(node_id=NodeId(f"n{number}")) for number in range(num_pipelines * num_stages)}
    link = Link(alpha_s=0.0, bytes_per_s=max(1.0, 2 * num_layers / num_stages * state_bytes / max(1e-9, costs.move_s)))
    ground = Ground(workload, Cluster(nodes=nodes, link=link), num_stages, order_of(family, num_stages))
    grid = ground.grid(list(nodes))
    assert grid is not None, "as many nodes as the grid has places"
    fullest_bytes = priced(grid, workload, ground.cluster).peak_bytes
    return replace(ground, config=PlannerConfig(worker_memory_bytes=copies * fullest_bytes))


def ground_of(cluster: Cluster, workload: Workload, num_stages: int, family: Family, move_s: float | None = None) -> Ground:
    """A cluster and a workload as they are, with as many activation slots for the grid as fit.

    ``move_s``: with links on which a whole stage goes to one node in half of that.

    Raises:
        InfeasibleError: the grid does not fit.
    """
    order = order_of(family, num_stages)
    for extra_slots in dict.fromkeys((order.extra_slots, order.extra_slots // 2, 0)):
        ground = Ground(workload, cluster, num_stages, replace(order, extra_slots=extra_slots))
        grid = ground.grid(list(cluster.nodes))
        if grid is None:
            raise InfeasibleError(f"{len(cluster.nodes)} nodes make no grid of {num_stages} stages", {})
        lacking = overfull(priced(grid, workload, cluster).needed_bytes, cluster, None)
        if not lacking:
            return ground if move_s is None else _slowed(ground, move_s)
    raise InfeasibleError(f"the grid of {num_stages} stages does not fit: {lacking}", {f"{num_stages} stages": lacking})


def _slowed(ground: Ground, move_s: float) -> Ground:
    """State goes over links ``ratio`` times as slow, while messages and sums take as long as before and memory is as full.

    What a node holds of a unit, state and gradient sum, stays; the sum gets ``ratio`` times smaller and the state so much
    larger. So a stage of H bytes, G of them sums, takes ``(H - G/ratio)·ratio / rate`` to move: that is half of ``move_s``.
    """
    workload, link = ground.workload, ground.cluster.link
    fullest = max(
        (workload.units_of(set(range(*bounds))) for bounds in ground.bounds),
        key=lambda units: sum(workload.units[name].held_bytes for name in units),
    )
    held = sum(workload.units[name].held_bytes for name in fullest)
    summed = sum(_summed_bytes(workload.units[name]) for name in fullest)
    ratio = max(1e-9, (move_s / 2 * link.bytes_per_s + summed) / held)
    units = {}
    for name, unit in workload.units.items():
        gradient_bytes = round(_summed_bytes(unit) / ratio)
        units[name] = replace(unit, gradient_bytes=gradient_bytes, state_bytes=unit.held_bytes - gradient_bytes)
    layers = tuple(replace(layer, output_bytes=round(layer.output_bytes / ratio)) for layer in workload.layers)
    cluster = ground.cluster
    links = replace(
        cluster, link=_thinner(cluster.link, ratio), host_link=cluster.host_link and _thinner(cluster.host_link, ratio),
        site_links={pair: _thinner(each, ratio) for pair, each in cluster.site_links.items()},
    )
    return replace(ground, workload=replace(workload, units=units, layers=layers), cluster=links)


def _summed_bytes(unit: Unit) -> int:
    return unit.gradient_bytes or unit.parameter_bytes


def _thinner(link: Link, ratio: float) -> Link:
    return replace(slower(link, ratio), alpha_s=link.alpha_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """How a name plays: by which policy of the planner, what it begins as, and what it is told."""

    policy: PolicyName
    starts_on_grid: bool = True
    """Else on the fastest layout, if the grid is not as fast."""
    reserve: int = 0
    knows_gap: bool = False
    is_free: bool = False
    fused: bool = False
    """Schedules as published, whatever the others have."""
    is_redundant: bool = False
    """Begins with everything held twice, and needs the memory for it."""


SEATS: Mapping[str, Seat] = {
    "auto": Seat(policy="auto", starts_on_grid=False),
    "reroute": Seat(policy="reroute"),
    "normalize": Seat(policy="normalize"),
    "heal": Seat(policy="heal"),
    "grow": Seat(policy="grow"),
    "rebalance": Seat(policy="rebalance"),
    "repartition": Seat(policy="repartition", starts_on_grid=False),
    "two-phase": Seat(policy="two-phase", starts_on_grid=False),
    "shrink": Seat(policy="shrink"),
    "spare": Seat(policy="spare", reserve=4),
    "redundant": Seat(policy="redundant", is_redundant=True),
    "restore": Seat(policy="restore", starts_on_grid=False),
    "oobleck": Seat(policy="oobleck", starts_on_grid=False),
    "recycle": Seat(policy="recycle", knows_gap=True),
    "plain-reroute": Seat(policy="plain-reroute"),
    "chameleon": Seat(policy="chameleon", starts_on_grid=False, knows_gap=True),
    "torchft": Seat(policy="torchft"),
    "parcae": Seat(policy="parcae", knows_gap=True),
    "bamboo": Seat(policy="bamboo", fused=True, is_redundant=True, knows_gap=True),
    "varuna": Seat(policy="varuna", fused=True),
    "free": Seat(policy="auto", starts_on_grid=False, is_free=True),
    "oobleck-published": Seat(policy="oobleck", starts_on_grid=False, fused=True),
    "reroute-published": Seat(policy="plain-reroute", fused=True),
    "chameleon-published": Seat(policy="chameleon", starts_on_grid=False, knows_gap=True, fused=True),
}

SINGLES = (
    "reroute", "normalize", "heal", "grow", "rebalance", "repartition", "two-phase", "shrink", "spare", "redundant", "restore",
)
"""What ``auto`` chooses among, each alone: regret is against the best of them in hindsight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Grounds by family, and those on which everything may be held twice."""

    plain: Mapping[Family, Ground]
    twice: Mapping[Family, Ground]

    def seated(self, names: Sequence[str], family: Family, knows_gap: bool | None = None) -> list[Planned]:
        """Players by name; ``knows_gap`` None: each as it is.

        Raises:
            KeyError: no such player.
        """
        found = []
        for name in names:
            seat = SEATS[name]
            grounds = self.twice if seat.is_redundant else self.plain
            found.append(Planned(
                name=name, policy=seat.policy, ground=grounds["fused" if seat.fused else family],
                starts_on_grid=seat.starts_on_grid, reserve=seat.reserve, is_free=seat.is_free,
                is_redundant=seat.is_redundant, knows_gap=seat.knows_gap if knows_gap is None else knows_gap,
            ))
        return found


def equal_table(costs: Costs, *, micro_batches: int = 8, num_pipelines: int = 8, num_layers: int = 32) -> Table:
    """The job of the studies in every family."""
    plain, twice = (
        {
            family: equal_ground(
                family, costs, micro_batches=micro_batches, num_pipelines=num_pipelines, num_layers=num_layers, copies=copies,
            ) for family in FAMILIES
        } for copies in (1, 2)
    )
    return Table(plain=plain, twice=twice)


def table_of(cluster: Cluster, workload: Workload, num_stages: int, move_s: float | None = None) -> Table:
    """A cluster and a workload as they are.

    Raises:
        InfeasibleError: the grid does not fit.
    """
    grounds = {family: ground_of(cluster, workload, num_stages, family, move_s) for family in FAMILIES}
    return Table(plain=grounds, twice=grounds)
