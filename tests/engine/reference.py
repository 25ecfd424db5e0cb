"""One process, whole batches, plain torch: what every plan must agree with. Shares nothing with the engine but the
functions that say which weights a layer starts with and which samples a step has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from everstep.engine.model import build_layers, seed_of
from everstep.engine.samples import Samples, inputs_of


@dataclass
class Reference:
    """A model trained the plain way; ``parameters`` and ``moments`` by full name."""

    layers: Callable[[], Any]
    loss: Callable[[Any, Any], tuple[Tensor, float]]
    factory: Callable[[Any], torch.optim.Optimizer]
    samples: Samples
    seed: int
    ties: tuple[tuple[str, str], ...] = ()
    clip_norm: float | None = None
    rate: Callable[[int], float] = lambda step: 1.0
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)  # as workers do: some bits depend on it, and small tensors gain nothing from more
        self.modules = nn.ModuleDict()
        self.names = []
        for _, name, module in build_layers(self.layers, self.seed, lambda _: True):
            self.names.append(name)
            self.modules[name.replace(".", "/")] = module
        for first, *others in self.ties:
            shared = self._get(first)
            for other in others:
                owner, _, last = other.rpartition(".")
                setattr(self._module(owner), last, shared)
        self.optimizer = self.factory([(self._clean(n), p) for n, p in self.modules.named_parameters() if p.requires_grad])
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def _clean(self, name: str) -> str:
        layer, _, rest = name.partition(".")
        return f"{layer.replace('/', '.')}.{rest}"

    def _module(self, path: str) -> nn.Module:
        name = max((n for n in self.names if path == n or path.startswith(f"{n}.")), key=len)
        return self.modules[name.replace(".", "/")].get_submodule(path[len(name) + 1 :])

    def _get(self, full: str) -> nn.Parameter:
        owner, _, last = full.rpartition(".")
        return getattr(self._module(owner), last)

    def step(self, number: int) -> float:
        self.optimizer.zero_grad()
        total, count = 0.0, 0.0
        for micro_batch, ids in enumerate(self.samples.micro_batches(number)):
            item = self.samples.read(number, ids)
            value = inputs_of(item)
            for index, name in enumerate(self.names):
                torch.manual_seed(seed_of(self.seed, number, micro_batch, index))
                value = self.modules[name.replace(".", "/")](value)
            loss, n = self.loss(value, item)
            loss.backward()
            total, count = total + float(loss.detach()), count + n
        parameters = [p for p in self.modules.parameters() if p.grad is not None]
        for parameter in parameters:
            parameter.grad /= count
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip_norm, foreach=False)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * self.rate(number)
        self.optimizer.step()
        self.losses.append(total / count)
        return self.losses[-1]

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and optimizer slots by the names that packed units use."""
        found: dict[str, Tensor] = {}
        for raw, parameter in self.modules.named_parameters():
            name = self._clean(raw)
            found[f"parameter:{name}"] = parameter.detach()
            for slot, value in self.optimizer.state.get(parameter, {}).items():
                found[f"optimizer:{name}:{slot}"] = value
        return copy.deepcopy(found)
