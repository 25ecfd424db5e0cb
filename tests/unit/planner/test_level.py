"""The bound on how evenly work can be shared, and routes that come near it."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from everstep.plan import Hop, Route
from everstep.planner.routes.level import Levelled, heads_s, least_seconds
from everstep.planner.routes.router import PASSED_ON, TOLERATED, Router
from everstep.quantities import NodeId
from everstep.workload import Workload

from .worlds import node, workload_of

Windows = Mapping[NodeId, frozenset[int]]


def solved_seconds(windows: Windows, workload: Workload, speeds: Mapping[NodeId, float], split: bool) -> float:
    """The least T by a linear program: how many passes of each layer each node does."""
    pairs = [(member, layer) for member, layers in windows.items() for layer in sorted(layers)]
    head_s = heads_s(workload, split=split)
    capacity = [
        [workload.layers[layer].total_s / speeds[who] if who == member else 0.0 for who, layer in pairs] + [-1.0]
        for member in windows
    ]
    served = [[float(layer == wanted) for _, layer in pairs] + [0.0] for wanted in range(workload.num_layers)]
    found = linprog(
        [0.0] * len(pairs) + [1.0], A_ub=capacity, b_ub=[-head_s[min(layers)] for layers in windows.values()], A_eq=served,
        b_eq=[workload.num_micro_batches] * workload.num_layers,
    )
    return float(found.fun)


@st.composite
def windows_of_neighbours(draw: st.DrawFn) -> tuple[Windows, Workload, dict[NodeId, float]]:
    num_layers = draw(st.integers(2, 6))
    windows = {node(0): frozenset(range(num_layers))}
    for number in range(1, draw(st.integers(2, 6))):
        first = draw(st.integers(0, num_layers - 1))
        windows[node(number)] = frozenset(range(first, draw(st.integers(first + 1, num_layers))))
    seconds = [draw(st.sampled_from([1.0, 2.0, 0.5])) for _ in range(num_layers)]
    speeds = {member: draw(st.sampled_from([1.0, 2.0])) for member in windows}
    return windows, workload_of(num_layers, 300, seconds=seconds), speeds


def lies_inside(ours: frozenset[int], theirs: frozenset[int]) -> bool:
    return min(theirs) < min(ours) and max(ours) < max(theirs)


@settings(max_examples=100, deadline=None)
@given(windows_of_neighbours(), st.booleans())
def test_the_bound_is_what_a_linear_program_finds_where_no_window_lies_inside_another(
    case: tuple[Windows, Workload, dict[NodeId, float]], split: bool,
) -> None:
    windows, workload, speeds = case
    found_s, solved_s = least_seconds(windows, workload, speeds, split=split), solved_seconds(windows, workload, speeds, split)
    assert found_s <= solved_s * (1 + 1e-9)
    if not any(lies_inside(ours, theirs) for ours in windows.values() for theirs in windows.values()):
        assert found_s == pytest.approx(solved_s, rel=1e-6)


def uneven(seed: int) -> tuple[tuple[Route, ...], Windows, Workload]:
    """Pipelines of 3 to 6 stages over twelve layers, and the windows that are left when one or two of their nodes are gone."""
    chance = random.Random(seed)
    pipelines: list[Route] = []
    number = 0
    for _ in range(4):
        cuts = sorted(chance.sample(range(1, 12), chance.randint(2, 5)))
        hops = []
        for first, end in zip([0, *cuts], [*cuts, 12], strict=True):
            hops.append(Hop(node(number), first, end))
            number += 1
        pipelines.append(tuple(hops))
    routes = tuple(pipelines[m % 4] for m in range(24))
    lost = {node(k) for k in chance.sample(range(number), chance.randint(1, 2))}
    windows = {hop.node: frozenset(hop.layers) for route in pipelines for hop in route if hop.node not in lost}
    if frozenset[int]().union(*windows.values()) != frozenset(range(12)):
        return uneven(seed + 1000)
    return routes, windows, workload_of(12, 24)


def ends_s(routes: tuple[Route, ...], windows: Windows, workload: Workload) -> dict[NodeId, float]:
    head_s = heads_s(workload)
    found = {member: head_s[min(layers)] for member, layers in windows.items()}
    for route in routes:
        for hop in route:
            found[hop.node] += sum(workload.layers[layer].total_s for layer in hop.layers)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_work_passed_on_leaves_every_route_whole_and_nobody_busier_than_the_busiest(seed: int) -> None:
    old, windows, workload = uneven(seed)
    speeds = dict.fromkeys(windows, 1.0)
    filled = Router(windows, workload, speeds).routes(old, passed_on=0)
    assert filled is not None
    level = Levelled(filled, windows, workload, speeds)
    before_s = max(ends_s(filled, windows, workload).values())
    assert level.over == pytest.approx(before_s / least_seconds(windows, workload, speeds) - 1)
    level.pass_on(0.0, 40)
    found = level.routes()
    for route in found:
        assert [layer for hop in route for layer in hop.layers] == list(range(12))
        assert len({hop.node for hop in route}) == len(route)
        assert all(windows[hop.node].issuperset(hop.layers) for hop in route)
    after_s = max(ends_s(found, windows, workload).values())
    assert after_s == pytest.approx((level.over + 1) * least_seconds(windows, workload, speeds))
    assert least_seconds(windows, workload, speeds) * (1 - 1e-9) <= after_s <= before_s


def test_uneven_layouts_come_within_a_twentieth_of_the_bound_on_average() -> None:
    over: list[list[float]] = [[], []]
    for seed in range(20):
        old, windows, workload = uneven(seed)
        speeds = dict.fromkeys(windows, 1.0)
        for shares, times in zip(over, (0, PASSED_ON), strict=True):
            routes = Router(windows, workload, speeds).routes(old, passed_on=times)
            assert routes is not None
            shares.append(max(ends_s(routes, windows, workload).values()) / least_seconds(windows, workload, speeds) - 1)
    filled, passed_on = (sum(shares) / len(shares) for shares in over)
    assert filled > 0.1
    assert passed_on < 0.05


def test_nothing_is_passed_on_where_the_busiest_is_near_the_bound() -> None:
    routes = tuple((Hop(node(k % 2), 0, 2),) for k in range(10))
    windows = {node(k): frozenset({0, 1}) for k in range(2)}
    level = Levelled(routes, windows, workload_of(2, 10), dict.fromkeys(windows, 1.0))
    assert level.pass_on(TOLERATED, 10) == 0
    assert level.routes() == routes


def test_work_goes_over_a_chain_of_nodes_that_only_share_layers_with_their_neighbours() -> None:
    """n0 can help nobody but n1, and n1 nobody but n2, which has most to do."""
    whole = (Hop(node(0), 0, 2), Hop(node(1), 2, 4), Hop(node(2), 4, 9))
    windows = {node(0): frozenset(range(4)), node(1): frozenset(range(2, 6)), node(2): frozenset(range(4, 9))}
    workload = workload_of(9, 30)
    level = Levelled((whole,) * 30, windows, workload, dict.fromkeys(windows, 1.0))
    assert level.over > 0.4
    level.pass_on(0.0, 60)
    assert level.over < 0.02


def test_routes_of_shadowed_hops_are_left_as_they_are() -> None:
    """Who shadows a hop computes its forward: what is passed on would be computed twice elsewhere."""
    windows = {node(k): frozenset({0, 1}) for k in range(3)}
    old = ((Hop(node(9), 0, 1), Hop(node(0), 1, 2, shadow=node(1))),) * 6
    found = Router(windows, workload_of(2, 6), dict.fromkeys(windows, 1.0)).routes(old)
    assert found is not None
    assert all(route[-1].shadow == node(1) for route in found)


def test_only_the_micro_batches_that_these_nodes_compute_count() -> None:
    """Some of a step's micro-batches may be at other sites: what is left here is level only for those that are here."""
    whole = (Hop(node(0), 0, 2), Hop(node(1), 2, 4))
    windows = {node(0): frozenset(range(3)), node(1): frozenset(range(2, 4)), node(2): frozenset(range(4))}
    level = Levelled((whole,) * 10, windows, workload_of(4, 1000), dict.fromkeys(windows, 1.0))
    assert level.over > 0.3
    level.pass_on(0.0, 30)
    assert 0 <= level.over < 0.1
