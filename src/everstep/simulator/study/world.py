"""A policy against a trace: who trains how fast when, on pretend time.

1. A move of state takes effect when all of it is through. A change before, or at that very moment, breaks it off: the old
   layout, less who is gone, is what remains, since old copies are freed only afterwards.
2. While a move is blocking nothing is trained; behind training the old layout goes on, but for a short stall at the end.
3. Whoever has lost all holders of a layer goes back to the last checkpoint and pays for what was trained since.
4. A policy is told predictions only. What is true may differ, by node and by kind of layout; it learns of that when it has
   trained on such a layout, or moved that way, itself.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from typing import Generic

from everstep.planner import objective
from everstep.simulator.study.player import Costs, Option, Player, S, Situation
from everstep.trace import Change, Trace

PRIOR_GAP_S = 600.0
"""What a planner expects before anything has happened."""

_SURPRISE = 0.05
"""A step that is longer or shorter than predicted by more than this share is reason to choose again."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A decision: when, what, and how."""

    at_s: float
    policy: str
    way: str
    step_s: float

    @property
    def words(self) -> str:
        """``repartition behind``; ways that say nothing are left out."""
        return f"{self.policy} {self.way}" if self.way in ("blocking", "behind") else self.policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it."""

    samples: float
    elapsed_s: float
    stall_s: float
    """Time in which nothing was trained."""
    lost_samples: float
    """Trained, and lost again."""
    whole_samples: float
    """What the living nodes would have done at the pace of the grid without failure, each its share: FSE is against it."""
    decisions: tuple[Taken, ...]
    progress: tuple[tuple[float, float], ...]
    """Seconds, and samples until then, at every change and at the end."""

    @property
    def goodput(self) -> float:
        """Samples a second."""
        return self.samples / self.elapsed_s

    @property
    def fse(self) -> float:
        """Measured rate by survivors / N × the rate without failures."""
        return self.samples / self.whole_samples


@dataclass(slots=True)
class Truth:
    """What is really so: log-normal errors of ``sigma``, fixed for each node and each kind of layout and move.

    A step is as slow as its slowest node. With ``sigma`` 0 predictions are true.
    """

    sigma: float = 0.0
    seed: int = 0
    _drawn: dict[str, float] = field(default_factory=dict)

    def factor(self, what: str) -> float:
        if self.sigma == 0:
            return 1.0
        if what not in self._drawn:
            self._drawn[what] = math.exp(self.sigma * random.Random(f"{self.seed} {what}").gauss(0.0, 1.0))
        return self._drawn[what]

    def node(self, name: str) -> float:
        return self.factor(f"node {name}")


@dataclass(slots=True)
class Records(Generic[S]):
    """What a policy has measured itself: by kind of layout, by kind of move and by node, measured by predicted."""

    truth: Truth
    seen: dict[str, float] = field(default_factory=dict)

    def ran(self, layout: S) -> None:
        """A whole step on ``layout`` tells of its kind, and of each of its nodes."""
        self.saw(f"step {layout.kind}")
        if self.truth.sigma:
            for node in layout.busy:
                self.saw(f"node {node}")

    def saw(self, what: str) -> None:
        self.seen[what] = self.truth.factor(what)

    def step_ratio(self, layout: S) -> float:
        """Nodes are taken as known. A kind never run is taken to be like the best of those that were, so it is tried."""
        if self.truth.sigma == 0:
            return 1.0
        return self._ratio("step", layout.kind) * max(map(self.truth.node, layout.busy))

    def move_ratio(self, move: str) -> float:
        return self._ratio("move", move)

    def _ratio(self, group: str, which: str) -> float:
        known = [ratio for name, ratio in self.seen.items() if name.startswith(group)]
        return self.seen.get(f"{group} {which}", min(known, default=1.0))


@dataclass(slots=True)
class _Run(Generic[S]):
    policy: Player[S]
    costs: Costs
    truth: Truth
    gap_s: float
    nodes_at_start: tuple[str, ...]
    layout: S = field(init=False)
    is_down: bool = field(init=False)
    """Nothing can be trained on ``layout``: all of it has to come from a checkpoint."""
    pending: Option[S] | None = None
    began_s: float = 0.0
    now_s: float = 0.0
    samples: float = 0.0
    lost_samples: float = 0.0
    checkpoint_samples: float = 0.0
    since_checkpoint_s: float = 0.0
    """Trained since then."""
    stall_s: float = 0.0
    whole_samples: float = 0.0
    num_changes: int = 0
    records: Records[S] = field(init=False)
    taken: list[Taken] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.records = Records(self.truth)
        started = self.policy.start(self.nodes_at_start)
        self.is_down = started is None
        self.layout = self.policy.bare(self.nodes_at_start) if started is None else started
        if started is not None:
            self.records.ran(started)      # what ran before the trace begins

    def step_s(self, layout: S) -> float:
        true_s = self.policy.true_step_s(layout, self.truth.node)
        return true_s if math.isinf(true_s) else true_s * self.truth.factor(f"step {layout.kind}")

    def until(self, end_s: float) -> None:
        """Train and move until ``end_s``; what would be through at that moment exactly is not."""
        while self.pending is not None:
            option = self.pending
            true = self.truth.factor(f"move {option.moves}") if option.moves else 1.0
            copying_s, copied_s = self.began_s + option.pause_s, self.began_s + option.pause_s + option.copy_s * true
            through_s = copied_s + option.stall_s * (true if option.way == "blocking" else 1.0)
            self._stand(min(end_s, copying_s))
            if option.copy_s and copying_s < end_s:
                self._train(min(end_s, copied_s))
            if through_s >= end_s:
                self._stand(end_s)
                return
            self._stand(through_s)
            self._through(option)
        if self.policy.rethinks:
            self._look(end_s)
        if self.pending is not None:
            self.until(end_s)
        self._train(end_s)

    def _look(self, end_s: float) -> None:
        """After the first step on a kind of layout never run before: was it as predicted? If not, choose again."""
        step_s = math.inf if self.is_down else self.step_s(self.layout)
        what = f"step {self.layout.kind}"
        if what not in self.records.seen and self.now_s + step_s < end_s:
            assumed = self.records.step_ratio(self.layout)
            self._train(self.now_s + step_s)
            if abs(self.records.step_ratio(self.layout) / assumed - 1) > _SURPRISE:
                self._decide(Change(at_s=self.now_s), progress_of=None)

    def _through(self, option: Option[S]) -> None:
        self.layout, self.is_down, self.pending = option.target, False, None
        if option.moves:
            self.records.saw(f"move {option.moves}")

    def _train(self, end_s: float) -> None:
        """At the pace of the layout, a checkpoint every so often."""
        step_s = math.inf if self.is_down else self.step_s(self.layout)
        if math.isinf(step_s):
            self._stand(end_s)
            return
        left_s = max(0.0, end_s - self.now_s)
        if left_s >= step_s * (1 - 1e-9):
            self.records.ran(self.layout)
        rate = self.policy.batch / step_s
        steps = self.costs.checkpoint_every_steps
        every_s = self.costs.checkpoint_every_s if steps is None else steps * step_s
        while left_s > 0:
            trained_s = min(left_s, max(0.0, every_s - self.since_checkpoint_s))
            self.samples += rate * trained_s
            self.since_checkpoint_s += trained_s
            left_s -= trained_s
            if self.since_checkpoint_s >= every_s * (1 - 1e-12):
                written_s = min(left_s, self.costs.checkpoint_write_s)
                left_s -= written_s
                self.stall_s += written_s
                if written_s < self.costs.checkpoint_write_s:
                    break
                self.checkpoint_samples, self.since_checkpoint_s = self.samples, 0.0
        self.now_s = max(self.now_s, end_s)

    def _stand(self, end_s: float) -> None:
        self.stall_s += max(0.0, end_s - self.now_s)
        self.now_s = max(self.now_s, end_s)

    def count(self, num_nodes: int, until_s: float, rate_of_a_node: float) -> None:
        self.whole_samples += num_nodes * rate_of_a_node * (until_s - self.now_s)

    def change(self, change: Change) -> None:
        self.num_changes += 1
        broken_off, layout = self.pending, self.layout
        is_training = broken_off is None or (self.began_s + broken_off.pause_s < self.now_s and broken_off.copy_s > 0)
        if change.lost and is_training and not self.is_down and math.isfinite(self.step_s(self.layout)):
            self._lose(self.costs.redone_steps * self.policy.batch)
        if broken_off is not None and self.costs.keep_progress:
            true = self.truth.factor(f"move {broken_off.moves}") if broken_off.moves else 1.0
            layout = self.policy.kept(broken_off, max(0.0, self.now_s - self.began_s - broken_off.pause_s) / true, layout)
        self.layout = layout.without(change.lost).joined_by(change.joined)
        self.pending = None
        self._decide(change, progress_of=broken_off)

    def _lose(self, samples: float) -> None:
        samples = min(samples, self.samples)
        self.samples -= samples
        self.lost_samples += samples
        self.checkpoint_samples = min(self.checkpoint_samples, self.samples)

    def _decide(self, change: Change, progress_of: Option[S] | None) -> None:
        situation = Situation(
            layout=self.layout.bare() if self.is_down else self.layout, gap_s=self.gap_s, costs=self.costs,
            seen_gap_s=objective.expected_gap_s(PRIOR_GAP_S, self.num_changes, self.now_s),
            lost=change.lost, joined=change.joined,
            unsaved_steps=max(0.0, self.samples - self.checkpoint_samples) / self.policy.batch,
            seen=self.records.seen, step_ratio=self.records.step_ratio, move_ratio=self.records.move_ratio,
        )
        option = self.policy.react(situation)
        if option.way == "restore" or (self.policy.loses_work and option.way == "blocking"):
            self._lose(self.samples - self.checkpoint_samples)
            self.since_checkpoint_s = 0.0
        self.is_down = option.way in ("restore", "wait")
        if option.meanwhile is not None:
            self.layout = option.meanwhile
        if option.way != "wait":
            self.pending, self.began_s = self._continued(option, progress_of), self.now_s
        self.taken.append(Taken(self.now_s, option.policy, option.way, option.step_s))

    def _continued(self, option: Option[S], broken_off: Option[S] | None) -> Option[S]:
        """With ``keep_progress`` what was copied already of a like move need not be copied again, but for a quarter."""
        alike = broken_off is not None and broken_off.policy == option.policy and broken_off.way == option.way == "behind"
        if not (self.costs.keep_progress and alike) or option.arrivals:
            return option
        return replace(option, copy_s=max(0.25 * option.copy_s, option.copy_s - (self.now_s - self.began_s)))


def play(
    trace: Trace, policy: Player[S], costs: Costs, *, truth: Truth | None = None, gap_s: float | None = None,
    num_nodes: int | None = None,
) -> Outcome:
    """``policy`` from the start of ``trace`` to its end.

    ``gap_s``: the mean gap that policies which know it are told; None: that of the trace. ``num_nodes``: the cluster
    without failures, for FSE; None: the most that the trace ever has.
    """
    if policy.is_free:
        costs = replace(costs, move_s=0.0, exposed_s=0.0)
    run = _Run(
        policy, costs, truth or Truth(), trace.mean_gap_s if gap_s is None else gap_s, trace.nodes,
    )
    rate_of_a_node = policy.pace_of_a_node(trace.most_nodes if num_nodes is None else num_nodes)
    alive = len(trace.nodes)
    progress = [(0.0, 0.0)]
    for change in trace.changes:
        run.count(alive, change.at_s, rate_of_a_node)
        run.until(change.at_s)
        progress.append((change.at_s, run.samples))
        run.change(change)
        alive += len(change.joined) - len(change.lost)
    run.count(alive, trace.end_s, rate_of_a_node)
    run.until(trace.end_s)
    return Outcome(
        samples=run.samples, elapsed_s=trace.end_s, stall_s=run.stall_s, lost_samples=run.lost_samples,
        whole_samples=run.whole_samples, decisions=tuple(run.taken),
        progress=(*progress, (trace.end_s, run.samples)),
    )
