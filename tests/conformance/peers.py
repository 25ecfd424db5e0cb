"""Processes that reduce together, over gloo or over our own links, and do what a pipe tells them."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import FileStore

from everstep.engine.gloo import GlooGroup
from everstep.engine.links import Mailbox
from everstep.engine.reduce import Reduction, Where
from everstep.engine.tcp import TcpLinks
from everstep.quantities import NodeId
from tests.conformance.transports import MINUTE_S


class Group(Protocol):
    """What both implementations can do."""

    def open(self, view: int, members: list[int]) -> None: ...
    def reduce(self, source: Tensor) -> Tensor: ...
    def abort(self, newer_view: int) -> None: ...


class OverGloo:
    def __init__(self, rank: int, folder: Path) -> None:
        self._rank, self._store = rank, FileStore(str(folder / "store"), -1)

    def open(self, view: int, members: list[int]) -> None:
        self._group = GlooGroup(
            store=self._store, view=view, rank=members.index(self._rank), size=len(members), within_s=MINUTE_S
        )
        self._group.open()

    def reduce(self, source: Tensor) -> Tensor:
        return self._group.all_reduce(source)

    def abort(self, newer_view: int) -> None:
        self._group.abort(newer_view)


class OverLinks:
    def __init__(self, rank: int, folder: Path) -> None:
        self._node, self._mailbox = NodeId(f"n{rank}"), Mailbox(MINUTE_S)
        self._links = TcpLinks(self._node, self._mailbox, "token", lambda peer, what: None)
        self.address, self._numbers = self._links.open(), itertools.count()

    def know(self, addresses: dict[int, str]) -> None:
        self._links.know({NodeId(f"n{rank}"): address for rank, address in addresses.items()})

    def open(self, view: int, members: list[int]) -> None:
        self._view, self._members = view, tuple(NodeId(f"n{rank}") for rank in members)
        self._numbers = itertools.count()
        self._mailbox.adopt(view)

    def reduce(self, source: Tensor) -> Tensor:
        one = Reduction(
            node=self._node, group=self._members, name="sums", where=Where(self._view, next(self._numbers), 0),
            source=[source], pairs={}, expected={}, mailbox=self._mailbox, post=self._links,
        )
        one.post_parts()
        target = torch.empty_like(source)
        one.finish([target])
        return target

    def abort(self, newer_view: int) -> None:
        self._mailbox.adopt(newer_view)


KINDS: dict[str, Any] = {"gloo": OverGloo, "tcp": OverLinks}


def source_of(rank: int, length: int, whole: bool) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    drawn = torch.randn(length, generator=generator)
    return (drawn * 100).round() if whole else drawn


def work(kind: str, rank: int, folder: Path, pipe: Connection) -> None:
    """One peer: an order is a tuple, each gets one answer; a reduction answers from a thread of its own."""
    torch.set_num_threads(1)
    group = KINDS[kind](rank, folder)

    def reduce(length: int, whole: bool, times: int) -> None:
        try:
            for _ in range(times):
                total = group.reduce(source_of(rank, length, whole))
            pipe.send(("sum", total))
        except BaseException as error:
            pipe.send((type(error).__name__, str(error)))

    while True:
        order, *arguments = pipe.recv()
        if order == "reduce":
            threading.Thread(target=reduce, args=arguments, daemon=True).start()
            continue
        answer = group.address if order == "address" else getattr(group, order)(*arguments)
        pipe.send((order, answer))


class Peers:
    def __init__(self, kind: str, count: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.conformance.peers"])
        self.pipes: dict[int, Connection] = {}
        self.processes: dict[int, Any] = {}
        for rank in range(count):
            self.pipes[rank], other = context.Pipe()
            self.processes[rank] = context.Process(target=work, args=(kind, rank, folder, other), daemon=True)
            self.processes[rank].start()
            other.close()
        if kind == "tcp":
            addresses = {rank: answer for rank, (_, answer) in self.ask(self.pipes, "address").items()}
            self.ask(self.pipes, "know", addresses)

    def tell(self, ranks: Any, *order: Any) -> None:
        for rank in ranks:
            self.pipes[rank].send(order)

    def answers(self, ranks: Any, within_s: float = MINUTE_S) -> dict[int, Any]:
        """One answer of each; who has given none in time is not in it."""
        found: dict[int, Any] = {}
        pending = {self.pipes[rank]: rank for rank in ranks}
        while pending and (ready := wait(list(pending), within_s)):
            for pipe in ready:
                found[pending.pop(pipe)] = pipe.recv()  # type: ignore[index, union-attr]
        return found

    def all_answers(self, counts: dict[int, int]) -> dict[int, list[str]]:
        """So many answers of each: what each said, in any order."""
        found: dict[int, list[str]] = {rank: [] for rank in counts}
        for round_ in range(max(counts.values())):
            for rank, (name, _) in self.answers([rank for rank, count in counts.items() if count > round_]).items():
                found[rank].append(name)
        return {rank: sorted(names) for rank, names in found.items()}

    def ask(self, ranks: Any, *order: Any) -> dict[int, Any]:
        ranks = list(ranks)
        self.tell(ranks, *order)
        found = self.answers(ranks)
        assert sorted(found) == sorted(ranks), f"{order[0]}: only {sorted(found)} answered"
        return found

    def kill(self, rank: int) -> None:
        os.kill(self.processes[rank].pid, signal.SIGKILL)
        self.processes[rank].join(MINUTE_S)

    def freeze(self, rank: int) -> None:
        os.kill(self.processes[rank].pid, signal.SIGSTOP)


@contextmanager
def peers(kind: str, count: int, folder: Path) -> Iterator[Peers]:
    made = Peers(kind, count, folder)
    try:
        yield made
    finally:
        for process in made.processes.values():
            process.kill()
            process.join(MINUTE_S)
        for pipe in made.pipes.values():
            pipe.close()
