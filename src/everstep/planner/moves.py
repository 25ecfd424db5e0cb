"""Which bytes go from whom to whom, so that every node holds the units of its placement.

Each unit comes from a living holder, holders taken in turn by the bytes that they already send; with a restore every unit
of every node comes from the checkpoint, because what is in memory belongs to another step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everstep.errors import InfeasibleError
from everstep.plan import Plan
from everstep.planner.parts import holders, units_by_layers
from everstep.quantities import NodeId, UnitName, node_number
from everstep.transfer import Load, Move
from everstep.workload import Workload

Holds = Mapping[NodeId, frozenset[UnitName]]


def moves_for(plan: Plan, holds: Holds, workload: Workload, restore: bool = False) -> tuple[tuple[Move, ...], tuple[Load, ...]]:
    """The moves and loads before ``plan`` can run, when living nodes hold ``holds``.

    Raises:
        InfeasibleError: a unit that somebody lacks has no living holder; ``rejected`` names each.
    """
    by_layers = holders(plan.placement)
    units = units_by_layers(by_layers, workload)
    if restore:
        wanted = [(node, units[plan.placement[node]]) for node in plan.nodes]
        return (), tuple(Load(unit, node) for node, needed in wanted for unit in _in_order(needed, workload))
    absent = _absent(by_layers, holds, units)
    if not absent:
        return (), ()
    lacking = [(node, unit) for node in sorted(absent, key=node_number) for unit in _in_order(absent[node], workload)]
    by_held: dict[frozenset[UnitName], list[NodeId]] = {}
    for node, held in holds.items():
        if node in plan.placement:
            by_held.setdefault(held, []).append(node)
    sources = {
        unit: sorted((node for held, nodes in by_held.items() if unit in held for node in nodes), key=node_number)
        for unit in {unit for _, unit in lacking}
    }
    lost = {unit: "no living holder" for unit in _in_order(frozenset(sources), workload) if not sources[unit]}
    if lost:
        raise InfeasibleError(f"no living holder of {', '.join(lost)}", {str(unit): why for unit, why in lost.items()})
    sent_bytes = dict.fromkeys(holds, 0)
    chosen: dict[tuple[NodeId, UnitName], Move] = {}
    for node, unit in sorted(lacking, key=lambda pair: -workload.units[pair[1]].state_bytes):
        source = min(sources[unit], key=lambda holder: sent_bytes[holder])
        sent_bytes[source] += workload.units[unit].state_bytes
        chosen[node, unit] = Move(unit, source, node, workload.units[unit].state_bytes)
    return tuple(chosen[pair] for pair in lacking), ()


def _absent(
    by_layers: Mapping[tuple[int, ...], Sequence[NodeId]], holds: Holds, units: Mapping[tuple[int, ...], frozenset[UnitName]],
) -> dict[NodeId, frozenset[UnitName]]:
    """What nodes lack, of those that lack something; most have just what they need, and few different things are held."""
    nothing = frozenset[UnitName]()
    known: dict[tuple[frozenset[UnitName], frozenset[UnitName]], frozenset[UnitName]] = {}
    found: dict[NodeId, frozenset[UnitName]] = {}
    for layers, nodes in by_layers.items():
        needed = units[layers]
        for node in [node for node in nodes if holds.get(node) is not needed]:
            pair = (needed, holds.get(node, nothing))
            if pair not in known:
                known[pair] = needed - pair[1]
            if known[pair]:
                found[node] = known[pair]
    return found


def _in_order(units: frozenset[UnitName], workload: Workload) -> list[UnitName]:
    return sorted(units, key=lambda name: (workload.units[name].layers, name))
