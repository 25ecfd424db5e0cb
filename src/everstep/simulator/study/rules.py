"""Systems as rules: what each can do when nodes are lost or come, and by what it chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from everstep.simulator.study.player import Way
from everstep.simulator.study.times import Family

Reroute = Literal["none", "drop", "grid", "any", "shadow"]
"""How a broken layout goes on: not at all; without broken pipelines; by peers of the stage where all pipelines are alike;
by whatever is fastest of these and of layer by layer; by the neighbour that holds a second copy."""

Move = Literal["heal", "normalize", "grow", "grid", "holed", "repartition", "sturdy", "templates", "morph"]
Score = Literal["value", "equation 8", "first", "fastest", "liveput"]
"""Of all options the one with: most expected steps until the next change; most by Chameleon's rule; the first move there
is; the shortest step; most steps until the next change and until the one after it."""

ABSORBED = 1.5
"""With redundant computation: how much longer a step takes while somebody does two stages, as Bamboo's simulator has it."""

STAGE_COPY = 0.5
"""Share of the time of a whole re-partition that it takes to copy single stages."""

def move_kind(move: str) -> str:
    """Moves that take alike: single stages, or the whole layout."""
    return "stage" if move in ("heal", "normalize") else "layout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """A system. The first fields say what it can do, the others how it chooses."""

    name: str
    family: Family
    reroute: Reroute
    moves: tuple[Move, ...] = ()
    ways: tuple[Way, ...] = ("blocking",)
    score: Score = "value"
    knows_gap: bool = False
    """Told the true mean gap; otherwise it estimates it from its own history."""
    restarts: bool = False
    """Every move is a restart of all processes."""
    loses_work: bool = False
    """And what was trained since the last checkpoint is trained again."""
    reserve: int = 0
    """Nodes kept idle at the start."""
    rethinks: bool = False
    """Chooses again when steps turn out to be other than predicted, not only at changes."""
    sturdy_start: bool = False
    """Starts with the layout that would be best after one loss, of those that are as good without."""
    look_ahead: bool = False
    """Adds what would be left after the next loss, while state is moved again, to the value of the best few."""


def named(name: str, family: Family = "staggered") -> Rules:
    """The rules behind a name; ``family`` of schedules for all but those with ``published``, which have their own.

    Raises:
        KeyError: no such policy.
    """
    return replace(RULES[name], family=family) if name not in PUBLISHED else RULES[name]


def _all(*rules: Rules) -> dict[str, Rules]:
    return {each.name: each for each in rules}


_OURS: tuple[Move, ...] = ("heal", "normalize", "repartition", "sturdy", "grid", "holed")

RULES: Mapping[str, Rules] = _all(
    Rules(
        name="auto", family="staggered", reroute="any", moves=_OURS, ways=("blocking", "behind"), look_ahead=True,
        rethinks=True,
    ),
    Rules(name="reroute", family="staggered", reroute="grid", moves=("heal", "grow")),
    Rules(name="normalize", family="staggered", reroute="grid", moves=("normalize", "heal", "grow"), score="first"),
    Rules(name="repartition", family="staggered", reroute="none", moves=("repartition",), score="first"),
    Rules(
        name="two-phase", family="staggered", reroute="any", moves=("repartition",), ways=("behind", "blocking"), score="first",
    ),
    Rules(name="shrink", family="staggered", reroute="drop", moves=("grow",)),
    Rules(name="spare", family="staggered", reroute="grid", moves=("heal",), score="first", reserve=4),
    Rules(name="redundant", family="staggered", reroute="shadow", moves=("heal", "grid"), restarts=True),
    Rules(
        name="restore", family="staggered", reroute="none", moves=("repartition",), score="first", restarts=True,
        loses_work=True,
    ),
    Rules(name="oobleck", family="staggered", reroute="none", moves=("templates",), score="first"),
    Rules(name="plain-reroute", family="staggered", reroute="grid", moves=("heal", "grow")),
    Rules(name="recycle", family="staggered", reroute="grid", moves=("normalize", "heal", "grow"), knows_gap=True),
    Rules(name="chameleon", family="staggered", reroute="grid", moves=("repartition",), score="equation 8", knows_gap=True),
    Rules(name="torchft", family="staggered", reroute="drop", moves=("grow",), ways=("behind", "blocking"), score="first"),
    Rules(name="bamboo", family="fused", reroute="shadow", moves=("heal", "grid"), restarts=True, knows_gap=True),
    Rules(name="varuna", family="fused", reroute="none", moves=("morph",), score="first", restarts=True, loses_work=True),
    Rules(name="parcae", family="staggered", reroute="drop", moves=("heal", "grid", "morph"), score="liveput", knows_gap=True),
    Rules(name="free", family="staggered", reroute="any", moves=_OURS, score="fastest"),
    Rules(name="oobleck-published", family="fused", reroute="none", moves=("templates",), score="first"),
    Rules(name="reroute-published", family="fused", reroute="grid", moves=("heal", "grow")),
    Rules(
        name="chameleon-published", family="fused", reroute="grid", moves=("repartition",), score="equation 8", knows_gap=True,
    ),
)

PUBLISHED = frozenset({"bamboo", "varuna", "oobleck-published", "reroute-published", "chameleon-published"})
"""These keep the schedules that their authors describe."""

SINGLES = ("reroute", "normalize", "repartition", "two-phase", "shrink", "spare", "redundant", "restore")
"""What ``auto`` chooses among, each alone: regret is against the best of them in hindsight."""
