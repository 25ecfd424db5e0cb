"""How runs end besides well: signals, a lost agent, frozen workers, bugs in the user's code. Never an orphan, never a traceback
that is not the user's."""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.quantities import NodeId
from everstep.records import Committed, StepSeen, ViewCommitted, read
from everstep.runtime import checkpoints
from everstep.runtime.control import Hello, framed
from tests.integration.harness import ROOT, SCRIPTS, processes_of, train

WITHIN_S = 90.0
"""Far beyond what anything here needs; what is asserted is how it comes to an end, not when."""


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain for {what}"
        time.sleep(0.02)


def everstep(*arguments: str) -> subprocess.Popen[str]:
    """The command line as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "everstep.cli.main", *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def steps_seen(directory: Path) -> int:
    path = directory / "agent.jsonl"
    return sum(isinstance(record, StepSeen) for record in read(path)) if path.exists() else 0


def begun(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    """A run that has made some steps."""
    process = everstep("run", str(SCRIPTS / "small.py"), "--workers", "3", "--dir", str(directory), *arguments,
                       "--", "--steps", "100000", "--pace", "0.02")
    until(lambda: steps_seen(directory) > 3 or process.poll() is not None, "the first steps")
    assert process.poll() is None, process.communicate()
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_processes_in_order_and_leaves_a_checkpoint(number: signal.Signals, tmp_path: Path) -> None:
    process = begun(tmp_path)
    process.send_signal(number)
    _, errors = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert processes_of(tmp_path) == []
    newest, _ = checkpoints.newest_usable(tmp_path / "checkpoints")
    assert newest is not None and newest.step == steps_seen(tmp_path)
    assert f"everstep run --resume --dir {tmp_path}" in errors


def test_after_the_agent_is_killed_workers_end_the_step_write_a_checkpoint_and_exit(tmp_path: Path) -> None:
    process = begun(tmp_path)
    before = steps_seen(tmp_path)
    process.kill()
    process.communicate()
    until(lambda: processes_of(tmp_path) == [], "the workers to end")
    newest, damaged = checkpoints.newest_usable(tmp_path / "checkpoints")
    assert newest is not None and not damaged and newest.step >= before
    last = max(record.step for path in (tmp_path / "nodes").iterdir() for record in read(path) if isinstance(record, Committed))
    assert newest.step == last + 1


def test_a_frozen_worker_is_given_up_and_the_run_goes_on(tmp_path: Path) -> None:
    frozen: list[int] = []

    def freeze(record: object) -> None:
        if isinstance(record, StepSeen) and record.step == 5 and not frozen:
            frozen.append(max(processes_of(tmp_path)))
            os.kill(frozen[0], signal.SIGSTOP)

    run = train(
        tmp_path, "small.py", "--steps", "12", workers=6, settings={"detector": {"suspect_after_s": 2.0}}, on_record=freeze,
    )
    assert run.outcome.exit_code == 0, run.outcome
    assert [event.kind for event in run.events] == ["silent"]
    run.assert_every_sample_once()


@pytest.mark.parametrize("code", [0, 1, 3])
def test_any_exit_of_a_worker_is_a_lost_worker_unless_the_run_is_over(code: int, tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(
        f"import os, sys, runpy\nimport everstep.runtime.job as job\n"
        f"from everstep.runtime.session import WorkerSession\nplain = WorkerSession.run\n"
        f"def run(self, position):\n    if position.step == 4 and self._node == 'n1':\n        sys.exit({code})\n"
        f"    return plain(self, position)\nWorkerSession.run = run\n"
        f"runpy.run_path({str(SCRIPTS / 'small.py')!r}, run_name='__main__')\n"
    )
    run = train(tmp_path / "run", str(script), "--steps", "10", workers=6)
    assert run.outcome.exit_code == 0, run.outcome
    (loss,) = [view for view in run.of(ViewCommitted) if "lost" in view.cause]
    assert f"exit code {code}" in loss.cause
    run.assert_every_sample_once()


RAISES = """
import torch, everstep
from torch import nn
class Bad(nn.Module):
    def __init__(self):
        super().__init__(); self.lin = nn.Linear(4, 4); self.calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls > 6: raise ValueError("a bug in the user's layer")
        return self.lin(x)
