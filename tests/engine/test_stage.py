"""What one node does to its layers for one micro-batch, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everstep.engine.values import put_together, take_apart
from everstep.errors import UnsupportedError, UserCodeError
from tests.engine.stages import held, same, stage_of, trained_through, whole_hop

D = 4


class Counting(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, value: Tensor) -> Tensor:
        if self.how == "in place":
            self.seen.add_(1)
        elif self.how == "replaced":
            self.seen = self.seen + 1
        return value * 2


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_a_forward_with_side_effects_is_refused(how: str) -> None:
    with pytest.raises(UnsupportedError, match="layer layer0 changes a buffer in its forward"):
        trained_through(held(lambda: Counting(how)), [torch.ones(2, D)], split=False)


def test_a_buffer_that_is_only_read_is_no_side_effect() -> None:
    trained_through(held(lambda: Counting("never")), [torch.ones(2, D)], split=False)


class Raising(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        raise ValueError("no such thing")


@pytest.mark.parametrize("split", [False, True])
def test_what_the_users_code_raises_says_where(split: bool) -> None:
    state = held(lambda: nn.Linear(D, D), Raising)
    stage = stage_of(state, split=split, step=6)
    with pytest.raises(UserCodeError, match="ValueError in layer1, step 6, micro-batch 3: no such thing") as caught:
        stage.forward(3, 0, whole_hop(state), [torch.ones(2, D)], None, None)
    error = caught.value
    assert (error.layer, error.step, error.micro_batch, error.node) == ("layer1", 6, 3, "n0")
    assert isinstance(error.__cause__, ValueError)
    assert "forward" not in state.modules[0].__dict__


class Forbidden(nn.Module):
    """Changes what its own backward needs."""

    def forward(self, value: Tensor) -> Tensor:
        value = torch.exp(value)
        value.add_(1)
        return value


@pytest.mark.parametrize("split", [False, True])
def test_what_the_backward_of_the_users_code_raises_says_where(split: bool) -> None:
    state = held(lambda: nn.Linear(D, D), Forbidden)
    stage = stage_of(state, split=split, step=6)
    stage.forward(3, 0, whole_hop(state), [torch.ones(2, D)], None, None)
    with pytest.raises(UserCodeError, match=r"in the backward of layer0, layer1, step 6, micro-batch 3: .*inplace operation"):
        stage.backward(3, 0, [torch.ones(2, D)])


def loss_of(loss: Any, item: Any) -> tuple[float, float]:
    state = held(lambda: nn.Linear(D, D))
    stage = stage_of(state, split=False, loss=loss)
    sent, _, found = stage.forward(0, 0, whole_hop(state), [torch.ones(3, D)], None, item)
    assert sent == [] and found is not None
    return found


def test_a_loss_is_a_mean_or_a_sum_with_its_count() -> None:
    assert loss_of(lambda output, item: output.sum() * 0 + 2, torch.ones(3, D)) == (6.0, 3.0)
    assert loss_of(lambda output, item: (output.sum() * 0 + 2, 5), torch.ones(3, D)) == (2.0, 5.0)
    assert loss_of(lambda output, item: (output.sum() * 0 + 2, torch.tensor(5)), torch.ones(3, D)) == (2.0, 5.0)
    assert loss_of(lambda output, item: output.sum() * 0 + 2, {"text": "a", "ids": torch.ones(7)}) == (14.0, 7.0)


@pytest.mark.parametrize("loss", [
    lambda output, item: output, lambda output, item: 3.0, lambda output, item: (output, 3), lambda output, item: None,
    lambda output, item: (3.0, output),
], ids=["a tensor of many", "a number", "many and a count", "nothing", "turned round"])
def test_a_loss_of_another_kind_is_refused(loss: Any) -> None:
    with pytest.raises(UnsupportedError, match="loss must return one number as a tensor"):
        loss_of(loss, torch.ones(3, D))


def test_a_mean_needs_something_to_count() -> None:
    with pytest.raises(UnsupportedError, match=r"must return \(sum, count\)"):
        loss_of(lambda output, item: output.sum(), {"text": ["a", "b"]})


def test_a_loss_that_raises_is_the_users_code() -> None:
    with pytest.raises(UserCodeError, match="KeyError in loss"):
        loss_of(lambda output, item: item["nothing"], {"ids": torch.ones(3)})


@pytest.mark.parametrize("value", [
    torch.ones(2), (torch.ones(1), torch.zeros(2)), [torch.ones(1)],
    {"a": torch.ones(1), "b": (torch.ones(2), [torch.ones(3)])}, (), {}, ((), {"x": torch.ones(0)}, []),
], ids=["tensor", "tuple", "list", "nested", "empty tuple", "empty dict", "empties"])
def test_a_value_is_put_together_as_it_was_taken_apart(value: Any) -> None:
    tensors, form = take_apart(value, "here")
    again = put_together(tensors, form)
    assert repr(again) == repr(value)
    assert type(again) is type(value)


@pytest.mark.parametrize("value", [3, "text", None, {1: torch.ones(1)}, (torch.ones(1), None)], ids=repr)
def test_what_cannot_be_sent_is_refused_with_the_layers_name(value: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"layer x gives a .*only a tensor"):
        take_apart(value, "layer x")


class Passing(nn.Module):
    """A dict in, a dict out: one tensor changed, one passed on as it is, one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        return {"hidden": self.linear(value["hidden"]), "same": value["same"], "rest": (value["rest"][0], value["rest"][1] * 2)}


@pytest.mark.parametrize("split", [False, True])
def test_gradients_come_back_for_what_can_have_one(split: bool) -> None:
    value = {"hidden": torch.ones(2, D), "same": torch.full((2,), 3.0), "rest": (torch.arange(3), torch.ones(2))}
    _, (found,), _ = trained_through(held(Passing), [value], split=split)
    assert [gradient is not None for gradient in found] == [True, True, False, True]
    generator = torch.Generator().manual_seed(0)
    torch.randn((2, D), generator=generator, dtype=torch.float64)
    assert same(found[1], torch.randn((2,), generator=generator, dtype=torch.float64).float())


@pytest.mark.parametrize("split", [False, True])
def test_an_output_that_nobody_used_brings_no_gradient(split: bool) -> None:
    state = held(lambda: nn.Linear(D, D))
    stage, hop = stage_of(state, split=split), whole_hop(state)
    stage.forward(0, 1, hop, [torch.ones(2, D)], None, None)
    assert stage.backward(0, 1, [None]) == [None]
    if split:
        stage.weight(0, 1)
    assert not any(bool(unit.flat.any()) for unit in state.units.values())


def test_what_a_layer_draws_depends_on_step_micro_batch_and_layer() -> None:
    state = held(lambda: nn.Dropout(0.5), lambda: nn.Dropout(0.5))
    value = torch.ones(64)

    def drawn(step: int, micro_batch: int) -> Tensor:
        stage = stage_of(state, split=False, step=step)
        return stage.forward(micro_batch, 0, whole_hop(state), [value], None, None)[0][0]

    assert torch.equal(drawn(3, 1), drawn(3, 1))
    assert len({tuple(drawn(step, m).tolist()) for step in (3, 4) for m in (0, 1)}) == 4
    assert set(drawn(3, 1).tolist()) == {0.0, 2.0, 4.0} - {2.0}  # dropped by one of the two, or kept by both
