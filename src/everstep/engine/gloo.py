"""The same all-reduce over gloo, to compare with: in conformance tests and benchmarks, never in a run.

Rules, each learned from what gloo does:

1. One group object a view, made directly on a store under a prefix of the view's own; no default group is registered.
2. gloo has no abort. What frees a blocked member is shutting down the group's own connections from another thread. They
   are found by comparing the open sockets before and after the group is made, so nobody else may open one meanwhile.
3. Its listening socket is left alone: an error of its accept would end the process. So are the store's sockets.
4. A sum is made in a copy: a member that is lost within an all-reduce leaves partial sums.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from everstep.engine.links import InterruptedByView
from everstep.errors import EngineError

Sockets = dict[int, str]
"""Descriptor → what the kernel calls the socket behind it: a number is used again, a name is not."""


class GlooGroup:
    """The members of one view, as gloo sees them."""

    def __init__(self, *, store: Any, view: int, rank: int, size: int, within_s: float = 60.0) -> None:
        """``store``: one of torch.distributed's, the same for all members. ``within_s``: gloo's own deadline of every
        operation; recovery never relies on it, since an abort comes first."""
        self._store, self._view, self._rank, self._size, self._within_s = store, view, rank, size, within_s
        self._group: Any = None
        self._connections: Sockets = {}
        self._newer_view: int | None = None

    def open(self) -> None:
        """Connect to all members; returns when all have called it.

        Raises:
            EngineError: they did not come within the deadline.
        """
        before = _open_sockets()
        store = PrefixStore(f"view-{self._view}", self._store)
        try:
            self._group = ProcessGroupGloo(store, self._rank, self._size, timedelta(seconds=self._within_s))
        except RuntimeError as error:
            raise EngineError(f"no gloo group of {self._size} in view {self._view}: {error}") from error
        new = {number: name for number, name in _open_sockets().items() if before.get(number) != name}
        self._connections = {number: name for number, name in new.items() if not _listens(number)}

    def all_reduce(self, source: Tensor) -> Tensor:
        """The sum of every member's ``source``.

        Raises:
            InterruptedByView: the group was aborted for a newer view.
            EngineError: a member was lost, or did not come within the deadline.
        """
        assert self._group is not None, "a group is opened before it reduces"
        self._check()
        total = source.detach().clone()
        if not total.numel():
            return total
        try:
            self._group.allreduce([total]).wait()
        except RuntimeError as error:
            self._check()
            raise EngineError(f"all-reduce over gloo in view {self._view}: {error}") from error
        return total

    def _check(self) -> None:
        if self._newer_view is not None:
            raise InterruptedByView(self._newer_view)

    def abort(self, newer_view: int) -> None:
        """Free whoever is blocked in this group, here and, since connections end, at its peers. From any thread."""
        self._newer_view = newer_view
        still_open = _open_sockets()
        for number, name in self._connections.items():
            if still_open.get(number) == name:
                with _borrowed(number) as connection, suppress(OSError):  # the peer may have been faster
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the group. Not while an operation is pending: gloo would wait for it here; abort first."""
        self._group = None
        self._connections = {}


def _open_sockets() -> Sockets:
    found: Sockets = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed since it was listed
            name = os.readlink(entry)
            if name.startswith("socket:"):
                found[int(entry.name)] = name
    return found


@contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """Somebody else's descriptor as a socket object that closes only its own copy."""
    with socket.socket(fileno=os.dup(number)) as copy:
        yield copy


def _listens(number: int) -> bool:
    with _borrowed(number) as connection:
        return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
