"""The state that a node holds, unit by unit: parameters, buffers, optimizer, and the sums of this step's gradients.

A unit has one optimizer, made by the user's factory, so that it can move alone. The parameters of a tie group exist once;
every layer that uses it has a leaf of its own on the same storage.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everstep.engine import compiler
from everstep.engine.heap import keep_freed_memory
from everstep.engine.model import Layers, ModelFacts, UnitFacts, build_layers
from everstep.engine.values import DTYPES, dtype_name
from everstep.errors import ConfigError, EngineError, TransferError, UnsupportedError
from everstep.quantities import UnitName

OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Packed:
    """A unit as it travels or lies on disk: named tensors in a fixed order, and the optimizer's plain numbers."""

    tensors: dict[str, Tensor]
    scalars: dict[str, float | int | bool]

    def digest(self) -> str:
        """SHA-256 over names, types, shapes and bytes: equal for equal state."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name}|{dtype_name(tensor)}|{tuple(tensor.shape)}|".encode())
            digest.update(as_bytes(tensor))
        digest.update(repr(sorted(self.scalars.items())).encode())
        return digest.hexdigest()

    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(t).all()) for t in self.tensors.values() if t.is_floating_point()) and all(
            math.isfinite(value) for value in self.scalars.values()
        )


def as_bytes(tensor: Tensor) -> memoryview:
    """The raw bytes of a CPU tensor, without a copy where it is contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


