"""The agent: starts a host's workers, sees them die, and leads.

One thread and one loop: sockets of workers, pidfds, signals and deadlines in; the leader's machine decides; its effects are
carried out here. Planning happens here too, never in a worker. The agent never imports torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
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
from everstep.controller import ClusterFacts, Controller
from everstep.decision import Decision
from everstep.errors import CheckpointError, ConfigError, InfeasibleError, RemoteProtocolError
from everstep.planner.policies.situation import CheckpointInfo
from everstep.planner.step.measure import from_bytes
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
    Beat,
    Carried,
    Declared,
    Failed,
    Finished,
    InstantReached,
    Proceed,
    Quit,
    Saved,
    SaveFailed,
    StepDone,
    Welcome,
)
from everstep.runtime.crew import Crew, Worker
from everstep.runtime.injector import Injector
from everstep.runtime.kills import Kill, RandomKills
from everstep.runtime.replacements import Replacements
from everstep.runtime.shelf import Shelf
from everstep.runtime.store import LocalStore
from everstep.runtime.tracker import EventTracker
from everstep.view import Member

STOP_WITHIN_S = 30.0
"""After an orderly stop was asked for: how long workers may take to end the step and write a checkpoint."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, an order to end, a terminal that closed: the run ends after the step, with a checkpoint."""

THINK_EVERY_S, THINK_AGAIN_S = 0.2, 2.0
"""Between two answers worked out ahead, and once there is nothing left to think about. Each takes some milliseconds of a core
that workers could use."""

START_WITHIN_S = 60.0
"""How long a worker may be silent until it has declared its job. Starting is slow, and loading may hold up its heartbeat."""

LEFT_ALONE_AFTER_S = 300.0
"""How long a worker that left the script's loop early waits for the others to leave it too, before it counts as lost."""

OVERSLEPT_S = 1.0
"""A pass of the loop that takes so much longer than it meant to says that this process itself stood still."""

STUCK_GRACE_S = 0.1
"""How long a lost link may turn out to be a death. On one host a death is known in milliseconds."""

WAITED_TIMES, WAITED_BESIDES_S = 1.5, 0.2
"""A plan is held back for a replacement by so much longer than it usually takes to come."""

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


