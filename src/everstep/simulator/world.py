"""A pretend world: nodes, an agent, a store and a network, hurt by faults drawn from one seed, then left to heal.

Hurt, heal, settle: until ``heal_s`` anything may fail; after it nothing does, and so everybody must come to the last step,
or the run must have ended for a reason that it states.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any

from everstep.protocol import leader, member
from everstep.protocol.resolution import Resolution
from everstep.quantities import NodeId, UnitName, node_number
from everstep.simulator import checkers, faults
from everstep.simulator.agent import TOKEN, Agent
from everstep.simulator.chooser import Chooser, RandomChooser
from everstep.simulator.kernel import Died, Kernel
from everstep.simulator.model import Model, reference
from everstep.simulator.network import LEADER, Network
from everstep.simulator.node import Fact, PretendNode, Rules
from everstep.simulator.store import Disk, Store
from everstep.view import Member

NO_NODE_LEFT = "no node is left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is played: how many nodes, what they train, what goes wrong."""

    seed: int
    num_nodes: int
    num_steps: int
    model: Model
    faults: tuple[faults.Fault, ...]
    checkpoint_every: int = 2
    heal_s: float = 0.6
    settle_s: float = 20.0
    rules: Rules = field(default_factory=Rules)


def random_model(chance: random.Random) -> Model:
    """A few layers of a unit each; often the first and the last share one."""
    num_layers = chance.randint(2, 6)
    units: dict[UnitName, tuple[int, ...]] = {UnitName(f"u{layer}"): (layer,) for layer in range(num_layers)}
    if chance.random() < 0.4:
        units[UnitName("tied")] = (0, num_layers - 1)
    return Model(
        num_layers=num_layers, units=units, chunks={unit: chance.randint(1, 3) for unit in units},
        micro_batches=chance.randint(2, 5), clip_norm=chance.choice((0.1, 100.0)),
    )


def random_scenario(seed: int, rules: Rules | None = None) -> Scenario:
    """The scenario of a seed."""
    chance = random.Random(seed)
    num_steps = chance.randint(4, 8)
    return Scenario(
        seed=seed, num_nodes=chance.randint(2, 8), num_steps=num_steps, model=random_model(chance),
        faults=faults.draw(chance, until_s=0.03 * num_steps), rules=rules or Rules(), checkpoint_every=chance.randint(1, 4),
    )


