"""Windows of a broken pipeline, moved so that all nodes share what was lost."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from everstep import plan as plans
from everstep.plan import Hop, Order, Plan
from everstep.planner.layouts.search import priced
from everstep.planner.routes.level import heads_s
from everstep.planner.routes.router import Router
from everstep.planner.routes.windows import NEARLY, shifted
from everstep.planner.step.moves import moves_for
from everstep.quantities import NodeId
from everstep.view import Member, View
from everstep.workload import Workload

from .worlds import cluster_of, node, workload_of


def grid(num_pipelines: int, num_stages: int, stage_layers: int, each: int) -> Plan:
    routes = [
        tuple(Hop(node(d * num_stages + s), s * stage_layers, (s + 1) * stage_layers) for s in range(num_stages))
        for d in range(num_pipelines)
    ]
    return Plan(
        num_layers=num_stages * stage_layers, placement={hop.node: tuple(hop.layers) for route in routes for hop in route},
        routes=tuple(routes[m % num_pipelines] for m in range(num_pipelines * each)), order=Order(split=True),
    )


def living(plan: Plan, *lost: int) -> dict[NodeId, frozenset[int]]:
    gone = {node(k) for k in lost}
    return {member: frozenset(layers) for member, layers in plan.placement.items() if member not in gone}


def shifts(plan: Plan, workload: Workload, *lost: int) -> list[Plan]:
    can = living(plan, *lost)
    return shifted(plan, workload, dict.fromkeys(can, 1.0), can)


def windows_of(plan: Plan, *numbers: int) -> list[tuple[int, int]]:
    return [(min(plan.placement[node(k)]), max(plan.placement[node(k)]) + 1) for k in numbers]


def test_three_that_are_left_of_four_move_their_windows_and_leave_small_gaps() -> None:
    plan, workload = grid(8, 4, 8, 32), workload_of(32, 256)
    best, even = shifts(plan, workload, 31)
    assert windows_of(best, 28, 29, 30) == [(3, 11), (13, 21), (23, 31)]
    assert windows_of(even, 28, 29, 30) == [(2, 10), (12, 20), (22, 30)]


@pytest.mark.parametrize("lost", [(1,), (4,), (7,), (1, 4), (0, 11), (1, 2)])
@pytest.mark.parametrize("each", [3, 8])
def test_only_the_broken_pipelines_change_and_nobody_holds_more_than_before(lost: tuple[int, ...], each: int) -> None:
    plan, workload = grid(4, 3, 4, each), workload_of(12, 4 * each)
    found = shifts(plan, workload, *lost)
    assert found
    for answer in found:
        can = living(plan, *lost)
        assert plans.problems(answer, View(1, tuple(map(Member, sorted(can)))), 12) == []
        broken = {k // 3 for k in lost}
        for number in range(12):
            if number not in lost:
                assert len(answer.placement[node(number)]) == 4
                if number // 3 not in broken:
                    assert answer.placement[node(number)] == plan.placement[node(number)]
        assert all(
            after == before for before, after in zip(plan.routes, answer.routes, strict=True)
            if not any(hop.node in {node(3 * d + s) for d in broken for s in range(3)} for hop in before)
        )


def last_end_s(plan: Plan, workload: Workload, lost: int, windows: list[tuple[int, int]], each: int) -> float:
    """When the last node ends, lenders with the most pieces of a gap that one of its peers gets: one layer after the other."""
    head_s = heads_s(workload)
    times = [layer.total_s for layer in workload.layers]
    own = lost // 3
    lenders = {member: layers for member, layers in living(plan, lost).items() if int(member[1:]) // 3 != own}
    ends = [head_s[first] + each * sum(times[first:end]) for first, end in windows]
    edges = [0, *itertools.chain.from_iterable(windows), workload.num_layers]
    for first, end in zip(edges[::2], edges[1::2], strict=True):
        if first > end:
            return math.inf
        for layers in lenders.values():
            lent = [layer for layer in range(first, end) if layer in layers]
            if lent:
                extra_s = sum(
                    times[layer] * math.ceil(each / sum(layer in others for others in lenders.values())) for layer in lent
                )
                ends.append(head_s[min(layers)] + each * sum(times[layer] for layer in layers) + extra_s)
    return max(ends)


@pytest.mark.parametrize("each", [3, 8, 20])
@pytest.mark.parametrize("lost", [3, 4, 5])
@pytest.mark.parametrize("seconds", [[1.0] * 12, [2.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 2.0]])
def test_no_other_windows_let_the_last_node_end_clearly_earlier(each: int, lost: int, seconds: list[float]) -> None:
    plan, workload = grid(4, 3, 4, each), workload_of(12, 4 * each, seconds=seconds)
    best, *_ = shifts(plan, workload, lost)
    left = [k for k in (3, 4, 5) if k != lost]
    found_s = last_end_s(plan, workload, lost, windows_of(best, *left), each)
    others_s = {
        ((one, one + 4), (other, other + 4)): last_end_s(plan, workload, lost, [(one, one + 4), (other, other + 4)], each)
        for one in range(5) for other in range(one + 4, 9)
    }
    assert found_s <= min(others_s.values()) * NEARLY + 1e-9

    def moved(windows: tuple[tuple[int, int], ...]) -> int:
        return sum(
            len(set(range(*window)) - set(plan.placement[node(k)])) for window, k in zip(windows, left, strict=True)
        )

    least = min(moved(windows) for windows, end_s in others_s.items() if end_s <= min(others_s.values()) * NEARLY + 1e-9)
    assert moved(tuple(windows_of(best, *left))) == least


def test_it_beats_rerouting_and_moves_less_than_a_stage() -> None:
    plan, workload = grid(8, 4, 8, 8), workload_of(32, 64)
    cluster = cluster_of(32, memory_bytes=40 * 8 + 64)
    can = living(plan, 5)
    routes = Router(can, workload, dict.fromkeys(can, 1.0)).routes(plan.routes)
    assert routes is not None
    rerouted = replace(plan, routes=routes, placement={member: tuple(sorted(layers)) for member, layers in can.items()})
    here = cluster.without(frozenset({node(5)}))
    best = min(priced(answer, workload, here).step_s for answer in shifts(plan, workload, 5))
    assert best < 0.96 * priced(rerouted, workload, here).step_s
    assert best < 1.07 * priced(plan, workload, cluster).step_s
    holds = {member: workload.units_of(layers) for member, layers in can.items()}
    moves, _ = moves_for(shifts(plan, workload, 5)[1], holds, workload)
    assert len(moves) <= 12


def test_a_second_loss_moves_the_windows_of_both_pipelines() -> None:
    plan, workload = grid(5, 3, 4, 4), workload_of(12, 20)
    once = shifts(plan, workload, 1)[0]
    twice = shifts(once, workload, 1, 5)[0]
    can = living(once, 1, 5)
    assert plans.problems(twice, View(1, tuple(map(Member, sorted(can)))), 12) == []
    assert len(twice.placement[node(3)]) == len(twice.placement[node(4)]) == 4
    assert windows_of(twice, 3, 4) != [(0, 4), (4, 8)]


def test_with_nothing_lost_or_nobody_left_there_is_nothing_to_move() -> None:
    plan, workload = grid(3, 2, 2, 2), workload_of(4, 6)
    assert shifts(plan, workload) == []
    assert shifts(plan, workload, 2, 3) == []


def test_layers_that_nobody_else_holds_cannot_be_lent() -> None:
    plan, workload = grid(1, 3, 2, 4), workload_of(6, 4)
    assert shifts(plan, workload, 1) == []
