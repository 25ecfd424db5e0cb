"""torch without its compiler.

Making an optimizer, each of its steps, and arithmetic on ``meta`` go through wrappers of torch's that import ``torch._dynamo``:
two seconds of processor time in every fresh process, to tell a compiler that is not there to look away. Here they find a
stand-in, or are gone around. Who asks the stand-in for anything else gets the real thing.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

_NAME = "torch._dynamo"


class _StandIn(types.ModuleType):
    """All that torch's wrappers want of the compiler: that it disables itself."""

    @staticmethod
    def disable(function: Any = None, recursive: bool = True, **_: Any) -> Any:
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _withdraw(self)
        return getattr(importlib.import_module(_NAME), name)


def _withdraw(stand_in: _StandIn) -> None:
    if sys.modules.get(_NAME) is stand_in:
        del sys.modules[_NAME]
        if torch.__dict__.get("_dynamo") is stand_in:
            del torch.__dict__["_dynamo"]


@contextmanager
def no_compiler() -> Iterator[None]:
    """Inside, nothing imports the compiler unless it is needed. Where it is loaded already, nothing changes."""
    if _NAME in sys.modules:
        yield
        return
    stand_in = _StandIn(_NAME)
    sys.modules[_NAME] = stand_in
    torch.__dict__["_dynamo"] = stand_in
    try:
        yield
    finally:
        _withdraw(stand_in)


def step(optimizer: Optimizer) -> None:
    """``optimizer.step()``: the function inside its wrappers, with the same bits, where nothing would be missed by that."""
    kind = type(optimizer)
    inner = inspect.unwrap(kind.step)
    is_plain = (
        kind.__module__.startswith("torch.optim.")
        and inner is not kind.step
        and not optimizer.defaults.get("differentiable", False)
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and "step" not in optimizer.__dict__
    )
    if not is_plain:
        optimizer.step()
        return
    with torch.no_grad():
        inner(optimizer)
