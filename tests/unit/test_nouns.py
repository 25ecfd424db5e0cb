"""Views, workloads, clusters, moves and decisions: their faults are found, and they read as something a person reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from everstep import cluster, transfer, view, workload
from everstep.cluster import Cluster, Link, Node
from everstep.decision import Candidate, Decision, table, text
from everstep.errors import InfeasibleError, PeerLost
from everstep.quantities import HostId, NodeId, SiteId, UnitName
from everstep.transfer import Move
from everstep.view import Member, View
from everstep.workload import LayerCost, Unit, Workload
from tests.unit.protocol.makers import N0, N1, N2, order

VIEW = View(3, (Member(N2), Member(N0), Member(N1, incarnation=4, place=1, address="127.0.0.1:1")))


def test_a_view_knows_its_members_by_name() -> None:
    assert view.problems(VIEW) == []
    assert VIEW.nodes == (N2, N0, N1)
    assert N0 in VIEW and NodeId("n9") not in VIEW and 3 not in VIEW
    assert VIEW.member(N1).incarnation == 4
    assert [VIEW.rank_of(node) for node in VIEW.nodes] == [0, 1, 2]
    with pytest.raises(KeyError):
        VIEW.member(NodeId("n9"))


@pytest.mark.parametrize(("made", "said"), [
    (View(0, VIEW.members), ["views are numbered from 1, got 0"]),
    (View(2, ()), ["view 2 has no members"]),
    (View(2, (Member(N0), Member(N1), Member(N0, incarnation=1))), ["n0 is in view 2 twice"]),
])
def test_a_fault_in_a_view_is_found(made: View, said: list[str]) -> None:
    assert view.problems(made) == said


LAYER = LayerCost(name="a", forward_s=1.0, backward_input_s=2.0, backward_weight_s=3.0)
UNITS = {
    UnitName("a"): Unit(name=UnitName("a"), layers=(0,), parameter_bytes=4, state_bytes=12, gradient_bytes=4),
    UnitName("tie"): Unit(name=UnitName("tie"), layers=(0, 1), parameter_bytes=8, state_bytes=24, gradient_bytes=8),
}
WORKLOAD = Workload(layers=(LAYER, replace(LAYER, name="b")), units=UNITS, num_micro_batches=4, micro_batch_samples=3)


def test_a_workload_counts_each_unit_once() -> None:
    assert workload.problems(WORKLOAD) == []
    assert (WORKLOAD.num_layers, WORKLOAD.batch, LAYER.total_s) == (2, 12, 6.0)
    assert WORKLOAD.units_of({1}) == {"tie"} and WORKLOAD.units_of({0, 1}) == {"a", "tie"}
    assert [WORKLOAD.held_bytes(layers) for layers in ({0}, {1}, {0, 1}, set[int]())] == [48, 32, 48, 0]


def unit(**changes: Any) -> dict[str, Any]:
    return {"units": {UnitName("a"): replace(UNITS[UnitName("a")], **changes)}}


@pytest.mark.parametrize(("changes", "said"), [
    ({"layers": (), "units": {}}, "a workload needs at least one layer"),
    ({"num_micro_batches": 0}, "need at least one micro-batch of one sample, got 0 of 3"),
    ({"micro_batch_samples": 0}, "need at least one micro-batch of one sample, got 4 of 0"),
    ({"layers": (LAYER, LAYER)}, "two layers are called a"),
    ({"layers": (LAYER, replace(LAYER, name="b", output_bytes=-1))}, "layer b: times and bytes cannot be negative"),
    ({"layers": (replace(LAYER, forward_s=-0.1), replace(LAYER, name="b"))}, "layer a: times and bytes cannot be negative"),
    (unit(name=UnitName("z")), "unit a is filed under another name: z"),
    (unit(layers=()), r"unit a: layers must be in 0..1, got ()"),
    (unit(layers=(0, 2)), "unit a: layers must be in 0..1, got (0, 2)"),
    (unit(state_bytes=-1), "unit a: bytes cannot be negative"),
])
def test_a_fault_in_a_workload_is_found(changes: dict[str, Any], said: str) -> None:
    assert workload.problems(replace(WORKLOAD, **changes)) == [said]


CLUSTER = Cluster(nodes={N0: Node(node_id=N0), N1: Node(node_id=N1, speed=0.5, memory_bytes=10)}, host_cores={HostId("h"): 2})


def test_a_cluster_without_a_node_is_the_rest_of_it() -> None:
    assert cluster.problems(CLUSTER) == []
    rest = CLUSTER.without(frozenset({N0}))
    assert (set(rest.nodes), rest.host_cores, rest.link) == ({N1}, CLUSTER.host_cores, CLUSTER.link)
    assert Link(alpha_s=0.5, bytes_per_s=10.0).seconds(20) == 2.5


@pytest.mark.parametrize(("changes", "said"), [
    ({"nodes": {}}, "a cluster needs at least one node"),
    ({"nodes": {N0: Node(node_id=N1)}}, "n0 is filed under another name: n1"),
    ({"nodes": {N0: Node(node_id=N0, memory_bytes=0)}}, "n0: memory must be positive, got 0"),
    ({"nodes": {N0: Node(node_id=N0, speed=0)}}, "n0: speed must be positive, got 0"),
    ({"nodes": {N0: Node(node_id=N0, speed=float("nan"))}}, "n0: speed must be positive, got nan"),
    ({"host_cores": {HostId("h"): 0}}, "host h: cores must be at least 1, got 0"),
    ({"link": Link(alpha_s=-1.0)}, "a link needs alpha_s >= 0 and bytes_per_s > 0"),
    ({"link": Link(bytes_per_s=0.0)}, "a link needs alpha_s >= 0 and bytes_per_s > 0"),
])
def test_a_fault_in_a_cluster_is_found(changes: dict[str, Any], said: str) -> None:
    (found,) = cluster.problems(replace(CLUSTER, **changes))
    assert found.startswith(said)


EAST, WEST, SOUTH = SiteId("east"), SiteId("west"), SiteId("south")
TWO_SITES = Cluster(
    nodes={
        N0: Node(node_id=N0, host=HostId("h"), site=EAST), N1: Node(node_id=N1, host=HostId("h"), site=EAST),
        N2: Node(node_id=N2, host=HostId("i"), site=WEST),
    },
    host_link=Link(alpha_s=0.0), site_links={(EAST, WEST): Link(alpha_s=0.5)},
)


def test_a_link_depends_on_where_its_ends_are_and_not_on_the_direction() -> None:
    assert cluster.problems(TWO_SITES) == []
    assert cluster.site_pair(WEST, EAST) == cluster.site_pair(EAST, WEST) == (EAST, WEST)
    assert TWO_SITES.link_between(N0, N1) == Link(alpha_s=0.0)
    assert TWO_SITES.link_between(N0, N2) == TWO_SITES.link_between(N2, N0) == Link(alpha_s=0.5)
    assert replace(TWO_SITES, host_link=None).link_between(N0, N1) == TWO_SITES.link


def test_a_cluster_of_one_link_says_so() -> None:
    assert CLUSTER.one_link == CLUSTER.link
    assert TWO_SITES.one_link is None
    assert replace(CLUSTER, host_link=Link(alpha_s=0.0)).one_link is None


def test_a_cluster_keeps_its_links_when_nodes_are_lost() -> None:
    rest = TWO_SITES.without(frozenset({N2}))
    assert (rest.host_link, rest.site_links) == (TWO_SITES.host_link, TWO_SITES.site_links)
    assert cluster.problems(rest) == []


@pytest.mark.parametrize(("changes", "said"), [
    ({"site_links": {}}, "there is no link between sites east and west"),
    ({"site_links": {(EAST, WEST): Link(), (WEST, EAST): Link()}},
     "a link between sites needs two, in the order of their names, got west and east"),
    ({"site_links": {(EAST, WEST): Link(), (EAST, EAST): Link()}},
     "a link between sites needs two, in the order of their names, got east and east"),
    ({"site_links": {(EAST, WEST): Link(bytes_per_s=0)}}, "the link between sites east and west needs alpha_s >= 0"),
    ({"site_links": {(EAST, WEST): Link(alpha_s=float("inf"))}}, "the link between sites east and west needs alpha_s >= 0"),
    ({"host_link": Link(alpha_s=-1.0)}, "a link inside a host needs alpha_s >= 0"),
    ({"nodes": {**TWO_SITES.nodes, N1: replace(TWO_SITES.nodes[N1], site=WEST)}},
     "host h cannot be at more than one site: east, west"),
])
def test_a_fault_in_sites_and_links_is_found(changes: dict[str, Any], said: str) -> None:
    (found,) = cluster.problems(replace(TWO_SITES, **changes))
    assert found.startswith(said)


A, B = UnitName("a"), UnitName("b")


@pytest.mark.parametrize(("moves", "said"), [
    ((), []),
    ((Move(A, N0, N1), Move(B, N0, N1)), []),
    ((Move(B, N1, N2),), ["b: n1 → n2: n1 does not hold it"]),
    ((Move(A, NodeId("n9"), N1),), ["a: n9 → n1: n9 does not hold it"]),
    ((Move(A, N0, N2),), ["a: n0 → n2: n2 holds it already"]),
    ((Move(A, N0, N1), Move(A, N2, N1)), ["a unit is sent to one node twice"]),
])
def test_a_fault_in_the_moves_is_found(moves: tuple[Move, ...], said: list[str]) -> None:
    held = {N0: frozenset({A, B}), N1: frozenset[UnitName](), N2: frozenset({A})}
    assert transfer.problems(moves, held) == said


def test_a_decision_says_what_was_chosen_first_and_why_the_others_lost() -> None:
    plan = order(1, N0, N1).plan
    decision = Decision(cause="n2 lost", view=4, step=7, gap_s=600, chosen=1, candidates=(
        Candidate(policy="spare", plan=None, reason="no spare"),
        Candidate(policy="reroute", plan=plan, step_s=0.25, stall_s=0.1, peak_bytes=24_000_000, value=4000.0),
        Candidate(policy="repartition", plan=plan, step_s=0.2, stall_s=90, peak_bytes=12, value=3500.0, reason="fewer samples"),
    ))
    assert decision.plan == plan and decision.candidate.policy == "reroute"
    assert [candidate.feasible for candidate in decision.candidates] == [False, True, True]
    assert [row[0] for row in table(decision)] == ["policy", "reroute", "repartition", "spare"]
    assert text(decision) == "\n".join((
        "n2 lost: step 7, view 4; next event expected in 10 min",
        "policy       step    stall    memory   samples  verdict",
        "reroute      0.25 s  0.10 s   24.0 MB  4,000    chosen",
        "repartition  0.20 s  90.00 s  12 B     3,500    fewer samples",
        "spare        -       -        -        -        no spare",
    ))


def test_errors_carry_fields_and_say_where() -> None:
    lost = PeerLost(peers=["n1", "n2"], operation="gradient", view=3, step=7, micro_batch=None)
    assert str(lost) == "no gradient from n1, n2 in step 7 of view 3" and lost.peers == ("n1", "n2")
    nothing = InfeasibleError("no plan fits", {"2 stages": "n0 needs 32 B of 16 B"})
    assert str(nothing) == "no plan fits" and nothing.rejected == {"2 stages": "n0 needs 32 B of 16 B"}
