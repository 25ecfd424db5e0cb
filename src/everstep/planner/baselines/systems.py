"""Published systems as policies: what each proposes for a situation, and by what it chooses.

They differ from ours by policy alone: the schedules are those of the running plan, but for Varuna's and Bamboo's, which have
their own. Where a system is not defined it has no answer, and the run goes back to a checkpoint.

=================  ====================================================================================================
``oobleck``        templates, borrowing and merging; newcomers make or lengthen a pipeline
``recycle``        rerouting into bubbles, and normalization; newcomers fill holes
``plain-reroute``  rerouting in turn to the peers of a stage; newcomers fill holes
``bamboo``         the neighbour takes over; rebuilt as a grid of the same depth where that is worth more
``varuna``         the fastest grid, restarted from a checkpoint
``torchft``        the broken replica is dropped; newcomers wait until they are a whole one
``parcae``         the broken pipeline is dropped or a grid moved to, by throughput also after the next loss
``chameleon``      rerouting or Algorithm 1, by Equation 8
=================  ====================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from everstep.decision import Candidate
from everstep.plan import Order
from everstep.planner import objective
from everstep.planner.baselines.grids import even_cuts, grid
from everstep.planner.baselines.morphing import by_liveput, parcae, varuna
from everstep.planner.baselines.rerouting import plain_reroute, recycle, torchft
from everstep.planner.baselines.selection import chameleon
from everstep.planner.baselines.templates import oobleck
from everstep.planner.policies.situation import Situation
from everstep.planner.policies.standing import with_redundancy, with_redundancy_again
from everstep.planner.step.parts import grouped


def by_value(_: Situation, candidates: Sequence[Candidate]) -> int:
    return objective.choose(candidates)


@dataclass(frozen=True, slots=True)
class System:
    """What a published system proposes, and how it chooses: the index of one of the candidates."""

    propose: Callable[[Situation], list[Candidate]]
    choose: Callable[[Situation, Sequence[Candidate]], int] = by_value
    starts_alike: bool = True
    """Whether it begins with pipelines that are all cut alike."""


def bamboo(situation: Situation) -> list[Candidate]:
    """Who holds a second copy takes over at once, or everything stops for a grid of the depth before, with redundancy."""
    depth = max(len(route) for route in grouped(situation.plan.routes))
    rebuilt = grid(situation, even_cuts(situation.workload.num_layers, depth), Order())
    plans = [] if rebuilt is None else [with_redundancy(rebuilt.plan, shadows=situation.shadows)]
    return [each for each in with_redundancy_again(situation, "bamboo", plans) if each.way != "behind"]


SYSTEMS: Mapping[str, System] = {
    "oobleck": System(oobleck, starts_alike=False),
    "recycle": System(recycle),
    "plain-reroute": System(plain_reroute),
    "bamboo": System(bamboo),
    "varuna": System(varuna),
    "torchft": System(torchft),
    "parcae": System(parcae, by_liveput),
    "chameleon": System(chameleon),
}
