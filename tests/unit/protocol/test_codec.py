"""Messages survive the wire, and nothing else gets through."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import LocalProtocolError, RemoteProtocolError
from everstep.plan import Hop, Order, Plan
from everstep.protocol import codec
from everstep.protocol.messages import (
    BoundaryOrdered,
    BoundaryReached,
    PlanOrdered,
    Prepared,
    Report,
    ResumeOrdered,
    StateReady,
    Stuck,
    Union,
    UnitSums,
    ViewOrdered,
)
from everstep.quantities import NodeId, UnitName
from everstep.transfer import Load, Move
from everstep.view import Member, View
from tests.unit.protocol.makers import order, record, report, union

numbers = st.integers(-1, 2**40)
words = st.text(max_size=8)
nodes = st.integers(0, 99).map(lambda number: NodeId(f"n{number}"))
units = words.map(UnitName)
floats = st.floats(allow_nan=False)
sums = st.builds(
    UnitSums, pairs=st.dictionaries(words, st.lists(numbers, max_size=4).map(tuple), max_size=3),
    square_norms=st.dictionaries(words, floats, max_size=3),
)
books = {
    "view": numbers, "step": numbers, "attempt": numbers, "units": st.dictionaries(units, sums, max_size=3),
    "losses": st.dictionaries(numbers, st.tuples(floats, floats), max_size=3), "flags": st.lists(words, max_size=2).map(tuple),
    "times": st.dictionaries(nodes, st.dictionaries(words, floats, max_size=2), max_size=2),
}
unions = st.builds(Union, **books)
records = st.builds(Prepared, nodes=st.lists(nodes, max_size=3).map(tuple), **books)
reports = st.builds(
    Report, view=numbers, node=nodes, incarnation=numbers, applied=numbers, attempt=numbers, prepared=st.booleans(),
    union=st.none() | unions, holds=st.lists(units, max_size=3).map(tuple),
)
members = st.builds(Member, node_id=nodes, incarnation=numbers, place=numbers, address=words)
views = st.builds(View, number=numbers, members=st.lists(members, max_size=4).map(tuple))
hops = st.builds(Hop, node=nodes, first=numbers, end=numbers, shadow=st.none() | nodes)
plans = st.builds(
    Plan, num_layers=numbers, placement=st.dictionaries(nodes, st.lists(numbers, max_size=3).map(tuple), max_size=3),
    routes=st.lists(st.lists(hops, max_size=2).map(tuple), max_size=3).map(tuple),
    order=st.builds(Order, split=st.booleans(), extra_slots=numbers, staggered=st.booleans()),
)
orders = st.builds(
    PlanOrdered, view=numbers, token=numbers, step=numbers, attempt=numbers, plan=plans, union=st.none() | unions,
    moves=st.lists(st.builds(Move, unit=units, source=nodes, target=nodes, num_bytes=numbers), max_size=2).map(tuple),
    loads=st.lists(st.builds(Load, unit=units, target=nodes), max_size=2).map(tuple), restore=st.none() | words,
    rollbacks=st.lists(st.tuples(numbers, numbers, numbers), max_size=2).map(tuple),
)
to_leader = (
    reports | st.builds(StateReady, view=numbers, node=nodes)
    | st.builds(BoundaryReached, view=numbers, node=nodes, step=numbers)
    | st.builds(Stuck, view=numbers, node=nodes, peer=nodes, what=words)
)
to_member = (
    st.builds(ViewOrdered, view=views, token=numbers) | orders | st.builds(ResumeOrdered, view=numbers, token=numbers)
    | st.builds(BoundaryOrdered, view=numbers, token=numbers, flag=words)
)
DECODERS = (codec.decode_exchange, codec.decode_to_leader, codec.decode_to_member)
decoders = pytest.mark.parametrize("decode", DECODERS)


@given(records | unions)
def test_what_nodes_say_to_each_other_survives_the_wire(message: Prepared | Union) -> None:
    assert codec.decode_exchange(codec.encode(message)) == message


@given(to_leader)
def test_what_members_say_survives_the_wire(message: Report) -> None:
    assert codec.decode_to_leader(codec.encode(message)) == message


@given(to_member)
def test_orders_survive_the_wire(message: PlanOrdered) -> None:
    assert codec.decode_to_member(codec.encode(message)) == message


@decoders
@given(data=st.binary(max_size=200))
def test_bytes_that_are_no_message_are_the_peers_error(decode: Callable[[bytes, str | None], object], data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match=r"expected .*, got ") as caught:
        decode(data, "n3")
    assert caught.value.peer == "n3"


@decoders
@given(data=st.data())
def test_a_message_that_is_cut_short_or_damaged_is_the_peers_error_or_a_message(
    decode: Callable[[bytes, str | None], object], data: st.DataObject,
) -> None:
    message = data.draw(st.sampled_from([record(NodeId("n1")), union(), report(NodeId("n1"), 5, union=union()), order()]))
    whole = bytearray(codec.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    kept = whole[: data.draw(st.integers(0, len(whole)))]
    try:
        decode(bytes(kept), "n3")
    except RemoteProtocolError as error:
        assert error.peer == "n3"


@decoders
@pytest.mark.parametrize(
    "nested", [b"\x91" * 100_000, b"\x81\xa4type" * 20_000, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"],
)
def test_deep_and_boastful_bytes_are_the_peers_error(decode: Callable[[bytes], object], nested: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(nested)


def test_a_message_of_one_kind_is_not_taken_for_another() -> None:
    with pytest.raises(RemoteProtocolError, match="expected an order of the leader"):
        codec.decode_to_member(codec.encode(record(NodeId("n1"))))


def test_no_message_is_longer_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    data = codec.encode(record(NodeId("n1")))
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", len(data) - 1)
    with pytest.raises(RemoteProtocolError, match=f"got {len(data)} bytes, more than {len(data) - 1}"):
        codec.decode_exchange(data)
    with pytest.raises(LocalProtocolError, match="may be sent"):
        codec.encode(record(NodeId("n1")))
