"""What is held twice may be lost by two losses in a row, and that is part of what a plan is worth."""

import pytest

from everstep.cluster import Cluster, Link, Node
from everstep.plan import Hop, Plan
from everstep.planner.policies.pricing import risk_after
from everstep.planner.policies.situation import Situation
from everstep.planner.policies.survivors import wary
from everstep.quantities import NodeId, UnitName
from everstep.workload import LayerCost, Unit, Workload

STATE, SWITCH_S = 1000, 1.0
WORKLOAD = Workload(
    layers=tuple(LayerCost(name=f"l{k}", forward_s=1, backward_input_s=1, backward_weight_s=1) for k in range(4)),
    units={
        UnitName(f"l{k}"): Unit(name=UnitName(f"l{k}"), layers=(k,), parameter_bytes=0, state_bytes=STATE) for k in range(4)
    },
    num_micro_batches=4,
)


def situation(*lengths: int, gap_s: float = 100.0) -> Situation:
    """Pipelines of so many equal stages; a stage of two layers takes ten seconds to copy."""
    routes, count = [], 0
    for length in lengths:
        size = 4 // length
        routes.append(tuple(Hop(NodeId(f"n{count + s}"), s * size, (s + 1) * size) for s in range(length)))
        count += length
    placement = {hop.node: tuple(hop.layers) for route in routes for hop in route}
    return Situation(
        cluster=Cluster(
            nodes={node: Node(node_id=node) for node in placement}, link=Link(alpha_s=0.0, bytes_per_s=2 * STATE / 10.0),
        ),
        workload=WORKLOAD, holds={node: WORKLOAD.units_of(set(layers)) for node, layers in placement.items()}, gap_s=gap_s,
        plan=Plan(num_layers=4, placement=placement, routes=tuple(routes[m % len(routes)] for m in range(4))),
        switch_s=SWITCH_S,
    )


def test_what_three_hold_is_not_at_risk():
    three = situation(2, 2, 2)
    assert risk_after(three, three.plan) == 0.0


def test_of_two_alike_pipelines_each_pair_of_peers_is_one_that_must_not_go():
    two = situation(2, 2)
    too_soon = 1 - two.gap.survival(SWITCH_S + 10.0)
    assert risk_after(two, two.plan) == pytest.approx(2 / 6 * too_soon)     # two of six pairs of nodes


def test_pipelines_cut_apart_have_more_such_pairs():
    """A stage of two layers has two peers in a pipeline of four."""
    apart = situation(2, 4)
    too_soon = 1 - apart.gap.survival(SWITCH_S + 10.0)
    assert risk_after(apart, apart.plan) == pytest.approx(4 / 15 * too_soon)


def test_the_rarer_losses_are_the_smaller_is_the_risk():
    often, seldom = (situation(2, 2, gap_s=gap_s) for gap_s in (100.0, 10_000.0))
    assert risk_after(often, often.plan) > 50 * risk_after(seldom, seldom.plan) > 0


def test_where_another_loss_is_likely_before_the_first_is_made_good_two_must_be_survived():
    often, seldom = (situation(2, 2, 2, gap_s=gap_s) for gap_s in (100.0, 1000.0))
    assert wary(often).config.tolerate == 2
    assert wary(seldom) is seldom
