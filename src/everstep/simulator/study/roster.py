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
from everstep.simulator.study.planned import Ground, Planned
from everstep.simulator.study.player import Costs
from everstep.simulator.study.times import FAMILIES, Family, equal_layers
from everstep.workload import LayerCost, Unit, Workload

MOST_STAGES = 16
"""The longest pipelines that are tried for a grid."""


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
            raise InfeasibleError(f"{len(cluster.nodes)} nodes make no pipeline of {_stages(num_stages)}", {})
        lacking = overfull(priced(grid, workload, cluster).needed_bytes, cluster, None)
        if not lacking:
            return ground if move_s is None else _slowed(ground, move_s)
    raise InfeasibleError(f"the grid of {_stages(num_stages)} does not fit: {lacking}", {_stages(num_stages): lacking})


def _stages(count: int) -> str:
    return "1 stage" if count == 1 else f"{count} stages"


def fastest_grid(cluster: Cluster, workload: Workload) -> int:
    """Stages of the grid whose steps are shortest with fused backward, messages and sums counted, among those that fit.

    Raises:
        InfeasibleError: none fits; ``rejected`` says why, by number of stages.
    """
    rejected: dict[str, str] = {}
    found: list[tuple[float, int]] = []
    for num_stages in range(1, min(MOST_STAGES, workload.num_layers, max(1, len(cluster.nodes) // 2)) + 1):
        try:
            ground = ground_of(cluster, workload, num_stages, "fused")
        except InfeasibleError as error:
            rejected |= error.rejected
            continue
        grid = ground.grid(list(cluster.nodes))
        assert grid is not None, "of a grid that fits"
        found.append((ground.step_s(grid), num_stages))
    if not found:
        words = "; ".join(f"with {stages} {why}" for stages, why in rejected.items())
        raise InfeasibleError(f"no grid fits: {words}", rejected)
    return min(found)[1]


def _slowed(ground: Ground, move_s: float) -> Ground:
    """State of the fullest stage goes to one node in half of ``move_s``; messages and sums take as long as before."""
    workload, link = ground.workload, ground.cluster.link
    fullest_s = max(
        sum(link.seconds(workload.units[name].state_bytes) for name in workload.units_of(set(range(*bounds))))
        for bounds in ground.bounds
    )
    return replace(ground, move_ratio=move_s / 2 / fullest_s)


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
