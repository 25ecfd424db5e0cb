"""Point-to-point messages between nodes, addressed by view, that an abort can interrupt.

A *parcel* has a key (view, step, attempt, kind, micro-batch, hop, source) and carries tensors. A node receives into one
``Mailbox`` and sends through a ``Post``: TCP between processes, or directly into the other node's mailbox within one.
The view in the key is checked when a parcel arrives, and again when it is used: an older view's is dropped, a later
view's is kept, since peers may adopt a view before this node does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from everstep.errors import PeerLost
from everstep.quantities import NodeId


class Key(NamedTuple):
    """What a parcel is about. ``kind``: activation, gradient, part, sum, exchange or state."""

    view: int
    step: int
    attempt: int
    kind: str
    micro_batch: int
    hop: int
    source: NodeId
    name: str = ""


@dataclass(frozen=True)
class Parcel:
    """Tensors, and a small value that says what they are."""

    key: Key
    tensors: list[Tensor] = field(default_factory=list)
    note: Any = None


class InterruptedByView(Exception):
    """A newer view was adopted: whoever waits for the older one stops waiting."""

    def __init__(self, view: int) -> None:
        super().__init__(f"view {view} was adopted")
        self.view = view


class Post(Protocol):
    """How parcels leave a node."""

    def send(self, target: NodeId, parcel: Parcel) -> None:
        """Hand over; may return before it arrives. A lost link is reported elsewhere, never raised here."""


class Mailbox:
    """Parcels that have arrived, by key. One thread waits; any number deliver."""

    def __init__(self, receive_within_s: float | None = None) -> None:
        """``receive_within_s``: the deadline of a single wait. Under an agent there is none: a death is followed by an abort,
        and a peer whose script takes its time between two steps is waited for."""
        self._condition = threading.Condition()
        self._parcels: dict[Key, Parcel] = {}
        self._view = 0
        self._receive_within_s = receive_within_s

    @property
    def view(self) -> int:
        return self._view

    def deliver(self, parcel: Parcel) -> None:
        with self._condition:
            if parcel.key.view < self._view:
                return
            self._parcels[parcel.key] = parcel
            self._condition.notify_all()

    def adopt(self, view: int) -> None:
        """From now on only ``view`` and later count; whoever waits for an older one is interrupted."""
        with self._condition:
            self._view = max(self._view, view)
            self._parcels = {key: parcel for key, parcel in self._parcels.items() if key.view >= self._view}
            self._condition.notify_all()

    def receive(self, key: Key, operation: str) -> Parcel:
        """Wait for the parcel with ``key``.

        Raises:
            InterruptedByView: a newer view was adopted.
            PeerLost: nothing came within the deadline; names the peer, the operation, step, micro-batch and view.
        """
        deadline_s = None if self._receive_within_s is None else time.monotonic() + self._receive_within_s
        with self._condition:
            while True:
                if key.view < self._view:
                    raise InterruptedByView(self._view)
                if key in self._parcels:
                    return self._parcels.pop(key)
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise PeerLost(
                        peers=[key.source], operation=operation, view=key.view, step=key.step,
                        micro_batch=key.micro_batch if key.kind in ("activation", "gradient") else None,
                    )
                self._condition.wait(left_s)

    def receive_any(self, keys: frozenset[Key], operation: str) -> Parcel:
        """Wait for whichever parcel of ``keys`` comes first. Raises as ``receive``."""
        deadline_s = None if self._receive_within_s is None else time.monotonic() + self._receive_within_s
        with self._condition:
            while True:
                view = min(key.view for key in keys)
                if view < self._view:
                    raise InterruptedByView(self._view)
                for key in keys:
                    if key in self._parcels:
                        return self._parcels.pop(key)
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    first = min(keys)
                    raise PeerLost(
                        peers=sorted({key.source for key in keys}), operation=operation, view=view, step=first.step,
                        micro_batch=None,
                    )
                self._condition.wait(left_s)

    def check(self, view: int) -> None:
        """Raises InterruptedByView when ``view`` is no longer the newest."""
        if view < self._view:
            raise InterruptedByView(self._view)


class LocalPost:
    """Straight into the mailboxes of nodes in this process."""

    def __init__(self, mailboxes: Mapping[NodeId, Mailbox]) -> None:
        self._mailboxes = mailboxes

    def send(self, target: NodeId, parcel: Parcel) -> None:
        # A real link copies; sharing memory would let a later in-place change reach the receiver.
        copied = Parcel(parcel.key, [tensor.detach().clone() for tensor in parcel.tensors], parcel.note)
        self._mailboxes[target].deliver(copied)
