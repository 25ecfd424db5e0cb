"""Nodes as threads of this process over in-process links: the engine alone, without protocol, agent or processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from everstep.engine.executor import Executor, JobSpec
from everstep.engine.links import LocalPost, Mailbox
from everstep.engine.samples import Samples
from everstep.engine.stage import Stage
from everstep.engine.state import HeldState
from everstep.plan import Plan, problems
from everstep.planner.step.schedules import order_of
from everstep.protocol.messages import Union
from everstep.view import Member, View

_generator = threading.Lock()


@contextmanager
def one_layer_at_a_time() -> Iterator[None]:
    """Threads share torch's default generator, which the engine seeds before each layer; processes do not."""
    with ExitStack() as patches:
        for owner, name in ((Stage, "_call"), (Samples, "read")):
            patches.enter_context(mock.patch.object(owner, name, _locked(getattr(owner, name))))
        yield


def _locked(plain: Callable[..., Any]) -> Callable[..., Any]:
    def locked(*arguments: Any) -> Any:
        with _generator:
            return plain(*arguments)

    return locked


@dataclass
class Quiet:
    """A ledger and instants that remember."""

    records: list[Any] = field(default_factory=list)

    def write(self, record: Any) -> None:
        self.records.append(record)

    def reached(self, phase: str, step: int) -> None:
        pass


class Cluster:
    def __init__(
        self, plan: Plan, layers: Callable[[], Any], spec: JobSpec, factory: Callable[[Any], torch.optim.Optimizer],
        sums_dtype: torch.dtype | None = None,
    ) -> None:
        self.spec = spec
        self.mailboxes = {node: Mailbox(receive_within_s=60) for node in plan.nodes}
        self.ledgers = {node: Quiet() for node in plan.nodes}
        self.executors: dict[Any, Executor] = {}
        for node in plan.nodes:
            held = HeldState(spec.facts, layers, spec.seed, factory, sums_dtype)
            held.hold(plan.placement[node])
            self.executors[node] = Executor(
                node=node, spec=spec, held=held, mailbox=self.mailboxes[node], post=LocalPost(self.mailboxes),
                ledger=self.ledgers[node], instants=self.ledgers[node],
            )
        self.follow(plan, 1)

    def follow(self, plan: Plan, view_number: int) -> None:
        view = View(view_number, tuple(Member(node) for node in plan.nodes))
        assert problems(plan, view, len(self.spec.facts.layers)) == []
        schedule = order_of(plan)
        for node, executor in self.executors.items():
            self.mailboxes[node].adopt(view_number)
            executor.follow(plan, schedule[node], view)

    def step(self, number: int, attempt: int = 0) -> dict[Any, Union]:
        unions: dict[Any, Union] = {}
        errors: list[BaseException] = []

        def work(node: Any) -> None:
            try:
                unions[node] = self.executors[node].run(number, attempt)
            except BaseException as error:
                errors.append(error)
                for mailbox in self.mailboxes.values():
                    mailbox.adopt(1_000_000)

        threads = [threading.Thread(target=work, args=(node,)) for node in self.executors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return unions

    def tensors(self) -> dict[str, dict[Any, torch.Tensor]]:
        """Every packed tensor by name, on each node that holds it."""
        found: dict[str, dict[Any, torch.Tensor]] = {}
        for node, executor in self.executors.items():
            for unit in executor.held.units.values():
                for name, tensor in unit.pack().tensors.items():
                    found.setdefault(name, {})[node] = tensor
        return found