class World:
    """One play of one scenario."""

    def __init__(
        self, scenario: Scenario, *, choose: Callable[[Model, Disk, random.Random], Chooser] = RandomChooser,
        leads: type[leader.Leader] = leader.Leader,
    ) -> None:
        """``choose`` makes what answers the leader when it asks for a plan; ``leads`` is the leader's class."""
        self.scenario = scenario
        self.model, self.rules = scenario.model, scenario.rules
        self.num_steps, self.checkpoint_every = scenario.num_steps, scenario.checkpoint_every
        self.kernel = Kernel(scenario.seed)
        self.network = Network(self.kernel, self._deliver)
        self.store = Store(write_once=self.rules.write_once)
        self.disk = Disk(self.model)
        self.chooser = choose(self.model, self.disk, self.kernel.random)
        self.agent = Agent(leads(token=TOKEN, num_members=scenario.num_nodes, stuck_grace_s=0.05), self)
        self.nodes: dict[NodeId, PretendNode] = {}
        self.facts: list[Fact] = []
        self.halts: dict[NodeId, str] = {}
        self._hurting = True
        self._armed = [f for f in scenario.faults if isinstance(f, faults.AimedCrash | faults.MomentCrash)]
        self._passed: Counter[str] = Counter()
        self._lingers_s: dict[NodeId, float] = {}

    def play(self) -> list[str]:
        """Hurt, heal, settle. Returns everything that went wrong."""
        for _ in range(self.scenario.num_nodes):
            self._start_node()
        for fault in self.scenario.faults:
            if not isinstance(fault, faults.AimedCrash | faults.MomentCrash):
                self.kernel.after(fault.at_s, partial(self._hurt, fault))
        self.kernel.run(self.scenario.heal_s, self._settled)
        self._hurting = False
        self.network.slow.clear()
        self.kernel.run(self.scenario.settle_s, self._settled)
        line = reference(self.model, self.num_steps)
        found = checkers.problems(
            model=self.model, views=self.store.views, plans=self.store.plans, facts=self.facts, line=line,
        )
        return found + ([] if self._settled() else [self._stuck()])

    # What nodes and agent need of the world.

    def point(self, node: NodeId, name: str) -> None:
        """A node is where it may be ended."""
        if not self._hurting:
            return
        self._passed[name] += 1
        for fault in self._armed:
            if isinstance(fault, faults.AimedCrash) and fault.point == name and self._passed[name] == fault.skip + 1:
                self._armed.remove(fault)
                if fault.also:
                    self.kernel.after(self.kernel.between(0.0, 0.01), lambda: self._crash(1))
                self._kill(node, f"at {name!r}")
                raise Died

    def moment(self, name: str) -> None:
        """The agent is where somebody may be ended."""
        if not self._hurting:
            return
        self._passed[name] += 1
        for fault in self._armed:
            if isinstance(fault, faults.MomentCrash) and fault.moment == name and self._passed[name] == fault.skip + 1:
                self._armed.remove(fault)
                self.kernel.after(self.kernel.between(0.0, 0.002), lambda: self._crash(1))
                return

    def note(self, fact: Fact) -> None:
        self.facts.append(fact)

    def halted(self, node: NodeId, reason: str) -> None:
        self.halts[node] = reason
        self._kill(node, f"halts: {reason}")
        raise Died

    def fence(self, node: NodeId) -> None:
        delay_s = self._lingers_s.get(node, self.kernel.between(0.0, 0.01))
        self.kernel.after(delay_s, lambda: self._kill(node, "fenced"))

    # What goes wrong.

    def _start_node(self) -> None:
        node = NodeId(f"n{len(self.nodes)}")
        self.nodes[node] = PretendNode(node, 0, self)
        self.kernel.after(self.kernel.between(0.0, 0.005), lambda: self._say_hello(node))

    def _say_hello(self, node: NodeId) -> None:
        if self.nodes[node].alive:
            self.agent.handle(leader.NodeReady(Member(node)))

    def _hurt(self, fault: faults.Fault) -> None:
        if not self._hurting:
            return
        self.kernel.say(f"fault: {fault}")
        match fault:
            case faults.Crash(num_nodes=num_nodes):
                self._crash(num_nodes)
            case faults.DeclaredDead(lingers_s=lingers_s, hears_late=hears_late):
                for node in self._some(1):
                    self._lingers_s[node] = lingers_s
                    self.network.slow[node, node] = 20.0 if hears_late else 1.0
                    self.agent.handle(leader.NodeLost(node, "silent"))
            case faults.CutLink():
                self._cut(self._some(2))
            case faults.SlowLink(factor=factor, into_node=into_node):
                for source in self._some(1):
                    self.network.slow[source, source if into_node else self._some(1)[0]] = factor
            case faults.Join():
                self._start_node()
            case faults.WantFlag():
                self.agent.handle(leader.FlagWanted("checkpoint"))
            case faults.WantPlan():
                self.agent.handle(leader.PlanWanted("a better plan"))
            case faults.WouldWait(for_s=for_s):
                self.agent.would_wait_s = for_s
            case faults.SecondPlan():
                self._plan_again()
            case faults.AimedCrash() | faults.MomentCrash():
                raise AssertionError("armed, not scheduled")

    def _alive(self) -> list[NodeId]:
        return sorted((node for node, process in self.nodes.items() if process.alive), key=node_number)

    def _some(self, num_nodes: int) -> list[NodeId]:
        alive = self._alive()
        return self.kernel.random.sample(alive, min(num_nodes, len(alive)))

    def _crash(self, num_nodes: int) -> None:
        for node in self._some(num_nodes) if self._hurting else []:
            self._kill(node, "crashes")

    def _kill(self, node: NodeId, why: str) -> None:
        if not self.nodes[node].alive:
            return
        self.nodes[node].alive = False
        self.kernel.say(f"{node} {why}")
        self.network.died(node)
        self.kernel.after(self.kernel.between(0.001, 0.02), lambda: self.agent.handle(leader.NodeLost(node, why)))
        for peer in self._alive():
            if self.kernel.random.random() < 0.3:
                self._reset(peer, node)

    def _cut(self, ends: list[NodeId]) -> None:
        for a, b in combinations(ends, 2):
            self.network.cut(a, b)
            self._reset(a, b)
            self._reset(b, a)

    def _reset(self, node: NodeId, peer: NodeId) -> None:
        self.kernel.after(self.kernel.between(0.0002, 0.003), lambda: self.nodes[node].link_lost(peer))

    def _plan_again(self) -> None:
        """Somebody who does not know of the first plan writes another, and spreads it if the store takes it."""
        first = self.store.plans[-1] if self.store.plans else None
        if first is None or self.store.view is None or self.store.view.number != first.view:
            return
        holders = {node: frozenset(self.nodes[node].states) for node in first.plan.nodes}
        request = leader.ComputePlan(
            view=self.store.view, resolution=Resolution(first.step, first.attempt, first.union, holders), reports=(),
            lost=(), joined=(), cause="again", rollbacks=first.rollbacks,
        )
        second, _ = self.chooser(request, TOKEN)
        if second is not None and self.store.write_plan(second):
            for node in second.plan.nodes:
                self.network.send(LEADER, node, second)

    def _deliver(self, source: NodeId, target: NodeId, message: Any) -> None:
        if target == LEADER:
            self.agent.receive(message)
        elif self.nodes[target].alive:
            self.nodes[target].receive(source, message)

    # How it ends.

    def _settled(self) -> bool:
        if self.agent.end_reason is not None:
            return NO_NODE_LEFT in self.agent.end_reason
        view = self.store.view
        return view is not None and all(self._has_arrived(node) for node in view.nodes)

    def _has_arrived(self, node: NodeId) -> bool:
        process = self.nodes[node]
        return process.alive and process.applied == self.num_steps and process.member.phase in (
            member.Phase.TRAINING, member.Phase.AT_BOUNDARY,
        )

    def _stuck(self) -> str:
        if self.agent.end_reason is not None:
            return f"the run ended: {self.agent.end_reason}"
        states = ", ".join(f"{n} {self.nodes[n].member.phase.value} at {self.nodes[n].applied}" for n in self._alive())
        return f"not at step {self.num_steps}: leader {self.agent.leader.phase.value}; {states}"