class Agent:
    """Use as a context manager: inside, sockets are open and signals are heard."""

    def __init__(self, request: RunRequest, store: LocalStore) -> None:
        self._request, self._store = request, store
        self._config = from_mapping(request.settings, RunConfig(), "command line")
        self._selector = selectors.DefaultSelector()
        self._crew = Crew(
            self._selector, script=request.script, arguments=request.arguments, logs=request.directory / "logs",
            welcome=self._welcome, heard=self._heard, ended=self._ended,
        )
        self._shelf = Shelf(request.directory / "checkpoints", self._pass_over)
        self._injector = Injector(request.kills, seed=len(request.kills))
        self._tracker = EventTracker(self._record)
        self._clock_start_s = time.monotonic()
        self._records: BinaryIO | None = None
        self._outcome: RunOutcome | None = None
        self._last_record: RunEnded | None = None
        self._declared: Declared | None = None
        self._failure: Failed | None = None
        self._detector: FailureDetector | None = None
        self._controller: Controller | None = None
        self._decision: Decision | None = None
        self._resumed_from: CheckpointInfo | None = None
        self._stop_deadline_s: float | None = None
        self._respawns: dict[int, int] = {}
        self._replacements = Replacements()
        self._waited_in = 0  # the last view in which an answer was held back
        self._think_at_s = 0.0

    # Set up and tear down

    def __enter__(self) -> Agent:
        self._records = (self._request.directory / "agent.jsonl").open("ab", buffering=0)
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._old_wakeup = signal.set_wakeup_fd(self._wake_write.fileno())
        self._old_handlers = {number: signal.signal(number, lambda *_: None) for number in _STOP_SIGNALS}
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._signalled)
        self._crew.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self._crew.__exit__(*failure)
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._wake_read.close()
        self._wake_write.close()
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
            self._resumed_from = self._to_resume_from()
        self._lease = self._store.take_lease(f"agent {os.getpid()}")
        current = self._store.current()
        num_places = request.workers + request.spares
        self._leader = lead.Leader(
            token=self._lease, num_members=num_places, newest_view=current.number if current else 0,
            stuck_grace_s=STUCK_GRACE_S,
        )
        for place in range(num_places):
            self._crew.start(place, self._lease, self._now_s())
        while self._outcome is None or self._crew.workers:
            wait_s = self._wait_s()
            before_s = self._now_s()
            for key, _ in self._selector.select(wait_s):
                key.data()
            if self._now_s() - before_s > wait_s + OVERSLEPT_S:
                self._forgive_silence()
            self._check_deadlines()
            self._think_ahead()
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

    def _think_ahead(self) -> None:
        """While training goes on: work out what to do if one more node is lost, one answer at a time and seldom; after that
        look for a better schedule."""
        now_s = self._now_s()
        is_quiet = self._leader.phase is lead.Phase.TRAINING and self._controller is not None and self._outcome is None
        if is_quiet and now_s >= self._think_at_s and self._tracker.median_step_s() > 0:
            assert self._controller is not None, "looked at just now"
            controller = self._controller
            self._think_at_s = now_s + (THINK_EVERY_S if controller.think() or controller.refine() else THINK_AGAIN_S)
            if controller.wish:
                self._handle(lead.PlanWanted(controller.wish))

    def _forgive_silence(self) -> None:
        """This process itself was stopped, or busy for long: silence in that time says nothing about workers."""
        for worker in self._crew.workers.values():
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
            # A silent process may only be stopped; fenced, it cannot come back. Its pidfd then says that it is gone.
            self._tracker.suspected(node, now_s)
            self._crew.kill(node)
            self._detector.forget(node) if self._detector else None
        for worker in self._crew.workers.values():
            never_started = not worker.declared and now_s - worker.heard_s > START_WITHIN_S
            left_alone = worker.left_s is not None and now_s - worker.left_s > LEFT_ALONE_AFTER_S
            if never_started or left_alone:
                worker.process.kill()
        if self._injector.next_deadline_s() is not None:
            self._inject(self._injector.due(now_s, self._living()), None)
        if self._stop_deadline_s is not None and now_s >= self._stop_deadline_s:
            self._stop_deadline_s = None
            self._end("stopped", 1, f"workers did not stop within {STOP_WITHIN_S:.0f} s and were ended")
            self._crew.kill_all()

    def _record(self, record: Record) -> None:
        assert self._records is not None, "the agent's file is open while it leads"
        self._records.write(line(record))
        self._request.on_record(record)

    # Workers

    def _welcome(self) -> Welcome | None:
        if self._outcome is not None:
            return None  # the run ended while this one was starting
        return Welcome(
            directory=str(self._request.directory.resolve()), settings=dict(self._request.settings),
            instants=self._injector.instants(),
        )

    def _living(self) -> dict[NodeId, int]:
        """Members of the present view that are alive, and their places."""
        view = self._leader.view
        members = view.nodes if view else ()
        return {node: self._crew.workers[node].place for node in members if node in self._crew.workers}

    def _ended(self, worker: Worker, how: str) -> None:
        if self._detector:
            self._detector.forget(worker.node)
        if self._outcome is not None:
            return
        self._replacements.gone(worker.node)
        self._tracker.lost(worker.node, worker.phase, self._now_s())
        self._handle(lead.NodeLost(worker.node, how))
        may_replace = self._outcome is None and self._config.respawn and self._leader.view is not None
        if may_replace and self._respawns_left(worker.place):
            self._replacements.began(self._crew.start(worker.place, self._lease, self._now_s()), self._now_s())

    def _respawns_left(self, place: int) -> bool:
        """A place whose process dies again and again is given up, so that a broken machine cannot keep a run busy."""
        self._respawns[place] = self._respawns.get(place, 0) + 1
        return self._respawns[place] <= 10

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
                self._crew.send(worker.node, Proceed())
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
                folder = checkpoints.folder_of(self._shelf.root, step, self._leader.view.number if self._leader.view else 0)
                self._pass_over(str(folder), f"worker {worker.place}: {why}")

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
            self._crew.kill_all()
            return
        worker.declared = True
        self._replacements.ready(worker.node, self._now_s())
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
                self._crew.send(target, Carried(encode(message)))
            case lead.ComputePlan():
                self._compute(effect)
            case lead.WritePlan(order):
                won = self._store.write_plan(order, self._lease)
                if won:
                    self._planned(order)
                self._handle(lead.PlanWritten(order.view, won))
            case lead.Fence(node, _):
                self._crew.kill(node)
            case lead.EndRun(reason):
                self._end("failed", 1, self._with_advice(reason))
                self._quit_all(reason)

    def _compute(self, wanted: lead.ComputePlan) -> None:
        assert self._controller is not None, "a plan is wanted after workers have declared the job"
        began_s = time.monotonic()
        before = self._controller.plan
        # In one view a plan is held back once: who has not come by then is not waited for.
        expected = {} if wanted.view.number == self._waited_in else self._replacements.expected(self._now_s())
        order, decision, reason = self._asked(self._controller, wanted, expected)
        # A checkpoint is read through only when it is to be used: that takes long, and mostly it is not.
        while order is not None and order.restore is not None and self._shelf.is_damaged(order.restore):
            self._controller.plan = before
            order, decision, reason = self._asked(self._controller, wanted, {})
        if decision is not None:
            decide_s = time.monotonic() - began_s
            self._decision = replace(decision, decide_s=decide_s)
            self._tracker.decided(self._decision, decide_s)
        if order is None and decision is not None:
            self._waited_in = wanted.view.number
            until_s = self._now_s() + WAITED_TIMES * max(expected.values()) + WAITED_BESIDES_S
            self._handle(lead.AnswerDelayed(wanted.view.number, until_s))
            return
        self._handle(lead.PlanAnswered(wanted.view.number, order, reason))

    def _asked(
        self, controller: Controller, wanted: lead.ComputePlan, expected: Mapping[NodeId, float],
    ) -> tuple[PlanOrdered | None, Decision | None, str]:
        try:
            if controller.plan is None:
                order, decision = controller.start(
                    wanted.view, self._workload(), self._resumed_from, token=self._lease,
                    num_spares=self._request.spares, rollbacks=wanted.rollbacks,
                )
                return order, decision, ""
            return controller.answer(
                wanted.view, wanted.resolution, wanted.lost, wanted.joined, wanted.cause, self._now_s(), self._lease,
                self._shelf.newest(), wanted.rollbacks, expected,
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
        for worker in self._crew.workers.values():
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

    def _to_resume_from(self) -> CheckpointInfo:
        found = self._shelf.newest_sound()
        if found is None:
            raise CheckpointError(
                f"{self._request.directory}: no checkpoint to resume from; without --resume it starts from the beginning",
                str(self._shelf.root),
            )
        return found

    def _pass_over(self, path: str, why: str) -> None:
        self._record(CheckpointPassedOver(time_s=self._now_s(), path=path, why=why))

    def _with_advice(self, reason: str) -> str:
        if self._tracker.steps == 0:
            return reason
        newest = self._shelf.newest()
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
            self._tracker.killed(node, phase, self._now_s())
            self._crew.kill(node)

    # The end

    def _signalled(self) -> None:
        numbers = self._wake_read.recv(64)
        if self._outcome is None and self._stop_deadline_s is None and self._leader.view is not None:
            self._stop_deadline_s = self._now_s() + STOP_WITHIN_S
            self._handle(lead.FlagWanted("stop"))
        elif numbers:
            self._end("stopped", 130, "stopped at once")
            self._crew.kill_all()

    def _end_if_all_finished(self) -> None:
        living = self._living()
        view = self._leader.view
        finished = [self._crew.workers[node].finished for node in living]
        if not finished or view is None or any(done is None or done.view != view.number for done in finished):
            return
        stopped = any(done is not None and done.stopped for done in finished)
        hashes: dict[str, dict[str, str]] = {}
        for node in sorted(living, key=node_number):
            done = self._crew.workers[node].finished
            for unit, digest in (done.digests if done else {}).items():
                hashes.setdefault(unit, {})[node] = digest
        steps = max(done.step for done in finished if done is not None)
        newest = self._shelf.newest() if stopped else None
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
        for worker in self._crew.workers.values():
            if worker.declared:
                self._crew.send(worker.node, Quit(reason, is_well))
            else:
                worker.process.kill()  # nothing that it would miss, and perhaps not even a connection
        # What a script does after its loop may take as long as it likes; after a failure nothing is waited for.
        is_done = self._outcome is not None and self._outcome.outcome == "done"
        self._stop_deadline_s = None if is_done else self._now_s() + STOP_WITHIN_S
