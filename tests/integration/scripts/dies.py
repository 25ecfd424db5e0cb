"""``small.py``, where the worker that started at a given place kills itself at an instant of the commit of step 4.

    dies.py INSTANT NODE [arguments of small.py]

Instants that no phase of a drill names: before the record is sent, between two sends of the union, inside an update.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

from everstep.engine.executor import Executor
from everstep.engine.state import UnitState
from everstep.engine.tcp import TcpLinks
from everstep.protocol.messages import Prepared, Union

instant, node = sys.argv[1:3]
sys.argv[1:3] = []
STEP = 4


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


plain_send, plain_commit, plain_apply = TcpLinks.send, Executor._commit, UnitState.apply
unions_sent, step_now, updates = [], [-1], []


def send(self, target, parcel):  # type: ignore[no-untyped-def]
    if self._node == node and parcel.key.step == STEP:
        if instant == "before-record" and isinstance(parcel.note, Prepared):
            die()
        if instant == "between-unions" and isinstance(parcel.note, Union):
            unions_sent.append(target)
            if len(unions_sent) == 2:
                die()
    plain_send(self, target, parcel)
    if self._node == node and parcel.key.step == STEP and instant == "after-record" and isinstance(parcel.note, Prepared):
        die()


def commit(self, plan, current, num_micro_batches):  # type: ignore[no-untyped-def]
    step_now[0] = current.step
    self_node.append(self._node)
    return plain_commit(self, plan, current, num_micro_batches)


self_node: list[str] = []


def apply(self, scale, rate_factor):  # type: ignore[no-untyped-def]
    plain_apply(self, scale, rate_factor)
    if instant == "inside-apply" and step_now[0] == STEP and self_node[-1] == node:
        die()


TcpLinks.send, Executor._commit, UnitState.apply = send, commit, apply  # type: ignore[method-assign]
runpy.run_path(str(Path(__file__).with_name("small.py")), run_name="__main__")
