"""One node, one hop: what ``Stage`` does to a few layers, without plans or peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from everstep.engine.model import facts_of
from everstep.engine.stage import Stage
from everstep.engine.state import HeldState
from everstep.engine.values import take_apart
from everstep.plan import Hop
from everstep.quantities import NodeId

Make = Callable[[], nn.Module]


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


def held(*makes: Make, ties: Any = (), factory: Any = sgd, sums_dtype: torch.dtype | None = None) -> HeldState:
    """Layers ``layer0``, ``layer1``, ... all held by one node."""

    def layers() -> Any:
        for index, make in enumerate(makes):
            yield f"layer{index}", make()

    state = HeldState(facts_of(layers, 7, ties), layers, 7, factory, sums_dtype)
    state.hold(range(len(makes)))
    return state


def stage_of(state: HeldState, *, split: bool, loss: Any = None, step: int = 0) -> Stage:
    return Stage(state, loss, 7, step, split, "n0")


def whole_hop(state: HeldState) -> Hop:
    return Hop(NodeId("n0"), 0, len(state.modules))


def sums_of(state: HeldState) -> dict[str, Tensor]:
    return {name: sums.clone() for unit in state.units.values() for name, sums in unit.sums.items()}


def trained_through(
    state: HeldState, values: list[Any], *, split: bool, index: int = 1
) -> tuple[dict[str, Tensor], list[list[Tensor | None]], Stage]:
    """Forward and backward of each value as a micro-batch with a fixed random output gradient, weights last.

    ``index`` 0: the first hop of a route, whose inputs need no gradient. Returns sums and input gradients.
    """
    stage, hop = stage_of(state, split=split), whole_hop(state)
    found = []
    for micro_batch, value in enumerate(values):
        tensors, form = take_apart(value, "the test")
        outputs, _, loss = stage.forward(micro_batch, index, hop, [t.clone() for t in tensors], form, None)
        assert loss is None
        generator = torch.Generator().manual_seed(micro_batch)
        gradients = [
            torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) if t.requires_grad else None
            for t in outputs
        ]
        found.append(stage.backward(micro_batch, index, gradients))
    if split:
        for micro_batch in range(len(values)):
            stage.weight(micro_batch, index)
    return sums_of(state), found, stage


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """To the bit, and both there or both not."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)