def layers():
    yield "first", nn.Linear(4, 4)
    yield "bad", Bad()
job = everstep.Job(layers=layers, loss=lambda y, item: (y - item[1]).square().mean(),
    optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    data=everstep.Indexed([(torch.ones(4) * i, torch.zeros(4)) for i in range(32)], batch=8, micro=2))
for step in job.steps(until=20):
    step.run()
"""

def changed(*changes: tuple[str, str]) -> str:
    """``RAISES`` with each pair's first text replaced by its second."""
    text = RAISES
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


NO_BUG = ("if self.calls > 6: raise ValueError(\"a bug in the user's layer\")", "pass")
MISTAKES = {
    "no job": ("print('nothing to see')", "has no job"),
    "a name that is not there": ("import everstep\neverstep.Jobb", "AttributeError: module 'everstep' has no attribute 'Jobb'"),
    "a micro-batch that does not divide": (
        changed(("micro=2", "micro=3")), "a micro-batch of 3 samples does not divide the batch of 8; try micro=1",
    ),
    "batch norm": (changed(('"first", nn.Linear(4, 4)', '"first", nn.BatchNorm1d(4)')), "statistics over a batch"),
    "lbfgs": (changed(("SGD(named, lr=0.1)", "LBFGS([p for _, p in named])")), "LBFGS needs a closure"),
    "an output that cannot be sent": (
        changed(NO_BUG, ("return self.lin(x)", "return str(x)"), ("nn.Linear(4, 4)\n    yield", "Bad()\n    yield")),
        "layer first gives a str; only a tensor",
    ),
    "a loss that is no number": (changed((".mean()", ".mean() * float('nan')")), "the loss of step 0 is not a number"),
    "an unknown setting": (
        changed(("batch=8, micro=2))", "batch=8, micro=2), config={'planner.polcy': 'auto'})")),
        "unknown key 'planner.polcy'; did you mean planner.policy?",
    ),
    "a dataset without length": (
        changed(("everstep.Indexed([", "everstep.Indexed(iter(["), ("range(32)]", "range(32)])")), "must have a length",
    ),
    "more than fits": (
        changed(("micro=2))", "micro=2), config={'planner': {'worker_memory_bytes': 10}})")), "no plan for 2 nodes",
    ),
    "a step that is not run": (changed(("    step.run()", "    pass")), "call step.run()"),
    "a buffer changed in a forward": (
        changed(NO_BUG, ("self.calls = 0", "self.register_buffer('calls', torch.zeros(()))")),
        "changes a buffer in its forward",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_said_once_without_a_traceback_of_ours(mistake: str, tmp_path: Path) -> None:
    text, said = MISTAKES[mistake]
    script = tmp_path / "train.py"
    script.write_text(text)
    run = train(tmp_path / "run", str(script), workers=2)
    assert run.outcome.exit_code in (1, 2)
    assert said in run.outcome.message
    assert "/everstep/" not in run.outcome.message
    assert run.outcome.message.count(said) == 1


def test_an_exception_of_the_user_is_told_with_its_own_traceback_layer_step_and_micro_batch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RAISES)
    run = train(tmp_path / "run", str(script), workers=2)
    assert run.outcome.exit_code == 1 and run.outcome.outcome == "failed"
    message = run.outcome.message
    assert re.search(r"worker \d \(n\d\), in bad, step \d+, micro-batch \d+:", message)
    assert message.endswith("ValueError: a bug in the user's layer")
    assert 'line 9, in forward' in message
    assert message.count("Traceback") == 1
    assert not any("lost" in view.cause for view in run.views)  # a bug is not a machine failure, and is not retried


def test_losing_everybody_ends_with_the_layers_the_checkpoint_and_the_command(tmp_path: Path) -> None:
    run = train(
        tmp_path, "small.py", "--steps", "12", workers=2,
        kills=("worker=0,step=8,phase=backward", "worker=1,step=8,phase=backward"),
        settings={"checkpoint": {"every_steps": 3}, "planner": {"worker_memory_bytes": None}},
    )
    assert run.outcome.exit_code == 1
    assert "no node is left" in run.outcome.message
    assert re.search("newest checkpoint is of step [36];", run.outcome.message)  # the second may not be on disk yet
    assert f"everstep run --resume --dir {tmp_path}" in run.outcome.message


def test_leaving_the_loop_early_ends_the_run_well_and_goes_on_behind_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    loop = "    if step.run().step == 5:\n        break\nprint('behind the loop')"
    script.write_text(changed(NO_BUG, ("lr=0.1", "lr=1e-4"), ("    step.run()", loop)))
    run = train(tmp_path / "run", str(script), workers=2)
    assert (run.outcome.outcome, run.outcome.exit_code) == ("done", 0)
    assert len(run.losses) == 6
    assert "behind the loop" in (tmp_path / "run" / "logs" / "n1.txt").read_text()


def test_a_kill_that_never_strikes_is_said(tmp_path: Path) -> None:
    run = train(tmp_path, "small.py", "--steps", "4", workers=2, kills=("worker=0,step=9,phase=backward",))
    assert run.outcome.exit_code == 0
    assert run.outcome.message == "never struck: worker=0,step=9,phase=backward: no worker came by"


def test_what_the_script_raises_behind_its_loop_fails_the_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(changed(NO_BUG, ("lr=0.1", "lr=1e-4")) + "raise RuntimeError('the export failed')\n")
    run = train(tmp_path / "run", str(script), workers=2)
    assert run.outcome.exit_code == 1
    assert "RuntimeError: the export failed" in run.outcome.message
    assert len(run.losses) == 20


def test_a_second_agent_in_the_folder_of_a_running_one_is_refused(tmp_path: Path) -> None:
    process = begun(tmp_path)
    second = everstep("run", str(SCRIPTS / "small.py"), "--resume", "--dir", str(tmp_path))
    _, errors = second.communicate(timeout=WITHIN_S)
    assert second.returncode == 2
    assert f"is being run by process {process.pid}" in errors
    seen = steps_seen(tmp_path)
    until(lambda: steps_seen(tmp_path) > seen, "the first run to go on")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WITHIN_S)
    assert process.returncode == 130


