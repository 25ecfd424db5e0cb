"""Every transport under one face: so many nodes in this process, each with a mailbox and a post."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from everstep.engine.links import Key, LocalPost, Mailbox, Parcel, Post
from everstep.engine.tcp import TcpLinks
from everstep.quantities import NodeId

MINUTE_S = 60.0
"""Deadline of every wait: a test that ends sooner was freed by something else."""


@dataclass
class Nodes:
    mailboxes: dict[NodeId, Mailbox]
    posts: dict[NodeId, Post]
    lost: list[tuple[NodeId, NodeId, str]] = field(default_factory=list)
    """(who noticed, which peer, what it said)."""

    @property
    def ids(self) -> tuple[NodeId, ...]:
        return tuple(self.mailboxes)

    def adopt(self, view: int) -> None:
        for mailbox in self.mailboxes.values():
            mailbox.adopt(view)


def key(source: str, *, view: int = 1, step: int = 0, attempt: int = 0, kind: str = "activation", micro_batch: int = 0,
        hop: int = 1, name: str = "") -> Key:
    return Key(view, step, attempt, kind, micro_batch, hop, NodeId(source), name)


@contextmanager
def local(count: int, within_s: float = MINUTE_S) -> Iterator[Nodes]:
    mailboxes = {NodeId(f"n{index}"): Mailbox(within_s) for index in range(count)}
    yield Nodes(mailboxes, dict.fromkeys(mailboxes, LocalPost(mailboxes)))


@contextmanager
def tcp(count: int, within_s: float = MINUTE_S) -> Iterator[Nodes]:
    nodes = Nodes({NodeId(f"n{index}"): Mailbox(within_s) for index in range(count)}, {})
    links = {node: TcpLinks(node, mailbox, "token", noticed(nodes, node)) for node, mailbox in nodes.mailboxes.items()}
    try:
        addresses = {node: link.open() for node, link in links.items()}
        for link in links.values():
            link.know(addresses)
        nodes.posts.update(links)
        yield nodes
    finally:
        for link in links.values():
            link.close()


def noticed(nodes: Nodes, node: NodeId) -> Callable[[NodeId, str], None]:
    return lambda peer, what: nodes.lost.append((node, peer, what))


TRANSPORTS: dict[str, Callable[..., Any]] = {"local": local, "tcp": tcp}


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that another thread is about to do."""
    deadline_s = time.monotonic() + MINUTE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never came: {what}"
        time.sleep(0.002)


@dataclass
class Waiting:
    """Calls in threads of their own, and what each came to."""

    threads: list[threading.Thread] = field(default_factory=list)
    outcomes: dict[Any, Any] = field(default_factory=dict)

    def start(self, calls: dict[Any, Callable[[], Any]]) -> None:
        for name, call in calls.items():
            thread = threading.Thread(target=self._run, args=(name, call), daemon=True)
            self.threads.append(thread)
            thread.start()

    def _run(self, name: Any, call: Callable[[], Any]) -> None:
        try:
            self.outcomes[name] = call()
        except BaseException as error:
            self.outcomes[name] = error

    def ended(self) -> dict[Any, Any]:
        """All outcomes, once every call has come to something."""
        for thread in self.threads:
            thread.join(MINUTE_S)
            assert not thread.is_alive(), "a call is still blocked"
        return self.outcomes


def are_blocked(mailboxes: Sequence[Mailbox]) -> bool:
    """Somebody waits in every mailbox."""
    return all(mailbox._condition._waiters for mailbox in mailboxes)  # type: ignore[attr-defined]


def send_order(post: Post, target: str, keys: Sequence[Key]) -> None:
    for each in keys:
        post.send(NodeId(target), Parcel(each))
