"""The user's model as named layers and units of state.

The generator of layers is run with the default random generator seeded from (seed, layer index) before each layer, under
the ``meta`` device for layers that are not wanted: a node pays for what it holds, and initial weights depend on seed and
index alone. A tie group takes its initial value from its first layer.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from everstep.engine.compiler import no_compiler
from everstep.errors import ConfigError, UnsupportedError
from everstep.quantities import UnitName

LayerPart = tuple[str, "nn.Module | Callable[[], nn.Module]"]
Layers = Callable[[], Iterable[LayerPart]]


def seed_of(*numbers: int) -> int:
    """A 63-bit seed that depends on all ``numbers`` (SplitMix64, Steele et al. 2014, chained)."""
    state = 0
    for number in numbers:
        state = (state + 0x9E3779B97F4A7C15 + (number & 0xFFFFFFFFFFFFFFFF)) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


@dataclass(frozen=True)
class TensorFacts:
    """A parameter or buffer without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trains: bool

    @property
    def num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class UnitFacts:
    """A unit: its parameters by full name (``block.0.mlp.weight``), its buffers, and the layers that use it.

    For a tie group, ``names`` maps each use (layer name) to the parameter's name inside that layer.
    """

    name: UnitName
    layers: tuple[int, ...]
    parameters: dict[str, TensorFacts]
    buffers: dict[str, TensorFacts]
    names: dict[str, str] | None = None

    @property
    def parameter_bytes(self) -> int:
        return sum(p.num_bytes for p in (*self.parameters.values(), *self.buffers.values()))


@dataclass(frozen=True)
class ModelFacts:
    """Layer names in order, and units by name."""

    layers: tuple[str, ...]
    units: dict[UnitName, UnitFacts]

    def units_of(self, layers: Iterable[int]) -> tuple[UnitName, ...]:
        """Units that a holder of ``layers`` holds, in model order."""
        wanted = set(layers)
        return tuple(name for name, unit in self.units.items() if wanted.intersection(unit.layers))

    def uses(self) -> dict[str, tuple[str, ...]]:
        """Units that train, and the names of the layers that use each."""
        return {
            name: tuple(self.layers[index] for index in unit.layers)
            for name, unit in self.units.items()
            if any(p.trains for p in unit.parameters.values())
        }

    def digest(self) -> str:
        """The same for two scripts that declare the same model."""
        text = repr((self.layers, [(u.name, u.layers, u.parameters, u.buffers) for u in self.units.values()]))
        return hashlib.sha256(text.encode()).hexdigest()


