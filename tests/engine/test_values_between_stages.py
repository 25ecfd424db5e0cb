"""Layers that give tuples and dicts, with integers among them, train on several stages as they do in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everstep.engine.executor import JobSpec
from everstep.engine.model import facts_of
from everstep.engine.samples import Samples
from everstep.plan import Order
from everstep.protocol.commit import mean_loss
from tests.engine.cluster import Cluster
from tests.engine.models import VOCABULARY, D, Tokens, adamw
from tests.engine.reference import Reference
from tests.engine.test_plans_agree_with_one_process import compare, hops, plan_of


class Start(nn.Module):
    """Tokens → hidden, and with it the targets, a mask and a skip connection that goes round the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, D, dtype=torch.float64)
        self.skip = nn.Linear(D, D, dtype=torch.float64)

    def forward(self, tokens_BT: Tensor) -> dict[str, Any]:
        hidden_BTD = self.table(tokens_BT[:, :-1])
        around = (tokens_BT[:, 1:], [self.skip(hidden_BTD * 0.5)])
        return {"hidden": hidden_BTD, "around": around, "mask": tokens_BT[:, :-1] != 0}


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu, self.linear = nn.ReLU(inplace=True), nn.Linear(D, D, dtype=torch.float64)

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        hidden_BTD = torch.tanh(self.linear(self.relu(value["hidden"]))) * value["mask"].unsqueeze(-1)
        return {**value, "hidden": hidden_BTD}


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(D, VOCABULARY, dtype=torch.float64)

    def forward(self, value: dict[str, Any]) -> tuple[Tensor, Tensor]:
        targets_BT, (skip_BTD,) = value["around"]
        return self.head(value["hidden"] + skip_BTD), targets_BT


def layers() -> Iterator[tuple[str, nn.Module]]:
    yield "start", Start()
    for index in range(4):
        yield f"middle.{index}", Middle()
    yield "end", End()


def loss(output: tuple[Tensor, Tensor], tokens_BT: Tensor) -> tuple[Tensor, float]:
    logits_BTV, targets_BT = output
    total = nn.functional.cross_entropy(logits_BTV.reshape(-1, VOCABULARY), targets_BT.reshape(-1), reduction="sum")
    return total, float(targets_BT.numel())


PLANS = {
    "two stages": plan_of(*[hops(("n0", 0, 3), ("n1", 3, 6))] * 4),
    "cut before and after the skip": plan_of(
        hops(("n0", 0, 1), ("n1", 1, 5), ("n2", 5, 6)), *[hops(("n3", 0, 2), ("n4", 2, 6))] * 3
    ),
}


@pytest.mark.parametrize("split", [False, True], ids=["plain", "split"])
@pytest.mark.parametrize("name", PLANS)
def test_nested_values_with_integers_train_as_in_one_process(name: str, split: bool) -> None:
    data = Samples(dataset=Tokens(64), batch=12, micro=3, seed=5)
    spec = JobSpec(facts=facts_of(layers, 11), loss=loss, samples=data, seed=11)
    cluster = Cluster(replace(PLANS[name], order=Order(split=split)), layers, spec, adamw)
    reference = Reference(layers, loss, adamw, data, 11)
    for step in range(3):
        (found,) = {mean_loss(union) for union in cluster.step(step).values()}
        assert abs(found - reference.step(step)) < 1e-11
    compare(cluster, reference)
