"""The commit of a step: records go up a tree, the union comes down, and whoever holds the union applies.

The rules that carry the safety argument:

1. A record means that *all* sums of its node's units are complete. Every node of the view sends one, spares an empty one,
   and the root makes no union without them all.
2. Records are merged by unit and by micro-batch, never added: two records of the same unit must agree to the bit.
3. The union depends on the step alone, not on the tree or the view: clip factor and loss are worked out from it in one
   fixed order, so a second union of a step equals the first.
4. The union is handed down before it is acted upon.

No clock, socket, thread or random number is used here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from everstep.errors import LocalProtocolError
from everstep.protocol.marks import mark
from everstep.protocol.messages import ExchangeMessage, Prepared, Union
from everstep.quantities import NodeId, UnitName
from everstep.view import View


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to ``target``."""

    target: NodeId
    message: ExchangeMessage


@dataclass(frozen=True, slots=True)
class Committed:
    """The step is committed: keep ``union`` until the next one is held, and apply."""

    union: Union


Effect = Send | Committed


class Exchange:
    """One try of one step's commit, seen from one node. Its tree is a binary heap over the ranks of the view."""

    def __init__(
        self, *, node: NodeId, view: View, step: int, attempt: int, pairs: Mapping[UnitName, tuple[str, ...]],
        micro_batches: int,
    ) -> None:
        """``pairs``: unit → its uses (layer names). Each use must have all of the step's ``micro_batches``."""
        self.node, self.view, self.step, self.attempt = node, view, step, attempt
        self._pairs = {unit: tuple(uses) for unit, uses in pairs.items()}
        self._micro_batches = micro_batches
        self._subtree = _subtree(view.nodes, view.rank_of(node))
        self._merged: Prepared | None = None
        self._own_given = False
        self._sent_up = False
        self._union: Union | None = None

    @property
    def union(self) -> Union | None:
        """The answer, once it is held."""
        return self._union

    @property
    def parent(self) -> NodeId | None:
        """Where the merged record goes and the union comes from; None at the root."""
        rank = self.view.rank_of(self.node)
        return self.view.nodes[(rank - 1) // 2] if rank else None

    @property
    def children(self) -> tuple[NodeId, ...]:
        """Whose records come here, and who is sent the union."""
        return _children(self.view.nodes, self.view.rank_of(self.node))

    def accepts(self, message: ExchangeMessage) -> bool:
        """Whether ``message`` belongs to this try of this step in this view."""
        return (message.view, message.step, message.attempt) == (self.view.number, self.step, self.attempt)

    def prepared(self, record: Prepared) -> list[Effect]:
        """This node's sums are complete; ``record`` says what is in them.

        Raises:
            LocalProtocolError: the record is not this node's for this try, was given before, or contradicts another's.
        """
        if not self.accepts(record) or record.nodes != (self.node,):
            raise LocalProtocolError(f"expected the record of {self.node} for {self._where()}, got {_header(record)}")
        if self._own_given:
            raise LocalProtocolError(f"{self.node} is prepared twice for {self._where()}")
        self._own_given = True
        return self._take(record)

    def received(self, message: ExchangeMessage) -> list[Effect]:
        """A record of the subtree below, or the union from above. What belongs to another try is dropped.

        Raises:
            LocalProtocolError: records contradict each other, everybody is prepared and something is missing, or a union
                came before this node's record.
        """
        if not self.accepts(message):
            mark("commit.other-try-dropped")
            return []
        if isinstance(message, Union):
            if not self._own_given:
                raise LocalProtocolError(f"a union for {self._where()} came before the record of {self.node}")
            return self._hold(message)
        return self._take(message)

    def _take(self, record: Prepared) -> list[Effect]:
        if self._union is not None or self._sent_up:
            mark("commit.late-record-dropped")
            return []
        self._merged = record if self._merged is None else merge(self._merged, record)
        if not self._subtree.issubset(self._merged.nodes):
            return []
        if self.parent is not None:
            self._sent_up = True
            return [Send(self.parent, self._merged)]
        return self._hold(self._union_of(self._merged))

    def _hold(self, union: Union) -> list[Effect]:
        if self._union is not None:
            mark("commit.second-union-dropped")
            return []
        self._union = union
        return [*(Send(child, union) for child in self.children), Committed(union)]

    def _union_of(self, record: Prepared) -> Union:
        missing = self._missing(record)
        if missing:
            raise LocalProtocolError(f"everybody is prepared for {self._where()}, but {'; '.join(missing)}")
        return Union(
            view=record.view, step=record.step, attempt=record.attempt, units=record.units, losses=record.losses,
            flags=record.flags, times=record.times,
        )

    def _missing(self, record: Prepared) -> list[str]:
        wanted = tuple(range(self._micro_batches))
        found = [
            f"{unit}/{use} has the micro-batches {got}, not each of {self._micro_batches} once"
            for unit, uses in self._pairs.items()
            for use in uses
            if (got := _counted(record, unit, use)) != wanted
        ]
        found += [f"unit {unit} is not of this model" for unit in record.units if unit not in self._pairs]
        if tuple(sorted(record.losses)) != wanted:
            found.append(f"losses are those of the micro-batches {tuple(sorted(record.losses))}")
        return found

    def _where(self) -> str:
        return f"step {self.step}, attempt {self.attempt} of view {self.view.number}"


def _header(record: Prepared) -> str:
    nodes = ", ".join(record.nodes)
    return f"one of {nodes} for step {record.step}, attempt {record.attempt} of view {record.view}"


def _counted(record: Prepared, unit: UnitName, use: str) -> tuple[int, ...]:
    sums = record.units.get(unit)
    return tuple(sorted(sums.pairs.get(use, ()))) if sums else ()


def _children(nodes: tuple[NodeId, ...], rank: int) -> tuple[NodeId, ...]:
    return nodes[2 * rank + 1 : 2 * rank + 3]


def _subtree(nodes: tuple[NodeId, ...], rank: int) -> frozenset[NodeId]:
    below = (_subtree(nodes, child) for child in (2 * rank + 1, 2 * rank + 2) if child < len(nodes))
    return frozenset({nodes[rank]}).union(*below)


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def merge(a: Prepared, b: Prepared) -> Prepared:
    """Both records as one. The order of merging makes no difference.

    Raises:
        LocalProtocolError: they are of different tries, or say different things of the same unit, micro-batch or node.
    """
    if (a.view, a.step, a.attempt) != (b.view, b.step, b.attempt):
        raise LocalProtocolError(f"records of two tries cannot be merged: {_header(a)}, and {_header(b)}")
    return Prepared(
        view=a.view, step=a.step, attempt=a.attempt,
        nodes=tuple(sorted({*a.nodes, *b.nodes})),
        units=_agreed(a.units, b.units, "sums of unit"),
        losses=_agreed(a.losses, b.losses, "loss of micro-batch"),
        flags=tuple(sorted({*a.flags, *b.flags})),
        times=_agreed(a.times, b.times, "times of"),
    )


def _agreed(a: Mapping[_Key, _Value], b: Mapping[_Key, _Value], what: str) -> dict[_Key, _Value]:
    for key in a.keys() & b.keys():
        # By text, so that two NaN agree and 0.0 and -0.0 do not.
        if a[key] != b[key] and repr(a[key]) != repr(b[key]):
            raise LocalProtocolError(f"two records disagree about the {what} {key}: {a[key]} and {b[key]}")
    return {**a, **b}


def count(union: Union) -> float:
    """Samples (or whatever the losses are divided by) in the step."""
    return math.fsum(number for _, number in union.losses.values())


def mean_loss(union: Union) -> float:
    """Sum of the losses over their count, added in the order of the micro-batches and rounded once."""
    return _sum([union.losses[micro_batch][0] for micro_batch in sorted(union.losses)]) / count(union)


def clip_factor(union: Union, clip_norm: float | None, count: float) -> float:
    """What gradients (sums over ``count``) are multiplied by: ``min(1, clip_norm / (norm + 1e-6))``.

    ``norm = sqrt(Σ square norms) / count``, each parameter once whoever holds it. A norm that is not a number makes a
    factor that is none, as with ``torch.nn.utils.clip_grad_norm_``. None: not clipped, 1.0.
    """
    if clip_norm is None:
        return 1.0
    squares = [
        sums.square_norms[parameter]
        for _, sums in sorted(union.units.items())
        for parameter in sorted(sums.square_norms)
    ]
    factor = clip_norm / (math.sqrt(_sum(squares)) / count + 1e-6)
    return 1.0 if factor >= 1.0 else factor


def _sum(values: list[float]) -> float:
    """The exact sum, rounded once; where that leaves the range of floats (or there is an infinity), the plain sum."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)
