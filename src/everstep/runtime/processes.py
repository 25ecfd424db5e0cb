"""Worker processes: forked from a server that has torch loaded, watched through pidfds, ended by pid and nothing else."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import types
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess

from everstep.runtime.entry import PRELOADED, WorkerOrder, run_worker


class WorkerProcess:
    """One started worker. ``pidfd`` becomes readable when it has ended."""

    def __init__(self, process: BaseProcess, place: int) -> None:
        assert process.pid is not None, "a started process has a pid"
        self._process, self.pid, self.place = process, process.pid, place
        try:
            self.pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:  # it has ended already, and says so through its sentinel
            self.pidfd = os.dup(process.sentinel)

    def kill(self) -> None:
        """SIGKILL through the pidfd, so that it can never reach another process."""
        with contextlib.suppress(ProcessLookupError, OSError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def how_it_ended(self) -> str:
        """``killed by SIGKILL`` or ``exit code 3``. Call once it has ended; releases the pidfd."""
        self._process.join(5)
        code = self._process.exitcode
        os.close(self.pidfd)
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"


def warm_up() -> None:
    """Start the fork server now, if it does not run yet: it loads torch while the agent loads what it needs itself."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
    resource_tracker.ensure_running()  # on its own, since starting it would unblock what is blocked below
    with _without_main(), _deaf_to_interrupts():
        forkserver.ensure_running()


class Processes:
    """Starts workers. All are forked from one server, which imports torch once and ends with this process."""

    def __init__(self) -> None:
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")

    def start(self, order: WorkerOrder, place: int) -> WorkerProcess:
        process = self._context.Process(target=run_worker, args=(order,), name=order.node, daemon=False)
        warm_up()
        with _without_main(), _deaf_to_interrupts():
            process.start()
        return WorkerProcess(process, place)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide ``__main__`` from multiprocessing, which would import the command line into every worker."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """The server inherits that SIGINT is blocked: Ctrl-C in the terminal is the agent's to answer."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
