"""Parcels between processes: one TCP connection a direction and pair, opened on first use.

A frame is the length of its header, the header (MessagePack: key, note, tensors' types and shapes), then raw tensors. A
reader thread per incoming connection always drains into the mailbox, so a sender never waits for a receiver that lives. What
comes is not trusted: a connection must begin with the run's token, and sizes are bounded.
"""

from __future__ import annotations

import hmac
import math
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from everstep.engine.links import Key, Mailbox, Parcel
from everstep.engine.state import as_bytes, tensor_from
from everstep.engine.values import DTYPES, dtype_name
from everstep.errors import RemoteProtocolError, TransferError
from everstep.protocol.codec import decode_exchange, encode
from everstep.quantities import NodeId

MAX_HEADER_BYTES = 64 * 2**20
MAX_TENSOR_BYTES = 16 * 2**30
MAX_DIMENSIONS = 32
_LENGTH = struct.Struct("!I")
_ALLOCATED_AT_ONCE_BYTES = 64 * 2**20


class _Header(msgspec.Struct, frozen=True, array_like=True):
    key: tuple[int, int, int, str, int, int, str, str]
    note: Any
    tensors: list[tuple[str, tuple[int, ...]]]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header)


def frame(parcel: Parcel) -> list[bytes | memoryview]:
    """A parcel as the pieces that go on the wire."""
    note = encode(parcel.note) if parcel.key.kind == "exchange" else parcel.note
    key = parcel.key
    fields = (key.view, key.step, key.attempt, key.kind, key.micro_batch, key.hop, key.source, key.name)
    header = _encoder.encode(_Header(fields, note, [(dtype_name(t), tuple(t.shape)) for t in parcel.tensors]))
    return [_LENGTH.pack(len(header)) + header, *(as_bytes(tensor) for tensor in parcel.tensors)]


def read_parcel(read: Callable[[int], bytearray | None]) -> Parcel | None:
    """One parcel from ``read``, which gives exactly so many bytes, or None at the end of the stream.

    Raises:
        RemoteProtocolError: what comes is not a parcel, or is too large.
        ConnectionError: the stream ends within one.
    """
    start = read(_LENGTH.size)
    if start is None:
        return None
    (length,) = _LENGTH.unpack(start)
    if length > MAX_HEADER_BYTES:
        raise RemoteProtocolError(f"expected a header of at most {MAX_HEADER_BYTES} bytes, got {length}")
    try:
        header = _decoder.decode(_whole(read(length)))
        key = Key(*header.key[:6], NodeId(header.key[6]), header.key[7])
        note = decode_exchange(header.note, key.source) if key.kind == "exchange" else header.note
    except (msgspec.MsgspecError, TypeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"expected the header of a parcel, got {length} bytes that are none: {error}") from error
    tensors = []
    for dtype, shape in header.tensors:
        if dtype not in DTYPES or len(shape) > MAX_DIMENSIONS or any(size < 0 for size in shape):
            raise RemoteProtocolError(f"expected a tensor, got dtype {dtype!r:.40} and shape {shape!r:.200}", key.source)
        # Without its zeros: torch refuses also an empty tensor whose strides are too large to be numbers.
        largest = DTYPES[dtype].itemsize * math.prod(size or 1 for size in shape)
        if largest > MAX_TENSOR_BYTES:
            raise RemoteProtocolError(f"expected a tensor of at most {MAX_TENSOR_BYTES} bytes, got {largest}", key.source)
        size = DTYPES[dtype].itemsize * math.prod(shape)
        try:
            tensors.append(tensor_from(dtype, shape, _whole(read(size)) if size else b""))
        except TransferError as error:
            raise RemoteProtocolError(str(error), key.source) from error
    return Parcel(key, tensors, note)


def _whole(data: bytearray | None) -> bytearray:
    if data is None:
        raise ConnectionError("the stream ended within a parcel")
    return data


def reader_of(connection: socket.socket) -> Callable[[int], bytearray | None]:
    """``read`` for ``read_parcel``: exactly so many bytes; None when the peer closed before the first.

    Raises:
        ConnectionError: the peer closed in between.
    """

    def read(count: int) -> bytearray | None:
        data, have = bytearray(min(count, _ALLOCATED_AT_ONCE_BYTES)), 0
        while have < count:
            if have == len(data):  # memory for what a peer only announces is not taken
                data.extend(bytes(min(have, count - have)))
            with memoryview(data)[have:] as rest:
                received = connection.recv_into(rest)
            if received == 0:
                if have == 0:
                    return None
                raise ConnectionError("the peer closed within a parcel")
            have += received
        return data

    return read


