"""torch's optimizers without the compiler.

Making a ``torch.optim`` optimizer, and each of its steps, goes through wrappers that import ``torch._dynamo``: nearly two
seconds of processor time in every fresh process, to tell a compiler that is not there to look away. The functions inside the
wrappers (``__wrapped__``) do the same update with the same bits. Anything out of the ordinary takes the usual way.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import suppress

import torch
from torch.optim import Optimizer

_CACHED = "__dynamo_disable"
"""Where torch's own wrapper looks for what it has imported before."""


def make_light() -> None:
    """From now on making an optimizer does not import the compiler, unless it is there already."""
    function = inspect.unwrap(Optimizer.add_param_group)
    if "torch._dynamo" not in sys.modules and not hasattr(function, _CACHED):
        with suppress(AttributeError):
            setattr(function, _CACHED, function)


def step(optimizer: Optimizer) -> None:
    """``optimizer.step()``."""
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
