"""Split backward has the same bits as the plain one, for each kind of layer, and keeps nothing afterwards."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from everstep.engine.split import can_stash, linear_layers
from tests.engine.stages import Make, held, same, stage_of, sums_of, trained_through, whole_hop

D = 16


def hidden(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return hidden_BTD + self.down(functional.gelu(self.up(self.norm(hidden_BTD))))


class Attention(nn.Module):
    """A transformer block with scaled dot-product attention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv, self.out, self.mlp = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D, bias=False), Mlp()
        self.dropout = dropout

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        batch, length, _ = hidden_BTD.shape
        q, k, v = (
            part.view(batch, length, 4, D // 4).transpose(1, 2) for part in self.qkv(self.norm(hidden_BTD)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return self.mlp(hidden_BTD + self.out(mixed.transpose(1, 2).reshape(batch, length, D)))


class UsedTwice(nn.Module):
    def __init__(self, times: int = 2) -> None:
        super().__init__()
        self.linear, self.times = nn.Linear(D, D), times

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        for _ in range(self.times):
            hidden_BTD = torch.tanh(self.linear(hidden_BTD))
        return hidden_BTD


class WeightBorrowed(nn.Module):
    """One weight through a stashing layer and, once more, past it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return functional.linear(torch.tanh(self.linear(hidden_BTD)), self.linear.weight.t())


class Shared(nn.Module):
    """Two linear layers on one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.second.weight = self.first.weight

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(hidden_BTD)))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.head = nn.Conv1d(D, D, 3, padding=1), nn.GroupNorm(4, D), nn.Linear(D, D)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return self.head(self.norm(self.convolution(hidden_BTD.transpose(1, 2))).transpose(1, 2))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(D, D, batch_first=True), nn.Linear(D, D)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return self.head(self.cell(hidden_BTD)[0])


class MultiHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 4, batch_first=True)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return self.attention(hidden_BTD, hidden_BTD, hidden_BTD, need_weights=False)[0]


class Autocast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(hidden_BTD)


class Checkpointed(nn.Module):
    """Activation checkpointing: B calls the forward again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention(dropout=0.2)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return checkpoint(self.inner, hidden_BTD, use_reentrant=False)  # type: ignore[no-any-return]


class CheckpointedAsBefore(Checkpointed):
    """The older way, which runs a backward of its own within B."""

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return checkpoint(self.inner, hidden_BTD, use_reentrant=True)  # type: ignore[no-any-return]


class Mapped(nn.Module):
    """A linear layer within a transform of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.after = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return self.after(torch.func.vmap(self.linear)(hidden_BTD))


class Embedding(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(11, D, **options), nn.Linear(D, D)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.up(self.table(tokens_BT))


def frozen_weight() -> nn.Module:
    linear = nn.Linear(D, D)
    linear.weight.requires_grad_(False)
    return linear


def frozen() -> nn.Module:
    return Mlp().requires_grad_(False)


def half_frozen() -> nn.Module:
    mlp = Mlp()
    mlp.up.requires_grad_(False)
    return mlp


def hooked() -> nn.Module:
    linear = nn.Linear(D, D)
    linear.register_forward_hook(lambda module, inputs, output: output * 2)
    return linear


def hooked_weight() -> nn.Module:
    linear = nn.Linear(D, D)
    linear.weight.register_hook(lambda gradient: gradient * 3)
    return linear


def normed() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(D, D))


LAYERS: dict[str, Make] = {
    "linear": lambda: nn.Linear(D, D + 3),
    "linear without bias": lambda: nn.Linear(D, 2 * D, bias=False),
    "mlp": Mlp,
    "layer norm": lambda: nn.LayerNorm(D),
    "transformer block": Attention,
    "transformer block with dropout": lambda: Attention(dropout=0.3),
    "torch's encoder layer": lambda: nn.TransformerEncoderLayer(D, 4, 2 * D, batch_first=True),
    "weight used twice": UsedTwice,
    "weight used three times": lambda: UsedTwice(3),
    "weight borrowed": WeightBorrowed,
    "weight shared by two": Shared,
    "convolution": Convolution,
    "lstm": Recurrent,
    "multi-head attention": MultiHead,
    "frozen": frozen,
    "half frozen": half_frozen,
    "frozen weight, trained bias": frozen_weight,
    "forward hook": hooked,
    "hook on the weight": hooked_weight,
    "weight norm": normed,
    "checkpointed": Checkpointed,
    "mapped": Mapped,
    "autocast linear": lambda: Autocast(nn.Linear(D, D)),
    "autocast mlp": lambda: Autocast(Mlp()),
    "autocast transformer block": lambda: Autocast(Attention()),
    "autocast weight used twice": lambda: Autocast(UsedTwice()),
    "autocast of float64": lambda: Autocast(nn.Linear(D, D, dtype=torch.float64)),
    "bfloat16": lambda: nn.Linear(D, D, dtype=torch.bfloat16),
    "changes its input in place": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(D, D), nn.ReLU(inplace=True)),
}