class _WithoutChance(TorchFunctionMode):
    """On ``meta`` there are no values, so drawing some is skipped: torch would load a second of Python to pretend it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _DRAWS or (getattr(func, "__module__", "") == "torch.nn.init" and name.endswith("_")):
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        elif func in (torch.rand, torch.randn):
            made = torch.empty(*args, **{key: value for key, value in kwargs.items() if key != "generator"})
            if made.is_meta:  # else somebody asked for real values on another device
                return made
        return func(*args, **kwargs)


_DRAWS = frozenset(
    ("normal_", "uniform_", "bernoulli_", "exponential_", "geometric_", "log_normal_", "cauchy_", "random_")
)


def build_layers(layers: Layers, seed: int, wanted: Callable[[int], bool]) -> Iterator[tuple[int, str, nn.Module]]:
    """Each layer in turn: real where ``wanted(index)``, else on ``meta``. Leaves the default generator as it was.

    Raises:
        ConfigError: the generator does not give (name, module) pairs.
    """
    before = torch.random.get_rng_state()
    try:
        parts = iter(layers())
        index = 0
        while True:
            torch.manual_seed(seed_of(seed, index))
            with torch.device("cpu") if wanted(index) else _meta():
                part = next(parts, None)
                if part is None:
                    return
                name, module = _checked_part(part, index)
            if wanted(index):
                _refuse_without_values(name, module)
            yield index, name, module
            index += 1
    finally:
        torch.random.set_rng_state(before)


@contextmanager
def _meta() -> Iterator[None]:
    with no_compiler(), torch.device("meta"), _WithoutChance():
        yield


def _checked_part(part: Any, index: int) -> tuple[str, nn.Module]:
    if not isinstance(part, tuple) or len(part) != 2 or not isinstance(part[0], str):
        raise ConfigError(
            f"layers: item {index} must be a pair (name, module), for example ('block.0', Block()); got {_said(part)}"
        )
    name, module = part
    if not isinstance(module, nn.Module) and callable(module):
        module = module()
    if not isinstance(module, nn.Module):
        raise ConfigError(f"layers: {name!r} must be a torch.nn.Module or a function that makes one; got {_said(module)}")
    return name, module


def _refuse_without_values(name: str, module: nn.Module) -> None:
    for inner, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise ConfigError(
                f"layers: {name}.{inner} was made before {name!r} was asked for, so it has no values here; make each layer "
                "where it is yielded, or use everstep.sequential with a function that makes the whole model"
            )


def _said(value: Any) -> str:
    return f"a {type(value).__name__}"


def facts_of(layers: Layers, seed: int, ties: Sequence[tuple[str, ...]] = ()) -> ModelFacts:
    """Run the generator on ``meta`` and say what the model consists of.

    Raises:
        ConfigError: no layers, a name twice, or a tie that names no parameter or unlike ones.
        UnsupportedError: a module that cannot be trained this way, by name.
    """
    names: list[str] = []
    parameters: dict[str, tuple[int, str, TensorFacts]] = {}
    buffers: dict[str, tuple[int, TensorFacts]] = {}
    makers: dict[nn.Parameter, tuple[int, str]] = {}
    shared: list[tuple[str, str]] = []
    for index, name, module in build_layers(layers, seed, lambda _: False):
        if name in names:
            raise ConfigError(f"layers: two layers are called {name!r}; names say what state belongs to, so each needs its own")
        names.append(name)
        _refuse_unsupported(name, module)
        for inner, parameter in module.named_parameters():
            facts = TensorFacts(tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
            parameters[f"{name}.{inner}"] = (index, inner, facts)
            maker, first = makers.setdefault(parameter, (index, f"{name}.{inner}"))
            if maker != index:
                shared.append((first, f"{name}.{inner}"))
        for inner, buffer in module.named_buffers():
            buffers[f"{name}.{inner}"] = (index, TensorFacts(tuple(buffer.shape), buffer.dtype, False))
    if not names:
        raise ConfigError("layers: the generator gave no layers; yield (name, module) pairs in the order they run")
    tied = _tied(ties, parameters)
    for first, other in shared:
        if other not in tied.get(first, ()):
            raise ConfigError(f"layers: {first!r} and {other!r} are one parameter; say so with ties=[({first!r}, {other!r})]")
    units: dict[UnitName, UnitFacts] = {}
    for index, name in enumerate(names):
        own = {full: facts for full, (at, _, facts) in parameters.items() if at == index and full not in tied}
        held = {full: facts for full, (at, facts) in buffers.items() if at == index}
        if own or held:
            units[UnitName(name)] = UnitFacts(UnitName(name), (index,), own, held)
        for full in [full for full, (at, _, _) in parameters.items() if at == index and tied.get(full, ("",))[0] == full]:
            group = tied[full]
            at = sorted({parameters[member][0] for member in group})
            inner_names = {names[parameters[member][0]]: parameters[member][1] for member in group}
            unit = UnitName(f"tie:{full}")
            units[unit] = UnitFacts(unit, tuple(at), {full: parameters[full][2]}, {}, inner_names)
    return ModelFacts(tuple(names), units)


def _tied(ties: Sequence[tuple[str, ...]], parameters: dict[str, tuple[int, str, TensorFacts]]) -> dict[str, tuple[str, ...]]:
    """Full parameter name → its tie group, the first of the model first."""
    tied: dict[str, tuple[str, ...]] = {}
    for group in ties:
        for member in group:
            if member not in parameters:
                near = difflib.get_close_matches(member, list(parameters), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"ties: there is no parameter {member!r}{hint}")
            if member in tied:
                raise ConfigError(f"ties: {member!r} is in two groups; name all its parameters in one")
        ordered = tuple(sorted(group, key=lambda member: parameters[member][0]))
        if len({parameters[member][0] for member in ordered}) != len(ordered) or len(ordered) < 2:
            raise ConfigError(f"ties: {group} must name parameters of at least two different layers, one of each")
        facts = {parameters[member][2] for member in ordered}
        if len(facts) != 1:
            shapes = ", ".join(f"{member} {parameters[member][2].shape}" for member in ordered)
            raise ConfigError(f"ties: the parameters of a group must be alike, got {shapes}")
        tied.update(dict.fromkeys(ordered, ordered))
    return tied


def _refuse_unsupported(name: str, module: nn.Module) -> None:
    for inner, part in module.named_modules():
        where = f"{name}.{inner}" if inner else name
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats:
            raise UnsupportedError(
                f"layer {where} is a {type(part).__name__}: statistics over a batch cannot be kept when the batch is cut "
                "into micro-batches on several nodes; use LayerNorm or GroupNorm"
            )
        if isinstance(part, nn.modules.lazy.LazyModuleMixin):
            raise UnsupportedError(f"layer {where} is a {type(part).__name__}: shapes must be known when a layer is made")


def sequential(model: nn.Sequential | Callable[[], nn.Sequential]) -> Layers:
    """Layers from an ``nn.Sequential``: its children, under their own names.

    Give a function that makes it where you can: then weights depend on the job's seed alone. A module that is already
    made is used as it is, so every worker's script must have made the same one (checked when workers join).
    """

    def layers() -> Iterator[LayerPart]:
        with torch.device("cpu"):
            made = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
        if not isinstance(made, nn.Sequential):
            raise ConfigError(f"sequential: want an nn.Sequential or a function that makes one, got {_said(made)}")
        twins: dict[nn.Parameter, nn.Parameter] = {}
        for name, child in made.named_children():
            wanted_on_meta = torch.empty(0).is_meta
            yield name, (_to_meta(child, twins) if wanted_on_meta else child)

    return layers


def _to_meta(module: nn.Module, twins: dict[nn.Parameter, nn.Parameter]) -> nn.Module:
    """``module`` without values; parameters that were one stay one, which ``to`` forgets."""
    parts = [(part, name, p) for part in module.modules() for name, p in part.named_parameters(recurse=False)]
    module.to("meta")
    for part, name, before in parts:
        part.register_parameter(name, twins.setdefault(before, part.get_parameter(name)))
    return module
