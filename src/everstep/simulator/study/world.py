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
from typing import Protocol

from everstep.planner import objective
from everstep.simulator.study.layout import Layout
from everstep.simulator.study.policies import Option, Situation
from everstep.simulator.study.rules import Costs, Rules, move_kind
from everstep.trace import Change, Trace

PRIOR_GAP_S = 600.0
"""What a planner expects before anything has happened."""

_SURPRISE = 0.05
"""A step that is longer or shorter than predicted by more than this share is reason to choose again."""


class Player(Protocol):
    """What the world asks of a policy."""

    @property
    def rules(self) -> Rules: ...

    @property
    def batch(self) -> int:
        """Samples of a step."""

    def start(self, nodes: tuple[str, ...]) -> Layout | None: ...

    def step_s(self, layout: Layout) -> float: ...

    def react(self, situation: Situation) -> Option: ...

    def pace_of_a_node(self, num_nodes: int) -> float:
        """Samples a second of one of so many nodes, if none ever failed."""


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

    def nodes(self, layout: Layout) -> float:
        return 1.0 if self.sigma == 0 else max(self.factor(f"node {node}") for node in layout.busy)


@dataclass(slots=True)
class Records:
    """What a policy has measured itself: by kind of layout and by move, measured by predicted."""

    truth: Truth
    seen: dict[str, float] = field(default_factory=dict)

    def saw(self, what: str) -> None:
        self.seen[what] = self.truth.factor(what)

    def step_ratio(self, layout: Layout) -> float:
        """Nodes are measured one by one. A kind never run is taken to be like the best of those that were, so it is tried."""
        return 1.0 if self.truth.sigma == 0 else self._ratio("step", kind(layout)) * self.truth.nodes(layout)

    def move_ratio(self, move: str) -> float:
        return self._ratio("move", move)

    def _ratio(self, group: str, which: str) -> float:
        known = [ratio for name, ratio in self.seen.items() if name.startswith(group)]
        return self.seen.get(f"{group} {which}", min(known, default=1.0))


def kind(layout: Layout) -> str:
    """The families of plans whose errors are alike."""
    return f"{'grid' if layout.grid else 'mixed'}{'' if layout.is_whole else ' rerouted'}"


@dataclass(slots=True)
class _Run:
    policy: Player
    costs: Costs
    truth: Truth
    gap_s: float
    nodes_at_start: tuple[str, ...]
    layout: Layout = field(init=False)
    is_down: bool = field(init=False)
    """Nothing can be trained on ``layout``: all of it has to come from a checkpoint."""
    pending: Option | None = None
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
    records: Records = field(init=False)
    taken: list[Taken] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.records = Records(self.truth)
        started = self.policy.start(self.nodes_at_start)
        self.is_down = started is None
        self.layout = Layout((), self.nodes_at_start) if started is None else started
        if started is not None:
            self.records.saw(f"step {kind(started)}")      # what ran before the trace begins

    def step_s(self, layout: Layout) -> float:
        predicted_s = self.policy.step_s(layout)
        if math.isinf(predicted_s) or self.truth.sigma == 0:
            return predicted_s
        return predicted_s * self.truth.factor(f"step {kind(layout)}") * self.truth.nodes(layout)

    def until(self, end_s: float) -> None:
        """Train and move until ``end_s``; what would be through at that moment exactly is not."""
        while self.pending is not None:
            option = self.pending
            true = self.truth.factor(f"move {move_kind(option.policy)}") if option.way in ("blocking", "behind") else 1.0
            copy_s = option.copy_s * true
            stall_s = option.stall_s * (true if option.way == "blocking" else 1.0)
            if option.way == "behind":
                self._train(min(end_s, self.began_s + copy_s))
            if self.began_s + copy_s + stall_s >= end_s:
                self._stand(end_s)
                return
            self._stand(self.began_s + copy_s + stall_s)
            self._through(option)
        if self.policy.rules.rethinks:
            self._look(end_s)
        if self.pending is not None:
            self.until(end_s)
        self._train(end_s)

    def _look(self, end_s: float) -> None:
        """After the first step on a kind of layout never run before: was it as predicted? If not, choose again."""
        step_s = math.inf if self.is_down else self.step_s(self.layout)
        what = f"step {kind(self.layout)}"
        if what not in self.records.seen and self.now_s + step_s < end_s:
            assumed = self.records.step_ratio(self.layout)
            self._train(self.now_s + step_s)
            if abs(self.records.step_ratio(self.layout) / assumed - 1) > _SURPRISE:
                self._decide(Change(at_s=self.now_s), progress_of=None)

    def _through(self, option: Option) -> None:
        self.layout, self.is_down, self.pending = option.target, False, None
        if option.way != "restore":
            self.records.saw(f"move {move_kind(option.policy)}")

    def _train(self, end_s: float) -> None:
        """At the pace of the layout, a checkpoint every so often."""
        step_s = math.inf if self.is_down else self.step_s(self.layout)
        if math.isinf(step_s):
            self._stand(end_s)
            return
        left_s = max(0.0, end_s - self.now_s)
        if left_s >= step_s * (1 - 1e-9):
            self.records.saw(f"step {kind(self.layout)}")
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
        broken_off = self.pending
        is_training = broken_off is None or broken_off.way == "behind"
        if change.lost and is_training and not self.is_down and math.isfinite(self.step_s(self.layout)):
            self._lose(self.costs.redone_steps * self.policy.batch)
        self.layout = self.layout.without(change.lost).joined_by(change.joined)
        self.pending = None
        self._decide(change, progress_of=broken_off)

    def _lose(self, samples: float) -> None:
        samples = min(samples, self.samples)
        self.samples -= samples
        self.lost_samples += samples
        self.checkpoint_samples = min(self.checkpoint_samples, self.samples)

    def _decide(self, change: Change, progress_of: Option | None) -> None:
        situation = Situation(
            layout=Layout((), self.layout.nodes) if self.is_down else self.layout, gap_s=self.gap_s, costs=self.costs,
            seen_gap_s=objective.expected_gap_s(PRIOR_GAP_S, self.num_changes, self.now_s),
            step_ratio=self.records.step_ratio, move_ratio=self.records.move_ratio,
        )
        option = self.policy.react(situation)
        if option.way == "restore" or (self.policy.rules.loses_work and option.way == "blocking"):
            self._lose(self.samples - self.checkpoint_samples)
            self.since_checkpoint_s = 0.0
        self.is_down = option.way in ("restore", "wait")
        if option.way != "now" and option.way != "wait":
            self.pending, self.began_s = self._continued(option, progress_of), self.now_s
        self.taken.append(Taken(self.now_s, option.policy, option.way, option.step_s))

    def _continued(self, option: Option, broken_off: Option | None) -> Option:
        """With ``keep_progress`` what was copied already of a like move need not be copied again."""
        alike = broken_off is not None and broken_off.policy == option.policy and broken_off.way == option.way == "behind"
        if not (self.costs.keep_progress and alike):
            return option
        return replace(option, copy_s=max(0.25 * option.copy_s, option.copy_s - (self.now_s - self.began_s)))


def play(
    trace: Trace, policy: Player, costs: Costs, *, truth: Truth | None = None, gap_s: float | None = None,
    num_nodes: int | None = None,
) -> Outcome:
    """``policy`` from the start of ``trace`` to its end.

    ``gap_s``: the mean gap that policies which know it are told; None: that of the trace. ``num_nodes``: the cluster
    without failures, for FSE; None: the most that the trace ever has.
    """
    if policy.rules.score == "fastest":
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