def values_for(name: str) -> list[Any]:
    dtype = {"autocast of float64": torch.float64, "bfloat16": torch.bfloat16}.get(name, torch.float32)
    return [hidden(3, 5, D, dtype=dtype, seed=seed) for seed in range(3)]


@pytest.mark.parametrize("index", [0, 1], ids=["input needs no gradient", "input needs a gradient"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_split_backward_has_the_bits_of_the_plain_one(name: str, index: int) -> None:
    plain = trained_through(held(LAYERS[name]), values_for(name), split=False, index=index)
    split = trained_through(held(LAYERS[name]), values_for(name), split=True, index=index)
    assert plain[0].keys() == split[0].keys()
    assert [key for key, sums in plain[0].items() if not same(sums, split[0][key])] == []
    assert all(same(a, b) for p, s in zip(plain[1], split[1], strict=True) for a, b in zip(p, s, strict=True))
    assert all(parameter.grad is None for parameter in split[2]._held.modules[0].parameters())
    assert index == 0 or all(gradient is not None for row in split[1] for gradient in row)
    assert name == "frozen" or any(bool(sums.any()) for sums in split[0].values())


def test_the_older_checkpointing_splits_too() -> None:
    """It needs an input with a gradient, split or not."""
    found = [
        trained_through(held(CheckpointedAsBefore), values_for("mlp"), split=split) for split in (False, True)
    ]
    assert all(same(sums, found[1][0][key]) for key, sums in found[0][0].items())
    assert all(same(a[0], b[0]) for a, b in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.parametrize("shape", [(7, D), (3, 5, D), (2, 3, 4, D), (1, D), (D,)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_a_linear_layer_splits_whatever_the_shape_of_its_input(shape: tuple[int, ...], bias: bool) -> None:
    found = [
        trained_through(held(lambda: nn.Linear(D, 9, bias=bias)), [hidden(*shape), hidden(*shape, seed=2)], split=split)
        for split in (False, True)
    ]
    assert all(same(sums, found[1][0][key]) for key, sums in found[0][0].items())
    assert all(same(a[0], b[0]) for a, b in zip(found[0][1], found[1][1], strict=True))


def test_an_input_that_is_no_plain_block_of_memory_splits_too() -> None:
    value = hidden(D, 6, 3).permute(2, 1, 0)
    found = [trained_through(held(lambda: nn.Linear(D, D)), [value], split=split) for split in (False, True)]
    assert all(same(sums, found[1][0][key]) for key, sums in found[0][0].items())


@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"sparse": True}, {"scale_grad_by_freq": True}], ids=str)
def test_an_embedding_splits(options: dict[str, Any]) -> None:
    values = [torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    found = [trained_through(held(lambda: Embedding(**options)), values, split=split)[0] for split in (False, True)]
    assert all(same(sums, found[1][key]) for key, sums in found[0].items())
    assert bool(found[1]["layer0.table.weight"].any())


def test_sums_in_float64_are_the_same_split_or_not() -> None:
    found = [
        trained_through(held(Attention, sums_dtype=torch.float64), [hidden(3, 5, D), hidden(3, 5, D, seed=2)], split=split)[0]
        for split in (False, True)
    ]
    assert all(sums.dtype is torch.float64 and same(sums, found[1][key]) for key, sums in found[0].items())


def test_only_plain_linear_layers_stash() -> None:
    class Mine(nn.Linear):
        pass

    assert can_stash(nn.Linear(D, D))
    tied = nn.Linear(D, D)
    tied.forward = lambda input_: input_  # type: ignore[method-assign]
    for make in (hooked, hooked_weight, normed, frozen_weight, lambda: Mine(D, D), lambda: tied):
        assert not can_stash(make())
    for register in ("register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook"):
        watched = nn.Linear(D, D)
        getattr(watched, register)(lambda *_: None)
        assert not can_stash(watched), register


def test_compiled_layers_are_left_alone() -> None:
    block = Attention()
    assert len(list(linear_layers(block))) == 4
    block.mlp._compiled_call_impl = block.mlp._call_impl  # what Module.compile sets
    assert set(linear_layers(block)) == {block.qkv, block.out}
    wrapped = nn.Module()
    wrapped._orig_mod = Attention()  # what torch.compile returns
    assert list(linear_layers(nn.Sequential(wrapped))) == []


def test_weights_get_nothing_in_b_and_everything_in_w() -> None:
    state = held(Attention)
    stage, hop = stage_of(state, split=True), whole_hop(state)
    outputs, _, _ = stage.forward(0, 1, hop, [hidden(2, 3, D)], None, None)
    stage.backward(0, 1, [torch.ones_like(outputs[0])])
    assert not any(bool(sums.any()) for sums in sums_of(state).values())
    stage.weight(0, 1)
    assert all(bool(sums.any()) for name, sums in sums_of(state).items() if not name.endswith("qkv.bias"))


def test_the_users_modules_are_as_they_were_afterwards() -> None:
    state = held(Attention)
    trained_through(state, [hidden(2, 3, D)], split=True)
    assert not any("forward" in module.__dict__ for module in state.modules[0].modules())


@pytest.mark.parametrize("split", [False, True], ids=["plain", "split"])
def test_nothing_is_kept_of_a_micro_batch_once_its_weights_are_done(split: bool) -> None:
    seen: list[Any] = []

    class Watched(Attention):
        def forward(self, hidden_BTD: Tensor) -> Tensor:
            out = super().forward(hidden_BTD)
            seen.extend((weakref.ref(hidden_BTD), weakref.ref(out)))
            return out

    state = held(Watched)
    gc.collect()
    gc.disable()  # what only the garbage collector frees stays for as long as it likes
    try:
        _, _, stage = trained_through(state, [hidden(2, 3, D), hidden(2, 3, D)], split=split)
        assert stage._passages == {}
        assert [ref() for ref in seen if ref() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("until", ["forward", "backward"])
def test_nothing_is_kept_of_an_attempt_that_is_given_up(until: str) -> None:
    stashed: list[Any] = []
    state = held(Mlp, UsedTwice)
    stage, hop = stage_of(state, split=True), whole_hop(state)
    gc.collect()
    gc.disable()
    try:
        outputs, _, _ = stage.forward(0, 1, hop, [hidden(2, 3, D)], None, None)
        stashed.append(weakref.ref(outputs[0]))
        if until == "backward":
            stage.backward(0, 1, [torch.ones_like(outputs[0])])
            stashed += [weakref.ref(tensor) for _, *pair in stage._passages[0, 1].stash for tensor in pair]
            assert len(stashed) == 1 + 2 * 4
        del outputs
        stage.drop()
        assert [ref() for ref in stashed if ref() is not None] == []
    finally:
        gc.enable()


def test_torchs_own_split_agrees() -> None:
    backward = pytest.importorskip("torch.distributed.pipelining._backward")
    state = held(Attention)
    value, gradient = hidden(2, 5, D), hidden(2, 5, D, seed=9)
    stage, hop = stage_of(state, split=True), whole_hop(state)
    stage.forward(0, 1, hop, [value.clone()], None, None)
    (found,) = stage.backward(0, 1, [gradient])
    stage.weight(0, 1)

    module = held(Attention).modules[0]
    leaf = value.clone().requires_grad_()
    torch.manual_seed(0)
    output = module(leaf)
    inputs, groups = backward.stage_backward_input([output], [gradient], [leaf], iter(module.parameters()))
    backward.stage_backward_weight(iter(module.parameters()), groups)
    assert same(found, inputs[0])
    wanted = {f"layer0.{name}": parameter.grad for name, parameter in module.named_parameters()}
    assert all(same(sums, wanted[name]) for name, sums in sums_of(state).items())
