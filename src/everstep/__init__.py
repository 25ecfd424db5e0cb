"""Everstep keeps a PyTorch training job going while the machines under it fail, leave and join.

A bare import is cheap: names resolve on first use, so no torch is loaded and no thread or socket is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.api import Indexed, Job, sequential
    from everstep.config import RunConfig

__version__ = "0.1.0"
__all__ = ["Indexed", "Job", "RunConfig", "__version__", "sequential"]

_HOMES = {
    "Indexed": "everstep.api", "Job": "everstep.api", "sequential": "everstep.api", "RunConfig": "everstep.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'everstep' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