class TcpLinks:
    """A node's listening socket, its mailbox, and its connections to peers."""

    def __init__(self, node: NodeId, mailbox: Mailbox, token: str, on_lost: Callable[[NodeId, str], None]) -> None:
        """``on_lost(peer, what)``: a link broke; the peer may or may not be alive. Called from any thread."""
        self._node, self._mailbox, self._token, self._on_lost = node, mailbox, token.encode(), on_lost
        self._listener: socket.socket | None = None
        self._addresses: dict[NodeId, str] = {}
        self._outgoing: dict[NodeId, socket.socket] = {}
        self._incoming: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False

    def open(self) -> str:
        """Listen on a port that the system chooses; returns ``host:port``."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True, name="links-accept").start()
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def know(self, addresses: Mapping[NodeId, str]) -> None:
        """The peers of the newest view. Connections to others are cut, which frees whoever is blocked on one."""
        with self._lock:
            self._addresses = dict(addresses)
            gone = [self._outgoing.pop(node) for node in list(self._outgoing) if node not in addresses]
        for connection in gone:
            _cut(connection)

    def send(self, target: NodeId, parcel: Parcel) -> None:
        """Hand a parcel to the kernel. A link that fails is reported through ``on_lost``, and the parcel is gone."""
        if target == self._node:
            self._mailbox.deliver(parcel)
            return
        try:
            connection = self._connection(target)
            if connection is not None:
                for piece in frame(parcel):
                    connection.sendall(piece)
        except OSError as error:
            self._drop(target)
            if not self._closed:
                self._on_lost(target, f"{parcel.key.kind} of step {parcel.key.step} could not be sent: {error}")

    def _connection(self, target: NodeId) -> socket.socket | None:
        with self._lock:
            connection, address = self._outgoing.get(target), self._addresses.get(target)
        if connection is not None or address is None:
            return connection
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=10)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = self._token + b" " + self._node.encode()
        connection.sendall(_LENGTH.pack(len(hello)) + hello)
        with self._lock:
            self._outgoing[target] = connection
        return connection

    def _drop(self, target: NodeId) -> None:
        with self._lock:
            connection = self._outgoing.pop(target, None)
        if connection is not None:
            _cut(connection)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # closed
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._drain, args=(connection,), daemon=True, name="links-read").start()

    def _drain(self, connection: socket.socket) -> None:
        with self._lock:
            self._incoming.add(connection)
        peer: NodeId | None = None
        try:
            read = reader_of(connection)
            peer = self._greeted(read)
            while (parcel := read_parcel(read)) is not None:
                if parcel.key.source != peer:
                    raise RemoteProtocolError(f"{peer} sent a parcel in the name of {parcel.key.source}", peer)
                self._mailbox.deliver(parcel)
        except (OSError, RemoteProtocolError) as error:
            if peer is not None and not self._closed:
                self._on_lost(peer, str(error))
        finally:
            with self._lock:
                self._incoming.discard(connection)
            connection.close()

    def _greeted(self, read: Callable[[int], bytearray | None]) -> NodeId:
        start = read(_LENGTH.size)
        (length,) = _LENGTH.unpack(start) if start is not None else (0,)
        if not 0 < length <= 1024:
            raise RemoteProtocolError("expected a greeting with the run's token")
        token, _, node = bytes(_whole(read(length))).partition(b" ")
        if not hmac.compare_digest(token, self._token):
            raise RemoteProtocolError("a peer came with another token")
        return NodeId(node.decode(errors="replace"))

    def close(self) -> None:
        """Cut everything. Whoever is blocked raises or ends."""
        self._closed = True
        with self._lock:
            connections = [*self._outgoing.values(), *self._incoming]
            self._outgoing.clear()
        if self._listener is not None:
            _cut(self._listener)
        for connection in connections:
            _cut(connection)


def _cut(connection: socket.socket) -> None:
    """Shut down first: closing alone does not wake a thread that is blocked on the socket."""
    with suppress(OSError):  # never connected, or the peer was faster
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
