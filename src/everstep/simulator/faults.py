"""What goes wrong in a pretend world, drawn from its seed: at random moments, and aimed at the moments that hurt most."""

from __future__ import annotations

import random
from dataclasses import dataclass

from everstep.protocol.leader import Phase

POINTS = (
    "activation sent", "sums posted", "reduced chunk sent", "prepared", "record to send", "record sent", "union to send",
    "union sent", "union held", "applying", "applied", "reported", "plan adopted", "state changed", "state sent",
    "state arrived", "loading",
)
"""Where a node may be ended, in the order of a step and of a change of view."""

_IN_DOUBT = ("activation sent", "union to send", "union sent", "union held", "applying", "applied")
"""Points that leave it open whether the step was committed: aimed at twice as often."""

_PHASES = (Phase.COLLECTING, Phase.PLANNING, Phase.WRITING, Phase.MOVING, Phase.TRAINING)
MOMENTS = ("swapped", *(phase.value for phase in _PHASES))
"""When somebody may be ended while the agent is busy."""


@dataclass(frozen=True, slots=True)
class Crash:
    """``num_nodes`` random nodes end at ``at_s``."""

    at_s: float
    num_nodes: int


@dataclass(frozen=True, slots=True)
class AimedCrash:
    """Whoever comes to ``point`` for the ``skip + 1``-th time ends there; if ``also``, somebody else a moment later."""

    point: str
    skip: int
    also: bool


@dataclass(frozen=True, slots=True)
class MomentCrash:
    """Somebody ends when the agent comes to ``moment`` for the ``skip + 1``-th time."""

    moment: str
    skip: int


@dataclass(frozen=True, slots=True)
class DeclaredDead:
    """The agent takes a living node for dead at ``at_s``; it goes on for ``lingers_s``, and may hear late."""

    at_s: float
    lingers_s: float
    hears_late: bool


@dataclass(frozen=True, slots=True)
class CutLink:
    """A connection between two living nodes is reset at ``at_s``."""

    at_s: float


@dataclass(frozen=True, slots=True)
class SlowLink:
    """One link, or everything into one node, is ``factor`` times slower from ``at_s`` on."""

    at_s: float
    factor: float
    into_node: bool


@dataclass(frozen=True, slots=True)
class Join:
    """A fresh process is ready at ``at_s``."""

    at_s: float


@dataclass(frozen=True, slots=True)
class WantFlag:
    """Somebody asks for a checkpoint at ``at_s``."""

    at_s: float


@dataclass(frozen=True, slots=True)
class SecondPlan:
    """At ``at_s`` the plan of the current view is worked out again, as by a process that does not know of the first."""

    at_s: float


@dataclass(frozen=True, slots=True)
class WantPlan:
    """At ``at_s`` another plan would be better, with everybody well."""

    at_s: float


@dataclass(frozen=True, slots=True)
class WouldWait:
    """From ``at_s`` on: whoever is asked for a plan next says that somebody is expected within ``for_s``, who may not come."""

    at_s: float
    for_s: float


Fault = (
    Crash | AimedCrash | MomentCrash | DeclaredDead | CutLink | SlowLink | Join | WantFlag | SecondPlan | WantPlan | WouldWait
)


def draw(chance: random.Random, until_s: float) -> tuple[Fault, ...]:
    """One to four things that go wrong before ``until_s``, and some that merely happen."""
    drawn = [_one(chance, until_s) for _ in range(chance.randint(1, 4))]
    happening: list[Fault] = [Join(chance.uniform(0, until_s)) for _ in range(chance.choice((0, 0, 1, 1, 2, 3)))]
    if chance.random() < 0.3:
        happening.append(WantFlag(chance.uniform(0, until_s)))
    if chance.random() < 0.3:
        happening.append(SecondPlan(chance.uniform(0, until_s)))
    if chance.random() < 0.3:
        happening.append(WantPlan(chance.uniform(0, until_s)))
    if chance.random() < 0.3:
        happening.append(WouldWait(chance.uniform(0, until_s), chance.uniform(0.0, 0.1)))
    return (*drawn, *happening)


def _one(chance: random.Random, until_s: float) -> Fault:
    at_s = chance.uniform(0.0, until_s)
    kind = chance.random()
    if kind < 0.2:
        return Crash(at_s, chance.choice((1, 1, 2, 2, 3)))
    if kind < 0.55:
        return AimedCrash(chance.choice(POINTS + _IN_DOUBT), chance.choice((0, 1, 2, 3, 5, 8, 13)), chance.random() < 0.3)
    if kind < 0.7:
        return MomentCrash(chance.choice(MOMENTS), chance.choice((0, 0, 1, 2)))
    if kind < 0.82:
        return DeclaredDead(at_s, chance.uniform(0.0, 0.2), chance.random() < 0.6)
    if kind < 0.91:
        return CutLink(at_s)
    return SlowLink(at_s, chance.choice((5.0, 20.0, 50.0)), chance.random() < 0.5)
