"""A step that is given up and tried again, and layers that do not train, end where the undisturbed run ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everstep.engine.executor import JobSpec
from everstep.engine.links import InterruptedByView
from everstep.engine.model import facts_of
from everstep.engine.samples import Samples
from everstep.errors import EngineError
from tests.engine.cluster import Cluster, one_layer_at_a_time
from tests.engine.models import D, Embed, Head, Tokens, adamw, token_loss
from tests.engine.reference import Reference
from tests.engine.test_plans_agree_with_one_process import PLANS, TIES, compare, hops, plan_of, spec_of

TORN = 1_000_000
"""The view that the harness adopts everywhere when a node's step ends in an error."""


def interrupt(cluster: Cluster, node: Any, phase: str) -> None:
    """When ``node`` passes ``phase``, everybody learns of a newer view."""

    def reached(passed: str, step: int) -> None:
        if passed == phase:
            for mailbox in cluster.mailboxes.values():
                mailbox.adopt(TORN)

    cluster.ledgers[node].reached = reached  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["two even pipelines", "rerouted in pieces, split", "uneven pipelines and a spare"])
@pytest.mark.parametrize("phase", ["forward", "backward", "reduce"])
def test_a_step_that_is_interrupted_anywhere_and_redone_has_the_bits_of_one_that_was_not(name: str, phase: str) -> None:
    spec, made = spec_of(ties=TIES, clip=0.05, dropout=0.2)
    plan = PLANS[name]
    with one_layer_at_a_time():
        calm, disturbed = Cluster(plan, made, spec, adamw), Cluster(plan, made, spec, adamw)
        for cluster in (calm, disturbed):
            cluster.step(0)
        interrupt(disturbed, next(node for node in plan.nodes if plan.placement[node]), phase)
        with pytest.raises(InterruptedByView):
            disturbed.step(1)
        for ledger in disturbed.ledgers.values():
            vars(ledger).pop("reached", None)
        disturbed.follow(plan, TORN + 1)
        for cluster, attempt in ((calm, 0), (disturbed, 1)):
            cluster.step(1, attempt)
            cluster.step(2)
    found, wanted = disturbed.tensors(), calm.tensors()
    assert all(torch.equal(tensor, wanted[key][node]) for key, copies in found.items() for node, tensor in copies.items())


def test_sums_are_applied_once_and_only_those_of_the_union() -> None:
    spec, made = spec_of()
    cluster = Cluster(PLANS["one node"], made, spec, adamw)
    (union,) = cluster.step(0).values()
    (executor,) = cluster.executors.values()
    with pytest.raises(EngineError, match="asked to apply step 0, attempt 0, without its sums"):
        executor.apply(union)


class Shift(nn.Module):
    """No state at all."""

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return torch.tanh(hidden_BTD) + 0.1


def partly_frozen() -> Iterator[tuple[str, nn.Module]]:
    yield "embed", Embed(torch.float64).requires_grad_(False)
    yield "shift", Shift()
    yield "first", nn.Linear(D, D, dtype=torch.float64)
    yield "frozen", nn.Linear(D, D, dtype=torch.float64).requires_grad_(False)
    half = nn.Sequential(nn.Linear(D, D, dtype=torch.float64), nn.Tanh(), nn.Linear(D, D, dtype=torch.float64))
    half[0].requires_grad_(False)
    yield "mixed", half
    yield "head", Head(torch.float64)


@pytest.mark.parametrize("split", [False, True], ids=["plain", "split"])
@pytest.mark.parametrize("cuts", [(0, 6), (0, 1, 6), (0, 2, 4, 6), (0, 1, 2, 3, 4, 5, 6)], ids=str)
def test_frozen_layers_and_layers_without_state_train_as_in_one_process(cuts: tuple[int, ...], split: bool) -> None:
    route = hops(*((f"n{i}", first, end) for i, (first, end) in enumerate(itertools.pairwise(cuts))))
    data = Samples(dataset=Tokens(64), batch=12, micro=3, seed=5)
    spec = JobSpec(facts=facts_of(partly_frozen, 11), loss=token_loss, samples=data, seed=11, clip_norm=0.1)
    cluster = Cluster(plan_of(*[route] * 4, split=split), partly_frozen, spec, adamw)
    reference = Reference(partly_frozen, token_loss, adamw, data, 11, (), 0.1)
    for step in range(3):
        cluster.step(step)
        reference.step(step)
    compare(cluster, reference)
