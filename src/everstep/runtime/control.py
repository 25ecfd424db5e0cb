"""What an agent and its workers say to each other besides the protocol, and the frames both kinds travel in.

A frame is four bytes of length and a MessagePack message. Orders and reports of the protocol travel inside ``Carried``, as the
bytes that its codec made.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from everstep.config import RunConfig
from everstep.errors import RemoteProtocolError
from everstep.quantities import NodeId
from everstep.workload import Unit

MAX_FRAME_BYTES = 64 * 2**20
MAX_GREETING_BYTES = 4096
_LENGTH = struct.Struct("!I")


class Carried(msgspec.Struct, frozen=True, tag="carried"):
    """A message of the protocol."""

    data: bytes


# From a worker.


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The first thing that a worker says."""

    token: str
    node: NodeId
    pid: int
    incarnation: int
    address: str


class Declared(msgspec.Struct, frozen=True, kw_only=True, tag="declared"):
    """The script has made its job and wants to train. Every worker must declare the same (``digest``)."""

    digest: str
    layers: tuple[str, ...]
    uses: dict[str, tuple[str, ...]]
    units: tuple[Unit, ...]
    dataset_samples: int
    batch: int
    micro: int
    seed: int
    until: int
    config: RunConfig


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Alive; ``phase`` of ``step`` was the last one passed."""

    step: int
    phase: str


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag="step-done"):
    """The reporter holds the union of ``step``. ``times``: node → action → seconds of processor time."""

    step: int
    attempt: int
    loss: float
    samples: int
    flags: tuple[str, ...]
    times: dict[NodeId, dict[str, float]]


class InstantReached(msgspec.Struct, frozen=True, tag="instant"):
    """An armed instant of a drill: the worker stands still until ``Proceed``."""

    phase: str
    step: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The user's code or the job itself is wrong: the run ends. ``kind``: user, config or internal.

    With a traceback ``message`` says where, since the traceback says what.
    """

    kind: str
    message: str
    traceback: str = ""


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """This worker has nothing more to do. ``step``: how many are in its state. ``digests``: the hash of each unit."""

    view: int
    step: int
    stopped: bool
    digests: dict[str, str]


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """The checkpoint of ``step`` is complete on disk."""

    step: int
    view: int
    path: str


class SaveFailed(msgspec.Struct, frozen=True, tag="save-failed"):
    """This worker's part of the checkpoint of ``step`` could not be written."""

    step: int
    why: str


FromWorker = Carried | Hello | Declared | Beat | StepDone | InstantReached | Failed | Finished | Saved | SaveFailed

# To a worker.


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """What a worker needs to know: the run's folder, settings that win over the script's, and armed instants."""

    directory: str
    settings: dict[str, Any]
    instants: tuple[tuple[str, int], ...]


class Proceed(msgspec.Struct, frozen=True, tag="proceed"):
    """Go on from the instant."""


class Quit(msgspec.Struct, frozen=True, tag="quit"):
    """The run is over. ``well``: it is done or was stopped in order, so the script goes on behind its loop."""

    reason: str
    well: bool


ToWorker = Carried | Welcome | Proceed | Quit

_encoder = msgspec.msgpack.Encoder()
_from_worker = msgspec.msgpack.Decoder(FromWorker)
_to_worker = msgspec.msgpack.Decoder(ToWorker)


def framed(message: FromWorker | ToWorker) -> bytes:
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Bytes of a stream in, whole messages out."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any], limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder = decoder
        self._buffer = bytearray()
        self.limit_bytes = limit_bytes

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete with ``data``.

        Raises:
            RemoteProtocolError: what comes is no message, or too long.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self.limit_bytes:
                raise RemoteProtocolError(f"expected a message of at most {self.limit_bytes} bytes, got {length}")
            if len(self._buffer) < _LENGTH.size + length:
                return
            body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
            del self._buffer[: _LENGTH.size + length]
            try:
                yield self._decoder.decode(body)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise RemoteProtocolError(f"expected a control message, got {length} bytes that are none: {error}") from error


def frames_from_worker() -> Frames:
    """Before the greeting nobody is known, so next to nothing is taken; the reader raises the limit afterwards."""
    return Frames(_from_worker, MAX_GREETING_BYTES)


def frames_to_worker() -> Frames:
    return Frames(_to_worker)


def connect(address: str) -> socket.socket:
    """A connection to an agent at ``host:port``."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
