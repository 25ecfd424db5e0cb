"""The worker processes of an agent and what is said to and by them: starting, greeting, reading, writing, ending.

Carries out and decides nothing: what a worker says goes to ``heard``, that one has ended to ``ended``. Nothing here blocks; a
frozen worker's bytes wait in memory. Strangers who connect are hung up on unless they know the run's token.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.errors import RemoteProtocolError
from everstep.quantities import NodeId
from everstep.runtime.control import MAX_FRAME_BYTES, Finished, Frames, Hello, ToWorker, Welcome, framed, frames_from_worker
from everstep.runtime.entry import WorkerOrder
from everstep.runtime.processes import Processes, WorkerProcess


@dataclass
class Worker:
    """One worker as its agent knows it."""

    process: WorkerProcess
    node: NodeId
    connection: socket.socket | None = None
    frames: Frames = field(default_factory=frames_from_worker)
    unsent: bytearray = field(default_factory=bytearray)
    address: str = ""
    declared: bool = False
    finished: Finished | None = None
    phase: str = "start"
    heard_s: float = 0.0
    """When it last said anything; at first, when it was started."""
    left_s: float | None = None
    """When it left the script's loop before the end of the run."""

    @property
    def place(self) -> int:
        return self.process.place


class Crew:
    """Use as a context manager. ``workers`` are those that live, by node."""

    def __init__(
        self, selector: selectors.BaseSelector, *, script: Path, arguments: tuple[str, ...], logs: Path,
        welcome: Callable[[], Welcome | None], heard: Callable[[Worker, Any], None], ended: Callable[[Worker, str], None],
    ) -> None:
        """``welcome``: what a worker is greeted with; None when it comes too late."""
        self.workers: dict[NodeId, Worker] = {}
        self._selector, self._welcome, self._heard, self._ended = selector, welcome, heard, ended
        self._script, self._arguments, self._logs = script, arguments, logs
        self._token = secrets.token_hex(16)
        self._processes = Processes()
        self._strangers: set[socket.socket] = set()
        self._next_node = 0

    def __enter__(self) -> Crew:
        self._logs.mkdir(exist_ok=True)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._selector.register(self._listener, selectors.EVENT_READ, lambda: self._accept())
        return self

    def __exit__(self, *_: object) -> None:
        """Nobody is left behind."""
        self.kill_all()
        connections = [worker.connection for worker in self.workers.values() if worker.connection is not None]
        for connection in (*connections, *self._strangers, self._listener):
            connection.close()

    def start(self, place: int, incarnation: int, now_s: float) -> NodeId:
        """Start a fresh worker at ``place``, under a name that nobody had before, which is returned."""
        node = NodeId(f"n{self._next_node}")
        self._next_node += 1
        host, port = self._listener.getsockname()
        order = WorkerOrder(
            agent=f"{host}:{port}", token=self._token, node=node, incarnation=incarnation, script=str(self._script),
            arguments=self._arguments, log=str(self._logs / f"{node}.txt"),
        )
        worker = Worker(self._processes.start(order, place), node, heard_s=now_s)
        self.workers[node] = worker
        self._selector.register(worker.process.pidfd, selectors.EVENT_READ, lambda: self._end(worker))
        return node

    def send(self, node: NodeId, message: ToWorker) -> None:
        """Queue, and write what the socket takes. Nothing is sent to those who are gone or have not come yet."""
        worker = self.workers.get(node)
        if worker is not None and worker.connection is not None:
            worker.unsent += framed(message)
            self._flush(worker)

    def kill(self, node: NodeId) -> None:
        """SIGKILL, if it lives. That it has ended is heard as ever."""
        if node in self.workers:
            self.workers[node].process.kill()

    def kill_all(self) -> None:
        for worker in self.workers.values():
            worker.process.kill()

    # Connections

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        frames = frames_from_worker()
        self._strangers.add(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._greet(connection, frames))

    def _greet(self, connection: socket.socket, frames: Frames) -> None:
        """The first message of a connection must be a hello with the run's token; anything else is hung up on."""
        try:
            data = connection.recv(1 << 16)
            messages = list(frames.feed(data)) if data else [None]
        except BlockingIOError:
            return
        except (OSError, RemoteProtocolError):
            messages = [None]
        if not messages:
            return
        hello, *rest = messages
        self._selector.unregister(connection)
        self._strangers.discard(connection)
        welcome = self._welcome()
        if not isinstance(hello, Hello) or not self._is_ours(hello) or welcome is None:
            connection.close()
            return
        frames.limit_bytes = MAX_FRAME_BYTES
        worker = self.workers[hello.node]
        worker.connection, worker.frames, worker.address = connection, frames, hello.address
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._serve(worker))
        self.send(worker.node, welcome)
        for message in rest:
            self._heard(worker, message)

    def _is_ours(self, hello: Hello) -> bool:
        return secrets.compare_digest(hello.token.encode(), self._token.encode()) and hello.node in self.workers

    def _serve(self, worker: Worker) -> None:
        if worker.unsent:
            self._flush(worker)
        if worker.connection is None:  # its end was heard in the same pass
            return
        try:
            data = worker.connection.recv(1 << 18)
            messages = list(worker.frames.feed(data))
        except BlockingIOError:
            return
        except (OSError, RemoteProtocolError) as error:
            data, messages = b"", []
            if isinstance(error, RemoteProtocolError):
                worker.process.kill()  # what speaks nonsense is fenced; the run goes on without it
        for message in messages:
            self._heard(worker, message)
        if not data:
            self._hang_up(worker)

    def _flush(self, worker: Worker) -> None:
        if worker.connection is None:
            return
        try:
            while worker.unsent:
                del worker.unsent[: worker.connection.send(worker.unsent)]
        except BlockingIOError:
            pass  # goes on when the socket can be written again
        except OSError:
            worker.unsent.clear()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.unsent else 0)
        self._selector.modify(worker.connection, events, lambda: self._serve(worker))

    def _hang_up(self, worker: Worker) -> None:
        if worker.connection is not None:
            self._selector.unregister(worker.connection)
            worker.connection.close()
            worker.connection = None

    def _end(self, worker: Worker) -> None:
        """A process has ended: known through its pidfd, in a moment."""
        self._selector.unregister(worker.process.pidfd)
        for message in self._last_words(worker):
            self._heard(worker, message)
        self._hang_up(worker)
        del self.workers[worker.node]
        self._ended(worker, worker.process.how_it_ended())

    def _last_words(self, worker: Worker) -> Iterator[Any]:
        """What the process sent before it ended, such as why."""
        if worker.connection is None:
            return
        with contextlib.suppress(OSError, RemoteProtocolError):
            while data := worker.connection.recv(1 << 18):
                yield from worker.frames.feed(data)
