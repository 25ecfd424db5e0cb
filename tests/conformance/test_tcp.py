"""Links over TCP: what comes is not trusted, and a dead or frozen peer holds nobody up."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.engine.links import Mailbox, Parcel
from everstep.engine.tcp import MAX_HEADER_BYTES, MAX_TENSOR_BYTES, TcpLinks, frame, read_parcel, reader_of
from everstep.engine.values import DTYPES
from everstep.errors import RemoteProtocolError
from everstep.quantities import NodeId
from tests.conformance.transports import MINUTE_S, Waiting, key, until
from tests.untimed import UNTIMED

N0, N1 = NodeId("n0"), NodeId("n1")
LENGTH = struct.Struct("!I")


class Home:
    """A node that others write to."""

    def __init__(self) -> None:
        self.mailbox = Mailbox(MINUTE_S)
        self.lost: list[tuple[NodeId, str]] = []
        self.links = TcpLinks(N0, self.mailbox, "token", lambda peer, what: self.lost.append((peer, what)))
        self.address = self.links.open()

    def peer(self, greeting: bytes = b"token n1") -> socket.socket:
        host, _, port = self.address.rpartition(":")
        connection = socket.create_connection((host, int(port)))
        connection.settimeout(MINUTE_S)
        connection.sendall(LENGTH.pack(len(greeting)) + greeting)
        return connection

    def still_hears(self, micro_batch: int) -> None:
        """A good peer on a connection of its own is heard whatever another one has sent."""
        with self.peer(b"token n2") as good:
            where = key("n2", view=self.mailbox.view, micro_batch=micro_batch)
            good.sendall(b"".join(frame(Parcel(where, [torch.ones(2)]))))
            assert self.mailbox.receive(where, "activation").tensors[0].tolist() == [1.0, 1.0]


@pytest.fixture
def home() -> Iterator[Home]:
    made = Home()
    yield made
    made.links.close()


def hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def header(*tensors: tuple[str, Any], note: Any = None, kind: str = "activation", source: str = "n1") -> bytes:
    body = msgspec.msgpack.encode([[1, 0, 0, kind, 0, 0, source, ""], note, [list(t) for t in tensors]])
    return LENGTH.pack(len(body)) + body


GREETINGS = {
    "wrong token": b"nekot n1", "no token": b" n1", "longer token": b"token2 n1", "empty": b"", "bytes": b"\xff\xfe n1",
}


@pytest.mark.parametrize("greeting", GREETINGS.values(), ids=GREETINGS)
def test_whoever_comes_without_the_runs_token_is_hung_up_on(home: Home, greeting: bytes) -> None:
    with home.peer(greeting) as stranger:
        assert hung_up(stranger)
    home.still_hears(1)
    assert home.lost == []


def test_a_greeting_of_any_length_is_not_waited_for(home: Home) -> None:
    host, _, port = home.address.rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(LENGTH.pack(2**32 - 1))
        assert hung_up(stranger)


def nested(depth: int) -> bytes:
    return LENGTH.pack(depth + 2) + b"\x93" + b"\x91" * depth + b"\xc0"


HOSTILE: dict[str, bytes] = {
    "a header of four gigabytes": LENGTH.pack(2**32 - 1),
    "an empty header": LENGTH.pack(0),
    "no MessagePack": LENGTH.pack(4) + b"\xc1\xc1\xc1\xc1",
    "nested without end": nested(100_000),
    "another message": LENGTH.pack(5) + b"\xa4text",
    "an unknown dtype": header(("float31", (2,))),
    "a negative size": header(("float32", (-1,))),
    "a size of text": header(("float32", ("2",))),
    "more bytes than there are": header(("float64", (2**60,))),
    "a size beyond numbers": header(("float64", (2**64 - 1, 2**64 - 1))),
    "an empty tensor with endless strides": header(("int8", (0, 2**31, 2**31, 2**31))),
    "a thousand dimensions": header(("int8", (1,) * 1000)),
    "a record that is none": header(note=b"\xc1", kind="exchange"),
    "a record that is no bytes": header(note=[1, 2], kind="exchange"),
    "no record": header(kind="exchange"),
    "a key of text": LENGTH.pack(14) + msgspec.msgpack.encode([["1"] * 3, None, []]).ljust(14, b"\0"),
    "in another's name": header(source="n2"),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_peer_that_sends_what_cannot_be_is_dropped_and_nobody_else(home: Home, data: bytes) -> None:
    with home.peer() as hostile:
        hostile.sendall(data)
        assert hung_up(hostile)
    until(lambda: bool(home.lost), "word of the lost link")
    assert [peer for peer, _ in home.lost] == ["n1"]
    assert home.mailbox._parcels == {}
    home.still_hears(2)


def test_a_peer_that_stops_within_a_parcel_is_lost(home: Home) -> None:
    data = b"".join(frame(Parcel(key("n1"), [torch.ones(100)])))
    for cut in (1, 3, 4, 20, len(data) - 1):
        home.lost.clear()
        with home.peer() as torn:
            torn.sendall(data[:cut])
        until(lambda: bool(home.lost), f"word of the link cut after {cut} bytes")
        assert "within a parcel" in home.lost[0][1]
    with home.peer() as whole:
        whole.sendall(data * 2)
    home.mailbox.receive(key("n1"), "activation")


def test_memory_that_a_peer_only_announces_is_not_taken(home: Home) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"x" * 10)
        theirs.close()
        with pytest.raises(ConnectionError, match="closed within a parcel"):
            reader_of(ours)(2**62)


def test_a_parcel_larger_than_what_is_allocated_at_once_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.engine.tcp._ALLOCATED_AT_ONCE_BYTES", 100)
    ours, theirs = socket.socketpair()
    data = bytes(range(256)) * 5
    with ours, theirs:
        theirs.sendall(data)
        read = reader_of(ours)
        assert read(1000) == data[:1000] and read(0) == b"" and read(280) == data[1000:]


def from_bytes(data: bytes) -> Callable[[int], bytearray | None]:
    rest = memoryview(data)

    def read(count: int) -> bytearray | None:
        nonlocal rest
        if count > len(rest):
            if not rest:
                return None
            raise ConnectionError("the peer closed within a parcel")
        taken, rest = bytearray(rest[:count]), rest[count:]
        return taken

    return read


def only_their_fault(data: bytes) -> Parcel | None:
    try:
        return read_parcel(from_bytes(data))
    except (RemoteProtocolError, ConnectionError):
        return None


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3),
    max_leaves=8,
)
sizes = st.sampled_from([0, 1, 2, 3, 2**31, 2**62, 2**64 - 1, -1]) | st.integers(-(2**63), 2**64 - 1)
tensors = st.tuples(st.sampled_from([*DTYPES, "float31", ""]), st.lists(sizes, max_size=5))
keys = st.tuples(
    st.integers(-1, 5), st.integers(0, 5), st.integers(0, 5), st.sampled_from(["activation", "exchange", "x"]),
    st.integers(0, 5), st.integers(0, 5), st.just("n1"), st.text(max_size=3),
)


@given(st.binary(max_size=200))
@settings(UNTIMED, max_examples=300)
def test_no_bytes_do_more_than_end_the_stream(data: bytes) -> None:
    only_their_fault(data)
    only_their_fault(LENGTH.pack(len(data)) + data)


@given(key=keys | values, note=values, shapes=st.lists(tensors, max_size=3) | values, rest=st.binary(max_size=64))
@settings(UNTIMED, max_examples=400)
def test_no_header_does_more_than_end_the_stream(key: Any, note: Any, shapes: Any, rest: bytes) -> None:
    body = msgspec.msgpack.encode([key, note, shapes])
    only_their_fault(LENGTH.pack(len(body)) + body + rest)


@given(cut=st.integers(0, 10_000), position=st.integers(0, 10_000), flip=st.integers(0, 255))
@settings(UNTIMED, max_examples=300)
def test_no_parcel_that_was_changed_or_cut_does_more_than_end_the_stream(cut: int, position: int, flip: int) -> None:
    whole = b"".join(frame(Parcel(key("n1"), [torch.ones(3, 2), torch.arange(4)], ["a", {"b": 1}])))
    assert only_their_fault(whole) is not None
    assert only_their_fault(whole[: cut % len(whole)]) is None
    changed = bytearray(whole)
    changed[position % len(whole)] ^= flip
    only_their_fault(bytes(changed))


def test_the_bounds_are_those_that_are_promised() -> None:
    with pytest.raises(RemoteProtocolError, match=f"at most {MAX_HEADER_BYTES} bytes, got {MAX_HEADER_BYTES + 1}"):
        read_parcel(from_bytes(LENGTH.pack(MAX_HEADER_BYTES + 1)))
    with pytest.raises(RemoteProtocolError, match=f"at most {MAX_TENSOR_BYTES} bytes, got {MAX_TENSOR_BYTES + 1}"):
        read_parcel(from_bytes(header(("uint8", (MAX_TENSOR_BYTES + 1,)))))
    with pytest.raises(ConnectionError):
        read_parcel(from_bytes(header(("uint8", (MAX_TENSOR_BYTES,))) + b"x"))


LISTENER = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
kept = []
while True:
    kept.append(listener.accept())
"""


