"""What a policy does when nodes are lost or come: one engine, which follows the rules of the system that it plays.

Who has no answer left restores a checkpoint on the layout that it would start with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from everstep.planner import objective
from everstep.planner.baselines import chameleon, oobleck
from everstep.simulator.study.layout import Bounds, Layout, Place, built
from everstep.simulator.study.player import Option, Situation
from everstep.simulator.study.rules import ABSORBED, STAGE_COPY, Move, Rules, move_kind
from everstep.simulator.study.times import Times, signature

_GAIN = 1e-9

NEARLY = 0.01
"""Layouts whose steps are so little longer than the best count as equal when the next loss is thought of."""


@dataclass(frozen=True, slots=True)
class Policy:
    """``rules`` with the times of a job."""

    rules: Rules
    times: Times

    @property
    def name(self) -> str:
        return self.rules.name

    @property
    def is_free(self) -> bool:
        return self.rules.score == "fastest"

    @property
    def rethinks(self) -> bool:
        return self.rules.rethinks

    @property
    def loses_work(self) -> bool:
        return self.rules.loses_work

    def bare(self, nodes: tuple[str, ...]) -> Layout:
        return Layout((), nodes)

    def true_step_s(self, layout: Layout, factor: Callable[[str], float]) -> float:
        """A step is as slow as its slowest node."""
        step_s = self.step_s(layout)
        return step_s if math.isinf(step_s) else step_s * max(map(factor, layout.busy))

    def kept(self, option: Option[Layout], copied_s: float, layout: Layout) -> Layout:
        """Half a copy is no place."""
        return layout

    @property
    def _chosen_splits(self) -> dict[object, tuple[Bounds, ...] | None]:
        return self.times.remembered

    @property
    def batch(self) -> int:
        return self.times.job.batch

    def pace_of_a_node(self, num_nodes: int) -> float:
        """Samples a second of each, if so many made the grid and none ever failed."""
        bounds = self.times.grid_bounds()
        pipelines = max(1, num_nodes // len(bounds))
        return self.batch / self.times.grid_s(bounds, pipelines, (0,) * len(bounds)) / (pipelines * len(bounds))

    def start(self, nodes: tuple[str, ...]) -> Layout | None:
        """The layout that these nodes begin with; None: they cannot hold the model."""
        reserve = self.rules.reserve if len(nodes) - self.rules.reserve >= self.times.job.num_stages else 0
        return self._fastest_start(nodes[: len(nodes) - reserve], nodes[len(nodes) - reserve:])

    def _fastest_start(self, nodes: tuple[str, ...], idle: tuple[str, ...]) -> Layout | None:
        if self.rules.sturdy_start and (sturdy := self._moved("sturdy", Layout((), nodes))) is not None:
            return sturdy.joined_by(idle)
        wanted: tuple[Move, ...] = tuple(move for move in self.rules.moves if move in ("repartition", "morph"))
        if "templates" in self.rules.moves:
            wanted = ("repartition",)
        found = [layout for move in ("grid", *wanted) if (layout := self._moved(move, Layout((), nodes))) is not None]
        if not found:
            return None
        best = min(found, key=lambda layout: self.step_s(layout) * (1 if layout is found[0] else 1 + _GAIN))
        return best.joined_by(idle)

    def step_s(self, layout: Layout) -> float:
        """Predicted; infinite where this system cannot train on ``layout`` as it is."""
        key = ("step", self.rules.reroute, layout.grid, len(layout.pipelines), tuple(sorted(map(_shape, layout.pipelines))))
        known = self.times.known
        if key not in known:
            known[key] = self._step_s(layout)
        return known[key]

    def _step_s(self, layout: Layout) -> float:
        if self.rules.reroute == "shadow":
            return self._shadowed_s(layout)
        if layout.is_whole:
            return self._whole_s(layout)
        found = [math.inf]
        if self.rules.reroute in ("drop", "any"):
            found.append(self._whole_s(Layout(layout.whole)))
        if self.rules.reroute in ("grid", "any") and layout.grid:
            found.append(self.times.grid_s(layout.grid, len(layout.pipelines), layout.holes))
        if self.rules.reroute == "any" and not layout.grid and layout.has_all(self.times.job.num_layers):
            found.append(self.times.rerouted_s(signature(layout)))
        return min(found)

    def _whole_s(self, layout: Layout) -> float:
        if layout.grid == self.times.grid_bounds():
            return self.times.grid_s(layout.grid, len(layout.pipelines), (0,) * len(layout.grid))
        return self.times.whole_s([len(pipeline) for pipeline in layout.pipelines])

    def _shadowed_s(self, layout: Layout) -> float:
        """Bamboo: everybody also computes the forward of the next stage, in bubbles first."""
        if layout.grid is None or not layout.pipelines:
            return math.inf
        if any(line[s].node is None and line[s - 1].node is None for line in layout.pipelines for s in range(len(line))):
            return math.inf
        job, (first, end) = self.times.job, layout.grid[0]
        forward_s, work_s = sum(job.forward_s[first:end]), sum(job.work_s[first:end])
        micro_batches = math.ceil(job.num_micro_batches / len(layout.pipelines))
        plain_s = self.times.grid_s(layout.grid, len(layout.pipelines), (0,) * len(layout.grid))
        bubble_s = plain_s - micro_batches * work_s
        return (plain_s + max(0.0, micro_batches * forward_s - bubble_s)) * (1.0 if layout.is_whole else ABSORBED)

    def react(self, situation: Situation[Layout]) -> Option[Layout]:
        """What to do now."""
        options = self.options(situation)
        if options:
            return self._chosen(options, situation)
        target = self.start(situation.layout.nodes)
        if target is None:
            return Option(policy="wait", way="wait", target=situation.layout, step_s=math.inf)
        return Option(
            policy="restore", way="restore", target=target, step_s=self.step_s(target), stall_s=situation.costs.restore_s,
        )

    def options(self, situation: Situation[Layout]) -> list[Option[Layout]]:
        """Everything this system considers, staying first where it can, each with its value."""
        layout, costs = situation.layout, situation.costs
        now_s = self.step_s(layout)
        seen_now_s = now_s * situation.step_ratio(layout) if math.isfinite(now_s) else math.inf
        found = []
        if math.isfinite(now_s):
            found.append(Option(policy="stay" if layout.is_whole else "reroute", way="now", target=layout, step_s=now_s))
        can_move = layout.has_all(self.times.job.num_layers) or self.rules.loses_work or self.rules.reroute == "shadow"
        for move in self.rules.moves if can_move else ():
            target = self._moved(move, layout)
            if target is None:
                continue
            step_s = self.step_s(target)
            is_slower = math.isinf(step_s) or step_s * situation.step_ratio(target) >= seen_now_s * (1 - _GAIN)
            if is_slower and (self.rules.score != "value" or self.at_risk(target) >= self.at_risk(layout)):
                continue
            share = STAGE_COPY if move_kind(move) == "stage" else 1.0
            move_s = costs.restore_s if self.rules.restarts else costs.move_s * share
            option = Option(
                policy=move, way="blocking", target=target, step_s=step_s, now_s=now_s, stall_s=move_s, moves=move_kind(move),
            )
            for way in self.rules.ways:
                if way == "blocking":
                    found.append(option)
                elif math.isfinite(now_s):
                    found.append(replace(option, way="behind", copy_s=move_s, stall_s=costs.exposed_s))
        return [replace(option, value=self._value(_as_measured(option, situation), situation)) for option in found]

    def _value(self, option: Option[Layout], situation: Situation[Layout]) -> float:
        """Expected steps until the next change; equation 8 where that is the rule."""
        gap_s = situation.gap_s if self.rules.knows_gap else situation.seen_gap_s
        step_s = option.step_s * situation.step_ratio(option.target)
        if self.rules.score == "fastest":
            return 1 / step_s
        if self.rules.score == "equation 8":
            return chameleon.score(1.0, step_s, option.stall_s, gap_s)
        costs = situation.costs
        redo_steps = (costs.restore_s + costs.checkpoint_every_s / 2) / step_s
        if option.way == "behind":
            now_s = option.now_s * situation.step_ratio(situation.layout)
            too_early = -math.expm1(-(option.copy_s + option.stall_s) / gap_s)
            at_risk = too_early * self.at_risk(situation.layout) + (1 - too_early) * self.at_risk(option.target)
            return two_phase_value(now_s, option.copy_s, step_s, option.stall_s, gap_s) - at_risk * redo_steps
        before = self.at_risk(situation.layout) if option.way == "blocking" else 0.0
        at_risk = max(before * -math.expm1(-option.stall_s / gap_s), self.at_risk(option.target))
        return objective.value(
            batch=1.0, step_s=step_s, stall_s=option.stall_s, gap=objective.Exponential(gap_s), at_risk=at_risk,
            redo_steps=redo_steps,
        )

    def at_risk(self, layout: Layout) -> float:
        """The share of busy nodes that hold the only copy of some layer."""
        places = signature(layout)
        key = ("at risk", *sorted(places))
        if key not in self.times.known:
            alone = [0] * self.times.job.num_layers
            for first, end in places:
                for layer in range(first, end):
                    alone[layer] += 1
            only = [any(alone[layer] == 1 for layer in range(first, end)) for first, end in places]
            self.times.known[key] = sum(only) / len(places) if places else 1.0
        return self.times.known[key]

    def _chosen(self, options: list[Option[Layout]], situation: Situation[Layout]) -> Option[Layout]:
        if self.rules.score == "first":
            return next((option for option in options if option.way != "now"), options[0])
        if self.rules.look_ahead or self.rules.score == "liveput":
            gap_s = situation.gap_s if self.rules.knows_gap else situation.seen_gap_s
            lasts_s = gap_s if self.rules.score == "liveput" else gap_s * -math.expm1(-situation.costs.move_s / gap_s)
            options = sorted(options, key=lambda option: -option.value)[:4]
            options = [replace(each, value=each.value + lasts_s * self.after_a_loss(each.target)) for each in options]
        return max(options, key=lambda option: (option.value * (1 + _GAIN if option.way == "now" else 1), -option.stall_s))

    def after_a_loss(self, layout: Layout) -> float:
        """Steps a second after one more loss, each busy node as likely as the others; an idle one takes the place."""
        if layout.idle:
            return 1 / self.step_s(layout)
        shapes: dict[tuple[object, int], tuple[str, int]] = {}
        for pipeline in layout.pipelines:
            for stage, place in enumerate(pipeline):
                if place.node is not None:
                    node, count = shapes.get((_shape(pipeline), stage), (place.node, 0))
                    shapes[_shape(pipeline), stage] = (node, count + 1)
        total = sum(count for _, count in shapes.values())
        return sum(count / self.step_s(layout.without([node])) for node, count in shapes.values()) / total

    def _moved(self, move: Move | str, layout: Layout) -> Layout | None:
        return _MOVES[move](self, layout)

    def _healed(self, layout: Layout) -> Layout | None:
        """Idle nodes in the holes where they help most."""
        found = layout
        while found.idle and not found.is_whole:
            found = min(
                (found.filled(index, stage, found.idle[0]) for index, stage in _some_holes(found)), key=self._reached_s,
            )
        return found if found is not layout else None

    def _reached_s(self, layout: Layout) -> float:
        """For comparing moves: the step, or where there is none yet, more than any step, less with fewer holes."""
        step_s = self.step_s(layout)
        return step_s if math.isfinite(step_s) else 1e12 + sum(p.node is None for line in layout.pipelines for p in line)

    def _normalized(self, layout: Layout) -> Layout | None:
        """Healthy nodes change roles, of a grid, until no swap makes the step shorter; all copies at once."""
        if layout.is_whole or not layout.grid:
            return None
        found = layout
        while True:
            swaps = [found.swapped(source, hole) for hole in _some_holes(found) for source in _one_a_stage(found, hole[1])]
            best = min(swaps, key=self._reached_s, default=found)
            if self._reached_s(best) >= self._reached_s(found) * (1 - _GAIN):
                return found if found is not layout else None
            found = best

    def _grown(self, layout: Layout) -> Layout | None:
        """New pipelines of idle nodes next to a grid; pipelines that can do nothing more give their nodes."""
        bounds = self.times.grid_bounds()
        if self.rules.reroute == "drop":
            layout = built([bounds] * len(layout.whole), layout.nodes, Layout(layout.whole))
        count = len(layout.idle) // len(bounds)
        if not count or layout.grid not in (None, bounds):
            return None
        fresh = built([bounds] * count, layout.idle)
        return Layout((*layout.pipelines, *fresh.pipelines), fresh.idle)

    def _gridded(self, layout: Layout) -> Layout | None:
        bounds = self.times.grid_bounds()
        count = len(layout.nodes) // len(bounds)
        return built([bounds] * count, layout.nodes, layout) if count else None

    def _holed(self, layout: Layout) -> Layout | None:
        """A grid of all nodes with a pipeline more than they fill, its holes at the first stages."""
        bounds = self.times.grid_bounds()
        count, rest = divmod(len(layout.nodes), len(bounds))
        if not (count and rest):
            return None
        absent = [f"absent {number}" for number in range(len(bounds) - rest)]
        last = built([bounds], (*absent, *layout.nodes[-rest:])).without(absent)
        grid = built([bounds] * count, layout.nodes[:-rest], layout.without(layout.nodes[-rest:]))
        return Layout((*grid.pipelines, *last.pipelines), grid.idle)

    def _repartitioned(self, layout: Layout) -> Layout | None:
        best = self.times.best(len(layout.nodes))
        return None if best is None else built(best.splits, layout.nodes, layout)

    def _sturdy(self, layout: Layout) -> Layout | None:
        """Of all pipelines that are nearly as fast as the fastest, those that would be fastest after one more loss."""
        key = ("sturdy", self.rules.reroute, len(layout.nodes))
        names = [str(number) for number in range(len(layout.nodes))]
        if key not in self._chosen_splits:
            found = [each.splits for each in self.times.nearly_best(len(names), NEARLY)]
            self._chosen_splits[key] = max(
                found, key=lambda splits: self.after_a_loss(built(splits, names)), default=None,
            )
        splits = self._chosen_splits[key]
        return None if splits is None else built(splits, layout.nodes, layout)

    def _templated(self, layout: Layout) -> Layout | None:
        """Oobleck: borrow and merge after losses, all templates anew when somebody joined."""
        if layout.idle:
            return self._repartitioned(layout)
        members = [[place.node for place in line if place.node is not None] for line in layout.pipelines]
        smallest = self.times.shortest
        found = oobleck.reconfigured(members, (), smallest)
        if found is None:
            return None
        splits, share = [], self.times.job.num_micro_batches / max(1, len(layout.busy))
        longest = min(self.times.job.longest, self.times.job.num_layers)
        left_over: list[str] = []
        pipelines = []
        for ranks in found:
            left_over += ranks[longest:]
            ranks = ranks[:longest]
            splits.append(self.times.split(len(ranks), max(1, round(share * len(ranks)))))
            pipelines.append(tuple(Place(rank, *ends) for rank, ends in zip(ranks, splits[-1], strict=True)))
        return Layout(tuple(pipelines), tuple(left_over))

    def _morphed(self, layout: Layout) -> Layout | None:
        """Varuna: the fastest grid of all depths into which the layers divide."""
        nodes, job = layout.nodes, self.times.job
        depths = [
            depth for depth in range(self.times.shortest, min(job.longest, len(nodes)) + 1) if job.num_layers % depth == 0
        ]
        if not depths:
            return None
        depth = min(depths, key=lambda length: self.times.whole_s([length] * (len(nodes) // length)))
        count = len(nodes) // depth
        split = self.times.split(depth, math.ceil(job.num_micro_batches / count))
        return built([split] * count, nodes, layout)


_MOVES: Mapping[str, Callable[[Policy, Layout], Layout | None]] = {
    "heal": Policy._healed, "normalize": Policy._normalized, "grow": Policy._grown, "grid": Policy._gridded,
    "holed": Policy._holed,
    "repartition": Policy._repartitioned, "sturdy": Policy._sturdy, "templates": Policy._templated, "morph": Policy._morphed,
}


def _as_measured(option: Option[Layout], situation: Situation[Layout]) -> Option[Layout]:
    """With its move taking as long as records say."""
    ratio = situation.move_ratio(option.moves) if option.moves else 1.0
    return replace(
        option, copy_s=option.copy_s * ratio, stall_s=option.stall_s * (ratio if option.way == "blocking" else 1.0),
    )


def _shape(pipeline: tuple[Place, ...]) -> tuple[tuple[int, int, bool], ...]:
    return tuple((place.first, place.end, place.node is None) for place in pipeline)


def _some_holes(layout: Layout) -> Iterator[tuple[int, int]]:
    """One hole of each kind: pipelines of one shape are alike."""
    seen = set()
    for index, pipeline in enumerate(layout.pipelines):
        for stage, place in enumerate(pipeline):
            kind = (_shape(pipeline), stage)
            if place.node is None and kind not in seen:
                seen.add(kind)
                yield index, stage


def _one_a_stage(layout: Layout, besides: int) -> Iterator[tuple[int, int]]:
    """Of a grid one living place of each stage but one, of the pipeline with the most holes, where it is missed least."""
    ranked = sorted(range(len(layout.pipelines)), key=lambda d: -sum(place.node is None for place in layout.pipelines[d]))
    for stage in range(len(layout.pipelines[0])):
        if stage != besides:
            yield from ((index, stage) for index in ranked[:1] if layout.pipelines[index][stage].node is not None)


def two_phase_value(now_step_s: float, copy_s: float, then_step_s: float, stall_s: float, gap_s: float) -> float:
    """Expected steps until the next change, at ``now_step_s`` for ``copy_s``, then a stall, then at ``then_step_s``.

    ``E[min(G, c)] / now + E[(G - c - stall)+] / then`` with exponential G of mean g:
    ``g·(1 - exp(-c/g)) / now + g·exp(-(c + stall)/g) / then``.
    """
    first = gap_s * -math.expm1(-copy_s / gap_s) / now_step_s
    return first + gap_s * math.exp(-(copy_s + stall_s) / gap_s) / then_step_s
