"""Every recovery policy proposes plans; it chooses nothing. What each would cost is written into its candidates.

====================  =================================================================================================
``reroute``           routes only: living holders of the same layers take over the hops of who is gone
``normalize``         a healthy node changes its role, so that losses sit where they hurt least; else as ``reroute``
``spare``             an idle node takes the place of one that is gone; if there are too few, the rest is rerouted
``heal``              idle nodes and newcomers take the layers whose holders have most to do; losses as ``reroute``
``shrink``            pipelines that met who is gone are dropped, their micro-batches spread over the whole ones
``grow``              whole pipelines stay, idle nodes and newcomers lengthen one or make new ones; losses as ``reroute``
``rebalance``         slow nodes get fewer micro-batches or fewer layers; losses as ``reroute``
``repartition``       new pipelines over all survivors, state moved first
``two-phase``         the best of what can be had at once, and behind it the state of something better is copied
``redundant``         each node also holds what its successor does; who comes before somebody lost takes over
``wait``              nothing, until somebody who is known to be back is there; else as ``reroute``
``restore``           new pipelines over all survivors, all state from the newest checkpoint, or from the initial weights
====================  =================================================================================================

A node that joins stays idle except under ``heal``, ``grow``, ``repartition``, ``two-phase``, ``redundant`` and ``auto``.
Every living node is in every plan. The names of published systems are in ``baselines.systems``.

Where nodes are known to end, everything is proposed twice: with them, as long as they are there, and without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from everstep.decision import Candidate
from everstep.plan import Plan
from everstep.planner import objective
from everstep.planner.baselines.systems import SYSTEMS
from everstep.planner.policies.behind import two_phase
from everstep.planner.policies.foresight import choose_with_foresight, until_moved_s
from everstep.planner.policies.layouts import grow, layouts, repartition, restore
from everstep.planner.policies.local import only_inside
from everstep.planner.policies.pricing import at_risk, no_answer, risk_after
from everstep.planner.policies.roles import heal, normalize
from everstep.planner.policies.routes import keep, over_the_living, reroute, shrink, spare
from everstep.planner.policies.situation import Situation, is_broken
from everstep.planner.policies.slow import rebalance
from everstep.planner.policies.standing import REBUILT, is_redundant, redundant
from everstep.planner.policies.survivors import only_sturdy, wary
from everstep.planner.policies.waiting import wait
from everstep.planner.step.parts import grouped
from everstep.planner.uncollected import uncollected
from everstep.quantities import node_number

Policy = Callable[[Situation], list[Candidate]]


def _in_two_phases(situation: Situation) -> list[Candidate]:
    """Of what all others that change routes or move state propose, with and without nodes that are known to end."""
    situations = [situation, *_without_ending(situation)]
    others = [candidate for each in situations for name in (*AT_ONCE, *MOVING) for candidate in _asked(each, name)]
    return two_phase(situation, others)


POLICIES: Mapping[str, Policy] = {
    "reroute": reroute, "normalize": normalize, "spare": spare, "heal": heal, "shrink": shrink, "grow": grow,
    "rebalance": rebalance, "repartition": repartition, "two-phase": _in_two_phases, "redundant": redundant, "wait": wait,
    "restore": restore,
}

AT_ONCE = ("reroute", "shrink")
MOVING = ("normalize", "spare", "heal", "rebalance", "repartition")
"""What phases are made of. What ``grow`` would do is among the layouts of ``repartition``."""

BESIDE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("normalize", "heal", "grow", "rebalance", "wait"), ("reroute",)), "two-phase": ("reroute", "repartition"),
}
"""Policies that are not an answer to every loss: chosen alone, these are asked too and the best is taken."""

WHEN_WHOLE: Mapping[str, tuple[str, ...]] = {
    "auto": ("heal", "rebalance", "repartition", "two-phase", "redundant", "wait"),
    **{name: (name,) for name in ("heal", "grow", "rebalance", "repartition", "two-phase", "redundant", "wait")},
}
"""What is asked, by policy, where no route is broken: somebody joined, got slow, or will end; else nothing changes."""

FIRST = ("wait",)
"""Policies that are taken where they have an answer, whatever it is worth."""


SCORED_BY_ITSELF = ("chameleon",)
"""Policies whose values are not the objective's: what was worked out ahead cannot be valued for another moment."""


