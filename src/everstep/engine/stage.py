"""Forward and backward of a range of layers for one micro-batch, on the layers that a node holds.

Between F and its last backward a pair (micro-batch, hop) keeps its graph; afterwards nothing. Randomness is keyed by
(seed, step, micro-batch, layer), so it depends on neither placement nor history.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from everstep.engine.model import seed_of
from everstep.engine.samples import count_of
from everstep.engine.split import Stash, alias, linear_layers, stashing, weight_gradients
from everstep.engine.state import HeldState, UnitState
from everstep.engine.values import Form, can_have_gradient, put_together, take_apart
from everstep.errors import UnsupportedError, UserCodeError
from everstep.plan import Hop

Loss = Callable[[Any, Any], Any]


@dataclass
class Passage:
    """One micro-batch on one hop, between its forward and its last backward."""

    hop: Hop
    inputs: list[Tensor]
    outputs: list[Tensor]
    linear: list[nn.Linear]
    """The layers that stash; also while B runs, since activation checkpointing calls forwards again there."""
    stash: Stash = field(default_factory=list)
    kept_back: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Gradients that B found on the way; counted in W, together with the stashed ones."""


@dataclass
class Times:
    """Processor seconds by action and layer, summed over this step's micro-batches, and how many there were."""

    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.counts[name] = self.counts.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        return {name: seconds / self.counts[name] for name, seconds in self.seconds.items()}


