"""What passes between layers: a tensor, or a tuple, list or dict of such. Taken apart into tensors and put together again.

The shape of a value is a *form*: plain JSON, so that it can travel in a header.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from everstep.errors import UnsupportedError

Form = Any
"""``None`` stands for a tensor; ``["tuple", ...]``, ``["list", ...]`` and ``["dict", [keys], ...]`` for containers."""


def take_apart(value: Any, where: str) -> tuple[list[Tensor], Form]:
    """Tensors in order, and the form to put them together again.

    Raises:
        UnsupportedError: something else than tensors in tuples, lists and dicts; ``where`` names the layer.
    """
    tensors: list[Tensor] = []
    return tensors, _form(value, tensors, where)


def _form(value: Any, tensors: list[Tensor], where: str) -> Form:
    if isinstance(value, Tensor):
        tensors.append(value)
        return None
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, *(_form(item, tensors, where) for item in value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return ["dict", list(value), *(_form(item, tensors, where) for item in value.values())]
    raise UnsupportedError(
        f"{where} gives a {type(value).__name__}; only a tensor, or a tuple, list or dict (with text keys) of tensors "
        "can be sent to the next stage"
    )


def put_together(tensors: list[Tensor], form: Form) -> Any:
    """The inverse of ``take_apart``."""
    rest = iter(tensors)
    return _value(rest, form)


def _value(rest: Any, form: Form) -> Any:
    if form is None:
        return next(rest)
    kind, *inner = form
    if kind == "dict":
        keys, *inner = inner
        return {key: _value(rest, item) for key, item in zip(keys, inner, strict=True)}
    values = [_value(rest, item) for item in inner]
    return tuple(values) if kind == "tuple" else values


def can_have_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.complex64, torch.complex128,
    )
}


def dtype_name(tensor: Tensor) -> str:
    """Raises UnsupportedError for a dtype that cannot be sent."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedError(f"a tensor of {tensor.dtype} cannot be sent; known: {', '.join(DTYPES)}")
    return name
