"""The picture of a step: what is drawn where, and what is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep.cluster import Link
from everstep.plan import Hop, Order, Plan
from everstep.planner.step.cost import finish_seconds
from everstep.planner.step.schedules import order_of
from everstep.planner.step.timeline import MOST_ACTIONS, Timeline, text, timeline
from everstep.schedule import Action, Kind

from .worlds import cluster_of, grid_plan, node, workload_of


def drawn(plan: Plan, width: int, *, link: Link | None = None, most_nodes: int = 16) -> list[str]:
    """The lines of a picture, without names; the last is its legend."""
    cluster = cluster_of(len(plan.nodes), link=link) if link else cluster_of(len(plan.nodes))
    picture = timeline(plan, workload_of(plan.num_layers, len(plan.routes), output_bytes=1), cluster, most_nodes)
    assert picture is not None
    return [line.split(" ", 1)[1] for line in text(picture, width).splitlines()]


def test_a_character_a_second_shows_one_f_one_b_and_its_bubbles() -> None:
    assert drawn(grid_plan(1, 2, 2), 9)[:2] == ["FF..BB.BB", ".FBBFBB.."]


def test_split_backward_has_a_letter_of_its_own() -> None:
    plan = grid_plan(1, 2, 2, order=Order(split=True))
    lines = drawn(plan, 8)
    assert [line.count("F") for line in lines[:2]] == [line.count("B") for line in lines[:2]] == [2, 2]
    assert [line.count("W") for line in lines[:2]] == [2, 2]


def test_time_that_a_message_takes_is_idle() -> None:
    lines = drawn(grid_plan(1, 2, 1), 8, link=Link(alpha_s=1.0, bytes_per_s=1e30))
    assert lines[:2] == ["F.....BB", "..FBB..."]


def test_a_moment_shows_what_takes_most_of_it_and_a_dot_where_nothing_does() -> None:
    forward, backward = Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)
    picture = Timeline((node(0),), ((node(0), forward, 0.0, 0.4), (node(0), backward, 0.4, 1.0), (node(0), forward, 3.7, 4.0)))
    assert text(picture, 4).splitlines()[0] == "n0 B..."


def test_the_legend_says_how_long_it_takes() -> None:
    assert drawn(grid_plan(1, 2, 2), 9)[-1].strip() == "0 to 9.00 s"


def test_names_of_different_length_do_not_shift_the_lines() -> None:
    route = (Hop(node(9), 0, 1), Hop(node(10), 1, 2))
    plan = Plan(num_layers=2, placement={node(9): (0,), node(10): (1,)}, routes=(route,) * 3)
    cluster = cluster_of(11)
    picture = timeline(plan, workload_of(2, 3), replace(cluster, nodes={node(k): cluster.nodes[node(k)] for k in (9, 10)}))
    assert picture is not None
    assert len({len(line) for line in text(picture, 20).splitlines()[:2]}) == 1


def test_only_the_first_nodes_that_compute_are_drawn() -> None:
    plan = grid_plan(2, 2, 2)
    plan = replace(plan, placement={**plan.placement, node(4): ()})
    cluster, workload = cluster_of(5), workload_of(2, 4)
    shown, all_of_them = timeline(plan, workload, cluster, 3), timeline(plan, workload, cluster)
    assert shown is not None and all_of_them is not None
    assert shown.nodes == (node(0), node(1), node(2))
    assert {span[0] for span in shown.spans} == set(shown.nodes)
    assert all_of_them.nodes == tuple(node(k) for k in range(4)), "a spare does nothing"


@pytest.mark.parametrize("lost", [[], [(0, 1)]])
def test_it_ends_when_the_last_action_does(lost: list[tuple[int, int]]) -> None:
    plan, workload, cluster = grid_plan(3, 3, 4, lost=lost), workload_of(3, 12), cluster_of(9)
    picture = timeline(plan, workload, cluster)
    assert picture is not None
    assert picture.end_s == max(finish_seconds(plan, workload, cluster, order_of(plan)).values())
    assert len(picture.spans) == 2 * 3 * 12


def test_a_plan_of_very_many_actions_is_not_drawn() -> None:
    each = MOST_ACTIONS // 6
    assert timeline(grid_plan(1, 2, each), workload_of(2, each), cluster_of(2)) is not None
    assert timeline(grid_plan(1, 2, each + 1), workload_of(2, each + 1), cluster_of(2)) is None


def test_a_picture_of_nothing_is_empty() -> None:
    assert text(Timeline((), ())) == ""
