"""The life of a worker process: say hello, run the script, hand its job to a session, tell the agent how it ended.

A worker writes its output to a file, never into a pipe of the agent's: a reader that dies would raise in the user's
``print``. An exception of the user's code is told once and ends the run; any other end of the process, with whatever exit
code, is a lost worker.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch

from everstep.config import DetectorConfig, RunConfig, from_mapping
from everstep.engine.links import Mailbox
from everstep.engine.tcp import TcpLinks
from everstep.errors import CheckpointError, ConfigError, EverstepError, RemoteProtocolError, UserCodeError
from everstep.quantities import NodeId
from everstep.runtime.control import (
    Beat,
    Carried,
    Failed,
    FromWorker,
    Hello,
    InstantReached,
    Proceed,
    Quit,
    Welcome,
    connect,
    framed,
    frames_to_worker,
)
from everstep.runtime.entry import WorkerOrder
from everstep.runtime.job import CONTEXT, Declaration, Session
from everstep.runtime.session import RunOver, WorkerSession


def main(order: WorkerOrder) -> None:
    """Run in a fresh process; never returns."""
    # Ctrl-C and a closing terminal reach the whole foreground group; the agent alone answers them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _write_to(order.log)
    worker = Worker(order)
    try:
        code = worker.run()
    except BaseException:
        traceback.print_exc()
        code = 70
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Without the interpreter's own shutdown: threads that wait on sockets would hold it up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _write_to(path: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115 - for the life of the process
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115


class Worker:
    """The control connection, and the session once the script has opened one."""

    def __init__(self, order: WorkerOrder) -> None:
        self._order = order
        self._mailbox = Mailbox()
        self._links = TcpLinks(order.node, self._mailbox, order.token, self._link_lost)
        self._connection: socket.socket | None = None
        self._send_lock = threading.Lock()
        self._welcomed = threading.Event()
        self._proceed = threading.Event()
        self._welcome: Welcome | None = None
        self._session: WorkerSession | None = None
        self._waiting: list[bytes] = []
        self._over: str | None = None
        self._orphan_after_s = RunConfig().orphan_after_s
        self._beat_every_s = DetectorConfig().heartbeat_interval_s

    def run(self) -> int:
        """The exit code of the process."""
        order = self._order
        address = self._links.open()
        self._connection = connect(order.agent)
        self.send(Hello(
            token=order.token, node=order.node, pid=os.getpid(), incarnation=order.incarnation, address=address,
        ))
        threading.Thread(target=self._listen, args=(self._connection,), daemon=True, name="control").start()
        if not self._welcomed.wait(60) or self._welcome is None:
            return 71
        threading.Thread(target=self._beat, daemon=True, name="beat").start()
        CONTEXT.open = self._open
        sys.argv = [order.script, *order.arguments]
        sys.path.insert(0, str(Path(order.script).resolve().parent))
        try:
            runpy.run_path(order.script, run_name="__main__")
        except RunOver:
            return 0
        except SystemExit as error:
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
            if CONTEXT.opened or error.code in (None, 0):
                return error.code if isinstance(error.code, int) else int(error.code is not None)
            self.send(Failed(kind="user", message=f"{order.script} ended with exit code {error.code} before it trained"))
            return 1
        except BaseException as error:
            self._fail(error)
            return 1
        if not CONTEXT.opened:
            self.send(Failed(kind="config", message=(
                f"{order.script} has no job: it ended without `for step in job.steps(until=…)`; "
                "declare an everstep.Job and loop over its steps"
            )))
            return 1
        if self._session is not None:
            self._session.leave()
        return 0

    def _fail(self, error: BaseException) -> None:
        """Tell the agent, once. With a traceback the message only says where, since the traceback says what."""
        traceback.print_exception(error)  # into this worker's log, whatever becomes of the message
        if isinstance(error, UserCodeError) and error.__cause__ is not None:
            where = f"in {error.layer}, step {error.step}, micro-batch {error.micro_batch}"
            self.send(Failed(kind="user", message=where, traceback=_traceback_of(error.__cause__)))
        elif isinstance(error, ConfigError | CheckpointError | UserCodeError):
            self.send(Failed(kind="user" if isinstance(error, UserCodeError) else "config", message=str(error)))
        elif isinstance(error, EverstepError):
            self.send(Failed(kind="internal", message=f"a bug of ours: {error}", traceback=traceback.format_exc()))
        else:
            self.send(Failed(kind="user", message="in the script", traceback=_traceback_of(error)))

    # The script's session

    def _open(self, declaration: Declaration) -> Session:
        assert self._welcome is not None, "the script runs after the welcome"
        if self._session is not None:
            raise ConfigError("a script trains one job in a run: job.steps() was called twice")
        config = from_mapping(self._welcome.settings, declaration.config, "command line")
        declaration = Declaration(**{**declaration.__dict__, "config": config})
        torch.set_num_threads(config.engine.threads)
        directory = Path(self._welcome.directory)
        session = WorkerSession(
            node=self._order.node, incarnation=self._order.incarnation, declaration=declaration, links=self._links,
            mailbox=self._mailbox, directory=directory, send=self.send, instant=self._instant,
        )
        with self._send_lock:
            waiting, self._waiting, self._session = self._waiting, [], session
        for data in waiting:
            session.ordered(data)
        self._beat_every_s = config.detector.heartbeat_interval_s
        self._orphan_after_s = config.orphan_after_s
        return session

    def _instant(self, phase: str, step: int) -> None:
        """Stand still at an armed instant until the agent says what comes of it; mostly nothing is armed."""
        assert self._welcome is not None, "steps come after the welcome"
        for armed_phase, armed_step in self._welcome.instants:
            at_or_after = phase in ("switch", "recover")
            if phase == armed_phase and (step >= armed_step if at_or_after else step == armed_step):
                self._proceed.clear()
                self.send(InstantReached(phase, step))
                self._proceed.wait(30)
                return

    def _beat(self) -> None:
        stop = threading.Event()
        while not stop.wait(self._beat_every_s):
            session = self._session
            self.send(Beat(session.step, session.phase) if session is not None else Beat(-1, "start"))

    def _link_lost(self, peer: NodeId, what: str) -> None:
        if self._session is not None and self._over is None:
            self._session.link_lost(peer, what)

    # The control connection

    def send(self, message: FromWorker) -> None:
        """To the agent; without one there is nobody to tell."""
        if self._connection is not None:
            try:
                with self._send_lock:
                    self._connection.sendall(framed(message))
            except OSError:
                pass  # the reader of this connection notices, and acts on it

    def _listen(self, connection: socket.socket) -> None:
        frames = frames_to_worker()
        try:
            while data := connection.recv(1 << 16):
                for message in frames.feed(data):
                    self._heard(message)
        except (OSError, RemoteProtocolError):
            pass  # as good as gone
        except BaseException:
            self.send(Failed(kind="internal", message="the control thread failed", traceback=traceback.format_exc()))
            _leave(70)
        self._agent_gone()

    def _heard(self, message: Any) -> None:
        match message:
            case Welcome():
                self._welcome = message
                self._welcomed.set()
            case Proceed():
                self._proceed.set()
            case Carried(data):
                with self._send_lock:
                    session = self._session
                    if session is None:
                        self._waiting.append(data)
                if session is not None:
                    session.ordered(data)
            case Quit(reason):
                self._over = reason
                if self._session is None:
                    _leave(0)
                self._session.quit(message)

    def _agent_gone(self) -> None:
        """End the step, write a checkpoint, exit: within ``orphan_after_s``, or without a checkpoint."""
        if self._over is not None:
            return
        if self._session is None:
            _leave(72)
        print("the agent is gone: ending after this step with a checkpoint", file=sys.stderr, flush=True)
        self._proceed.set()
        self._session.agent_gone()
        threading.Timer(self._orphan_after_s, lambda: _leave(72)).start()


def _traceback_of(error: BaseException) -> str:
    """The traceback as its author expects it: without frames of this package and of what runs the script."""
    here = str(Path(__file__).resolve().parent.parent)
    told = traceback.TracebackException.from_exception(error)
    frames = [f for f in told.stack if not f.filename.startswith((here, "<frozen")) and "runpy" not in f.filename]
    told.stack = traceback.StackSummary.from_list(frames or list(told.stack))
    return "".join(told.format())