@uncollected()
def propose(situation: Situation) -> list[Candidate]:
    """The candidates of the configured policy, or of all.

    Where a forced policy has no answer, ``restore`` is proposed too, and the table says so.
    """
    forced, tolerate = situation.config.policy, situation.config.tolerate
    situation = wary(situation) if forced == "auto" else situation
    asked = situation.config.tolerate == tolerate
    found = _proposed(situation, forced)
    for without in _without_ending(situation):
        found += [candidate for candidate in _proposed(without, forced) if candidate.feasible and candidate.way != "behind"]
    found = only_sturdy(situation, only_inside(situation, found), asked=asked)
    if forced == "restore" or any(candidate.feasible for candidate in found):
        return found
    instead = only_sturdy(situation, restore(situation))
    return [*found, *(
        replace(each, note="; ".join(filter(None, [f"since {forced} has no answer", each.note]))) if each.feasible else each
        for each in instead
    )]


def _proposed(situation: Situation, forced: str) -> list[Candidate]:
    if forced in SYSTEMS:
        return _labelled(situation, SYSTEMS[forced].propose(situation))
    if not is_broken(situation):
        names = WHEN_WHOLE.get(forced, ())
        kept = [] if forced in ("repartition", "redundant") else keep(situation)
        return kept + [candidate for name in names for candidate in _asked(situation, name, forced)]
    if forced == "auto":  # what grow would do is among the layouts of repartition
        names = tuple(name for name in POLICIES if name != "grow")
    else:
        names = (*BESIDE.get(forced, ()), forced)
    return [candidate for name in names for candidate in _asked(situation, name, forced)]


def _asked(situation: Situation, name: str, forced: str = "") -> list[Candidate]:
    """What a policy proposes, once for all who ask."""
    if name == "redundant" and forced == "auto":
        return _redundant_beside_others(situation)
    ask = keep if name == "reroute" and not is_broken(situation) else POLICIES[name]
    return situation.remembered(("asked", name), lambda: _labelled(situation, ask(situation)))


def _redundant_beside_others(situation: Situation) -> list[Candidate]:
    """Only where something would be held by one or two, or redundancy is there. What ``reroute`` does is left to it."""
    plain = over_the_living(situation)
    plans = [plain, *(found.plan for found in layouts(situation)[:REBUILT])]
    at_stake = any(
        isinstance(plan, Plan) and at_risk(plan, situation.workload) + risk_after(situation, plan) > 0 for plan in plans
    )
    if not at_stake and not is_redundant(situation.plan):
        why = plain if isinstance(plain, str) else "no layer depends on one or two nodes alone"
        return [no_answer("redundant", why)]
    return [
        each for each in _asked(situation, "redundant")
        if each.plan is None or not isinstance(plain, Plan) or not _is_the_same(each.plan, plain)
    ]


def _is_the_same(one: Plan, other: Plan) -> bool:
    """But for which of the micro-batches take which route, which depends on names, and room, which no policy gives."""
    shares = [Counter({route: len(members) for route, members in grouped(plan.routes).items()}) for plan in (one, other)]
    return one.placement == other.placement and one.order == other.order and shares[0] == shares[1]


def _labelled(situation: Situation, candidates: list[Candidate]) -> list[Candidate]:
    """With the names of those whom they do without, though they live."""
    if not situation.avoided:
        return candidates
    names = ", ".join(sorted(situation.avoided, key=node_number))
    return [
        replace(candidate, reason=" ".join(filter(None, [candidate.reason, f"without {names}"])))
        if candidate.feasible else candidate for candidate in candidates
    ]


def _without_ending(situation: Situation) -> list[Situation]:
    """The situation in which those who are known to end get nothing to do any more, if others are left."""
    ending = frozenset(situation.ends) - situation.avoided
    if not ending or not set(situation.usable) - ending:
        return []
    return [situation.remembered("without ending", lambda: replace(situation, avoided=situation.avoided | ending))]


def decide(situation: Situation) -> tuple[list[Candidate], int]:
    """What is proposed, and the index of what is taken.

    Raises:
        InfeasibleError: nothing that is proposed has a plan; ``rejected`` has each one's reason.
    """
    candidates = propose(situation)
    return candidates, choose(situation, candidates)


def choose(situation: Situation, candidates: Sequence[Candidate]) -> int:
    """The index of what the configured policy takes: mostly what is worth most.

    Raises:
        InfeasibleError: there is no candidate with a plan.
    """
    forced = situation.config.policy
    if forced in FIRST:
        own = [index for index, each in enumerate(candidates) if each.feasible and each.policy == forced]
        return own[0] if own else objective.choose(candidates)
    if forced in SYSTEMS:
        return SYSTEMS[forced].choose(situation, candidates)
    if situation.config.look_ahead:
        lasts_s = until_moved_s(situation, candidates)
        return choose_with_foresight(situation, candidates, (_at_once, shrink), lasts_s)
    return objective.choose(candidates)


def _at_once(situation: Situation) -> list[Candidate]:
    return reroute(situation) if is_broken(situation) else keep(situation)
