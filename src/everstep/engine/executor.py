"""One attempt of one step on one node: run the order, reduce, exchange, apply. Decides nothing.

Order of events, each visible to the next: actions → reductions → ``Counted`` is written → prepared record is sent →
union is held → ``Committed`` is written → apply. A newer view interrupts any wait before the union; what had been summed is
kept until a plan says whether the union is handed on or the step is redone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from everstep.config import EngineConfig
from everstep.engine.links import Key, Mailbox, Parcel, Post
from everstep.engine.model import ModelFacts, UnitFacts
from everstep.engine.reduce import Pairs, Reduction, Where
from everstep.engine.samples import Samples, inputs_of
from everstep.engine.stage import Loss, Stage
from everstep.engine.state import HeldState
from everstep.engine.values import take_apart
from everstep.errors import EngineError, UserCodeError
from everstep.plan import Plan
from everstep.planner.step.rounds import in_rounds
from everstep.protocol.commit import Committed as ExchangeDone
from everstep.protocol.commit import Exchange, Send, clip_factor, count, mean_loss
from everstep.protocol.messages import Prepared, Union, UnitSums
from everstep.quantities import NodeId, UnitName
from everstep.records import Committed, Counted
from everstep.schedule import Kind, Order, for_micro_batches
from everstep.view import View

PHASES = ("forward", "backward", "reduce", "vote", "apply")


def _holders(facts: UnitFacts, plan: Plan) -> tuple[NodeId, ...]:
    return tuple(node for node in plan.nodes if set(facts.layers).intersection(plan.placement[node]))


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What the user declared, as the engine needs it."""

    facts: ModelFacts
    loss: Loss
    samples: Samples
    seed: int
    clip_norm: float | None = None
    rate: Callable[[int], float] = lambda step: 1.0
    engine: EngineConfig = field(default_factory=EngineConfig)


class Ledger(Protocol):
    """Where a node's account goes before it is announced."""

    def write(self, record: Counted | Committed) -> None: ...


class Instants(Protocol):
    """Told when a step passes a phase; a drill may end the process there."""

    def reached(self, phase: str, step: int) -> None: ...


@dataclass
class Attempt:
    """What a node keeps of the step that it is in, until the next one begins."""

    view: int
    step: int
    attempt: int
    stage: Stage
    pairs: Pairs = field(default_factory=dict)
    samples: dict[int, tuple[int, ...]] = field(default_factory=dict)
    losses: dict[int, tuple[float, float]] = field(default_factory=dict)
    unit_sums: dict[UnitName, UnitSums] = field(default_factory=dict)
    prepared: bool = False
    began_s: float = field(default_factory=time.monotonic)


