"""What each policy proposes, and that nothing that is proposed is wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep import plan as plans
from everstep import schedule as schedules
from everstep import transfer
from everstep.cluster import Cluster, Link, Node
from everstep.config import PlannerConfig
from everstep.plan import Hop, Order, Plan
from everstep.planner.policies.layouts import grow, repartition, restore
from everstep.planner.policies.pricing import at_risk, layout_words
from everstep.planner.policies.roles import heal, normalize
from everstep.planner.policies.routes import keep, reroute, shrink, spare
from everstep.planner.policies.situation import CheckpointInfo, Situation, is_broken
from everstep.planner.policies.table import BESIDE, POLICIES, propose
from everstep.planner.step.memory import cap_bytes, node_bytes
from everstep.planner.step.moves import moves_for
from everstep.planner.step.schedules import order_of
from everstep.quantities import NodeId, UnitName
from everstep.view import Member, View
from everstep.workload import Workload

from .worlds import FREE_LINK, cluster_of, grid_plan, node, workload_of
from .worlds import plans as any_plan


def situation_after(
    plan: Plan, lost: tuple[int, ...] = (), *, joined: int = 0, workload: Workload | None = None, cores: int | None = 1,
    policy: str = "auto", memory_bytes: int | None = None, checkpoint: CheckpointInfo | None = None, link: Link = FREE_LINK,
) -> Situation:
    workload = workload or workload_of(plan.num_layers, len(plan.routes))
    gone = frozenset(node(number) for number in lost)
    newest = max(int(member[1:]) for member in plan.nodes)
    newcomers = tuple(node(newest + number) for number in range(1, joined + 1))
    nodes = {
        member: Node(node_id=member, memory_bytes=memory_bytes) for member in (*plan.nodes, *newcomers) if member not in gone
    }
    template = cluster_of(1, cores=cores, link=link)
    return Situation(
        cluster=Cluster(nodes=nodes, host_cores=template.host_cores, link=template.link), workload=workload, plan=plan,
        holds={m: workload.units_of(frozenset(plan.placement.get(m, ()))) for m in nodes},
        lost=tuple(sorted(gone)), joined=newcomers, step=40, checkpoint=checkpoint,
        config=PlannerConfig(policy=policy), redo_steps=25,  # type: ignore[arg-type]
    )


def wrong_with(situation: Situation, plan: Plan) -> list[str]:
    view = View(2, tuple(Member(member) for member in situation.nodes))
    return plans.problems(plan, view, situation.workload.num_layers) or schedules.problems(order_of(plan), plan)


def load_of(plan: Plan) -> Counter[NodeId]:
    return Counter(hop.node for route in plan.routes for hop in route)


def plan_of(candidates: list) -> Plan:  # type: ignore[type-arg]
    plan = candidates[0].plan
    assert plan is not None, candidates[0].reason
    return plan


# No matter what is lost.


@settings(max_examples=150, deadline=None)
@given(st.data(), any_plan(max_micro_batches=5))
def test_no_policy_proposes_a_plan_with_problems_after_any_loss(data: st.DataObject, plan: Plan) -> None:
    lost = data.draw(st.sets(st.sampled_from(plan.nodes), max_size=len(plan.nodes) - 1))
    cap = data.draw(st.sampled_from([None, 60, 100, 160]))
    situation = situation_after(
        plan, tuple(int(member[1:]) for member in lost), joined=data.draw(st.integers(0, 2)), memory_bytes=cap,
        cores=data.draw(st.sampled_from([1, None])), checkpoint=CheckpointInfo(step=30, path="c"),
    )
    situation = replace(situation, thorough=data.draw(st.booleans()))
    candidates = [candidate for policy in POLICIES.values() for candidate in policy(situation)]
    assert {candidate.policy for candidate in candidates} == set(POLICIES)
    for candidate in candidates:
        if candidate.plan is None:
            assert candidate.reason
            continue
        assert wrong_with(situation, candidate.plan) == [], candidate.policy
        needed = node_bytes(candidate.plan, situation.workload)
        assert candidate.peak_bytes == max(needed.values())
        for member, num_bytes in needed.items():
            assert num_bytes <= (cap_bytes(member, situation.cluster, None) or num_bytes)
        moves, _ = moves_for(candidate.plan, situation.holds, situation.workload, restore=candidate.way == "restore")
        assert transfer.problems(moves, dict(situation.holds)) == []
        if candidate.way == "now":
            assert moves == (), "what is reached by routes alone moves nothing"


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(2, 4), st.integers(1, 4))
def test_a_plain_grid_is_rerouted_whenever_each_stage_has_a_holder_left(
    data: st.DataObject, num_pipelines: int, num_stages: int,
) -> None:
    plan = grid_plan(num_pipelines, num_stages, 4)
    survivors = [data.draw(st.integers(0, num_pipelines - 1)) * num_stages + s for s in range(num_stages)]
    lost = data.draw(st.sets(st.sampled_from(range(num_pipelines * num_stages))))
    found = reroute(situation_after(plan, tuple(sorted(lost - set(survivors)))))
    assert found[0].feasible, found[0].reason


# Reroute.


def test_peers_take_over_evenly() -> None:
    plan = plan_of(reroute(situation_after(grid_plan(3, 4, 6), (5,))))
    assert load_of(plan) == {**{node(k): 6 for k in range(12) if k != 5}, node(1): 9, node(9): 9}


def test_survivors_keep_what_they_hold() -> None:
    before = grid_plan(2, 3, 4)
    after = plan_of(reroute(situation_after(before, (1,))))
    assert after.placement == {member: layers for member, layers in before.placement.items() if member != node(1)}


def test_a_lost_range_is_taken_in_pieces_where_the_cuts_differ() -> None:
    one = (Hop(node(0), 0, 2), Hop(node(1), 2, 4))
    other = (Hop(node(2), 0, 3), Hop(node(3), 3, 4))
    placement = {hop.node: tuple(hop.layers) for hop in (*one, *other)}
    before = Plan(num_layers=4, placement=placement, routes=(one, other) * 2)
    after = plan_of(reroute(situation_after(before, (1,))))
    assert after.routes[0] == (Hop(node(0), 0, 2), Hop(node(2), 2, 3), Hop(node(3), 3, 4))


def test_what_was_rerouted_is_rerouted_again() -> None:
    once = plan_of(reroute(situation_after(grid_plan(3, 2, 4), (1,))))
    again = situation_after(once, (3,))
    assert {hop.node for route in plan_of(reroute(again)).routes for hop in route if hop.first == 1} == {node(5)}


def test_a_layer_without_a_holder_is_named() -> None:
    found = reroute(situation_after(grid_plan(2, 3, 2), (1, 4, 2, 5)))
    assert (found[0].plan, found[0].reason) == (None, "layers l1, l2 have no living holder")
    assert reroute(situation_after(grid_plan(2, 3, 2), (1, 4)))[0].reason == "layer l1 has no living holder"


def test_a_node_that_lost_its_state_is_routed_around() -> None:
    situation = situation_after(grid_plan(2, 2, 3))
    situation = replace(situation, holds={**situation.holds, node(1): frozenset()})
    assert is_broken(situation)
    after = plan_of(reroute(situation))
    assert load_of(after)[node(1)] == 0 and after.placement[node(1)] == ()


def test_state_left_from_a_broken_off_move_is_found_by_its_units() -> None:
    """The plan says n1 holds layer 1, and it is gone; n0 has the unit from before."""
    situation = situation_after(grid_plan(1, 2, 2), (1,))
    situation = replace(situation, holds={node(0): frozenset({UnitName("l0"), UnitName("l1")})})
    assert plan_of(reroute(situation)).routes == ((Hop(node(0), 0, 2),),) * 2


def test_a_holder_that_does_not_compute_is_used_too() -> None:
    before = grid_plan(1, 2, 4)
    before = replace(before, placement={**before.placement, node(2): (1,)})
    after = plan_of(reroute(situation_after(before, (1,))))
    assert load_of(after)[node(2)] == 4


def test_slower_peers_take_less() -> None:
    situation = situation_after(grid_plan(3, 1, 6), (0,))
    nodes = dict(situation.cluster.nodes)
    nodes[node(1)] = replace(nodes[node(1)], speed=0.5)
    load = load_of(plan_of(reroute(replace(situation, cluster=replace(situation.cluster, nodes=nodes)))))
    assert load[node(1)] < load[node(2)]


def test_more_activation_slots_are_used_on_devices_of_their_own_only() -> None:
    own = reroute(situation_after(grid_plan(3, 4, 6), (6,), cores=None))[0]
    shared = reroute(situation_after(grid_plan(3, 4, 6), (6,), cores=2))[0]
    assert own.plan is not None and own.plan.order.extra_slots == 2
    assert shared.plan is not None and shared.plan.order.extra_slots == 0


# Shrink, spare, repartition, restore.


def test_shrink_drops_the_broken_pipeline_and_its_survivors_become_spares() -> None:
    after = plan_of(shrink(situation_after(grid_plan(3, 2, 4), (1,))))
    assert after.spares == (node(0),) and after.placement[node(0)] == ()
    assert load_of(after) == {node(k): 6 for k in (2, 3, 4, 5)}


def test_shrink_has_no_answer_without_a_whole_pipeline() -> None:
    assert shrink(situation_after(grid_plan(2, 2, 4), (0, 3)))[0].reason == "no pipeline is whole"


def test_a_spare_takes_the_lost_place() -> None:
    before = grid_plan(2, 2, 3)
    before = replace(before, placement={**before.placement, node(4): ()})
    found = spare(situation_after(before, (1,)))
    after = plan_of(found)
    assert after.placement[node(4)] == (1,)
    assert load_of(after) == {node(k): 3 for k in (0, 2, 3, 4)}
    assert found[0].way == "blocking" and found[0].moved_bytes == 30


def test_where_spares_are_too_few_the_rest_is_rerouted() -> None:
    before = grid_plan(3, 2, 3)
    before = replace(before, placement={**before.placement, node(6): ()})
    after = plan_of(spare(situation_after(before, (0, 3))))
    assert load_of(after)[node(6)] == 3 and len(after.nodes) == 5


def test_without_idle_nodes_spare_has_no_answer() -> None:
    assert spare(situation_after(grid_plan(2, 2, 3), (1,)))[0].reason == "no node is idle"


def test_a_spare_cannot_get_what_nobody_has() -> None:
    before = grid_plan(1, 2, 3)
    before = replace(before, placement={**before.placement, node(2): ()})
    assert spare(situation_after(before, (1,)))[0].reason == "no living holder of l1"


def test_repartition_uses_everybody_and_moves_what_is_lacking() -> None:
    found = repartition(situation_after(grid_plan(2, 4, 4), (5,), workload=workload_of(4, 8, optimizer_s=0.5)))
    assert all(candidate.plan is not None and candidate.plan.spares == () for candidate in found)
    assert found[0].way == "blocking" and found[0].moved_bytes > 0 and found[0].stall_s > 0


def test_restore_pays_for_the_steps_that_are_trained_again() -> None:
    situation = situation_after(grid_plan(1, 2, 4), (1,), checkpoint=CheckpointInfo(step=30, path="c"))
    near, far = restore(situation)[0], restore(replace(situation, checkpoint=None))[0]
    assert (near.restore_step, far.restore_step) == (30, 0)
    assert far.stall_s - near.stall_s == pytest.approx(30 * near.step_s)
    assert near.value > far.value


# Normalize, heal, grow.


def test_two_losses_at_one_stage_are_spread_over_two_stages() -> None:
    """Three pipelines, two holes at stage 2: one node stays there with everything, until a node of stage 0 comes to help."""
    before = grid_plan(3, 4, 6)
    once = plan_of(reroute(situation_after(before, (2,))))
    situation = situation_after(once, (6,), cores=None)
    found = normalize(situation)
    after = plan_of(found)
    (helper,) = [member for member in after.nodes if after.placement[member] != once.placement[member]]
    assert after.placement[helper] == (2,) and len(after.holders(2)) == 2
    assert found[0].step_s < 0.7 * reroute(situation)[0].step_s
    assert found[0].way == "blocking" and found[0].moved_bytes == 30


def test_a_single_loss_is_left_where_it_is() -> None:
    assert normalize(situation_after(grid_plan(3, 4, 6), (5,)))[0].reason == "losses sit where they hurt least"


def test_a_newcomer_fills_the_hole() -> None:
    holed = plan_of(reroute(situation_after(grid_plan(3, 2, 4), (3,))))
    situation = situation_after(holed, joined=1, cores=None)
    found = heal(situation)
    after = plan_of(found)
    assert after.placement[after.nodes[-1]] == (1,)
    assert set(load_of(after).values()) == {4} and found[0].step_s < keep(situation)[0].step_s


def test_where_there_is_no_hole_nothing_is_healed() -> None:
    assert heal(situation_after(grid_plan(2, 2, 4), joined=1))[0].reason == "there is no hole to fill"
    assert heal(situation_after(grid_plan(2, 2, 4), (1,)))[0].reason == "no node is idle"


def test_newcomers_become_a_pipeline_beside_the_others() -> None:
    found = grow(situation_after(grid_plan(2, 2, 8), joined=2, cores=None, workload=workload_of(2, 16, state_bytes=30)))
    after = plan_of(found)
    assert load_of(after)[node(4)] > 0 and load_of(after)[node(5)] > 0
    assert [after.placement[node(k)] for k in range(4)] == [(0,), (1,), (0,), (1,)]


# All together.


def test_auto_asks_every_policy() -> None:
    asked = {candidate.policy for candidate in propose(situation_after(grid_plan(2, 4, 4), (5,)))}
    assert asked == set(POLICIES) - {"grow"}, "what grow would do is among the layouts of repartition"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_forced_policy_is_asked_alone_and_falls_to_restore_without_an_answer(policy: str) -> None:
    before = grid_plan(2, 2, 4)
    before = replace(before, placement={**before.placement, node(4): ()})
    alone = propose(situation_after(before, (1,), policy=policy))
    assert {candidate.policy for candidate in alone} == {policy, *BESIDE.get(policy, ())}
    hopeless = propose(situation_after(before, (1, 3), policy=policy))
    assert [candidate.policy for candidate in hopeless if candidate.feasible] == ["restore"]
    assert all(candidate.reason for candidate in hopeless if candidate.policy != "restore")


def test_a_newcomer_may_stay_spare_or_have_everything_cut_anew() -> None:
    found = propose(situation_after(grid_plan(2, 2, 4), joined=1))
    assert {(candidate.policy, candidate.way) for candidate in found} >= {("spare", "now"), ("repartition", "blocking")}
    assert found[0].plan is not None and found[0].plan.placement[node(4)] == ()
    assert found[0].plan.routes == grid_plan(2, 2, 4).routes


@pytest.mark.parametrize("policy", ["reroute", "normalize", "spare", "shrink", "restore"])
def test_a_forced_policy_lets_a_newcomer_in_as_a_spare(policy: str) -> None:
    found = propose(situation_after(grid_plan(2, 2, 4), joined=1, policy=policy))
    assert [(candidate.policy, candidate.way) for candidate in found] == [("spare", "now")]


def test_a_lost_spare_changes_nothing_else() -> None:
    before = grid_plan(2, 2, 4)
    before = replace(before, placement={**before.placement, node(4): ()})
    after = plan_of(keep(situation_after(before, (4,))))
    assert after.routes == before.routes and node(4) not in after.nodes


def test_memory_is_a_hard_limit() -> None:
    workload = workload_of(2, 8, state_bytes=20_000_000, gradient_bytes=2_000_000, activation_bytes=2_000_000)
    situation = situation_after(grid_plan(2, 2, 4), (1,), workload=workload, memory_bytes=25_000_000)
    assert reroute(situation)[0].reason == "n0 needs 26.0 MB of 25.0 MB"


def test_the_share_of_nodes_that_hold_an_only_copy() -> None:
    plan = grid_plan(2, 2, 1, lost=[(0, 1)])
    assert at_risk(plan, workload_of(2, 2)) == pytest.approx(1 / 3)
    assert at_risk(grid_plan(2, 2, 1), workload_of(2, 2)) == 0


def test_layouts_are_named_by_their_lengths() -> None:
    assert layout_words(grid_plan(2, 4, 1)) == "4+4"
    assert layout_words(grid_plan(5, 2, 1)) == "5×2"


def test_where_there_is_time_moved_windows_and_more_layouts_are_looked_at_too() -> None:
    """Four pipelines of three stages with four layers each: one node less, and only the windows of its pipeline move."""
    routes = [tuple(Hop(node(3 * d + s), 4 * s, 4 * s + 4) for s in range(3)) for d in range(4)]
    plan = Plan(
        num_layers=12, placement={hop.node: tuple(hop.layers) for route in routes for hop in route},
        routes=tuple(routes[m % 4] for m in range(32)), order=Order(split=True),
    )
    situation = situation_after(plan, (4,), cores=None, memory_bytes=40 * 4 + 24)
    quick, thorough = repartition(situation), repartition(replace(situation, thorough=True))
    (moved,) = [candidate for candidate in thorough if candidate.reason == "moved windows"]
    assert {candidate.reason for candidate in quick} < {candidate.reason for candidate in thorough}
    assert moved.step_s < min(candidate.step_s for candidate in quick)
    assert moved.moved_bytes <= min(candidate.moved_bytes for candidate in quick if candidate.moved_bytes)


# What is said.


def test_a_restore_in_place_of_a_policy_without_an_answer_says_so() -> None:
    *others, instead = propose(situation_after(grid_plan(2, 2, 4), (1,), policy="spare"))
    assert [candidate.reason for candidate in others] == ["no node is idle"]
    assert (instead.policy, instead.note) == ("restore", "since spare has no answer")


def test_many_lost_layers_are_told_by_the_first_and_the_last() -> None:
    found = propose(situation_after(grid_plan(1, 10, 2), tuple(range(1, 9))))
    why = next(candidate.reason for candidate in found if candidate.policy == "reroute")
    assert why.startswith("layers l1, l2, 5 more, l8 have no living holder"), why
