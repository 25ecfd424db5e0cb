"""Frames between agent and worker: whole messages however the bytes come, and no bytes do more than end the connection."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import RemoteProtocolError
from everstep.quantities import NodeId
from everstep.runtime.control import (
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    Beat,
    Carried,
    Failed,
    Hello,
    Proceed,
    Quit,
    Saved,
    Welcome,
    framed,
    frames_from_worker,
    frames_to_worker,
)
from tests.untimed import UNTIMED

FROM_WORKER = [
    Hello(token="t", node=NodeId("n0"), pid=3, incarnation=1, address="127.0.0.1:9"), Beat(3, "reduce"), Carried(b"\x00\xff"),
    Failed(kind="user", message="no"), Saved(3, 1, "checkpoints/x"),
]
TO_WORKER = [
    Welcome(directory="d", settings={"planner.policy": "auto"}, instants=(("forward", 3),)), Proceed(), Quit("done", well=True),
]


@given(st.lists(st.integers(1, 60), max_size=20))
@UNTIMED
def test_messages_come_out_whole_however_the_bytes_come_in(cuts: list[int]) -> None:
    data, frames, found, at = b"".join(map(framed, FROM_WORKER)), frames_from_worker(), [], 0
    for cut in [*cuts, len(data)]:
        found += list(frames.feed(data[at : at + cut]))
        at += cut
    assert found == FROM_WORKER


def test_each_side_takes_only_what_the_other_may_say() -> None:
    assert [message for m in TO_WORKER for message in frames_to_worker().feed(framed(m))] == TO_WORKER
    with pytest.raises(RemoteProtocolError, match="expected a control message, got"):
        list(frames_from_worker().feed(framed(TO_WORKER[0])))
    with pytest.raises(RemoteProtocolError, match="expected a control message, got"):
        list(frames_to_worker().feed(framed(FROM_WORKER[0])))


@given(st.binary(max_size=80), st.booleans())
@UNTIMED
def test_no_bytes_do_more_than_end_the_connection(data: bytes, with_length: bool) -> None:
    sent = struct.pack("!I", len(data)) + data if with_length else data
    for frames in (frames_from_worker(), frames_to_worker()):
        try:
            list(frames.feed(sent))
        except RemoteProtocolError:
            continue


@pytest.mark.parametrize("body", [b"\x91" * 100_000, b"\x81\xa4type\xa5hello", b"", b"\xc1"],
                         ids=["nested", "torn", "empty", "none"])
def test_what_is_no_message_is_the_peers_fault(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="expected a control message"):
        list(frames_to_worker().feed(struct.pack("!I", len(body)) + body))


@pytest.mark.parametrize(("side", "limit_bytes"), [("worker", MAX_GREETING_BYTES), ("agent", MAX_FRAME_BYTES)])
def test_a_message_without_end_is_refused_before_it_comes(side: str, limit_bytes: int) -> None:
    """Before its greeting a worker is a stranger, and next to nothing is kept of what it sends."""
    frames = frames_from_worker() if side == "worker" else frames_to_worker()
    with pytest.raises(RemoteProtocolError, match=f"at most {limit_bytes} bytes, got {2**32 - 1}"):
        list(frames.feed(struct.pack("!I", 2**32 - 1)))


def test_what_came_before_a_wrong_message_is_still_heard() -> None:
    found: list[Any] = []
    with pytest.raises(RemoteProtocolError):
        for message in frames_from_worker().feed(framed(Beat(1, "vote")) + struct.pack("!I", 1) + b"\xc1"):
            found.append(message)
    assert found == [Beat(1, "vote")]
