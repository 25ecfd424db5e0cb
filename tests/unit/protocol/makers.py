"""Small values for tests of the protocol."""

from __future__ import annotations

from typing import Any

from everstep.plan import Hop, Plan
from everstep.protocol.messages import PlanOrdered, Prepared, Report, Union, UnitSums
from everstep.quantities import NodeId, UnitName
from everstep.view import Member, View

N0, N1, N2, N3 = (NodeId(f"n{number}") for number in range(4))
U0, U1 = UnitName("u0"), UnitName("u1")
PAIRS = {U0: ("a",), U1: ("a", "b")}


def view(number: int, *nodes: NodeId) -> View:
    return View(number, tuple(Member(node) for node in nodes))


def sums(*uses: str, micro_batches: int = 2, norm: float = 4.0) -> UnitSums:
    return UnitSums(pairs={use: tuple(range(micro_batches)) for use in uses}, square_norms={"weight": norm})


def record(*nodes: NodeId, **fields: Any) -> Prepared:
    whole: dict[str, Any] = {
        "view": 1, "step": 5, "attempt": 0, "nodes": nodes, "units": {}, "losses": {}, "flags": (),
        "times": {node: {"step": 0.5} for node in nodes},
    }
    return Prepared(**{**whole, **fields})


def union(step: int = 5, **fields: Any) -> Union:
    whole: dict[str, Any] = {
        "view": 1, "step": step, "attempt": 0, "units": {U0: sums("a"), U1: sums("a", "b", norm=12.0)},
        "losses": {0: (3.0, 2.0), 1: (5.0, 2.0)}, "flags": (), "times": {},
    }
    return Union(**{**whole, **fields})


def report(node: NodeId, applied: int, **fields: Any) -> Report:
    whole: dict[str, Any] = {
        "view": 2, "node": node, "incarnation": 0, "applied": applied, "attempt": -1, "prepared": False, "union": None,
        "holds": (U0,),
    }
    return Report(**{**whole, **fields})


def order(number: int = 1, *nodes: NodeId, **fields: Any) -> PlanOrdered:
    nodes = nodes or (N0, N1)
    plan = Plan(
        num_layers=1, placement={**dict.fromkeys(nodes, ()), nodes[0]: (0,)}, routes=((Hop(nodes[0], 0, 1),),),
    )
    whole: dict[str, Any] = {"view": number, "token": 1, "step": 5, "attempt": 0, "plan": plan, "union": None, "moves": ()}
    return PlanOrdered(**{**whole, **fields})
