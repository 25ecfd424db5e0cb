"""In which order a node acts: forward F, backward for the input B, backward for the weights W.

``2F0`` is the forward of micro-batch 0 on the third hop of its route. When the order of the plan is not split, B stands
for both backwards and there is no W. After the last action that adds to a unit comes its reduction, ``R``. A schedule
prints as text and parses back.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep.errors import ConfigError
from everstep.plan import Plan
from everstep.quantities import NodeId


class Kind(enum.Enum):
    """What an action does."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"
    REDUCE = "R"


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a node does for one micro-batch; for a reduction both numbers are 0 and all of its sums are meant."""

    kind: Kind
    hop: int = 0
    micro_batch: int = 0

    def __str__(self) -> str:
        return "R" if self.kind is Kind.REDUCE else f"{self.hop}{self.kind.value}{self.micro_batch}"


REDUCE = Action(Kind.REDUCE)
_ACTION = re.compile(r"(\d+)([FBW])(\d+)")

Order = tuple[Action, ...]
Schedule = Mapping[NodeId, Order]


def parse_action(text: str) -> Action:
    """``"2F0"`` → forward of micro-batch 0 on hop 2.

    Raises:
        ConfigError: not an action.
    """
    if text == "R":
        return REDUCE
    found = _ACTION.fullmatch(text)
    if not found:
        raise ConfigError(f"not an action: {text!r} (want for example 2F0)")
    return Action(Kind(found[2]), int(found[1]), int(found[3]))


def parse_order(text: str) -> Order:
    """The inverse of ``" ".join(map(str, order))``."""
    return tuple(parse_action(word) for word in text.split())


def one_f_one_b(stage: int, num_stages: int, num_micro_batches: int) -> Order:
    """Fused 1F1B on one stage: ``num_stages - stage`` forwards, then one backward, one forward in turn, then the rest."""
    warm_up = min(num_stages - stage, num_micro_batches)
    order = [Action(Kind.FORWARD, stage, m) for m in range(warm_up)]
    for micro_batch in range(num_micro_batches):
        order.append(Action(Kind.BACKWARD, stage, micro_batch))
        if warm_up + micro_batch < num_micro_batches:
            order.append(Action(Kind.FORWARD, stage, warm_up + micro_batch))
    return tuple(order)


def for_micro_batches(order: Order, num_micro_batches: int) -> Order:
    """``order`` without the micro-batches from ``num_micro_batches`` on: a partial last batch has fewer."""
    return tuple(action for action in order if action.kind is Kind.REDUCE or action.micro_batch < num_micro_batches)


def problems(schedule: Schedule, plan: Plan) -> list[str]:
    """Everything wrong with ``schedule`` for ``plan``: missing or doubled actions, wrong node, order, or a deadlock."""
    found: list[str] = []
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT) if plan.order.split else (Kind.FORWARD, Kind.BACKWARD)
    wanted = {
        (hop.node, Action(kind, index, micro_batch))
        for micro_batch, route in enumerate(plan.routes)
        for index, hop in enumerate(route)
        for kind in kinds
    }
    present = [(node, action) for node, order in schedule.items() for action in order if action.kind is not Kind.REDUCE]
    found += [f"{node} never does {action}" for node, action in sorted(wanted - set(present), key=str)]
    found += [f"{node} should not do {action}" for node, action in sorted(set(present) - wanted, key=str)]
    if len(present) != len(set(present)):
        found.append("an action appears twice")
    for node in plan.nodes:
        order = schedule.get(node, ())
        reductions = [index for index, action in enumerate(order) if action.kind is Kind.REDUCE]
        if plan.placement[node] and reductions != [len(order) - 1]:
            found.append(f"{node} must reduce once, after everything else")
    return found or _deadlocks(schedule, plan)


def needs(action: Action, num_hops: int) -> list[Action]:
    """The actions that must be done before ``action``, on whichever node."""
    kind, hop, micro_batch = action.kind, action.hop, action.micro_batch
    if kind is Kind.FORWARD:
        return [Action(Kind.FORWARD, hop - 1, micro_batch)] if hop else []
    if kind is Kind.BACKWARD:
        after = [Action(Kind.BACKWARD, hop + 1, micro_batch)] if hop + 1 < num_hops else []
        return [Action(Kind.FORWARD, hop, micro_batch), *after]
    if kind is Kind.WEIGHT:
        return [Action(Kind.BACKWARD, hop, micro_batch)]
    return []


def _deadlocks(schedule: Schedule, plan: Plan) -> list[str]:
    """Run the schedule without time: what cannot start for ever is a deadlock."""
    position = dict.fromkeys(schedule, 0)
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for node, order in schedule.items():
            while position[node] < len(order) and _may_start(order[position[node]], plan, done):
                done.add(order[position[node]])
                position[node] += 1
                moved = True
    return [
        f"{node} waits for ever before {order[position[node]]}"
        for node, order in schedule.items()
        if position[node] < len(order)
    ]


def _may_start(action: Action, plan: Plan, done: set[Action]) -> bool:
    if action.kind is Kind.REDUCE:
        return True
    return done.issuperset(needs(action, len(plan.routes[action.micro_batch])))


def text(schedule: Schedule) -> str:
    """One line a node: ``n0: 0F0 0F1 0B0 0B1 R``."""
    return "\n".join(f"{node}: {' '.join(map(str, order))}" for node, order in schedule.items())


def parse(lines: str) -> dict[NodeId, Order]:
    """The inverse of ``text``.

    Raises:
        ConfigError: a line without a node, or something that is not an action.
    """
    schedule: dict[NodeId, Order] = {}
    for line in filter(str.strip, lines.splitlines()):
        node, colon, order = line.partition(":")
        if not colon:
            raise ConfigError(f"not a line of a schedule: {line!r} (want for example 'n0: 0F0 0B0 R')")
        schedule[NodeId(node.strip())] = parse_order(order)
    return schedule


def peak_activations(order: Sequence[Action]) -> int:
    """Most micro-batches whose activations a node holds at once, following ``order``."""
    last = {
        (action.hop, action.micro_batch): action.kind for action in order if action.kind in (Kind.BACKWARD, Kind.WEIGHT)
    }
    held = peak = 0
    for action in order:
        if action.kind is Kind.FORWARD:
            held += 1
            peak = max(peak, held)
        elif last.get((action.hop, action.micro_batch)) is action.kind:
            held -= 1
    return peak
