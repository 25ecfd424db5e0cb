"""What a model consists of is found without values; what a layer starts with depends on the seed and its place alone."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everstep.engine.model import build_layers, facts_of, seed_of, sequential
from everstep.engine.state import HeldState
from everstep.errors import ConfigError, UnsupportedError
from tests.engine.models import layers as tiny
from tests.engine.stages import sgd

SEED = 7


class Drawn(nn.Module):
    """Weights from most ways there are to draw some."""

    def __init__(self) -> None:
        super().__init__()
        self.randn, self.rand = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.rand((2, 5)))
        self.filled = nn.Parameter(torch.empty(4, 4).normal_(0, 0.02))
        self.uniform = nn.Parameter(torch.zeros(6).uniform_(-1, 1))
        self.xavier = nn.Parameter(nn.init.xavier_uniform_(torch.empty(3, 3)))
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(5)))
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(4, 4)))
        self.keyword = nn.Parameter(nn.init.normal_(tensor=torch.empty(2)))
        self.like = nn.Parameter(torch.randn_like(torch.empty(7)))
        self.scaled = nn.Parameter(torch.randn(size=(2, 2), dtype=torch.float32) / math.sqrt(2))
        self.register_buffer("mask", torch.randint(0, 2, (3, 3)))
        self.register_buffer("order", torch.randperm(5))
        self.linear = nn.Linear(3, 2)

    def forward(self, value: Tensor) -> Tensor:
        return value


def pairs(**modules: Callable[[], Any]) -> Callable[[], Iterator[tuple[str, Any]]]:
    def layers() -> Iterator[tuple[str, Any]]:
        for name, make in modules.items():
            yield name, make()

    return layers


def values(layers: Any, wanted: set[int]) -> dict[str, Tensor]:
    state = HeldState(facts_of(layers, SEED), layers, SEED, sgd)
    state.hold(wanted)
    return {key: t.clone() for unit in state.units.values() for key, t in unit.pack().tensors.items()}


def test_a_layer_that_is_not_wanted_takes_no_memory() -> None:
    layers = pairs(**{f"layer{index}": lambda: nn.Linear(20_000, 20_000) for index in range(50)})  # 80 GB
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    facts = facts_of(layers, SEED)
    state = HeldState(facts, layers, SEED, sgd)
    state.hold(())
    for _, _, module in build_layers(layers, SEED, lambda _: False):
        assert all(parameter.is_meta for parameter in module.parameters())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 50 * 2**10
    assert sum(unit.parameter_bytes for unit in facts.units.values()) == 50 * (20_000 * 20_000 + 20_000) * 4


def test_shapes_found_without_values_are_those_of_real_layers() -> None:
    facts = facts_of(pairs(drawn=Drawn), SEED)
    unit = facts.units[next(iter(facts.units))]
    real = Drawn()
    assert {name: (p.shape, p.dtype) for name, p in unit.parameters.items()} == {
        f"drawn.{name}": (tuple(p.shape), p.dtype) for name, p in real.named_parameters()
    }
    assert {name: (b.shape, b.dtype) for name, b in unit.buffers.items()} == {
        f"drawn.{name}": (tuple(b.shape), b.dtype) for name, b in real.named_buffers()
    }


def test_initial_weights_depend_on_seed_and_index_whatever_is_held() -> None:
    layers = pairs(a=Drawn, b=Drawn, c=lambda: nn.Linear(4, 4), d=Drawn)
    everything = values(layers, {0, 1, 2, 3})
    for wanted in ({0}, {1}, {3}, {0, 2}, {1, 3}):
        found = values(layers, wanted)
        assert found and all(torch.equal(tensor, everything[key]) for key, tensor in found.items())
    assert not torch.equal(everything["parameter:a.randn"], everything["parameter:b.randn"])
    torch.manual_seed(seed_of(SEED, 3))
    assert all(torch.equal(p, everything[f"parameter:d.{name}"]) for name, p in Drawn().named_parameters())


def test_what_is_added_later_starts_as_if_it_had_been_there_from_the_start() -> None:
    layers = tiny()
    state = HeldState(facts_of(layers, SEED), layers, SEED, sgd)
    state.hold({2})
    state.hold({2, 0})
    state.hold({5})
    wanted = values(layers, {0, 2, 5})
    assert {f"parameter:{n}": True for unit in state.units.values() for n in unit.parameters} == dict.fromkeys(wanted, True)
    for unit in state.units.values():
        assert all(torch.equal(t, wanted[key]) for key, t in unit.pack().tensors.items())


def test_building_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    facts_of(tiny(), SEED)
    values(tiny(), {0})
    assert torch.equal(torch.rand(3), expected)


def test_layers_may_be_given_as_functions_and_are_made_where_they_are_wanted() -> None:
    made: list[bool] = []

    def make() -> nn.Module:
        layer = nn.Linear(4, 4)
        made.append(layer.weight.is_meta)
        return layer

    def layers() -> Iterator[tuple[str, Any]]:
        yield from (("a", make), ("b", make))

    state = HeldState(facts_of(layers, SEED), layers, SEED, sgd)
    made.clear()
    state.hold({1})
    assert made == [True, False]


@pytest.mark.parametrize("held", [{0}, {5}, {0, 5}, {3, 5}], ids=str)
def test_a_tie_group_starts_as_its_first_layer_makes_it(held: set[int]) -> None:
    layers, ties = tiny(), (("head.weight", "embed.weight"),)
    untied = values(layers, {0, 5})
    state = HeldState(facts_of(layers, SEED, ties), layers, SEED, sgd)
    state.hold(held)
    unit = state.units[next(name for name in state.units if name.startswith("tie:"))]
    assert unit.facts.name == "tie:embed.weight" and unit.facts.layers == (0, 5)
    assert torch.equal(unit.parameters["embed.weight"], untied["parameter:embed.weight"])
    for index, name in ((0, "weight"), (5, "weight")):
        if index in held:
            leaf = state.modules[index].get_parameter(name)
            assert leaf.data_ptr() == unit.parameters["embed.weight"].data_ptr()
            assert leaf is not unit.parameters["embed.weight"]
    assert set(unit.uses) == {"embed" if index == 0 else "head" for index in held & {0, 5}}


def test_what_is_dropped_is_gone_and_a_tie_group_stays_with_its_last_layer() -> None:
    layers, ties = tiny(), (("embed.weight", "head.weight"),)
    state = HeldState(facts_of(layers, SEED, ties), layers, SEED, sgd)
    state.hold(range(6))
    state.drop({5})
    assert set(state.units) == {"head", "tie:embed.weight"} and set(state.modules) == {5}
    assert set(state.units[next(n for n in state.units if n.startswith("tie"))].uses) == {"head"}
    state.drop(())
    assert not state.units and not state.modules


def norm(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(3, 3), make())


REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    (lambda: iter([("a", nn.Linear(2, 2)), ("a", nn.Linear(2, 2))]), (), ConfigError, "two layers are called 'a'"),
    (lambda: iter([]), (), ConfigError, "no layers"),
    (lambda: iter([nn.Linear(2, 2)]), (), ConfigError, r"item 0 must be a pair .* got a Linear"),
    (lambda: iter([("a", nn.Linear(2, 2)), ("b", 3)]), (), ConfigError, "'b' must be a torch.nn.Module .* got a int"),
    (lambda: iter([("a", lambda: None)]), (), ConfigError, "'a' must be a torch.nn.Module .* got a NoneType"),
    (pairs(a=norm(lambda: nn.BatchNorm1d(3))), (), UnsupportedError, "layer a.1 is a BatchNorm1d: .* use LayerNorm"),
    (pairs(a=norm(lambda: nn.SyncBatchNorm(3))), (), UnsupportedError, "layer a.1 is a SyncBatchNorm"),
    (pairs(a=lambda: nn.LazyLinear(3)), (), UnsupportedError, "layer a is a LazyLinear"),
    (tiny(), (("embed.weigth", "head.weight"),), ConfigError, "no parameter 'embed.weigth'; did you mean 'embed.weight'"),
    (tiny(), (("embed.weight",),), ConfigError, "at least two different layers"),
    (tiny(), (("block.0.up.weight", "block.0.down.weight"),), ConfigError, "at least two different layers"),
    (tiny(), (("embed.weight", "block.0.up.weight"),), ConfigError, r"must be alike, got .*embed.weight \(17, 12\)"),
    (
        tiny(), (("block.0.up.weight", "block.1.up.weight"), ("block.1.up.weight", "block.2.up.weight")), ConfigError,
        "'block.1.up.weight' is in two groups",
    ),
    (sequential(lambda: nn.Linear(2, 2)), (), ConfigError, "want an nn.Sequential .* got a Linear"),  # type: ignore[arg-type, return-value]
]


@pytest.mark.parametrize(("layers", "ties", "kind", "said"), REFUSED, ids=[said for *_, said in REFUSED])
def test_what_cannot_be_trained_is_refused_by_name(layers: Any, ties: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        facts_of(layers, SEED, ties)


def test_batch_statistics_that_are_not_kept_are_allowed() -> None:
    assert facts_of(pairs(a=lambda: nn.BatchNorm1d(3, track_running_stats=False)), SEED).layers == ("a",)


def shared_layers() -> Iterator[tuple[str, nn.Module]]:
    embed = nn.Embedding(5, 3)
    yield "embed", embed
    yield "middle", nn.Linear(3, 3)
    head = nn.Linear(3, 5, bias=False)
    head.weight = embed.weight
    yield "head", head


def shared_model() -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False))
    model[2].weight = model[0].weight  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("layers", [shared_layers, sequential(shared_model)], ids=["layers", "sequential"])
def test_a_parameter_in_two_layers_must_be_declared(layers: Any) -> None:
    first, _, last = (name for name, _ in layers())
    with pytest.raises(ConfigError, match=rf"'{first}.weight' and '{last}.weight' are one parameter; say so with ties="):
        facts_of(layers, SEED)
    ties = ((f"{first}.weight", f"{last}.weight"),)
    facts = facts_of(layers, SEED, ties)
    for wanted in ({2}, {0, 1, 2}):
        state = HeldState(facts, layers, SEED, sgd)
        state.hold(wanted)
        torch.manual_seed(seed_of(SEED, 0))
        assert torch.equal(state.modules[2].get_parameter("weight"), nn.Embedding(5, 3).weight)


def test_a_layer_made_before_it_is_asked_for_is_refused_where_it_has_no_values() -> None:
    def layers() -> Iterator[tuple[str, nn.Module]]:
        made = [nn.Linear(2, 2) for _ in range(3)]
        for index, layer in enumerate(made):
            yield f"layer{index}", layer

    state = HeldState(facts_of(layers, SEED), layers, SEED, sgd)
    with pytest.raises(ConfigError, match=r"layer2.weight was made before 'layer2' was asked for"):
        state.hold({2})


class WithDraws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(64))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.scale


def model() -> nn.Sequential:
    inner = nn.Linear(4, 4)
    return nn.Sequential(nn.Linear(64, 64), WithDraws(), nn.Sequential(inner, nn.Tanh(), inner), nn.ReLU())


@pytest.mark.parametrize("given", [model, model()], ids=["a function", "an instance"])
def test_a_sequential_model_is_its_children_wherever_they_are_held(given: Any) -> None:
    layers = sequential(given)
    facts = facts_of(layers, SEED)
    assert facts.layers == ("0", "1", "2", "3")
    assert list(facts.units) == ["0", "1", "2"]
    if isinstance(given, nn.Module):
        expected = given
    else:
        torch.manual_seed(seed_of(SEED, 0))
        expected = model()
    for wanted in ({0}, {1}, {2, 3}, {1, 2}):
        state = HeldState(facts, layers, SEED, sgd)
        state.hold(wanted)
        for index in wanted:
            real = dict(expected[index].named_parameters())
            assert {n: torch.equal(p, real[n]) for n, p in state.modules[index].named_parameters()} == dict.fromkeys(real, True)


def test_an_instance_is_copied_so_that_training_it_twice_starts_alike() -> None:
    given = model()
    state = HeldState(facts_of(sequential(given), SEED), sequential(given), SEED, sgd)
    state.hold({0})
    with torch.no_grad():
        state.modules[0].get_parameter("weight").zero_()
    assert bool(given[0].get_parameter("weight").any())


def test_the_digest_tells_models_apart_and_not_seeds() -> None:
    assert facts_of(tiny(), 1).digest() == facts_of(tiny(), 2).digest()
    others = [facts_of(tiny(depth=3), 1), facts_of(tiny(dtype=torch.float32), 1),
              facts_of(tiny(), 1, (("embed.weight", "head.weight"),))]
    assert len({facts.digest() for facts in (facts_of(tiny(), 1), *others)}) == 4


def test_real_values_asked_for_elsewhere_are_drawn() -> None:
    seen: list[Tensor] = []

    def layers() -> Iterator[tuple[str, nn.Module]]:
        seen.append(torch.randn(1000, device="cpu"))
        yield "a", nn.Linear(2, 2)

    facts_of(layers, SEED)
    assert 0.8 < float(seen[0].std()) < 1.2
