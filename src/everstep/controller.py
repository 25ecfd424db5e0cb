"""Answers the protocol's request for a plan; the one place that knows both protocol and planner.

It keeps what plans are made from: the workload with its measured costs, the plan before, the history of events. Facts come
in as arguments, an order for all members and the decision behind it go out. No clock, socket, thread or random number is
used here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from everstep import plan as plans
from everstep.cluster import Cluster, Link, Node
from everstep.config import RunConfig
from everstep.decision import Candidate, Decision
from everstep.errors import InfeasibleError
from everstep.plan import Plan
from everstep.planner import objective
from everstep.planner.cases import cases_of
from everstep.planner.first import first_plan
from everstep.planner.idle.ahead import DRIFT, Prepared, answered, drift, prepared
from everstep.planner.idle.refine import Refined, refined
from everstep.planner.policies.pricing import candidate_of
from everstep.planner.policies.routes import keep
from everstep.planner.policies.situation import CheckpointInfo, Situation, is_broken
from everstep.planner.policies.table import SCORED_BY_ITSELF, choose, propose
from everstep.planner.policies.waiting import wait
from everstep.planner.step.beside import Rest
from everstep.planner.step.calibrate import Calibration, Residuals, calibrated, changed, family_of
from everstep.planner.step.cost import SWITCH_S, step_seconds
from everstep.planner.step.measure import measured
from everstep.planner.step.moves import moves_for
from everstep.planner.step.parts import units_by_layers
from everstep.protocol.messages import PlanOrdered, first_attempt
from everstep.protocol.resolution import Resolution
from everstep.quantities import HostId, NodeId, UnitName
from everstep.schedule import Schedule
from everstep.view import View
from everstep.workload import Workload

Rollbacks = tuple[tuple[int, int, int], ...]

INITIAL = "initial"
"""What ``PlanOrdered.restore`` says for the weights made from the seed."""

SCHEDULE = "schedule"
"""The policy of a candidate that changes only in which order nodes act, and perhaps which of two alike does what."""

LET_IN = "who is expected is let in once they are there, and until then training goes on"
"""Why ``auto`` does not wait in a run."""

OBSERVED_EVERY = 10
"""After the first steps only every so many-th is measured: a prediction costs the leader milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """What is known of the machines besides who is in: cores by host, the link, and how fast nodes are."""

    host_cores: Mapping[HostId, int | None] = field(default_factory=dict)
    link: Link = field(default_factory=Link)
    speeds: Mapping[NodeId, float] = field(default_factory=dict)
    """Absent: 1."""


