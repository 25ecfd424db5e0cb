"""Who takes which place of a layout: the assignment of nodes that moves the fewest bytes, given what each node holds.

Places of a site are for nodes of that site. Nodes that hold just what a place needs take it, which loses nothing; the
Hungarian method does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from everstep.cluster import Cluster
from everstep.plan import Hop, Order, Plan
from everstep.planner.layouts import Layout
from everstep.planner.parts import units_by_layers
from everstep.planner.pipelines import Array
from everstep.quantities import NodeId, UnitName
from everstep.workload import Workload

ASSIGNED_TOGETHER = 2048
"""So many nodes are assigned to places at once; more in turns of so many, which may miss the fewest bytes."""

Holds = Mapping[NodeId, frozenset[UnitName]]


def assigned(layout: Layout, nodes: Sequence[NodeId], workload: Workload, cluster: Cluster, holds: Holds) -> list[NodeId]:
    """The node for each new place of ``layout``. Equal choices follow the order of ``nodes``."""
    staying = {hop.node for route in layout.kept for hop in route}
    free = [node for node in nodes if node not in staying]
    layers = [tuple(range(*bounds)) for bounds in layout.places]
    units = units_by_layers(layers, workload)
    wanted = [units[some] for some in layers]
    if not layout.sites:
        return assign(wanted, free, workload, holds)
    sites = [site for some in layout.sites for site in some]
    chosen: dict[int, NodeId] = {}
    for site in dict.fromkeys(sites):
        places = [place for place, name in enumerate(sites) if name == site]
        here = [node for node in free if cluster.nodes[node].site == site]
        chosen |= zip(places, assign([wanted[place] for place in places], here, workload, holds), strict=True)
    return [chosen[place] for place in range(len(wanted))]


def assign(
    wanted: Sequence[frozenset[UnitName]], nodes: Sequence[NodeId], workload: Workload, holds: Holds,
) -> list[NodeId]:
    """The node for each place, of those at least as many, so that the fewest bytes move.

    ``wanted``: the units that each place needs. Equal choices follow the order of ``nodes``. A node that holds just what a
    place needs takes it: if it went elsewhere, the two could change places and would move no more. The others are assigned
    by the Hungarian method.
    """
    if not any(holds.get(node) for node in nodes):
        return list(nodes[: len(wanted)])
    holding: dict[frozenset[UnitName], list[NodeId]] = {}
    for node in reversed(nodes):
        holding.setdefault(holds.get(node, frozenset()), []).append(node)
    chosen: dict[int, NodeId] = {}
    for place, units in enumerate(wanted):
        if holding.get(units):
            chosen[place] = holding[units].pop()
    taken = set(chosen.values())
    rest, places = [node for node in nodes if node not in taken], [p for p in range(len(wanted)) if p not in chosen]
    if len(rest) == len(places) == 1:
        return [chosen.get(place, rest[0]) for place in range(len(wanted))]
    while places:
        some, places = places[:ASSIGNED_TOGETHER], places[ASSIGNED_TOGETHER:]
        offered = rest if not places else rest[:ASSIGNED_TOGETHER]
        rows, columns = linear_sum_assignment(lacking_bytes([wanted[p] for p in some], offered, workload, holds))
        chosen |= {some[int(column)]: offered[int(row)] for row, column in zip(rows, columns, strict=True)}
        gone = set(chosen.values())
        rest = [node for node in rest if node not in gone]
    return [chosen[place] for place in range(len(wanted))]


def lacking_bytes(
    wanted: Sequence[frozenset[UnitName]], nodes: Sequence[NodeId], workload: Workload, holds: Holds,
) -> Array:
    """By node and place: bytes of the place's units that the node does not hold."""
    held = [holds.get(node, frozenset()) for node in nodes]
    rows, columns = list(dict.fromkeys(held)), list(dict.fromkeys(wanted))
    names = list(workload.units)
    sizes = np.array([workload.units[name].state_bytes for name in names], dtype=np.float64)
    needs = np.array([[name in units for name in names] for units in columns], dtype=np.float64)
    lacks = np.array([[name not in units for name in names] for units in rows], dtype=np.float64)
    row_of, column_of = ({units: index for index, units in enumerate(kinds)} for kinds in (rows, columns))
    lacking = (lacks * sizes) @ needs.T  # by what is held and what is wanted, of which there are few
    found: Array = lacking[np.ix_([row_of[units] for units in held], [column_of[units] for units in wanted])]
    return found


def interleaved(shares: Sequence[int]) -> tuple[int, ...]:
    """Which pipeline each micro-batch takes: any first part of them is shared out as evenly as the whole.

    A partial last batch takes the first micro-batches only, and pipelines should start together.
    """
    counts = np.array(shares)
    owners = np.repeat(np.arange(len(counts)), counts)
    turns = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    order = np.lexsort((owners, (turns + 0.5) / counts[owners]))
    found: list[int] = owners[order].tolist()
    return tuple(found)


def plan_of(layout: Layout, chosen: Sequence[NodeId], nodes: Sequence[NodeId], num_layers: int, order: Order) -> Plan:
    """``layout`` with ``chosen`` on its new places and the rest of ``nodes``, which are in the order of their numbers, idle."""
    placement: dict[NodeId, tuple[int, ...]] = dict.fromkeys(nodes, ())
    routes = list(layout.kept)
    start = 0
    for split in layout.splits:
        members = chosen[start:start + len(split)]
        start += len(split)
        routes.append(tuple(Hop(node, first, end) for node, (first, end) in zip(members, split, strict=True)))
    layers: dict[tuple[int, int], tuple[int, ...]] = {}
    for route in routes:
        for hop in route:
            placement[hop.node] = layers.setdefault((hop.first, hop.end), tuple(hop.layers))
    return Plan(
        num_layers=num_layers, placement=placement, order=order,
        routes=tuple([routes[index] for index in interleaved(layout.shares)]),
    )
