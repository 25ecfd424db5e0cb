"""The agent: starts a host's workers, sees them die, and leads.

One thread and one loop: sockets of workers, pidfds, signals and deadlines in; the leader's machine decides; its effects are
carried out here. Planning happens here too, never in a worker. The agent never imports torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import selectors
import shlex
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from everstep.config import DetectorConfig, RunConfig, flat, from_mapping
from everstep.controller import INITIAL, ClusterFacts, Controller
from everstep.decision import Decision
from everstep.errors import CheckpointError, ConfigError, InfeasibleError, RemoteProtocolError
from everstep.planner.measure import from_bytes
from everstep.planner.policy import CheckpointInfo
from everstep.protocol import leader as lead
from everstep.protocol.codec import decode_to_leader, encode
from everstep.protocol.detector import FailureDetector
from everstep.protocol.messages import BoundaryReached, PlanOrdered, Report, StateReady, Stuck
from everstep.quantities import HostId, NodeId, node_number
from everstep.records import (
    CheckpointPassedOver,
    CheckpointWritten,
    PlanCommitted,
    Record,
    RolledBack,
    RunEnded,
    RunStarted,
    ViewCommitted,
    line,
)
from everstep.runtime import checkpoints
from everstep.runtime.control import (
    MAX_FRAME_BYTES,
    Beat,
    Carried,
    Declared,
    Failed,
    Finished,
    Frames,
    Hello,
    InstantReached,
    Proceed,
    Quit,
    Saved,
    SaveFailed,
    StepDone,
    ToWorker,
    Welcome,
    framed,
    frames_from_worker,
)
from everstep.runtime.entry import WorkerOrder
from everstep.runtime.injector import Injector
from everstep.runtime.kills import Kill, RandomKills
from everstep.runtime.processes import Processes, WorkerProcess
from everstep.runtime.store import LocalStore
from everstep.runtime.tracker import EventTracker
from everstep.view import Member

STOP_WITHIN_S = 30.0
"""After an orderly stop was asked for: how long workers may take to end the step and write a checkpoint."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, an order to end, a terminal that closed: the run ends after the step, with a checkpoint."""

START_WITHIN_S = 60.0
"""How long a worker may be silent until it has declared its job. Starting is slow, and loading may hold up its heartbeat."""

LEFT_ALONE_AFTER_S = 300.0
"""How long a worker that left the script's loop early waits for the others to leave it too, before it counts as lost."""

OVERSLEPT_S = 1.0
"""A pass of the loop that takes so much longer than it meant to says that this process itself stood still."""

STUCK_GRACE_S = 0.1
"""How long a lost link may turn out to be a death. On one host a death is known in milliseconds."""

