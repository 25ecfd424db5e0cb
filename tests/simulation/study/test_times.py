"""The closed forms: against the numbers that a solver found, against brute force, and against schedules of the planner."""

import math
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from everstep.cluster import Cluster, Link, Node
from everstep.plan import Hop, Order, Plan
from everstep.planner.routes.router import Router
from everstep.planner.step.cost import step_seconds
from everstep.quantities import NodeId, UnitName
from everstep.simulator.study.layout import Bounds
from everstep.simulator.study.times import Family, Job, Times, equal_layers, even_bounds
from everstep.workload import LayerCost, Unit, Workload


def job(num_layers: int = 4, micro_batches: int = 24, stages: int = 4, **more: int) -> Job:
    """Layers of one unit forward and two backward."""
    return Job(
        forward_s=(1.0,) * num_layers, work_s=(3.0,) * num_layers, num_micro_batches=micro_batches, num_stages=stages,
        batch=micro_batches, **more,
    )


@pytest.mark.parametrize(("stages", "micro_batches", "fused", "split"), [
    (4, 6, 27, 21), (4, 8, 33, 27), (4, 16, 57, 51), (8, 16, 69, 55), (2, 8, 27, 25),
])
def test_failure_free_pipelines_take_what_a_solver_found(stages: int, micro_batches: int, fused: float, split: float):
    one = job(stages, micro_batches, stages)
    assert Times(one, "fused").pipeline_s(stages, micro_batches) == fused
    assert Times(one, "split").pipeline_s(stages, micro_batches) == split


@pytest.mark.parametrize(("holes", "equation_13", "split", "staggered"), [
    ((0, 0, 0, 0), 27, 21, 18), ((1, 0, 0, 0), 36, 27, 27), ((0, 1, 0, 0), 36, 28, 27), ((0, 0, 1, 0), 36, 29, 27),
    ((0, 0, 0, 1), 36, 30, 27), ((0, 1, 1, 0), 45, 29, 27), ((0, 0, 2, 0), 63, 56, 54),
])
def test_rerouting_on_three_by_four_takes_what_a_solver_found(
    holes: tuple[int, ...], equation_13: float, split: float, staggered: float,
):
    three = job(4, 18)
    taken = [Times(three, family).grid_s(even_bounds(three.work_s, 4), 3, holes) for family in ("fused", "split", "staggered")]
    assert taken == [equation_13, split, staggered]


def test_a_stage_without_anybody_has_no_way_out():
    assert Times(job(), "split").grid_s(even_bounds((1.0,) * 4, 4), 3, (0, 3, 0, 0)) == math.inf


@pytest.mark.parametrize(("family", "micro_batches", "gap"), [
    ("fused", 8, 0.083), ("split", 8, 0.069), ("staggered", 8, 0.059), ("fused", 32, 0.054), ("split", 32, 0.048),
    ("staggered", 32, 0.045),
])
def test_the_best_plan_of_31_of_32_costs_what_is_known(family: Family, micro_batches: int, gap: float):
    times = Times(equal_layers(micro_batches=micro_batches), family)
    best = times.best(31)
    assert best is not None
    whole_s = times.grid_s(times.grid_bounds(), 8, (0, 0, 0, 0))
    assert 1 - whole_s / best.step_s == pytest.approx(gap, abs=0.0006)


@pytest.mark.parametrize("family", ["fused", "split", "staggered"])
@pytest.mark.parametrize(("layers", "length", "micro_batches"), [(7, 3, 2), (7, 3, 5), (8, 5, 4), (6, 4, 9)])
def test_the_split_is_the_best_of_all(family: Family, layers: int, length: int, micro_batches: int):
    work_s = tuple(3.0 + (index * 7 % 5) for index in range(layers))
    uneven = Job(
        forward_s=tuple(seconds / 3 for seconds in work_s), work_s=work_s, num_micro_batches=micro_batches, num_stages=1,
        batch=micro_batches,
    )
    times = Times(uneven, family)
    cuts = [(0, *inner, layers) for inner in combinations(range(1, layers), length - 1)]
    best = min(stages_s(uneven, family, cut, micro_batches) for cut in cuts)
    assert times.pipeline_s(length, micro_batches) == pytest.approx(best)
    chosen = times.split(length, micro_batches)
    assert stages_s(uneven, family, (0, *(end for _, end in chosen)), micro_batches) == pytest.approx(best)


def stages_s(one: Job, family: Family, cut: tuple[int, ...], m: int) -> float:
    found = []
    for index in range(len(cut) - 1):
        forward, work = (sum(each[cut[index]:cut[index + 1]]) for each in (one.forward_s, one.work_s))
        before, behind = sum(one.work_s[:cut[index]]), sum(one.work_s[cut[index + 1]:])
        after = len(cut) - 2 - index
        warm_up = min(m - 1, after)
        found.append(m * work + {
            "staggered": 0.0, "split": sum(one.forward_s[:cut[index]]),
            "fused": before + max(0.0, behind - warm_up * forward)
            + (max(0.0, behind - warm_up * (work - forward)) if m > after + 1 else 0.0),
        }[family])
    return max(found)