def test_a_stopped_process_group_goes_on_when_it_is_continued(tmp_path: Path) -> None:
    """Ctrl-Z and fg: the agent slept through the silence itself, so nobody is to blame for it."""
    process = begun(tmp_path, "--set", "detector.suspect_after_s=1")
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in (process.pid, *processes_of(tmp_path)):
            os.kill(pid, number)
        time.sleep(3 if number is signal.SIGSTOP else 0)  # the silence is the thing tested
    seen = steps_seen(tmp_path)
    until(lambda: steps_seen(tmp_path) > seen + 3 or process.poll() is not None, "training to go on")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WITHIN_S)
    assert not any("lost" in view.cause for view in read(tmp_path / "agent.jsonl") if isinstance(view, ViewCommitted))


def test_strangers_at_the_agents_port_are_hung_up_on(tmp_path: Path) -> None:
    process = begun(tmp_path)
    listening = ports_of(process.pid)
    for port in listening:
        for words in (b"", b"\xff" * 64, struct.pack("!I", 2**31), framed(HELLO)):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
                stranger.sendall(words)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b""
    assert listening
    seen = steps_seen(tmp_path)
    until(lambda: steps_seen(tmp_path) > seen + 3 or process.poll() is not None, "training to go on")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WITHIN_S)
    assert process.returncode == 130


HELLO = Hello(token="é", node=NodeId("n0"), pid=1, incarnation=1, address="")


def ports_of(pid: int) -> list[int]:
    """Where a process listens."""
    sockets = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