_HOST = HostId("localhost")


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What the command line asks for."""

    script: Path
    arguments: tuple[str, ...] = ()
    workers: int = 2
    spares: int = 0
    directory: Path
    resume: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Configuration that wins over what the script's job says."""
    kills: tuple[Kill | RandomKills, ...] = ()
    on_record: Callable[[Record], None] = lambda record: None


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run ended: done, stopped or failed."""

    directory: Path
    outcome: str
    exit_code: int
    message: str = ""


def run(request: RunRequest) -> RunOutcome:
    """Carry out a run, from the first process to the last. Returns when all of its processes have ended.

    Raises:
        ConfigError: the request itself cannot be carried out.
    """
    directory = request.directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be the folder of a run: {error.strerror}") from error
    with _alone_in(directory), LocalStore(directory / "store.sqlite") as store, Agent(request, store) as agent:
        return agent.work()


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Two agents in one folder would write over one another's records. The lock goes with the process that holds it."""
    with (directory / "agent.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(f"{directory}: is being run by process {file.read() or '?'}; name another folder") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@dataclass
class Worker:
    """One worker as the agent knows it."""

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


class Agent:
    """Use as a context manager: inside, sockets are open and signals are heard."""

    def __init__(self, request: RunRequest, store: LocalStore) -> None:
        self._request, self._store = request, store
        self._config = from_mapping(request.settings, RunConfig(), "command line")
        self._processes = Processes()
        self._selector = selectors.DefaultSelector()
        self._token = secrets.token_hex(16)
        self._workers: dict[NodeId, Worker] = {}
        self._by_connection: dict[socket.socket, Worker] = {}
        self._strangers: set[socket.socket] = set()
        self._clock_start_s = time.monotonic()
        self._records: BinaryIO | None = None
        self._outcome: RunOutcome | None = None
        self._last_record: RunEnded | None = None
        self._declared: Declared | None = None
        self._failure: Failed | None = None
        self._detector: FailureDetector | None = None
        self._controller: Controller | None = None
        self._decision: Decision | None = None
        self._next_node = 0
        self._stop_deadline_s: float | None = None
        self._respawns: dict[int, int] = {}
        self._resumed_from: checkpoints.Checkpoint | None = None
        self._checkpoints = request.directory / "checkpoints"
        self._passed_over: set[str] = set()
        self._useless: set[str] = set()

    # Set up and tear down

    def __enter__(self) -> Agent:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        host, port = self._listener.getsockname()
        self._address = f"{host}:{port}"
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._old_wakeup = signal.set_wakeup_fd(self._wake_write.fileno())
        self._old_handlers = {number: signal.signal(number, lambda *_: None) for number in _STOP_SIGNALS}
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._signalled)
        (self._request.directory / "logs").mkdir(exist_ok=True)
        self._records = (self._request.directory / "agent.jsonl").open("ab", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.process.kill()
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        for connection in (*self._by_connection, *self._strangers, self._listener, self._wake_read, self._wake_write):
            connection.close()
        self._selector.close()
        if self._records is not None:
            self._records.close()

    def _now_s(self) -> float:
        return time.monotonic() - self._clock_start_s

    # The loop

    def work(self) -> RunOutcome:
        """Run to the end."""
        request = self._request
        if request.resume:
            self._find_checkpoint()
        self._lease = self._store.take_lease(f"agent {os.getpid()}")
        current = self._store.current()
        num_places = request.workers + request.spares
        self._leader = lead.Leader(
            token=self._lease, num_members=num_places, newest_view=current.number if current else 0,
            stuck_grace_s=STUCK_GRACE_S,
        )
        self._injector = Injector(request.kills, seed=len(request.kills))
        self._tracker = EventTracker(self._record)
        for place in range(num_places):
            self._start(place)
        while self._outcome is None or self._workers:
            wait_s = self._wait_s()
            before_s = self._now_s()
            for key, _ in self._selector.select(wait_s):
                key.data(key.fileobj)
            if self._now_s() - before_s > wait_s + OVERSLEPT_S:
                self._forgive_silence()
            self._check_deadlines()
        if self._last_record is not None:  # after what workers said while they ended, such as that a checkpoint is written
            self._record(msgspec.structs.replace(self._last_record, time_s=self._now_s()))
        return self._outcome

    def _wait_s(self) -> float:
        now_s = self._now_s()
        deadlines = [
            self._leader.next_deadline_s(), self._stop_deadline_s, self._injector.next_deadline_s(),
            self._detector.next_deadline_s() if self._detector else None,
        ]
        waits = [max(0.0, deadline_s - now_s) for deadline_s in deadlines if deadline_s is not None]
        return min([1.0, *waits])

    def _forgive_silence(self) -> None:
        """This process itself was stopped, or busy for long: silence in that time says nothing about workers."""
        for worker in self._workers.values():
            self._hear(worker)

    def _hear(self, worker: Worker) -> None:
        worker.heard_s = self._now_s()
        if self._detector and worker.declared:
            self._detector.heard(worker.node, worker.heard_s)

    def _check_deadlines(self) -> None:
        now_s = self._now_s()
        deadline_s = self._leader.next_deadline_s()
        if deadline_s is not None and now_s >= deadline_s:
            self._handle(lead.Ticked())
        for node in self._detector.suspects(now_s) if self._detector else ():
            if node in self._workers:
                # A silent process may only be stopped; fenced, it cannot come back. Its pidfd then says that it is gone.
                self._tracker.suspected(node, now_s)
                self._workers[node].process.kill()
            self._detector.forget(node) if self._detector else None
        for worker in self._workers.values():
            never_started = not worker.declared and now_s - worker.heard_s > START_WITHIN_S
            left_alone = worker.left_s is not None and now_s - worker.left_s > LEFT_ALONE_AFTER_S
            if never_started or left_alone:
                worker.process.kill()
        if self._injector.next_deadline_s() is not None:
            self._inject(self._injector.due(now_s, self._living()), None)
        if self._stop_deadline_s is not None and now_s >= self._stop_deadline_s:
            self._stop_deadline_s = None
            self._end("stopped", 1, f"workers did not stop within {STOP_WITHIN_S:.0f} s and were ended")
            self._kill_all()

    def _record(self, record: Record) -> None:
        assert self._records is not None, "the agent's file is open while it leads"
        self._records.write(line(record))
        self._request.on_record(record)

    # Workers

    def _start(self, place: int) -> None:
        node = NodeId(f"n{self._next_node}")
        self._next_node += 1
        order = WorkerOrder(
            agent=self._address, token=self._token, node=node, incarnation=self._lease,
            script=str(self._request.script), arguments=self._request.arguments,
            log=str(self._request.directory / "logs" / f"{node}.txt"),
        )
        worker = Worker(self._processes.start(order, place), node, heard_s=self._now_s())
        self._workers[node] = worker
        self._selector.register(worker.process.pidfd, selectors.EVENT_READ, lambda _: self._ended(worker))

    def _living(self) -> dict[NodeId, int]:
        """Members of the present view that are alive, and their places."""
        view = self._leader.view
        members = view.nodes if view else ()
        return {node: self._workers[node].place for node in members if node in self._workers}

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        frames = frames_from_worker()
        self._strangers.add(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._greet(connection, frames))

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
        if not isinstance(hello, Hello) or not self._is_ours(hello):
            connection.close()
            return
        frames.limit_bytes = MAX_FRAME_BYTES
        worker = self._workers[hello.node]
        if self._outcome is not None:  # the run ended while this one was starting
            connection.close()
            worker.process.kill()
            return
        worker.connection, worker.frames, worker.address = connection, frames, hello.address
        self._by_connection[connection] = worker
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._read(worker))
        self._send(worker, Welcome(
            directory=str(self._request.directory.resolve()), settings=dict(self._request.settings),
            instants=self._injector.instants(),
        ))
        for message in rest:
            self._heard(worker, message)

    def _is_ours(self, hello: Hello) -> bool:
        return secrets.compare_digest(hello.token.encode(), self._token.encode()) and hello.node in self._workers

    def _read(self, worker: Worker) -> None:
        assert worker.connection is not None, "read after the greeting"
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

    def _hang_up(self, worker: Worker) -> None:
        if worker.connection is not None:
            self._selector.unregister(worker.connection)
            self._by_connection.pop(worker.connection, None)
            worker.connection.close()
            worker.connection = None

    def _send(self, worker: Worker, message: ToWorker) -> None:
        """Queue, and write what the socket takes: a frozen worker must not block the agent."""
        if worker.connection is None:
            return
        worker.unsent += framed(message)
        self._flush(worker)

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
        self._selector.modify(worker.connection, events, lambda _: self._serve(worker))

    def _serve(self, worker: Worker) -> None:
        if worker.unsent:
            self._flush(worker)
        self._read(worker)

    def _ended(self, worker: Worker) -> None:
        """A process has ended: noticed through its pidfd, in a moment."""
        self._selector.unregister(worker.process.pidfd)
        for message in self._last_words(worker):
            self._heard(worker, message)
        self._hang_up(worker)
        how = worker.process.how_it_ended()
        del self._workers[worker.node]
        if self._detector:
            self._detector.forget(worker.node)
        if self._outcome is not None:
            return
        self._tracker.lost(worker.node, worker.phase, self._now_s())
        self._handle(lead.NodeLost(worker.node, how))
        may_replace = self._outcome is None and self._config.respawn and self._leader.view is not None
        if may_replace and self._respawns_left(worker.place):
            self._start(worker.place)

    def _respawns_left(self, place: int) -> bool:
        """A place whose process dies again and again is given up, so that a broken machine cannot keep a run busy."""
        self._respawns[place] = self._respawns.get(place, 0) + 1
        return self._respawns[place] <= 10

    def _last_words(self, worker: Worker) -> Iterator[Any]:
        """What the process sent before it ended, such as why."""
        if worker.connection is None:
            return
        with contextlib.suppress(OSError, RemoteProtocolError):
            while data := worker.connection.recv(1 << 18):
                yield from worker.frames.feed(data)

    # What workers say

    def _heard(self, worker: Worker, message: Any) -> None:
        now_s = self._now_s()
        self._hear(worker)
        match message:
            case Carried(data):
                self._reported(worker, data)
            case Declared():
                self._declare(worker, message)
            case Beat(step, phase):
                worker.phase = phase
            case StepDone():
                self._step_done(message, now_s)
            case InstantReached(phase, step):
                worker.phase = phase
                victims = self._injector.reached(worker.node, phase, step, self._living(), self._lost_layers)
                self._inject(victims, phase)
                self._send(worker, Proceed())
            case Failed():
                self._failed(worker, message)
            case Finished():
                worker.finished = message
                is_early = self._declared is not None and message.step < self._declared.until and not message.stopped
                worker.left_s = now_s if is_early else None
                self._end_if_all_finished()
            case Saved(step, view, path):
                self._record(CheckpointWritten(time_s=now_s, step=step, view=view, path=path))
            case SaveFailed(step, why):
                folder = checkpoints.folder_of(self._checkpoints, step, self._leader.view.number if self._leader.view else 0)
                self._record(CheckpointPassedOver(time_s=now_s, path=str(folder), why=f"worker {worker.place}: {why}"))

    def _reported(self, worker: Worker, data: bytes) -> None:
        try:
            message = decode_to_leader(data, worker.node)
        except RemoteProtocolError:
            worker.process.kill()
            return
        match message:
            case Report():
                self._handle(lead.ReportCame(message))
            case StateReady():
                self._handle(lead.ReadyCame(message))
            case BoundaryReached():
                self._handle(lead.BoundaryCame(message))
            case Stuck():
                self._handle(lead.StuckCame(message))

    def _declare(self, worker: Worker, declared: Declared) -> None:
        if self._declared is None:
            self._declared = declared
            self._config = declared.config
            detector = declared.config.detector
            self._detector = FailureDetector(DetectorConfig(
                heartbeat_interval_s=detector.heartbeat_interval_s, suspect_after_s=detector.suspect_after_s,
            ))
            self._started(declared)
        elif (declared.digest, declared.until) != (self._declared.digest, self._declared.until):
            self._end("failed", 2, (
                f"worker {worker.place} declares another job than the others: the script must give the same layers, data, seed "
                "and number of steps wherever it runs (a model that is made before the job needs a fixed torch.manual_seed)"
            ))
            self._kill_all()
            return
        worker.declared = True
        self._handle(lead.NodeReady(
            Member(worker.node, self._lease, _HOST, worker.place, worker.address)
        ))

    def _started(self, declared: Declared) -> None:
        request = self._request
        self._tracker.until = declared.until
        self._injector.begin(declared.until)
        cores = len(os.sched_getaffinity(0))
        self._controller = Controller(declared.config, ClusterFacts(host_cores={_HOST: cores}), started_s=self._now_s())
        self._record(RunStarted(
            time_s=self._now_s(), script=str(request.script), arguments=request.arguments, workers=request.workers,
            spares=request.spares, seed=declared.seed, numerics=declared.config.engine.numerics, until=declared.until,
            dataset_samples=declared.dataset_samples, batch=declared.batch, micro=declared.micro, layers=declared.layers,
            uses=declared.uses, first_step=self._resumed_from.step if self._resumed_from else 0,
        ))

    def _step_done(self, done: StepDone, now_s: float) -> None:
        self._handle(lead.StepHeard(done.step))
        for flag in done.flags:
            self._handle(lead.FlagHeld(flag))
        if not self._tracker.step_done(done.step, done.attempt, done.loss, now_s):
            return
        assert self._controller is not None and self._declared is not None, "steps come after the start"
        if self._tracker.last_step_s is not None and done.samples == self._declared.batch:
            self._controller.observe(done.times, self._tracker.last_step_s)
        self._injector.step_begins(done.step + 1, now_s, self._tracker.median_step_s())

    def _failed(self, worker: Worker, failed: Failed) -> None:
        """A bug is not a machine failure: told once, from the worker that had it, and not retried."""
        if self._failure is None:
            self._failure = failed
            if self._outcome is not None and self._outcome.outcome == "done":
                self._outcome = None  # trained to the end, but what the script does behind its loop belongs to the run
            where = f"worker {worker.place} ({worker.node})"
            if failed.kind == "config":
                text = failed.message
            elif failed.traceback:
                text = f"{where}, {failed.message}:\n{failed.traceback.rstrip()}"
            else:
                text = f"{where}: {failed.message}"
            self._end("failed", 2 if failed.kind == "config" else 1, text)
        self._quit_all("another worker failed")

    # The leader's effects

    def _handle(self, event: lead.Event) -> None:
        if self._outcome is not None:
            return
        for effect in self._leader.handle(event, self._now_s()):
            self._perform(effect)

    def _perform(self, effect: lead.Effect) -> None:
        match effect:
            case lead.SwapView(expected, view, cause):
                won = self._store.swap_view(expected, view, self._lease)
                if won:
                    self._record(ViewCommitted(time_s=self._now_s(), view=view, cause=cause))
                    self._tracker.view_changed(view, cause, self._now_s())
                self._handle(lead.SwapAnswered(view.number, won, self._store.current()))
            case lead.SendMember(target, message):
                if target in self._workers:
                    self._send(self._workers[target], Carried(encode(message)))
            case lead.ComputePlan():
                self._compute(effect)
            case lead.WritePlan(order):
                won = self._store.write_plan(order, self._lease)
                if won:
                    self._planned(order)
                self._handle(lead.PlanWritten(order.view, won))
            case lead.Fence(node, _):
                if node in self._workers:
                    self._workers[node].process.kill()
            case lead.EndRun(reason):
                self._end("failed", 1, self._with_advice(reason))
                self._quit_all(reason)

    def _compute(self, wanted: lead.ComputePlan) -> None:
        assert self._controller is not None, "a plan is wanted after workers have declared the job"
        began_s = time.monotonic()
        before = self._controller.plan
        order, decision, reason = self._asked(self._controller, wanted)
        # A checkpoint is read through only when it is to be used: that takes long, and mostly it is not.
        while order is not None and order.restore is not None and self._is_damaged(order.restore):
            self._controller.plan = before
            order, decision, reason = self._asked(self._controller, wanted)
        if decision is not None:
            decide_s = time.monotonic() - began_s
            self._decision = replace(decision, decide_s=decide_s)
            self._tracker.decided(self._decision, decide_s)
        self._handle(lead.PlanAnswered(wanted.view.number, order, reason))

    def _asked(
        self, controller: Controller, wanted: lead.ComputePlan,
    ) -> tuple[PlanOrdered | None, Decision | None, str]:
        try:
            if controller.plan is None:
                order, decision = controller.start(
                    wanted.view, self._workload(), self._info(self._resumed_from), token=self._lease,
                    num_spares=self._request.spares, rollbacks=wanted.rollbacks,
                )
                return order, decision, ""
            return controller.answer(
                wanted.view, wanted.resolution, wanted.lost, wanted.joined, wanted.cause, self._now_s(), self._lease,
                self._newest(), wanted.rollbacks,
            )
        except InfeasibleError as error:
            return None, None, str(error)

    def _planned(self, order: PlanOrdered) -> None:
        assert self._decision is not None, "an order comes with its decision"
        now_s = self._now_s()
        self._tracker.planned(now_s)
        if order.restore is not None and self._tracker.steps > order.step:
            self._record(RolledBack(time_s=now_s, view=order.view, from_step=self._tracker.steps, to_step=order.step))
            self._tracker.rolled_back(order.step)
        self._record(PlanCommitted(
            time_s=now_s, view=order.view, step=order.step, attempt=order.attempt, policy=self._decision.candidate.policy,
            plan=order.plan, decision=self._decision,
        ))
        for worker in self._workers.values():
            worker.finished = None

    def _workload(self) -> Any:
        assert self._declared is not None, "declared before it is planned for"
        declared = self._declared
        return from_bytes(
            declared.layers, {unit.name: unit for unit in declared.units},
            num_micro_batches=declared.batch // declared.micro, micro_batch_samples=declared.micro,
        )

    def _lost_layers(self, lost: frozenset[NodeId]) -> tuple[int, ...]:
        plan = self._controller.plan if self._controller else None
        return plan.lost_layers(lost | (frozenset(plan.nodes) - frozenset(self._living()))) if plan else ()

    # Checkpoints

    def _find_checkpoint(self) -> None:
        found, damaged = checkpoints.newest_usable(self._checkpoints)
        if found is None:
            said = f"; {damaged[0]}" if damaged else ""
            raise CheckpointError(
                f"{self._request.directory}: no checkpoint to resume from{said}; without --resume it starts from the beginning",
                str(self._checkpoints),
            )
        self._resumed_from = found
        self._pass_over(damaged)

    def _newest(self) -> CheckpointInfo | None:
        """The newest checkpoint that is complete, and not known to be damaged."""
        found = [c for c in checkpoints.complete(self._checkpoints) if str(c.path.resolve()) not in self._useless]
        return self._info(found[0] if found else None)

    def _is_damaged(self, path: str) -> bool:
        """Read the checkpoint through; a damaged one is not proposed again."""
        if path == INITIAL or (self._resumed_from is not None and path == str(self._resumed_from.path.resolve())):
            return False  # nothing to read, or read through when the run was resumed
        try:
            checkpoints.verify(checkpoints.read(Path(path)))
        except CheckpointError as error:
            self._useless.add(path)
            self._pass_over([error])
            return True
        return False

    def _pass_over(self, damaged: list[CheckpointError]) -> None:
        """Say loudly, once, that a checkpoint is of no use."""
        for error in damaged:
            if error.path not in self._passed_over:
                self._passed_over.add(error.path)
                self._record(CheckpointPassedOver(time_s=self._now_s(), path=error.path, why=str(error)))

    @staticmethod
    def _info(found: checkpoints.Checkpoint | None) -> CheckpointInfo | None:
        return CheckpointInfo(step=found.step, path=str(found.path.resolve())) if found else None

    def _with_advice(self, reason: str) -> str:
        if self._tracker.steps == 0:
            return reason
        newest = self._newest()
        if newest is None:
            return f"{reason}; no checkpoint was written"
        request = self._request
        words = ["everstep", "run", "--resume", "--dir", str(request.directory), "--workers", str(request.workers)]
        words += ["--spares", str(request.spares)] if request.spares else []
        for key, value in flat(request.settings).items():
            words += ["--set", f"{key}={value}"]
        words += [str(request.script), *(["--", *request.arguments] if request.arguments else [])]
        command = shlex.join(words)
        return f"{reason}; the newest checkpoint is of step {newest.step}; go on from it with: {command}"

    # Kills

    def _inject(self, victims: tuple[NodeId, ...], phase: str | None) -> None:
        for node in victims:
            if node in self._workers:
                self._tracker.killed(node, phase, self._now_s())
                self._workers[node].process.kill()

    # The end

    def _signalled(self, wake: socket.socket) -> None:
        numbers = wake.recv(64)
        if self._outcome is None and self._stop_deadline_s is None and self._leader.view is not None:
            self._stop_deadline_s = self._now_s() + STOP_WITHIN_S
            self._handle(lead.FlagWanted("stop"))
        elif numbers:
            self._end("stopped", 130, "stopped at once")
            self._kill_all()

    def _end_if_all_finished(self) -> None:
        living = self._living()
        view = self._leader.view
        finished = [self._workers[node].finished for node in living]
        if not finished or view is None or any(done is None or done.view != view.number for done in finished):
            return
        stopped = any(done is not None and done.stopped for done in finished)
        hashes: dict[str, dict[str, str]] = {}
        for node in sorted(living, key=node_number):
            done = self._workers[node].finished
            for unit, digest in (done.digests if done else {}).items():
                hashes.setdefault(unit, {})[node] = digest
        steps = max(done.step for done in finished if done is not None)
        newest = self._newest() if stopped else None
        message = self._with_advice(f"stopped after step {steps}") if newest else self._injector.never_struck()
        self._end("stopped" if stopped else "done", 130 if stopped else 0, message, hashes, steps)
        self._quit_all("the run is over")

    def _end(
        self, outcome: str, code: int, message: str, hashes: dict[str, dict[str, str]] | None = None, steps: int | None = None,
    ) -> None:
        if self._outcome is not None:
            return
        self._tracker.close(self._now_s())
        self._outcome = RunOutcome(directory=self._request.directory, outcome=outcome, exit_code=code, message=message)
        if self._declared is not None:
            self._last_record = RunEnded(
                time_s=self._now_s(), outcome=outcome, steps=self._tracker.steps if steps is None else steps,
                message=message, state_hash=hashes or {},
            )

    def _quit_all(self, reason: str) -> None:
        is_well = self._outcome is not None and self._outcome.outcome in ("done", "stopped")
        for worker in self._workers.values():
            if worker.declared:
                self._send(worker, Quit(reason, is_well))
            else:
                worker.process.kill()  # nothing that it would miss, and perhaps not even a connection
        # What a script does after its loop may take as long as it likes; after a failure nothing is waited for.
        is_done = self._outcome is not None and self._outcome.outcome == "done"
        self._stop_deadline_s = None if is_done else self._now_s() + STOP_WITHIN_S

    def _kill_all(self) -> None:
        for worker in self._workers.values():
            worker.process.kill()
