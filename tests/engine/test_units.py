"""State unit by unit: one optimizer each is one optimizer over all, and what is packed comes back to the bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everstep.engine.shards import copied, from_bytes, to_bytes
from everstep.engine.state import HeldState, Packed, UnitState, tensor_from
from everstep.errors import ConfigError, EngineError, TransferError, UnsupportedError
from tests.engine.stages import held, sgd

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda named: torch.optim.SGD(named, lr=0.1),
    "SGD, momentum": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam": lambda named: torch.optim.Adam(named, lr=0.01),
    "Adam, amsgrad": lambda named: torch.optim.Adam(named, lr=0.01, amsgrad=True),
    "Adam, fused": lambda named: torch.optim.Adam(named, lr=0.01, fused=True),
    "Adam, foreach": lambda named: torch.optim.Adam(named, lr=0.01, foreach=True),
    "AdamW": lambda named: torch.optim.AdamW(named, lr=0.01, weight_decay=0.1),
    "NAdam": lambda named: torch.optim.NAdam(named, lr=0.01),
    "RAdam": lambda named: torch.optim.RAdam(named, lr=0.01),
    "Adamax": lambda named: torch.optim.Adamax(named, lr=0.01),
    "Adagrad": lambda named: torch.optim.Adagrad(named, lr=0.1),
    "Adadelta": lambda named: torch.optim.Adadelta(named, lr=1.0),
    "RMSprop": lambda named: torch.optim.RMSprop(named, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda named: torch.optim.Rprop(named, lr=0.01),
    "ASGD": lambda named: torch.optim.ASGD(named, lr=0.01),
    "Adafactor": lambda named: torch.optim.Adafactor(named, lr=0.01),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(5, 7), nn.LayerNorm(7)
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("flags", torch.tensor([True, False]))

    def forward(self, value: Tensor) -> Tensor:
        return self.norm(self.up(value))


def state_of(name: str, seed_of_gradients: int | None = None, steps: int = 3) -> HeldState:
    state = held(Layer, lambda: nn.Linear(7, 5), factory=OPTIMIZERS[name])
    if seed_of_gradients is not None:
        train(state, seed_of_gradients, steps)
    return state


def gradients(parameters: dict[str, Any], seed: int, step: int) -> dict[str, Tensor]:
    found = {}
    for index, (name, parameter) in enumerate(sorted(parameters.items())):
        generator = torch.Generator().manual_seed(1000 * seed + 100 * step + index)
        found[name] = torch.randn(parameter.shape, generator=generator)
    return found


def train(state: HeldState, seed: int, steps: int) -> None:
    for step in range(steps):
        for unit in state.units.values():
            for name, gradient in gradients(unit.trained, seed, step).items():
                unit.sums[name].copy_(gradient)
            unit.apply(1.0, 1.0)


def packed_of(state: HeldState) -> dict[str, Packed]:
    return {name: unit.pack() for name, unit in state.units.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_optimizer_a_unit_is_one_optimizer_over_all(name: str) -> None:
    state = state_of(name)
    everything = {key: nn.Parameter(p.detach().clone()) for unit in state.units.values() for key, p in unit.trained.items()}
    optimizer = OPTIMIZERS[name](list(everything.items()))
    for step in range(4):
        for unit in state.units.values():
            found = gradients(unit.trained, 1, step)
            for key, gradient in found.items():
                unit.sums[key].copy_(gradient * 4)
                everything[key].grad = gradient * 4 * 0.25
            unit.apply(0.25, 1.0)
        optimizer.step()
    for unit in state.units.values():
        for key, parameter in unit.trained.items():
            assert torch.equal(parameter, everything[key]), key
        assert not bool(unit.flat.any())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_is_packed_and_unpacked_goes_on_with_the_same_bits(name: str) -> None:
    source, target = state_of(name, 1), state_of(name, 2, steps=1)
    for unit, packed in packed_of(source).items():
        arrived = from_bytes(to_bytes(packed), packed.scalars)
        assert arrived.digest() == packed.digest()
        target.units[unit].unpack(arrived)
    assert target.digests() == source.digests()
    train(source, 3, 2)
    train(target, 3, 2)
    assert target.digests() == source.digests()
    assert source.digests() != state_of(name, 1).digests()


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad"])
def test_a_unit_that_was_never_updated_can_take_state_and_give_its_own(name: str) -> None:
    fresh = copy.deepcopy({unit: copied(packed) for unit, packed in packed_of(state_of(name)).items()})
    trained = state_of(name, 1)
    for unit, packed in fresh.items():
        trained.units[unit].unpack(packed)
    assert trained.digests() == state_of(name).digests()
    train(trained, 5, 2)
    assert trained.digests() == state_of(name, 5, 2).digests()


def test_a_copy_is_not_reached_by_later_updates() -> None:
    state = state_of("Adam", 1)
    kept = {unit: copied(packed) for unit, packed in packed_of(state).items()}
    before = {unit: packed.digest() for unit, packed in kept.items()}
    train(state, 2, 1)
    assert {unit: packed.digest() for unit, packed in kept.items()} == before
    assert state.digests() != before


def test_the_digest_is_of_names_types_shapes_bytes_and_numbers() -> None:
    base = Packed({"parameter:a": torch.arange(6.0), "buffer:b": torch.tensor(1)}, {"optimizer:a:step": 3})
    assert base.digest() == Packed(dict(reversed(base.tensors.items())), dict(base.scalars)).digest()
    strided = torch.arange(12.0).view(6, 2)[:, 0] / 2
    assert base.digest() == Packed({**base.tensors, "parameter:a": strided}, base.scalars).digest()
    others = [
        Packed({**base.tensors, "parameter:a": torch.arange(6.0).view(2, 3)}, base.scalars),
        Packed({**base.tensors, "parameter:a": torch.arange(6.0).double()}, base.scalars),
        Packed({**base.tensors, "parameter:a": torch.arange(6)}, base.scalars),
        Packed({**base.tensors, "buffer:b": torch.tensor(2)}, base.scalars),
        Packed({**base.tensors, "buffer:c": torch.zeros(0)}, base.scalars),
        Packed(base.tensors, {"optimizer:a:step": 4}),
        Packed(base.tensors, {}),
    ]
    assert len({packed.digest() for packed in (base, *others)}) == len(others) + 1


def test_what_is_not_finite_is_seen() -> None:
    assert Packed({"a": torch.ones(2), "b": torch.tensor([2**60])}, {"s": 1.0}).is_finite()
    assert not Packed({"a": torch.tensor([1.0, math.nan])}, {}).is_finite()
    assert not Packed({"a": torch.tensor([math.inf], dtype=torch.bfloat16)}, {}).is_finite()
    assert not Packed({}, {"s": math.inf}).is_finite()


@pytest.mark.parametrize(("key", "value", "said"), [
    ("parameter:layer1.weight", None, "unit layer1: parameter:layer1.weight is missing"),
    ("parameter:layer1.weight", torch.ones(7, 5), r"weight should be torch.float32 \(5, 7\), got torch.float32 \(7, 5\)"),
    ("parameter:layer1.weight", torch.ones(5, 7).double(), r"got torch.float64 \(5, 7\)"),
    ("parameter:layer1.other", torch.ones(5), "parameter:layer1.other is unknown"),
    ("buffer:layer1.other", torch.ones(5), "buffer:layer1.other is unknown"),
    ("optimizer:layer1.other:step", torch.ones(()), "optimizer state for an unknown parameter layer1.other"),
], ids=["missing", "shape", "dtype", "parameter", "buffer", "optimizer"])
def test_state_that_does_not_fit_is_refused_and_changes_nothing(key: str, value: Tensor | None, said: str) -> None:
    state = state_of("Adam", 1)
    unit = state.units[next(name for name in state.units if name == "layer1")]
    other = copied(state_of("Adam", 2).units[unit.facts.name].pack())
    tensors = {k: t for k, t in {**other.tensors, key: value}.items() if t is not None}
    before = unit.pack().digest()
    with pytest.raises(TransferError, match=said):
        unit.unpack(Packed(tensors, other.scalars))
    assert unit.pack().digest() == before


def test_bytes_that_are_no_tensors_are_refused() -> None:
    whole = to_bytes(state_of("SGD").units[next(iter(state_of("SGD").units))].pack())
    for data in (b"", b"nonsense", whole[:-1], whole[:20], b"\xff" * 64):
        with pytest.raises(TransferError, match="not the tensors of a unit"):
            from_bytes(data, {})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool"])
def test_shards_keep_every_dtype(dtype: str) -> None:
    square = torch.tensor([[0, 1], [2, 3]]).to(getattr(torch, dtype))
    packed = Packed({"a": square, "b": square.t(), "empty": torch.zeros(0, 3), "scalar": torch.tensor(2.0)}, {})
    assert from_bytes(to_bytes(packed), {}).digest() == packed.digest()


def test_tensors_are_made_of_bytes_that_fit_and_of_no_others() -> None:
    assert torch.equal(tensor_from("int16", (2, 1), b"\x01\x00\x02\x00"), torch.tensor([[1], [2]], dtype=torch.int16))
    assert tensor_from("float32", (0, 4), b"").shape == (0, 4)
    for arguments, said in (
        (("float32", (2,), b"\0" * 7), "takes 8 bytes, got 7"), (("float31", (2,), b""), "unknown dtype 'float31'"),
        (("float32", (0,), b"\0"), "takes 0 bytes, got 1"),
    ):
        with pytest.raises(TransferError, match=said):
            tensor_from(*arguments)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class KeepsText(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["note"] = "text"
        return super().step(closure)


@pytest.mark.parametrize(("factory", "kind", "said"), [
    (lambda named: torch.optim.LBFGS([p for _, p in named]), UnsupportedError, "LBFGS needs a closure"),
    (lambda named: NeedsClosure(named, lr=0.1), UnsupportedError, "NeedsClosure.step needs a closure"),
    (lambda named: None, ConfigError, "must return a torch.optim.Optimizer, got a NoneType"),
    (lambda named: torch.optim.SGD(named[:1], lr=0.1), ConfigError, "for unit layer0 it must take exactly the parameters"),
    (lambda named: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), ConfigError, "exactly the parameters"),
], ids=["LBFGS", "closure", "nothing", "too few", "others"])
def test_an_optimizer_that_cannot_work_unit_by_unit_is_refused(factory: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        held(Layer, factory=factory)


def test_optimizer_state_that_cannot_be_moved_is_refused() -> None:
    state = held(Layer, factory=lambda named: KeepsText(named, lr=0.1))
    train(state, 1, 1)
    with pytest.raises(UnsupportedError, match="KeepsText keeps a str as 'note'"):
        packed_of(state)


def test_a_unit_has_one_dtype() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1).double())

    with pytest.raises(UnsupportedError, match="unit layer0: its parameters must have one dtype"):
        held(Mixed)


def test_a_frozen_unit_has_no_optimizer_and_moves_all_the_same() -> None:
    state, other = (held(lambda: Layer().requires_grad_(False)) for _ in range(2))
    unit = state.units[next(iter(state.units))]
    unit.apply(1.0, 1.0)
    assert unit.optimizer is None and unit.flat.numel() == 0 and unit.square_norms() == {}
    with torch.no_grad():
        next(iter(unit.parameters.values())).add_(1)
    other.units[unit.facts.name].unpack(copied(unit.pack()))
    assert other.digests() == state.digests()


def test_the_rate_factor_is_of_the_base_rate_not_of_the_last_one() -> None:
    unit = next(iter(held(Layer, factory=sgd).units.values()))
    for factor in (0.5, 0.25, 1.0):
        unit.apply(1.0, factor)
        assert [group["lr"] for group in unit.optimizer.param_groups] == [0.1 * factor]  # type: ignore[union-attr]


def test_squared_norms_are_those_of_float64() -> None:
    unit: UnitState = next(iter(held(lambda: nn.Linear(300, 300), factory=sgd).units.values()))
    generator = torch.Generator().manual_seed(0)
    for sums in unit.sums.values():
        sums.copy_(torch.randn(sums.shape, generator=generator))
    for name, square in unit.square_norms().items():
        assert math.isclose(square, float(unit.sums[name].double().square().sum()), rel_tol=1e-12)  # float32 gives 1e-7


def test_sums_in_float64_keep_what_float32_would_lose() -> None:
    tiny = 2.0**-24
    found = []
    for dtype in (None, torch.float64):
        state = held(lambda: nn.Linear(1, 1, bias=False), factory=sgd, sums_dtype=dtype)
        unit = next(iter(state.units.values()))
        (leaf,) = (leaf for _, leaf in unit.uses["layer0"])
        unit.attach_sums(in_place=True)
        for value in (1.0, *[tiny] * 8):
            (leaf * value).sum().backward()
            unit.gather_leaves()
        found.append(float(unit.flat[0]))
    assert found == [1.0, 1.0 + 8 * tiny]


def test_a_unit_that_should_be_held_and_is_not_is_our_own_bug() -> None:
    state = held(Layer)
    state.require(state.units)
    with pytest.raises(EngineError, match="layer9"):
        state.require(["layer9"])  # type: ignore[list-item]