def test_no_node_of_a_plan_holds_more_than_in_the_grid():
    times = Times(equal_layers(), "split")
    assert times.shortest == 4
    for nodes in (4, 9, 17, 31):
        best = times.best(nodes)
        assert best is not None
        assert max(end - first for split in best.splits for first, end in split) <= 8
    assert times.best(3) is None


def test_more_nodes_are_never_slower():
    times = Times(equal_layers(), "split")
    steps = [best.step_s for nodes in range(4, 41) if (best := times.best(nodes))]
    assert len(steps) == 37
    assert all(later <= earlier for earlier, later in pairwise(steps))


def test_of_equally_fast_sets_the_one_with_most_pipelines_is_taken():
    best = Times(equal_layers(), "staggered").best(32)
    assert best is not None
    assert [len(split) for split in best.splits] == [4] * 8


def test_layer_by_layer_rerouting_never_beats_the_work_and_never_loses_to_whole_stages():
    times = Times(equal_layers(), "staggered")
    bounds = times.grid_bounds()
    places = list(bounds) * 8
    places.remove(bounds[1])
    rerouted_s = times.rerouted_s(places)
    assert sum(times.job.work_s) * 64 / 31 < rerouted_s <= times.grid_s(bounds, 8, (0, 1, 0, 0))


def test_a_layer_that_nobody_holds_cannot_be_rerouted():
    assert Times(job(), "split").rerouted_s([(0, 2), (3, 4)]) == math.inf


@pytest.mark.parametrize(("order", "family"), [(Order(), "fused"), (Order(split=True, extra_slots=16), "split")])
def test_the_planner_schedules_whole_layouts_as_fast_as_the_forms_say(order: Order, family: Family):
    times = Times(job(8, 24, 4), family)
    for nodes in (12, 11, 9):
        best = times.best(nodes)
        assert best is not None
        shares = shared_out(times, best.splits)
        assert planned_s(plan_of(best.splits, shares, order)) == pytest.approx(best.step_s)


def test_the_planner_schedules_a_rerouted_grid_as_fast_as_the_form_says():
    times = Times(job(4, 24, 4), "split")
    plan = plan_of((times.grid_bounds(),) * 3, (8, 8, 8), Order(split=True, extra_slots=16))
    for stage in range(4):
        holes = tuple(int(index == stage) for index in range(4))
        simulated_s = planned_s(without(plan, NodeId(f"n{stage}")))
        assert simulated_s == pytest.approx(times.grid_s(times.grid_bounds(), 3, holes), abs=1.0)


def test_whole_gaps_rerouted_by_the_planner_miss_the_layer_by_layer_bound_by_up_to_a_quarter():
    """The bound is one that a schedule may not reach: this is how far the planner's own rerouting is from it."""
    times = Times(job(8, 24, 4), "split")
    best = times.best(11)
    assert best is not None
    plan = plan_of(best.splits, shared_out(times, best.splits), Order(split=True, extra_slots=16))
    for node in plan.nodes:
        left = without(plan, node)
        places = [(layers[0], layers[-1] + 1) for layers in left.placement.values()]
        assert 0.999 <= planned_s(left) / times.rerouted_s(places) < 1.3


def shared_out(times: Times, splits: tuple[Bounds, ...]) -> tuple[int, ...]:
    """Micro-batches one by one to the pipeline that is through first."""
    shares = [0] * len(splits)
    for _ in range(times.job.num_micro_batches):
        shares[min(range(len(splits)), key=lambda d: times.pipeline_s(len(splits[d]), shares[d] + 1))] += 1
    return tuple(shares)


def plan_of(splits: tuple[Bounds, ...], shares: tuple[int, ...], order: Order) -> Plan:
    routes, placement, count = [], {}, 0
    for split, share in zip(splits, shares, strict=True):
        hops = tuple(Hop(NodeId(f"n{count + index}"), first, end) for index, (first, end) in enumerate(split))
        count += len(hops)
        placement.update({hop.node: tuple(hop.layers) for hop in hops})
        routes += [hops] * share
    return Plan(num_layers=splits[0][-1][1], placement=placement, routes=tuple(routes), order=order)


def without(plan: Plan, lost: NodeId) -> Plan:
    alive = {node: layers for node, layers in plan.placement.items() if node != lost}
    router = Router({node: frozenset(layers) for node, layers in alive.items()}, workload(plan), dict.fromkeys(alive, 1.0))
    routes = router.routes(plan.routes)
    assert routes is not None
    return replace(plan, placement=alive, routes=routes)


def planned_s(plan: Plan) -> float:
    cluster = Cluster(
        nodes={node: Node(node_id=node) for node in plan.nodes}, link=Link(alpha_s=0.0, bytes_per_s=1e15),
    )
    return step_seconds(plan, workload(plan), cluster)


def workload(plan: Plan) -> Workload:
    names = [f"layer{index}" for index in range(plan.num_layers)]
    return Workload(
        layers=tuple(LayerCost(name=name, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0) for name in names),
        units={
            UnitName(name): Unit(name=UnitName(name), layers=(index,), parameter_bytes=0, state_bytes=0)
            for index, name in enumerate(names)
        },
        num_micro_batches=len(plan.routes), measured=True,
    )