class Controller:
    """Plans for one run. A new leader makes a new one and tells it the plan in the store with ``adopt``."""

    def __init__(self, config: RunConfig, facts: ClusterFacts, *, started_s: float = 0.0, switch_s: float = SWITCH_S) -> None:
        """``started_s``: when the run began, on the clock that ``answer`` is told. ``switch_s``: fixed cost of a change."""
        self.config = config
        self.facts = facts
        self.workload: Workload | None = None
        self.plan: Plan | None = None
        self.schedule: Schedule | None = None
        """Of the present plan, where it is another than the one that follows from it."""
        self.cluster: Cluster | None = None
        self.calibration = Calibration()
        self.num_events = 0
        self._settled: Workload | None = None
        self._residuals: Residuals = {}
        self._rest = Rest()
        self._ahead: Iterator[Prepared] | None = None
        self._known: dict[NodeId, Prepared] = {}
        self._cases: dict[NodeId, NodeId] = {}
        self._search: Iterator[Refined | None] | None = None
        self._better: Refined | None = None
        self._awaited: Plan | None = None
        self._started_s = started_s
        self._switch_s = switch_s
        self._num_observed = 0

    def start(
        self, view: View, workload: Workload, resume: CheckpointInfo | None, *, token: int = 0, num_spares: int = 0,
        rollbacks: Rollbacks = (),
    ) -> tuple[PlanOrdered, Decision]:
        """The first plan of a run, from the initial weights or a checkpoint; ``num_spares`` nodes stay idle.

        Raises:
            InfeasibleError: nothing fits; ``rejected`` says why.
        """
        self.workload = workload
        cluster = self._cluster_of(view)
        step = resume.step if resume else 0
        decision = first_plan(
            view.nodes, self._calibrated(), cluster, self.config.planner, idle=num_spares,
            split=self.config.engine.split_backward, view=view.number, step=step, redo_steps=self._redo_steps(),
            cause=f"start from step {step}" if resume else "start",
        )
        order = PlanOrdered(
            view=view.number, token=token, step=step, attempt=first_attempt(step, rollbacks), plan=decision.plan, union=None,
            moves=(), loads=moves_for(decision.plan, {}, workload, restore=True)[1],
            restore=resume.path if resume else INITIAL, rollbacks=rollbacks,
        )
        self._take(decision.plan, cluster, view)
        return order, decision

    def adopt(self, plan: Plan, workload: Workload, view: View) -> None:
        """What is running already, for a leader that came later."""
        self.workload = workload
        self._take(plan, self._cluster_of(view), view)

    def answer(
        self, view: View, resolution: Resolution, lost: tuple[NodeId, ...], joined: tuple[NodeId, ...], cause: str,
        now_s: float, token: int, checkpoint: CheckpointInfo | None, rollbacks: Rollbacks = (),
        expected: Mapping[NodeId, float] | None = None,
    ) -> tuple[PlanOrdered | None, Decision | None, str]:
        """The plan of ``view`` after an event, or None and why there is none. The third value is a reason in words.

        ``expected``: who is on the way to replace somebody, and in how many seconds each should be there. A decision without
        an order says that it is best to wait for them: ask again when somebody has come or gone, or, without ``expected``,
        when the time is over.

        After ``start`` or ``adopt``. With a restore the leader adds the roll-back; everything else is in the order.
        """
        assert self.plan is not None and self.workload is not None, "a run is started or adopted before it is answered for"
        if (lost or joined) and self._awaited is None:
            self.num_events += 1
        situation = self._situation(view, resolution, lost, joined, now_s, checkpoint)
        if expected and self.config.planner.policy == "wait":
            situation = replace(situation, expected=expected, ways=situation.ways | {"wait"})
        better = self._better if self._may_refine(situation) else None
        candidates = self._with_schedule(situation, better) if better else self._proposed(situation, bool(expected))
        try:
            chosen = choose(situation, candidates)
        except InfeasibleError as error:
            return None, None, self._why_not(error, situation)
        decision = Decision(
            cause=cause, view=view.number, step=situation.step, lost=lost, gap_s=situation.gap_s,
            candidates=objective.explained(candidates, chosen), chosen=chosen,
        )
        if decision.candidate.way == "wait":
            self._awaited = decision.plan
            return None, decision, decision.candidate.reason
        schedule = self._schedule_of(decision, better)
        order = self._order(view, decision, resolution, situation, token, rollbacks, schedule)
        self._take(decision.plan, situation.cluster, view, schedule)
        return order, decision, decision.candidate.reason

    def think(self) -> bool:
        """Work out one answer ahead, for the loss of one more node; to be called while there is nothing else to do.

        Returns whether more is left to think about. After ``start`` or ``adopt``. One call takes as long as one search.
        """
        assert self.plan is not None and self.cluster is not None, "there is nothing to think about before the start"
        workload = self._planned_for()
        if self._ahead is None:
            self._known = {}
            self._cases = cases_of(self.plan, self.cluster)
            units = units_by_layers([(), *self.plan.placement.values()], workload)
            self._ahead = prepared(Situation(
                cluster=self.cluster, workload=workload, plan=self.plan,
                holds={node: units[layers] for node, layers in self.plan.placement.items()}, config=self.config.planner,
                redo_steps=self._redo_steps(), switch_s=self._switch_s, residuals=self._residuals, thorough=True,
            ))
        found = next(self._ahead, None)
        if found is not None:
            self._known[found.node] = found
        return found is not None

    def refine(self) -> bool:
        """Search on for a better schedule of the present plan; to be called when there is nothing left to think about.

        Returns whether there is more to search; ``wish`` says what came of it. After ``start`` or ``adopt``. One call takes
        some milliseconds. Only ``auto`` looks for better schedules: a policy that is set alone stays what it is.
        """
        assert self.plan is not None and self.cluster is not None, "there is nothing to refine before the start"
        if self.config.planner.policy != "auto" or self.workload is None or not self.workload.measured:
            return False
        if self._search is None:
            limit = self.config.planner.worker_memory_bytes
            self._search = refined(self.plan, self._planned_for(), self.cluster, limit)
        try:
            self._better = next(self._search)
        except StopIteration:
            return False
        return self._better is None

    @property
    def wish(self) -> str:
        """Why another plan is wanted although everybody is well; empty where none is."""
        return f"a schedule that takes {self._better.gain:.1%} less time" if self._better else ""

    def _proposed(self, situation: Situation, is_somebody_expected: bool) -> list[Candidate]:
        """What was worked out ahead or is now; with what was waited for, if all who were expected have come.

        Among other policies waiting is no candidate: they have a value until the next event and do not know that somebody
        comes before it, who is then let in at a step boundary. Waiting spares only that second change of plan.
        """
        found = self._remembered(situation) or propose(situation)
        if situation.expected and any(candidate.policy == "wait" for candidate in found):
            found = [*(candidate for candidate in found if candidate.policy != "wait"), *wait(situation)]
        elif is_somebody_expected:
            found = [replace(each, reason=LET_IN) if each.policy == "wait" and not each.feasible else each for each in found]
        if self._awaited is not None and set(self._awaited.nodes) == set(situation.nodes):
            found = [*found, candidate_of(situation, "wait", self._awaited, "blocking")]
        return found

    def _may_refine(self, situation: Situation) -> bool:
        return self._better is not None and not (situation.lost or situation.joined or is_broken(situation))

    def _with_schedule(self, situation: Situation, better: Refined) -> list[Candidate]:
        return [*keep(situation), candidate_of(situation, SCHEDULE, better.answer, "now")]

    def _schedule_of(self, decision: Decision, better: Refined | None) -> Schedule | None:
        """What the plan that was chosen is run by; None: by what follows from it."""
        if better is not None and decision.candidate.policy == SCHEDULE:
            return better.schedule
        return self.schedule if decision.plan == self.plan else None

    def _remembered(self, situation: Situation) -> list[Candidate] | None:
        """What was worked out ahead for just this; None where it was not, or where something is not as was thought."""
        if len(situation.lost) != 1 or situation.joined or situation.ends or situation.expected or self._ahead is None:
            return None
        if self.config.planner.policy in SCORED_BY_ITSELF:
            return None
        (node,) = situation.lost
        known = self._known.get(self._cases.get(node, node))
        if known is None or known.situation.plan is not self.plan or known.situation.workload is not situation.workload:
            return None
        assert self.plan is not None, "known answers are about a plan"
        units = units_by_layers([(), *self.plan.placement.values()], situation.workload)
        as_thought = all(held == units[self.plan.placement[member]] for member, held in situation.holds.items())
        return answered(known, node, situation) if as_thought else None

    def observe(self, times: Mapping[NodeId, Mapping[str, float]], step_s: float) -> None:
        """What a full step under the present plan took, whole and by action; both move the costs that plans are made from."""
        assert self.plan is not None and self.workload is not None and self.cluster is not None, "observed after the start"
        self._num_observed += 1
        if self._num_observed > OBSERVED_EVERY and self._num_observed % OBSERVED_EVERY:
            return
        self.workload = measured(self.workload, times)
        if self.workload.measured:
            self._rest = self._rest.after(self.plan, self.workload, times)
            self.workload = replace(self.workload, beside=self._rest.beside())
            predicted_s = step_seconds(self.plan, self.workload, self.cluster, self.schedule)
            self.calibration = self.calibration.after(step_s, predicted_s, family_of(self.plan))

    def predicted_step_s(self) -> float:
        """Seconds of a step under the present plan, as far as is known now."""
        assert self.plan is not None and self.cluster is not None and self.workload is not None, "predicted after the start"
        bare_s = step_seconds(self.plan, self.workload, self.cluster, self.schedule)
        return self.calibration.seconds(bare_s, family_of(self.plan))

    def _situation(
        self, view: View, resolution: Resolution, lost: tuple[NodeId, ...], joined: tuple[NodeId, ...], now_s: float,
        checkpoint: CheckpointInfo | None,
    ) -> Situation:
        assert self.plan is not None, "checked by answer"
        gap_s = objective.expected_gap_s(self.config.planner.gap_s, self.num_events, max(0.0, now_s - self._started_s))
        holds: dict[NodeId, frozenset[UnitName]] = {node: resolution.holds.get(node, frozenset()) for node in view.nodes}
        return Situation(
            cluster=self._cluster_of(view), workload=self._planned_for(), plan=self.plan, holds=holds, lost=lost, joined=joined,
            step=max(0, resolution.step if resolution.step is not None else 0), checkpoint=checkpoint, gap_s=gap_s,
            config=self.config.planner, redo_steps=self._redo_steps(), switch_s=self._switch_s, residuals=self._residuals,
        )

    def _order(
        self, view: View, decision: Decision, resolution: Resolution, situation: Situation, token: int, rollbacks: Rollbacks,
        schedule: Schedule | None,
    ) -> PlanOrdered:
        candidate = decision.candidate
        restores = candidate.way == "restore"
        step = candidate.restore_step if restores and candidate.restore_step is not None else situation.step
        attempt = resolution.attempt if step == resolution.step else first_attempt(step, rollbacks)
        moves, loads = moves_for(decision.plan, situation.holds, situation.workload, restores, situation.cluster)
        path = situation.checkpoint.path if situation.checkpoint else INITIAL
        return PlanOrdered(
            view=view.number, token=token, step=step, attempt=attempt, plan=decision.plan,
            union=None if restores else resolution.union, moves=moves, loads=loads, restore=path if restores else None,
            rollbacks=rollbacks,
            schedule=None if schedule is None else {node: " ".join(map(str, actions)) for node, actions in schedule.items()},
        )

    def _take(self, plan: Plan, cluster: Cluster, view: View, schedule: Schedule | None = None) -> None:
        assert self.workload is not None, "planned with one"
        wrong = plans.problems(plan, view, self.workload.num_layers)
        assert not wrong, f"a plan of ours has problems: {wrong}"
        self.plan, self.cluster, self.schedule = plan, cluster, schedule
        self._ahead = self._better = self._awaited = None
        # What was found for this plan is the best that a search finds, so it is not searched for again.
        self._search = iter(()) if schedule is not None else None

    def _calibrated(self) -> Workload:
        assert self.workload is not None, "known after the start"
        return calibrated(self.workload, self.calibration)

    def _planned_for(self) -> Workload:
        """The workload that plans are made for: it and the residuals follow what is measured only when that has moved
        beyond noise, so that tables and answers worked out before stay good."""
        now, residuals = self._calibrated(), self.calibration.residuals
        if self._settled is None or drift(self._settled, now) > DRIFT or changed(self._residuals, residuals) > DRIFT:
            self._settled, self._residuals, self._ahead = now, residuals, None
        return self._settled

    def _redo_steps(self) -> float:
        """Half a checkpoint interval; without checkpoints all is at stake, and that grows: take the default interval."""
        every = self.config.checkpoint.every_steps
        return every / 2 if every else 50.0

    def _cluster_of(self, view: View) -> Cluster:
        nodes = {
            member.node_id: Node(
                node_id=member.node_id, host=member.host, memory_bytes=self.config.planner.worker_memory_bytes,
                speed=self.facts.speeds.get(member.node_id, 1.0),
            )
            for member in view.members
        }
        return Cluster(nodes=nodes, host_cores=self.facts.host_cores, link=self.facts.link)

    def _why_not(self, error: InfeasibleError, situation: Situation) -> str:
        held = frozenset[UnitName]().union(*situation.holds.values())
        lost = [
            layer.name for index, layer in enumerate(situation.workload.layers)
            if not situation.workload.units_of({index}) <= held
        ]
        newest = situation.checkpoint
        words = [f"no plan fits: {error}"]
        words.append(f"layers without a living holder: {', '.join(lost)}" if lost else "every layer has a living holder")
        words.append(f"newest checkpoint: step {newest.step} at {newest.path}" if newest else "no checkpoint was written")
        return "; ".join(words)
