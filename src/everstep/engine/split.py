"""Split backward: B gives the gradient of the input, W the gradients of the weights, later.

A linear layer's backward here returns the gradient of its input only and *stashes* (input, output gradient); W is then
one matrix product and one column sum, with the same bits as the plain backward. The user's modules are neither replaced
nor renamed: only the ``forward`` of instances whose type is exactly ``nn.Linear``, without hooks or parametrizations, is
swapped while the engine runs them. Every other parameter gets its gradient in B; the executor keeps it back until W, so
that a pair is counted once and whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def alias(tensor: Tensor) -> Tensor:
    """``tensor`` on the same memory, and no view to autograd: a view from a function of ours could not be changed in place."""
    return tensor.new_empty(0).set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


Stash = list[tuple[nn.Linear, Tensor, Tensor]]
"""(layer, input, output gradient), in the order of the backward."""


class _StashLinear(torch.autograd.Function):
    """``functional.linear`` whose backward leaves the weights for later."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Linear, stash: Stash) -> Tensor:
        ctx.save_for_backward(input_, weight)
        ctx.layer, ctx.stash = layer, stash
        return alias(functional.linear(input_, weight, bias))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (gradient,) = gradients
        input_, weight = ctx.saved_tensors
        # Detached: the input leads back to this very node, and a ring through autograd's graph is never collected.
        ctx.stash.append((ctx.layer, input_.detach(), gradient))
        return (gradient.matmul(weight) if ctx.needs_input_grad[0] else None), None, None, None, None


def can_stash(module: nn.Module) -> bool:
    """A plain trainable linear layer that nobody has hooked into."""
    return (
        type(module) is nn.Linear
        and all(p.requires_grad and not p._backward_hooks for p in (module.weight, module.bias) if p is not None)
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and "forward" not in module.__dict__
        and not hasattr(module, "parametrizations")
    )


def linear_layers(module: nn.Module) -> Iterator[nn.Linear]:
    """The layers in ``module`` that stash, each once. What is compiled is left alone: its code would be compiled again."""
    seen: set[nn.Module] = set()
    waiting = [module]
    while waiting:
        part = waiting.pop()
        if part in seen or part._compiled_call_impl is not None or "_orig_mod" in part._modules:
            continue
        seen.add(part)
        waiting.extend(part.children())
        if can_stash(part):
            assert isinstance(part, nn.Linear)
            yield part


@contextmanager
def stashing(modules: list[nn.Linear], stash: Stash) -> Iterator[None]:
    """While open, the linear layers of ``modules`` put what W needs into ``stash`` when their backward runs."""
    for module in modules:
        module.__dict__["forward"] = _swapped(module, stash)  # Module's own setattr takes longer than a small product
    try:
        yield
    finally:
        for module in modules:
            del module.__dict__["forward"]


def _swapped(module: nn.Linear, stash: Stash) -> Any:
    def forward(input_: Tensor) -> Tensor:
        weight: Tensor = module.weight
        bias: Tensor | None = module.bias
        if torch._C._are_functorch_transforms_active():  # vmap and its like want functions of another form
            return functional.linear(input_, weight, bias)
        device = input_.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            input_, weight = _cast(input_, dtype), _cast(weight, dtype)
            bias = None if bias is None else _cast(bias, dtype)
        return _StashLinear.apply(input_, weight, bias, module, stash)  # type: ignore[no-any-return, no-untyped-call]

    return forward


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast does it: float64 stays."""
    return tensor if tensor.dtype is torch.float64 else tensor.to(dtype)


def weight_gradients(stash: Stash, kept_back: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """W: the gradients of the stashed layers' parameters and those that B found, each parameter once.

    Uses of one parameter are added up before they are cast to its dtype, as the plain backward does: autocast keeps one
    cast of a weight for all its uses.
    """
    sums: dict[Tensor, Tensor] = {}
    for parameter, gradient in kept_back:
        _add(sums, parameter, gradient)
    for layer, input_, gradient in stash:
        rows_in = input_.reshape(-1, input_.shape[-1])
        rows_out = gradient.reshape(-1, gradient.shape[-1])
        _add(sums, layer.weight, rows_out.t().mm(rows_in))
        if layer.bias is not None:
            _add(sums, layer.bias, rows_out.sum(0))
    stash.clear()
    kept_back.clear()
    for parameter, gradient in sums.items():
        yield parameter, gradient.to(parameter.dtype)


def _add(sums: dict[Tensor, Tensor], parameter: Tensor, gradient: Tensor) -> None:
    sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
