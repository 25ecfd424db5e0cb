"""Every recovery policy proposes plans; it chooses nothing. What each would cost is written into its candidates.

====================  =================================================================================================
``reroute``           routes only: living holders of the same layers take over the hops of who is gone
``normalize``         a healthy node changes its role, so that losses sit where they hurt least; else as ``reroute``
``spare``             an idle node takes the place of one that is gone; if there are too few, the rest is rerouted
``shrink``            pipelines that met who is gone are dropped, their micro-batches spread over the whole ones
``heal``              idle nodes and newcomers take the layers whose holders have most to do; losses as ``reroute``
``grow``              whole pipelines stay, idle nodes and newcomers lengthen one or make new ones; losses as ``reroute``
``repartition``       new pipelines over all survivors, state moved first
``restore``           new pipelines over all survivors, all state from the newest checkpoint, or from the initial weights
====================  =================================================================================================

A node that joins stays idle except under ``heal``, ``grow``, ``repartition`` and ``auto``. Every living node is in every
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from everstep.decision import Candidate
from everstep.planner import objective
from everstep.planner.policies.layouts import grow, repartition, restore
from everstep.planner.policies.roles import heal, normalize
from everstep.planner.policies.routes import keep, reroute, shrink, spare
from everstep.planner.policies.situation import Situation, is_broken

POLICIES: Mapping[str, Callable[[Situation], list[Candidate]]] = {
    "reroute": reroute, "normalize": normalize, "spare": spare, "heal": heal, "shrink": shrink, "grow": grow,
    "repartition": repartition, "restore": restore,
}

BESIDE_REROUTE = ("normalize", "heal", "grow")
"""Policies that are about more than a loss: chosen alone, they are asked beside ``reroute`` and the better one is taken."""


def propose(situation: Situation) -> list[Candidate]:
    """The candidates of the configured policy, or of all.

    Where a forced policy has no answer, ``restore`` is proposed too, and the table says so.
    """
    forced = situation.config.policy
    if not is_broken(situation):
        asked = {"auto": ("heal", "repartition"), "repartition": ("repartition",), "heal": ("heal",), "grow": ("grow",)}
        found = [] if forced == "repartition" else keep(situation)
        return found + [candidate for policy in asked.get(forced, ()) for candidate in POLICIES[policy](situation)]
    if forced == "auto":  # what grow would do is among the layouts of repartition
        return [c for name, policy in POLICIES.items() if name != "grow" for c in policy(situation)]
    found = POLICIES[forced](situation)
    if forced in BESIDE_REROUTE:
        found = [*reroute(situation), *found]
    if forced == "restore" or any(candidate.feasible for candidate in found):
        return found
    return [*found, *restore(situation)]


def decide(situation: Situation) -> tuple[list[Candidate], int]:
    """What is proposed, and the index of what is taken.

    Raises:
        InfeasibleError: nothing that is proposed has a plan; ``rejected`` has each one's reason.
    """
    candidates = propose(situation)
    return candidates, choose(situation, candidates)


def choose(situation: Situation, candidates: Sequence[Candidate]) -> int:
    """The index of what the configured policy takes: what is worth most."""
    return objective.choose(candidates)