@pytest.fixture
def frozen() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that accepts and never reads."""
    process = subprocess.Popen([sys.executable, "-S", "-c", LISTENER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        yield process, f"127.0.0.1:{int(process.stdout.readline())}"
        process.kill()
        process.wait()


def test_a_sender_is_not_held_up_by_a_peer_that_was_killed(home: Home, frozen: tuple[Any, str]) -> None:
    process, address = frozen
    home.links.know({N1: address})
    home.links.send(N1, Parcel(key("n0"), [torch.ones(4)]))
    process.kill()
    process.wait()
    for micro_batch in range(50):  # the kernel takes one or two before it hears of the reset; then connecting is refused
        home.links.send(N1, Parcel(key("n0", micro_batch=micro_batch), [torch.zeros(1_000_000)]))
    assert {peer for peer, _ in home.lost} == {"n1"}
    assert "activation of step 0 could not be sent" in home.lost[0][1]


def test_a_sender_that_a_frozen_peer_holds_up_is_freed_by_a_view_without_it(home: Home, frozen: tuple[Any, str]) -> None:
    _, address = frozen
    for _ in range(2):
        home.links.know({N1: address})
        started, waiting = threading.Event(), Waiting()

        def send(started: threading.Event = started) -> None:
            started.set()
            for micro_batch in range(40):
                home.links.send(N1, Parcel(key("n0", micro_batch=micro_batch), [torch.zeros(1_000_000)]))

        waiting.start({N0: send})
        started.wait(MINUTE_S)
        until(lambda: N1 in home.links._outgoing, "the connection")
        home.links.know({})
        assert waiting.ended() == {N0: None}


def test_a_frozen_peer_holds_nobody_up_when_the_links_close(home: Home, frozen: tuple[Any, str]) -> None:
    home.links.know({N1: frozen[1]})
    waiting = Waiting()
    waiting.start({N0: lambda: home.links.send(N1, Parcel(key("n0"), [torch.zeros(20_000_000)]))})
    until(lambda: N1 in home.links._outgoing, "the connection")
    home.links.close()
    assert waiting.ended() == {N0: None}
    assert home.lost == []


def test_what_is_sent_to_nobody_known_goes_nowhere(home: Home) -> None:
    home.links.send(NodeId("n9"), Parcel(key("n0")))
    assert home.lost == []


def test_an_address_where_nobody_listens_is_a_lost_peer(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    home.links.know({N1: address})
    home.links.send(N1, Parcel(key("n0")))
    assert [peer for peer, _ in home.lost] == ["n1"]


def test_a_peer_that_closes_between_parcels_is_not_reported(home: Home) -> None:
    with home.peer() as leaving:
        leaving.sendall(b"".join(frame(Parcel(key("n1")))))
        home.mailbox.receive(key("n1"), "activation")
        leaving.shutdown(socket.SHUT_WR)
        assert hung_up(leaving)
    assert home.lost == []
