"""Where a worker process begins. Light, since the agent names it too: only the fork server and its children load torch."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.quantities import NodeId

PRELOADED = ("everstep.runtime.worker", "everstep.api", "safetensors.torch")
"""What the fork server imports once, so that a worker starts with everything there."""


@dataclass(frozen=True, kw_only=True)
class WorkerOrder:
    """What a worker process is started with."""

    agent: str
    """Where the agent listens, ``host:port``."""
    token: str
    node: NodeId
    incarnation: int
    script: str
    arguments: tuple[str, ...]
    log: str


def run_worker(order: WorkerOrder) -> None:
    """The target of every worker process; never returns."""
    from everstep.runtime.worker import main

    main(order)