class _Entry(torch.autograd.Function):
    """The same tensor as an inner node of the graph: a layer may change it in place, which no leaf allows.

    Whether a layer is the first of a hop depends on the plan, and what the user may write must not.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return alias(leaf)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Stage:
    """Runs hops on the layers of ``held``. One object lives for one attempt of one step."""

    def __init__(self, held: HeldState, loss: Loss, seed: int, step: int, split: bool, node: str) -> None:
        self._held, self._loss, self._seed, self._step, self._split, self._node = held, loss, seed, step, split, node
        self._passages: dict[tuple[int, int], Passage] = {}
        self._linear: dict[tuple[int, int], list[nn.Linear]] = {}
        self._owners: dict[int, list[dict[str, Tensor | None]]] = {}
        self.times = Times()
        self._leaf_homes: dict[int, tuple[UnitState, str]] = {
            id(leaf): (unit, name)
            for unit in held.units.values()
            for leaves in unit.uses.values()
            for name, leaf in leaves
        }
        for unit in held.units.values():
            unit.attach_sums(in_place=not split)

    def forward(
        self, micro_batch: int, index: int, hop: Hop, inputs: list[Tensor], form: Form, item: Any
    ) -> tuple[list[Tensor], Form, tuple[float, float] | None]:
        """F. ``item``: the collated samples where the hop ends the model, else None.

        Returns what is sent on and its form; or, at the end of the model, nothing and (loss sum, count).

        Raises:
            UserCodeError: a layer or the loss raised; names layer, step and micro-batch.
        """
        if index > 0:
            inputs = [t.detach().requires_grad_() if can_have_gradient(t) else t for t in inputs]
        modules = [self._held.modules[layer] for layer in hop.layers]
        passage = Passage(hop, inputs, [], self._linear_of(hop) if self._split else [])
        entered = [_Entry.apply(t) if t.requires_grad else t for t in inputs]  # type: ignore[no-untyped-call]
        value = put_together(entered, form)
        with stashing(passage.linear, passage.stash):
            for layer, module in zip(hop.layers, modules, strict=True):
                began_s = time.thread_time()
                value = self._call(layer, module, value, micro_batch)
                self.times.add(f"F:{self._held.facts.layers[layer]}", time.thread_time() - began_s)
        self._passages[micro_batch, index] = passage
        if item is not None:
            total, count = self._loss_of(value, item, micro_batch)
            passage.outputs = [total]
            return [], None, (float(total.detach()), count)
        last = self._held.facts.layers[hop.end - 1]
        passage.outputs, out_form = take_apart(value, f"layer {last}")
        return passage.outputs, out_form, None

    def _linear_of(self, hop: Hop) -> list[nn.Linear]:
        """The layers of ``hop`` that stash; looked up once, since they do not change within a step."""
        key = (hop.first, hop.end)
        if key not in self._linear:
            self._linear[key] = [part for layer in hop.layers for part in linear_layers(self._held.modules[layer])]
        return self._linear[key]

    def _call(self, layer: int, module: nn.Module, value: Any, micro_batch: int) -> Any:
        torch.default_generator.manual_seed(seed_of(self._seed, self._step, micro_batch, layer))
        before = self._buffers_of(layer)
        versions = [buffer._version for buffer in before]
        try:
            value = module(value)
        except Exception as error:
            raise self._user_error(error, self._held.facts.layers[layer], micro_batch) from error
        if layer < len(self._held.facts.layers) - 1 and not isinstance(value, Tensor | tuple | list | dict):
            take_apart(value, f"layer {self._held.facts.layers[layer]}")  # says what is wrong with it
        after = self._buffers_of(layer)
        if versions != [b._version for b in after] or any(a is not b for a, b in zip(before, after, strict=True)):
            raise UnsupportedError(
                f"layer {self._held.facts.layers[layer]} changes a buffer in its forward: a micro-batch may be computed "
                "on any worker, or twice, so a forward must have no side effects"
            )
        return value

    def _buffers_of(self, layer: int) -> list[Tensor]:
        """The layer's buffers; its modules are looked up once, since walking them takes longer than a small layer."""
        if layer not in self._owners:
            self._owners[layer] = [owner._buffers for owner in self._held.modules[layer].modules()]
        return [buffer for buffers in self._owners[layer] for buffer in buffers.values() if buffer is not None]

    def _user_error(self, error: Exception, layer: str, micro_batch: int) -> UserCodeError:
        return UserCodeError(
            f"{type(error).__name__} in {layer}, step {self._step}, micro-batch {micro_batch}: {error}",
            layer=layer, step=self._step, micro_batch=micro_batch, node=self._node,
        )

    def _loss_of(self, output: Any, item: Any, micro_batch: int) -> tuple[Tensor, float]:
        try:
            loss = self._loss(output, item)
        except Exception as error:
            raise self._user_error(error, "loss", micro_batch) from error
        if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[0], Tensor) and loss[0].numel() == 1:
            return loss[0], float(loss[1])
        if isinstance(loss, Tensor) and loss.numel() == 1:
            count = count_of(item)
            if count is None:
                raise UnsupportedError("the item has no tensor to count samples by: the loss must return (sum, count)")
            return loss.reshape(()) * count, float(count)
        raise UnsupportedError(
            f"loss must return one number as a tensor (the mean over the micro-batch), or (sum, count); got {loss!r:.60}"
        )

    def backward(self, micro_batch: int, index: int, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """B: the gradients of the hop's inputs. ``gradients``: of its outputs; empty where the hop ends in the loss.

        Not split, it also adds the weights' gradients to the sums.

        Raises:
            UserCodeError: autograd refused what the layers did, or a function of theirs raised; names step and micro-batch.
        """
        passage = self._passages[micro_batch, index]
        began_s = time.thread_time()
        roots, root_gradients = self._roots(passage, gradients)
        wanted = [t for t in passage.inputs if t.requires_grad] if index > 0 else []
        try:
            if self._split:
                found = self._backward_apart(passage, roots, root_gradients, wanted)
            elif roots:
                torch.autograd.backward(roots, root_gradients)
        except Exception as error:
            names = [self._held.facts.layers[layer] for layer in passage.hop.layers]
            raise self._user_error(error, f"the backward of {', '.join(names)}", micro_batch) from error
        if not self._split:
            for unit in self._held.units.values():
                unit.gather_leaves()
            found = [t.grad for t in wanted]
            del self._passages[micro_batch, index]
        passage.outputs = []
        self._share_time("B", passage.hop, time.thread_time() - began_s)
        answers = iter(found)
        return [next(answers) if t.requires_grad else None for t in passage.inputs] if index > 0 else []

    def _roots(self, passage: Passage, gradients: list[Tensor | None]) -> tuple[list[Tensor], list[Tensor | None]]:
        if not gradients:
            return [output for output in passage.outputs if output.requires_grad], [None] * len(passage.outputs)
        pairs = [
            (output, gradient)
            for output, gradient in zip(passage.outputs, gradients, strict=True)
            if output.requires_grad and gradient is not None
        ]
        return [output for output, _ in pairs], [gradient for _, gradient in pairs]

    def _backward_apart(
        self, passage: Passage, roots: list[Tensor], root_gradients: list[Tensor | None], wanted: list[Tensor]
    ) -> list[Tensor | None]:
        leaves = [
            parameter
            for layer in passage.hop.layers
            for parameter in self._held.modules[layer].parameters()
            if parameter.requires_grad
        ]
        if not roots:
            return [None] * len(wanted)
        with stashing(passage.linear, passage.stash):
            # Not ``autograd.grad``: reentrant activation checkpointing refuses to be asked for certain gradients only.
            torch.autograd.backward(roots, root_gradients)
        for leaf in leaves:
            if leaf.grad is not None:
                passage.kept_back.append((leaf, leaf.grad))
                leaf.grad = None
        return [t.grad for t in wanted]

    def weight(self, micro_batch: int, index: int) -> None:
        """W: add the pair's weight gradients to the sums."""
        passage = self._passages.pop((micro_batch, index))
        began_s = time.thread_time()
        with torch.no_grad():
            for parameter, gradient in weight_gradients(passage.stash, passage.kept_back):
                unit, name = self._leaf_homes[id(parameter)]
                unit.sums[name].add_(gradient)
        self._share_time("W", passage.hop, time.thread_time() - began_s)

    def _share_time(self, kind: str, hop: Hop, seconds: float) -> None:
        """Give each layer of the hop its part of a backward's time, by its part of the forward's."""
        forward = self.times.means()
        names = [self._held.facts.layers[layer] for layer in hop.layers]
        total = sum(forward.get(f"F:{name}", 0.0) for name in names)
        for name in names:
            part = forward.get(f"F:{name}", 0.0) / total if total > 0 else 1 / len(names)
            self.times.add(f"{kind}:{name}", seconds * part)

    def drop(self) -> None:
        """Forget all graphs: the attempt is given up."""
        self._passages.clear()
