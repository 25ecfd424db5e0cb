"""Who takes which place: hosts apart where it costs nothing."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.cluster import Cluster, Node
from everstep.plan import Hop
from everstep.planner.layouts.catalogue import Layout
from everstep.planner.layouts.places import Holds, apart, assign, assigned, lacking_bytes
from everstep.quantities import HostId, NodeId
from everstep.workload import Workload

from .worlds import FREE_LINK, node, workload_of


def cluster_on(hosts: str) -> Cluster:
    """Node ``k`` is on the host that the letter ``hosts[k]`` names."""
    nodes = {node(k): Node(node_id=node(k), host=HostId(letter)) for k, letter in enumerate(hosts)}
    return Cluster(nodes=nodes, link=FREE_LINK)


def lone_layers(layout: Layout, chosen: list[NodeId], cluster: Cluster, num_layers: int) -> int:
    """Layers whose holders are all on one host."""
    hosts = [
        {cluster.nodes[name].host for (first, end), name in zip(layout.places, chosen, strict=True) if first <= layer < end}
        for layer in range(num_layers)
    ]
    return sum(len(some) < 2 for some in hosts)


def moved(layout: Layout, chosen: list[NodeId], workload: Workload, holds: Holds) -> float:
    wanted = [workload.units_of(set(range(*bounds))) for bounds in layout.places]
    return sum(float(lacking_bytes([units], [name], workload, holds)[0, 0]) for units, name in zip(wanted, chosen, strict=True))


def test_two_replicas_of_a_layer_are_on_two_hosts_where_no_more_bytes_move() -> None:
    """All four held what they hold before; whichever takes the first stage of a pipeline moves nothing."""
    workload = workload_of(2, 4)
    cluster = cluster_on("abab")
    layout = Layout(splits=(((0, 1), (1, 2)),) * 2, shares=(2, 2), estimate_s=0.0)
    holds = {node(0): workload.units_of({0}), node(2): workload.units_of({0}), node(1): workload.units_of({1}),
             node(3): workload.units_of({1})}
    assert lone_layers(layout, assigned(layout, list(cluster.nodes), workload, cluster, holds), cluster, 2) == 2, (
        "who holds what cannot change places for nothing"
    )
    chosen = assigned(layout, list(cluster.nodes), workload, cluster, {})
    assert lone_layers(layout, chosen, cluster, 2) == 0


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_keeping_hosts_apart_never_moves_more_bytes_and_never_leaves_more_layers_on_one_host(data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(1, 4))
    workload = workload_of(num_layers, 4, state_bytes=1)
    splits = []
    for _ in range(data.draw(st.integers(1, 3))):
        cuts = sorted(data.draw(st.sets(st.integers(1, num_layers), max_size=2)) | {0, num_layers})
        splits.append(tuple(pairwise(cuts)))
    count = sum(map(len, splits)) + data.draw(st.integers(0, 2))
    cluster = cluster_on("".join(data.draw(st.sampled_from("abc")) for _ in range(count)))
    holds = {
        name: workload.units_of(data.draw(st.sets(st.integers(0, num_layers - 1), max_size=2))) for name in cluster.nodes
    }
    layout = Layout(splits=tuple(splits), shares=(1,) * len(splits), estimate_s=0.0)
    wanted = [workload.units_of(set(range(*bounds))) for bounds in layout.places]
    before = assign(wanted, list(cluster.nodes), workload, holds)
    after = apart(layout, before, wanted, list(cluster.nodes), workload, cluster, holds)
    assert len(set(after)) == len(wanted)
    assert moved(layout, after, workload, holds) == moved(layout, before, workload, holds)
    assert lone_layers(layout, after, cluster, num_layers) <= lone_layers(layout, before, cluster, num_layers)


def test_a_layout_that_moves_nobody_is_left_as_it_is_though_layers_are_on_one_host_alone() -> None:
    routes = tuple(tuple(Hop(node(2 * line + stage), stage, stage + 1) for stage in range(2)) for line in range(2))
    layout = Layout(kept=routes, splits=(), shares=(1, 1), estimate_s=0.0)
    assert assigned(layout, [], workload_of(2, 2), cluster_on("aaaab"), {}) == []