class UnitState:
    """One unit, held: what ``Packed`` can become again."""

    def __init__(
        self, facts: UnitFacts, parameters: dict[str, nn.Parameter], buffers: dict[str, Tensor],
        uses: dict[str, list[tuple[str, nn.Parameter]]], factory: OptimizerFactory, sums_dtype: torch.dtype | None,
    ) -> None:
        """``uses``: layer name → (full parameter name, leaf) of each parameter that trains."""
        self.facts, self.parameters, self.buffers, self.uses = facts, parameters, buffers, uses
        self.trained = {name: p for name, p in parameters.items() if p.requires_grad}
        self.optimizer = self._optimizer(factory)
        self.base_rates = [group["lr"] for group in self.optimizer.param_groups] if self.optimizer else []
        dtypes = {p.dtype for p in self.trained.values()}
        if len(dtypes) > 1:
            raise UnsupportedError(f"unit {facts.name}: its parameters must have one dtype, got {sorted(map(str, dtypes))}")
        dtype = sums_dtype or next(iter(dtypes), torch.float32)
        self.flat = torch.zeros(sum(p.numel() for p in self.trained.values()), dtype=dtype)
        self.sums: dict[str, Tensor] = {}
        offset = 0
        for name, parameter in self.trained.items():
            self.sums[name] = self.flat[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()
        self._accumulates_in_place = not dtypes or dtype == next(iter(dtypes))

    def _optimizer(self, factory: OptimizerFactory) -> torch.optim.Optimizer | None:
        if not self.trained:
            return None
        with compiler.no_compiler():
            made = factory(list(self.trained.items()))
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(f"optimizer: the function must return a torch.optim.Optimizer, got a {type(made).__name__}")
        refuse_optimizer(made)
        held = {id(p) for group in made.param_groups for p in group["params"]}
        if held != {id(p) for p in self.trained.values()}:
            raise ConfigError(f"optimizer: for unit {self.facts.name} it must take exactly the parameters that it is given")
        return made

    def attach_sums(self, *, in_place: bool) -> None:
        """Point every leaf's gradient at the sums, so that a plain backward adds to them ``in_place``; else at nothing."""
        for leaves in self.uses.values():
            for name, leaf in leaves:
                leaf.grad = self.sums[name] if in_place and self._accumulates_in_place else None

    def gather_leaves(self) -> None:
        """After a backward: take gradients that could not be added in place (float64 sums) into the sums."""
        if not self._accumulates_in_place:
            for leaves in self.uses.values():
                for name, leaf in leaves:
                    if leaf.grad is not None:
                        self.sums[name].add_(leaf.grad)
                        leaf.grad = None

    def square_norms(self) -> dict[str, float]:
        """Squared norm of each parameter's sum, in float64: the same bits on every holder."""
        if not self.sums:
            return {}
        norms = torch.stack([torch.linalg.vector_norm(sums, dtype=torch.float64) for sums in self.sums.values()])
        return dict(zip(self.sums, norms.square().tolist(), strict=True))

    def apply(self, scale: float, rate_factor: float) -> None:
        """One update with ``sums * scale`` as the gradient; the sums are zero afterwards."""
        if self.optimizer is None:
            return
        self.flat.mul_(scale)
        for name, parameter in self.trained.items():
            parameter.grad = self.sums[name].to(parameter.dtype)
        for group, base in zip(self.optimizer.param_groups, self.base_rates, strict=True):
            group["lr"] = base * rate_factor
        compiler.step(self.optimizer)
        for parameter in self.trained.values():
            parameter.grad = None
        self.flat.zero_()

    def pack(self) -> Packed:
        """The state, sharing memory with it: copy before the next update if it is kept."""
        tensors: dict[str, Tensor] = {f"parameter:{name}": p.detach() for name, p in self.parameters.items()}
        tensors |= {f"buffer:{name}": buffer for name, buffer in self.buffers.items()}
        scalars: dict[str, float | int | bool] = {}
        if self.optimizer is not None:
            for name, parameter in self.trained.items():
                for key, value in self.optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        tensors[f"optimizer:{name}:{key}"] = value
                    elif isinstance(value, bool | int | float):
                        scalars[f"optimizer:{name}:{key}"] = value
                    elif value is not None:
                        raise UnsupportedError(
                            f"{type(self.optimizer).__name__} keeps a {type(value).__name__} as {key!r}; only tensors and "
                            "numbers can be moved between workers"
                        )
        return Packed(tensors, scalars)

    def unpack(self, packed: Packed) -> None:
        """Become what was packed.

        Raises:
            TransferError: names or shapes do not fit this unit, which is then as it was.
        """
        own = {f"parameter:{name}": p.detach() for name, p in self.parameters.items()}
        own |= {f"buffer:{name}": buffer for name, buffer in self.buffers.items()}
        state: dict[str, dict[str, Any]] = {name: {} for name in self.trained}
        for key, value in (*packed.tensors.items(), *packed.scalars.items()):
            kind, _, rest = key.partition(":")
            name, _, slot = rest.rpartition(":")
            if kind == "optimizer":
                if name not in state:
                    raise TransferError(f"unit {self.facts.name}: optimizer state for an unknown parameter {name}")
                state[name][slot] = value.clone() if isinstance(value, Tensor) else value
            elif key not in own or not isinstance(value, Tensor):
                raise TransferError(f"unit {self.facts.name}: {key} is unknown; known: {', '.join(own)}")
            elif value.shape != own[key].shape or value.dtype != own[key].dtype:
                raise TransferError(
                    f"unit {self.facts.name}: {key} should be {own[key].dtype} {tuple(own[key].shape)}, "
                    f"got {value.dtype} {tuple(value.shape)}"
                )
        missing = set(own) - set(packed.tensors)
        if missing:
            raise TransferError(f"unit {self.facts.name}: {sorted(missing)[0]} is missing")
        for key, tensor in own.items():
            tensor.copy_(packed.tensors[key])
        if self.optimizer is not None:
            self.optimizer.state.clear()
            for name, slots in state.items():
                if slots:
                    self.optimizer.state[self.trained[name]] = slots


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises UnsupportedError for an optimizer that cannot work unit by unit, by name."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError("LBFGS needs a closure and all parameters at once; use an optimizer that works tensor by tensor")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(f"{name}.step needs a closure; a step that is cut over workers cannot evaluate the loss again")


class HeldState:
    """Layers and units of one node."""

    def __init__(
        self, facts: ModelFacts, layers: Layers, seed: int, factory: OptimizerFactory,
        sums_dtype: torch.dtype | None = None,
    ) -> None:
        self.facts, self._layers, self._seed, self._factory, self._sums_dtype = facts, layers, seed, factory, sums_dtype
        self.modules: dict[int, nn.Module] = {}
        self.units: dict[UnitName, UnitState] = {}

    def hold(self, wanted: Iterable[int]) -> None:
        """Build the layers of ``wanted`` that are not held, with their initial weights, beside those that are."""
        new = set(wanted) - set(self.modules)
        if not new:
            return
        keep_freed_memory()  # before the weights have their memory
        # A tie group starts as its first layer makes it, also where that layer itself is not held.
        first = {self.facts.units[unit].layers[0] for unit in self.facts.units_of(new)}
        built = {
            index: module
            for index, _, module in build_layers(self._layers, self._seed, lambda index: index in new or index in first)
            if index in new or index in first
        }
        self.modules |= {index: built[index] for index in new}
        for unit in self.facts.units_of(new):
            self._hold_unit(self.facts.units[unit], built)

    def drop(self, kept: Iterable[int]) -> None:
        """Let go of all layers but ``kept``, and of the units that only they used."""
        kept = set(kept)
        self.modules = {index: module for index, module in self.modules.items() if index in kept}
        staying = self.facts.units_of(kept)
        self.units = {name: unit for name, unit in self.units.items() if name in staying}
        for unit in self.units.values():
            unit.uses = {use: leaves for use, leaves in unit.uses.items() if self.facts.layers.index(use) in kept}

    def _hold_unit(self, facts: UnitFacts, built: Mapping[int, nn.Module]) -> None:
        if facts.names is None:
            (index,) = facts.layers
            module, layer = self.modules[index], self.facts.layers[index]
            inner = dict(module.named_parameters())
            parameters = {full: inner[full.removeprefix(f"{layer}.")] for full in facts.parameters}
            inner_buffers = dict(module.named_buffers())
            buffers = {full: inner_buffers[full.removeprefix(f"{layer}.")] for full in facts.buffers}
            leaves = [(full, p) for full, p in parameters.items() if p.requires_grad]
            self.units[facts.name] = UnitState(facts, parameters, buffers, {layer: leaves}, self._factory, self._sums_dtype)
            return
        held = self.units.get(facts.name)
        (full,) = facts.parameters
        if held is None:
            made = _parameter(built[facts.layers[0]], facts.names[self.facts.layers[facts.layers[0]]])
            shared = nn.Parameter(made.detach(), requires_grad=made.requires_grad)
            held = UnitState(facts, {full: shared}, {}, {}, self._factory, self._sums_dtype)
            self.units[facts.name] = held
        shared = held.parameters[full]
        for index in facts.layers:
            layer = self.facts.layers[index]
            if index in self.modules and layer not in held.uses:
                leaf = nn.Parameter(shared.detach(), requires_grad=shared.requires_grad)
                _set_parameter(self.modules[index], facts.names[layer], leaf)
                held.uses[layer] = [(full, leaf)] if shared.requires_grad else []

    def digests(self) -> dict[str, str]:
        """The hash of each unit held."""
        return {name: unit.pack().digest() for name, unit in self.units.items()}

    def require(self, units: Iterable[UnitName]) -> None:
        """Raises EngineError when a unit is not held: our own bug."""
        missing = [unit for unit in units if unit not in self.units]
        if missing:
            raise EngineError(f"units that the plan says are here are not: {', '.join(missing)}")


def _parameter(module: nn.Module, name: str) -> nn.Parameter:
    return module.get_parameter(name)


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, last = name.rpartition(".")
    setattr(module.get_submodule(owner), last, parameter)


def tensor_from(dtype: str, shape: tuple[int, ...], data: bytes | bytearray | memoryview) -> Tensor:
    """A tensor over ``data``, which it may share.

    Raises:
        TransferError: an unknown dtype, or the number of bytes does not fit the shape.
    """
    if dtype not in DTYPES:
        raise TransferError(f"unknown dtype {dtype!r}")
    size = DTYPES[dtype].itemsize * math.prod(shape)
    if size != len(data):
        raise TransferError(f"{dtype} {shape} takes {size} bytes, got {len(data)}")
    if not size:
        return torch.empty(shape, dtype=DTYPES[dtype])
    writable = data if isinstance(data, bytearray) else bytearray(data)
    return torch.frombuffer(writable, dtype=DTYPES[dtype]).reshape(shape)
