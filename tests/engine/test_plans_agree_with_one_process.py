"""Any plan trains as one process does: same losses, parameters and Adam moments to 1e-10 in float64.

The bound is of each tensor's largest magnitude. Replicas of a unit are equal to the bit, whatever the plan.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from everstep.engine.executor import Executor, JobSpec
from everstep.engine.model import facts_of
from everstep.engine.reduce import Reduction
from everstep.engine.samples import Samples
from everstep.errors import EngineError
from everstep.plan import Hop, Order, Plan
from everstep.planner.step.rounds import in_rounds
from everstep.protocol.commit import mean_loss
from everstep.quantities import NodeId
from tests.engine.cluster import Cluster, one_layer_at_a_time
from tests.engine.models import Tokens, adamw, layers, token_loss
from tests.engine.reference import Reference

TIES = (("embed.weight", "head.weight"),)
STEPS = 4


def hops(*parts: tuple[str, int, int]) -> tuple[Hop, ...]:
    return tuple(Hop(NodeId(node), first, end) for node, first, end in parts)


def plan_of(*routes: tuple[Hop, ...], spares: tuple[str, ...] = (), split: bool = False) -> Plan:
    placement: dict[NodeId, set[int]] = {NodeId(spare): set() for spare in spares}
    for route in routes:
        for hop in route:
            placement.setdefault(hop.node, set()).update(hop.layers)
    held = {node: tuple(sorted(found)) for node, found in placement.items()}
    return Plan(num_layers=6, placement=held, routes=routes, order=Order(split=split))


ONE = hops(("n0", 0, 6))
A = hops(("n0", 0, 3), ("n1", 3, 6))
B = hops(("n2", 0, 3), ("n3", 3, 6))
LONG = hops(("n0", 0, 1), ("n1", 1, 3), ("n2", 3, 5), ("n3", 5, 6))
SHORT = hops(("n4", 0, 4), ("n5", 4, 6))
REROUTED = hops(("n0", 0, 3), ("n3", 3, 6))
EVEN = hops(("n0", 0, 2), ("n1", 2, 4), ("n2", 4, 6))
ODD = hops(("n3", 0, 1), ("n4", 1, 3), ("n5", 3, 5), ("n6", 5, 6))
PIECES = hops(("n0", 0, 1), ("n4", 1, 4), ("n5", 4, 6))

PLANS = {
    "one node": plan_of(ONE, ONE, ONE, ONE),
    "one pipeline": plan_of(A, A, A, A),
    "two even pipelines": plan_of(A, B, A, B),
    "uneven shares": plan_of(A, A, A, B),
    "uneven pipelines and a spare": plan_of(LONG, SHORT, SHORT, LONG, spares=("n6",)),
    "cut in different places": plan_of(EVEN, ODD, ODD, EVEN),
    "rerouted to a peer": plan_of(A, REROUTED, B, A),
    "rerouted in pieces": plan_of(LONG, PIECES, SHORT, LONG),
    "a holder without micro-batches": Plan(
        num_layers=6, placement={**plan_of(A, B).placement}, routes=(A, A, A, A)
    ),
}
PLANS |= {f"{name}, split": replace(plan, order=Order(split=True)) for name, plan in PLANS.items()}


def spec_of(*, ties: Any = (), clip: float | None = None, samples: int = 64, dropout: float = 0.0) -> tuple[JobSpec, Any]:
    made = layers(dropout=dropout)
    facts = facts_of(made, 11, ties)
    data = Samples(dataset=Tokens(samples), batch=12, micro=3, seed=5)
    rate = lambda step: min(1.0, (step + 1) / 3)  # noqa: E731
    return JobSpec(facts=facts, loss=token_loss, samples=data, seed=11, clip_norm=clip, rate=rate), made


def compare(cluster: Cluster, reference: Reference, bound: float = 1e-10) -> None:
    found = cluster.tensors()
    wanted = reference.tensors()
    assert found.keys() == wanted.keys()
    for name, copies in found.items():
        first, *others = copies.values()
        assert all(torch.equal(first, other) for other in others), f"{name}: replicas differ"
        scale = max(float(wanted[name].abs().max()), 1e-30)
        assert float((first - wanted[name]).abs().max()) <= bound * scale, name


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_agrees_with_one_process(name: str) -> None:
    spec, made = spec_of(ties=TIES, clip=0.05)
    cluster = Cluster(PLANS[name], made, spec, adamw)
    reference = Reference(made, token_loss, adamw, spec.samples, 11, TIES, 0.05, spec.rate)
    for step in range(STEPS):
        losses = {mean_loss(union) for union in cluster.step(step).values()}
        assert len(losses) == 1
        assert abs(losses.pop() - reference.step(step)) < 1e-11
    compare(cluster, reference)


@pytest.mark.parametrize("name", ["one node", "uneven pipelines and a spare", "rerouted in pieces, split"])
def test_a_short_last_batch_agrees_with_one_process(name: str) -> None:
    spec, made = spec_of(samples=31)  # Three steps an epoch; the last has 7 samples: micro-batches of 3, 3 and 1.
    cluster = Cluster(PLANS[name], made, spec, adamw)
    reference = Reference(made, token_loss, adamw, spec.samples, 11, (), None, spec.rate)
    for step in range(5):
        cluster.step(step)
        reference.step(step)
    compare(cluster, reference)


@pytest.mark.parametrize("name", ["one pipeline", "rerouted in pieces", "uneven pipelines and a spare, split"])
def test_dropout_depends_on_step_and_micro_batch_not_on_the_plan(name: str) -> None:
    spec, made = spec_of(dropout=0.3)
    reference = Reference(made, token_loss, adamw, spec.samples, 11, (), None, spec.rate)
    with one_layer_at_a_time():
        cluster = Cluster(PLANS[name], made, spec, adamw)
        for step in range(STEPS):
            cluster.step(step)
            reference.step(step)
    compare(cluster, reference)


def test_a_micro_batch_counted_twice_is_found_before_it_is_applied() -> None:
    spec, made = spec_of()
    cluster = Cluster(PLANS["two even pipelines"], made, spec, adamw)
    plain = Executor._count

    def twice(self: Executor, plan: Plan, current: Any, index: int, micro_batch: int) -> None:
        plain(self, plan, current, index, micro_batch)
        if micro_batch == 1 and index == 0:
            plain(self, plan, current, index, micro_batch)

    for executor in cluster.executors.values():
        executor._count = twice.__get__(executor)  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="once each"):
        cluster.step(0)


def test_a_mean_loss_is_weighted_by_samples() -> None:
    spec, made = spec_of(samples=31)
    flat = replace(spec, loss=lambda output, item: token_loss(output, item)[0] / len(item))
    cluster = Cluster(PLANS["uneven shares"], made, flat, adamw)
    reference = Reference(
        made, lambda output, item: (token_loss(output, item)[0], float(len(item))), adamw, spec.samples, 11, (), None, spec.rate
    )
    for step in range(3):
        cluster.step(step)
        reference.step(step)
    compare(cluster, reference)


def test_with_sums_in_float64_every_plan_gives_the_same_bits_in_float32() -> None:
    """Not a guarantee (a rounding edge may be hit), but in practice certain: the exact sum needs fewer than 53 bits."""
    made = layers(dtype=torch.float32)
    spec = replace(spec_of()[0], facts=facts_of(made, 11))
    found = []
    for name in ("one pipeline", "uneven shares", "rerouted in pieces", "one node"):
        cluster = Cluster(PLANS[name], made, spec, adamw, sums_dtype=torch.float64)
        for step in range(STEPS):
            cluster.step(step)
        found.append({key: next(iter(copies.values())) for key, copies in cluster.tensors().items()})
    for other in found[1:]:
        assert all(torch.equal(tensor, other[key]) for key, tensor in found[0].items())


def test_all_nodes_reduce_their_groups_in_one_order_by_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, made = spec_of()
    plan = PLANS["cut in different places"]
    cluster = Cluster(plan, made, spec, adamw)
    finished: dict[NodeId, list[tuple[NodeId, ...]]] = {node: [] for node in plan.nodes}
    plain = Reduction.finish

    def noted(self: Reduction, target: Any) -> Any:
        finished[self._node].append(self._group)
        return plain(self, target)

    monkeypatch.setattr(Reduction, "finish", noted)
    cluster.step(0)
    groups = {
        tuple(node for node in plan.nodes if index in plan.placement[node]): spec.facts.units[unit].parameter_bytes
        for index, unit in enumerate(spec.facts.units)
    }
    order = in_rounds(groups)
    assert order != list(groups), "by layers they would wait for each other"
    for node, seen in finished.items():
        assert seen == [group for group in order if node in group]