class Executor:
    """Carries out steps under one plan after another."""

    def __init__(
        self, *, node: NodeId, spec: JobSpec, held: HeldState, mailbox: Mailbox, post: Post, ledger: Ledger,
        instants: Instants,
    ) -> None:
        self._node, self._spec, self.held = node, spec, held
        self._mailbox, self._post, self._ledger, self._instants = mailbox, post, ledger, instants
        self._plan: Plan | None = None
        self._order: Order = ()
        self._turns: dict[tuple[NodeId, ...], int] = {}
        self.view = View(0, ())
        self.current: Attempt | None = None
        self._flags: frozenset[str] = frozenset()
        self._flags_lock = threading.Lock()  # raised by the control thread, taken back by the main thread
        self._update_times: dict[str, float] = {}
        self._worked_until_s = time.process_time()

    def follow(self, plan: Plan, order: Order, view: View) -> None:
        """Work under ``plan`` from the next attempt on."""
        self._plan, self._order, self.view = plan, order, view
        self._turns = self._turns_of(plan)

    def raise_flag(self, flag: str) -> None:
        """Put ``flag`` into the prepared records from now on, until a union has it. May be called from another thread."""
        with self._flags_lock:
            self._flags = self._flags | {flag}

    def lower_flag(self, flag: str) -> None:
        """Take back a flag that no union has had yet."""
        with self._flags_lock:
            self._flags = self._flags - {flag}

    def run(self, step: int, attempt: int) -> Union:
        """One attempt of ``step``, up to and with its application.

        Raises:
            InterruptedByView: a newer view was adopted before the union was held.
            UserCodeError, UnsupportedError: the user's code; EngineError: ours.
        """
        plan = self._plan
        assert plan is not None, "a plan comes before the first step"
        self.give_up()
        spec = self._spec
        batches = spec.samples.micro_batches(step)
        stage = Stage(self.held, spec.loss, spec.seed, step, plan.order.split, self._node)
        self.current = current = Attempt(self.view.number, step, attempt, stage)
        self._mailbox.check(current.view)
        order = for_micro_batches(self._order, len(batches))
        first_of = {kind: next((a for a in order if a.kind is kind), None) for kind in (Kind.FORWARD, Kind.BACKWARD)}
        for action in order:
            self._mailbox.check(current.view)
            if action.kind is Kind.FORWARD:
                self._forward(plan, current, action.hop, action.micro_batch, batches[action.micro_batch])
            elif action.kind is Kind.BACKWARD:
                self._backward(plan, current, action.hop, action.micro_batch)
            elif action.kind is Kind.WEIGHT:
                current.stage.weight(action.micro_batch, action.hop)
                self._count(plan, current, action.hop, action.micro_batch)
            if action is first_of.get(action.kind):
                self._instants.reached("forward" if action.kind is Kind.FORWARD else "backward", step)
        self._reduce(plan, current, len(batches))
        return self._commit(plan, current, len(batches))

    # Actions

    def _key(self, current: Attempt, kind: str, micro_batch: int, hop: int, source: NodeId) -> Key:
        return Key(current.view, current.step, current.attempt, kind, micro_batch, hop, source)

    def _forward(self, plan: Plan, current: Attempt, index: int, micro_batch: int, ids: list[int]) -> None:
        route = plan.routes[micro_batch]
        hop, is_first, is_last = route[index], index == 0, index == len(route) - 1
        item: Any = None
        if is_first or is_last:
            item = self._spec.samples.read(current.step, ids)
            current.samples[micro_batch] = tuple(ids)
        if is_first:
            inputs, form = take_apart(inputs_of(item), "the dataset")
        else:
            parcel = self._mailbox.receive(
                self._key(current, "activation", micro_batch, index, route[index - 1].node), "activation"
            )
            inputs, form = parcel.tensors, parcel.note
        outputs, out_form, loss = current.stage.forward(
            micro_batch, index, hop, inputs, form, item if is_last else None
        )
        if loss is not None:
            current.losses[micro_batch] = loss
        else:
            key = self._key(current, "activation", micro_batch, index + 1, self._node)
            self._post.send(route[index + 1].node, Parcel(key, outputs, out_form))

    def _backward(self, plan: Plan, current: Attempt, index: int, micro_batch: int) -> None:
        route = plan.routes[micro_batch]
        gradients: list[Tensor | None] = []
        if index < len(route) - 1:
            parcel = self._mailbox.receive(
                self._key(current, "gradient", micro_batch, index, route[index + 1].node), "gradient"
            )
            present = iter(parcel.tensors)
            gradients = [next(present) if there else None for there in parcel.note]
        found = current.stage.backward(micro_batch, index, gradients)
        if index > 0:
            key = self._key(current, "gradient", micro_batch, index - 1, self._node)
            parcel = Parcel(key, [g for g in found if g is not None], [g is not None for g in found])
            self._post.send(route[index - 1].node, parcel)
        if not plan.order.split:
            self._count(plan, current, index, micro_batch)

    def _count(self, plan: Plan, current: Attempt, index: int, micro_batch: int) -> None:
        """The pair's gradients are whole in the sums: enter it in the books."""
        layers = set(plan.routes[micro_batch][index].layers)
        for unit in self.held.units.values():
            if unit.trained:
                for layer in layers.intersection(unit.facts.layers):
                    use = f"{unit.facts.name}/{self._spec.facts.layers[layer]}"
                    current.pairs.setdefault(use, []).append(micro_batch)

    # Reduction

    def _turns_of(self, plan: Plan) -> dict[tuple[NodeId, ...], int]:
        """When each group reduces: one order for all nodes, in which groups that share no node need not wait."""
        sizes: dict[tuple[NodeId, ...], int] = {}
        for facts in self._spec.facts.units.values():
            holders = _holders(facts, plan)
            if len(holders) > 1:
                sizes[holders] = sizes.get(holders, 0) + facts.parameter_bytes
        return {group: turn for turn, group in enumerate(in_rounds(sizes))}

    def _groups(self, plan: Plan) -> dict[tuple[tuple[NodeId, ...], str], list[UnitName]]:
        """Buckets: units that train, by their holders and the dtype of their sums, in the order in which they reduce."""
        buckets: dict[tuple[tuple[NodeId, ...], str], list[UnitName]] = {}
        for name, facts in self._spec.facts.units.items():
            unit = self.held.units.get(name)
            if unit is None or not unit.trained:
                continue
            buckets.setdefault((_holders(facts, plan), str(unit.flat.dtype)), []).append(name)
        return dict(sorted(buckets.items(), key=lambda bucket: self._turns.get(bucket[0][0], -1)))

    def _reduce(self, plan: Plan, current: Attempt, num_micro_batches: int) -> None:
        where = Where(current.view, current.step, current.attempt)
        # The account of what is in the local sums comes before they leave this node.
        self._ledger.write(Counted(
            node=self._node, view=current.view, step=current.step, attempt=current.attempt,
            pairs={use: tuple(pairs) for use, pairs in current.pairs.items()}, samples=current.samples,
        ))
        open_: list[tuple[list[UnitName], list[Tensor], Reduction]] = []
        for (holders, dtype), names in self._groups(plan).items():
            sums = [self.held.units[name].flat for name in names]
            facts = self._spec.facts
            uses = [f"{name}/{facts.layers[layer]}" for name in names for layer in facts.units[name].layers]
            reduction = Reduction(
                node=self._node, group=holders, name=f"{names[0]}+{len(names) - 1}:{dtype}", where=where, source=sums,
                pairs={use: current.pairs.get(use, []) for use in uses}, expected=dict.fromkeys(uses, num_micro_batches),
                mailbox=self._mailbox, post=self._post,
            )
            reduction.post_parts()
            open_.append((names, sums, reduction))
        self._instants.reached("reduce", current.step)
        for names, sums, reduction in open_:
            pairs = reduction.finish(sums)
            for name in names:
                unit = self.held.units[name]
                own = {use: tuple(found) for use, found in pairs.items() if use.startswith(f"{name}/")}
                norms = unit.square_norms() if self._spec.clip_norm is not None else {}
                current.unit_sums[name] = UnitSums({use.removeprefix(f"{name}/"): found for use, found in own.items()}, norms)
        current.prepared = True

    # Commit

    def _commit(self, plan: Plan, current: Attempt, num_micro_batches: int) -> Union:
        flags = tuple(sorted(self._flags))
        now_s = time.process_time()
        times = {**current.stage.times.means(), **self._update_times, "step": now_s - self._worked_until_s}
        self._worked_until_s = now_s
        record = Prepared(
            current.view, current.step, current.attempt, (self._node,), current.unit_sums, current.losses, flags,
            {self._node: times},
        )
        exchange = Exchange(
            node=self._node, view=self.view, step=current.step, attempt=current.attempt,
            pairs={UnitName(unit): uses for unit, uses in self._spec.facts.uses().items()},
            micro_batches=num_micro_batches,
        )
        union = self._sent(exchange.prepared(record), current)
        self._instants.reached("vote", current.step)
        awaited = {self._exchange_key(current, "up", child) for child in exchange.children}
        if exchange.parent is not None:
            awaited.add(self._exchange_key(current, "down", exchange.parent))
        while union is None:
            parcel = self._mailbox.receive_any(frozenset(awaited), "record of the commit")
            awaited.discard(parcel.key)
            union = self._sent(exchange.received(parcel.note), current)
        self._instants.reached("apply", current.step)
        self.apply(union)
        return union

    def _sent(self, effects: list[Send | ExchangeDone], current: Attempt) -> Union | None:
        union: Union | None = None
        for effect in effects:
            if isinstance(effect, Send):
                name = "up" if isinstance(effect.message, Prepared) else "down"
                self._post.send(effect.target, Parcel(self._exchange_key(current, name, self._node), [], effect.message))
            else:
                union = effect.union
        return union

    def _exchange_key(self, current: Attempt, name: str, source: NodeId) -> Key:
        return self._key(current, "exchange", 0, 0, source)._replace(name=name)

    def apply(self, union: Union) -> None:
        """Update every unit from this node's own sums, with the scalars of the union.

        Raises:
            EngineError: the sums of that step are not here.
            UserCodeError: the losses of the step count nothing to divide by.
        """
        current = self.current
        if current is None or not current.prepared or (current.step, current.attempt) != (union.step, union.attempt):
            raise EngineError(f"asked to apply step {union.step}, attempt {union.attempt}, without its sums")
        total = count(union)
        if not total > 0:
            raise UserCodeError(
                f"the losses of step {union.step} count {total:g} in all: loss must return (sum, count) with a count "
                "above 0 in some micro-batch of every step", step=union.step,
            )
        self._ledger.write(Committed(
            node=self._node, view=union.view, step=union.step, attempt=union.attempt, loss=mean_loss(union),
        ))
        scale = clip_factor(union, self._spec.clip_norm, total) / total
        factor = self._spec.rate(union.step)
        with self._flags_lock:
            self._flags = self._flags - set(union.flags)
        self._update_times = {}
        for name, unit in self.held.units.items():
            began_s = time.thread_time()
            unit.apply(scale, factor)
            self._update_times[f"U:{name}"] = time.thread_time() - began_s
        self.current = None

    def give_up(self) -> None:
        """Throw away what was begun: sums, graphs and books."""
        if self.current is None:
            return
        self.current.stage.drop()
        self.current = None
        for unit in self.held.units.values():
            unit.flat.zero_()
            for leaves in unit.uses.values():
                for _, leaf in leaves:
                    leaf.grad = None
