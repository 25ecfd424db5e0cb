"""Looks at a pretend world from outside, and knows nothing of how it works: only what was decided, held and used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from everstep.protocol.messages import PlanOrdered, Union
from everstep.quantities import UnitName
from everstep.simulator.model import Model
from everstep.simulator.node import Applied, Begun, Fact, Resumed, Stranded, Used
from everstep.view import View

Line = Sequence[dict[UnitName, str]]


def problems(
    *, model: Model, views: Sequence[View], plans: Sequence[PlanOrdered], facts: Sequence[Fact], line: Line,
) -> list[str]:
    """Everything that went wrong; an empty list means nothing did. ``line``: values after each step, undisturbed."""
    applied = [fact for fact in facts if isinstance(fact, Applied)]
    resumed = [fact for fact in facts if isinstance(fact, Resumed)]
    checks: tuple[Callable[[], list[str]], ...] = (
        lambda: _views(views),
        lambda: _plans(views, plans),
        lambda: _resumed_under_its_plan(plans, resumed),
        lambda: _unions(model, applied),
        lambda: _one_union_a_try(applied),
        lambda: _values(applied, line),
        lambda: _same_bits(applied),
        lambda: _agreed_on_resume(resumed, line),
        lambda: _nobody_stranded(plans, [fact for fact in facts if isinstance(fact, Stranded)]),
        lambda: _no_try_twice([fact for fact in facts if isinstance(fact, Begun)]),
        lambda: _nothing_old([fact for fact in facts if isinstance(fact, Used)]),
    )
    return [text for check in checks for text in check()]


def _views(views: Sequence[View]) -> list[str]:
    """One committed view per number, and numbers that only grow by one."""
    numbers = [view.number for view in views]
    return [] if numbers == list(range(1, len(numbers) + 1)) else [f"views are numbered {numbers}"]


def _plans(views: Sequence[View], plans: Sequence[PlanOrdered]) -> list[str]:
    """At most one plan per view, of a view that there was."""
    found = [f"view {view} has {n} plans" for view, n in Counter(order.view for order in plans).items() if n > 1]
    known = {view.number: set(view.nodes) for view in views}
    for order in plans:
        if known.get(order.view) != set(order.plan.nodes):
            found.append(f"the plan of view {order.view} is for {', '.join(order.plan.nodes)}")
    return found


def _resumed_under_its_plan(plans: Sequence[PlanOrdered], resumed: Sequence[Resumed]) -> list[str]:
    return [f"{fact.node} trains under a plan that is not in the store" for fact in resumed if fact.order not in plans]


def _unions(model: Model, applied: Sequence[Applied]) -> list[str]:
    """Each committed union has each (use, micro-batch) once, and each loss."""
    wanted = tuple(range(model.micro_batches))
    found = []
    for union in _distinct(applied):
        for unit, uses in model.pairs.items():
            sums = union.units.get(unit)
            found += [
                f"{_name(union)}: {unit}/{use} has {sums.pairs.get(use) if sums else None}"
                for use in uses
                if sums is None or sums.pairs.get(use) != wanted
            ]
        if tuple(sorted(union.losses)) != wanted:
            found.append(f"{_name(union)} has losses of {sorted(union.losses)}")
    return found


def _one_union_a_try(applied: Sequence[Applied]) -> list[str]:
    """A try of a step in a view is committed with one union; a step, with one attempt a line."""
    tries = Counter((union.view, union.step, union.attempt) for union in _distinct(applied))
    found = [f"step {step}.{attempt} of view {view} has {n} unions" for (view, step, attempt), n in tries.items() if n > 1]
    again = Counter((fact.node, fact.union.step, fact.union.attempt, fact.union.view) for fact in applied)
    return found + [f"{node} applied step {step}.{attempt} {n} times" for (node, step, attempt, _), n in again.items() if n > 1]


def _values(applied: Sequence[Applied], line: Line) -> list[str]:
    """After each step every holder, expelled ones included, has the values of the undisturbed run."""
    return [
        f"{fact.node} after {_name(fact.union)}: {unit} is not what the undisturbed run has"
        for fact in applied
        for unit, state in fact.states.items()
        if state.value != line[fact.union.step + 1][unit]
    ]


def _same_bits(applied: Sequence[Applied]) -> list[str]:
    """Whoever applied the same union has the same bits: sums were copied, not made twice."""
    seen: dict[tuple[int, int, int, UnitName], str] = {}
    found = []
    for fact in applied:
        for unit, state in fact.states.items():
            key = (fact.union.view, fact.union.step, fact.union.attempt, unit)
            if seen.setdefault(key, state.bits) != state.bits:
                found.append(f"{fact.node} after {_name(fact.union)}: {unit} has other bits")
    return found


def _agreed_on_resume(resumed: Sequence[Resumed], line: Line) -> list[str]:
    """Everybody resumes a view with the right values, the same bits, and what the plan gives them."""
    seen: dict[tuple[int, UnitName], str] = {}
    found = []
    for fact in resumed:
        for unit, state in fact.states.items():
            if state.value != line[fact.order.step][unit]:
                found.append(f"{fact.node} resumes view {fact.order.view} with a wrong {unit}")
            if seen.setdefault((fact.order.view, unit), state.bits) != state.bits:
                found.append(f"{fact.node} resumes view {fact.order.view} with other bits of {unit}")
    return found


def _nobody_stranded(plans: Sequence[PlanOrdered], stranded: Sequence[Stranded]) -> list[str]:
    """Whoever is prepared for a step that was applied finds its union, unless a restore was ahead of the survivors."""
    restores = [order.view for order in plans if order.restore is not None]
    return [
        f"the union for {', '.join(fact.nodes)} is lost in view {fact.view}"
        for fact in stranded
        if not any(view < fact.view for view in restores if view > 1)
    ]


def _no_try_twice(begun: Sequence[Begun]) -> list[str]:
    """A node begins each try of a step once in a run: its account of it then has one meaning."""
    tries = Counter((fact.node, fact.step, fact.attempt) for fact in begun)
    return [f"{node} begins step {step}.{attempt} {n} times" for (node, step, attempt), n in tries.items() if n > 1]


def _nothing_old(used: Sequence[Used]) -> list[str]:
    """Nothing that names another view than the user's is used."""
    return [f"{u.node} used {u.what} of view {u.theirs} in view {u.ours}" for u in used if u.ours != u.theirs]


def _distinct(applied: Sequence[Applied]) -> list[Union]:
    found: list[Union] = []
    for fact in applied:
        if fact.union not in found:
            found.append(fact.union)
    return found


def _name(union: Union) -> str:
    return f"step {union.step}.{union.attempt} of view {union.view}"
