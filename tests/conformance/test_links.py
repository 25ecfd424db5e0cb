"""What every transport promises: parcels whole, in order, by view, and an abort that frees whoever waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from everstep.engine.links import InterruptedByView, Parcel
from everstep.engine.reduce import Reduction, Where
from everstep.engine.values import DTYPES
from everstep.errors import EngineError, PeerLost
from everstep.protocol.messages import Prepared, UnitSums
from everstep.quantities import NodeId, UnitName
from tests.conformance.transports import MINUTE_S, TRANSPORTS, Nodes, Waiting, are_blocked, key, send_order, until

N0, N1, N2 = NodeId("n0"), NodeId("n1"), NodeId("n2")


@pytest.fixture(params=TRANSPORTS)
def nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    with TRANSPORTS[request.param](3) as made:
        made.adopt(1)
        yield made


@pytest.fixture(params=TRANSPORTS)
def impatient(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    with TRANSPORTS[request.param](2, within_s=0.01) as made:
        made.adopt(1)
        yield made


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype_arrive_as_they_were_sent(nodes: Nodes, dtype: str) -> None:
    square = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(DTYPES[dtype])
    sent = [square, square.t(), square[:, 1], square[0, 1], torch.zeros(0, dtype=DTYPES[dtype]), square[:0, :]]
    nodes.posts[N0].send(N1, Parcel(key("n0"), sent, {"note": [1, "two", None, True]}))
    found = nodes.mailboxes[N1].receive(key("n0"), "activation")
    assert found.key == key("n0") and found.note == {"note": [1, "two", None, True]}
    assert [(t.dtype, t.shape) for t in found.tensors] == [(t.dtype, t.shape) for t in sent]
    assert all(torch.equal(a, b) for a, b in zip(found.tensors, sent, strict=True))


def test_special_values_keep_their_bits(nodes: Nodes) -> None:
    sent = torch.tensor([float("nan"), float("inf"), -0.0, 2.0**-149])
    nodes.posts[N0].send(N1, Parcel(key("n0"), [sent]))
    (found,) = nodes.mailboxes[N1].receive(key("n0"), "activation").tensors
    assert torch.equal(found.view(torch.int32), sent.view(torch.int32))


def test_a_later_change_of_what_was_sent_does_not_reach_the_receiver(nodes: Nodes) -> None:
    sent = torch.ones(4, requires_grad=True)
    nodes.posts[N0].send(N1, Parcel(key("n0"), [sent]))
    with torch.no_grad():
        sent.zero_()
    (found,) = nodes.mailboxes[N1].receive(key("n0"), "activation").tensors
    assert found.tolist() == [1.0] * 4 and not found.requires_grad


def test_a_parcel_without_tensors_and_records_of_the_commit_arrive(nodes: Nodes) -> None:
    record = Prepared(1, 4, 0, (N0,), {UnitName("a"): UnitSums({"a": (0, 1)}, {"a.w": 2.5})}, {0: (1.5, 3.0)}, ("stop",),
                      {N0: {"F:a": 0.25}})
    where = key("n0", kind="exchange", step=4, name="up")
    nodes.posts[N0].send(N1, Parcel(where, [], record))
    assert nodes.mailboxes[N1].receive(where, "record").note == record


def test_parcels_of_one_peer_arrive_in_the_order_they_were_sent(nodes: Nodes) -> None:
    keys = [key("n0", micro_batch=micro_batch) for micro_batch in range(200)]
    send_order(nodes.posts[N0], "n1", keys)
    nodes.mailboxes[N1].receive(keys[-1], "activation")
    # What was sent before the last one is here without any waiting.
    assert list(nodes.mailboxes[N1]._parcels) == keys[:-1]


def test_a_parcel_to_oneself_arrives(nodes: Nodes) -> None:
    nodes.posts[N0].send(N0, Parcel(key("n0"), [torch.ones(2)]))
    assert nodes.mailboxes[N0].receive(key("n0"), "activation").tensors[0].tolist() == [1.0, 1.0]


def test_parcels_are_told_apart_by_all_of_their_key(nodes: Nodes) -> None:
    keys = [key("n0"), key("n0", step=1), key("n0", attempt=1), key("n0", kind="gradient"), key("n0", micro_batch=1),
            key("n0", hop=2), key("n0", name="x"), key("n0", view=2), key("n2")]
    for index, each in enumerate(keys):
        nodes.posts[each.source].send(N1, Parcel(each, [torch.tensor(index)]))
    found = [int(nodes.mailboxes[N1].receive(each, "activation").tensors[0]) for each in keys]
    assert found == list(range(len(keys)))


def test_a_later_views_parcel_is_kept_until_the_view_is_adopted(nodes: Nodes) -> None:
    nodes.posts[N0].send(N1, Parcel(key("n0", view=3), [torch.ones(1)]))
    until(lambda: key("n0", view=3) in nodes.mailboxes[N1]._parcels, "the parcel")
    nodes.mailboxes[N1].adopt(2)
    nodes.mailboxes[N1].adopt(3)
    assert nodes.mailboxes[N1].receive(key("n0", view=3), "activation").tensors[0].tolist() == [1.0]


def test_an_older_views_parcel_is_dropped_when_it_arrives_and_when_it_is_used(nodes: Nodes) -> None:
    mailbox = nodes.mailboxes[N1]
    nodes.posts[N0].send(N1, Parcel(key("n0", view=1)))
    until(lambda: bool(mailbox._parcels), "the parcel")
    mailbox.adopt(2)
    assert not mailbox._parcels
    send_order(nodes.posts[N0], "n1", [key("n0", view=1), key("n0", view=2)])
    mailbox.receive(key("n0", view=2), "activation")
    assert not mailbox._parcels
    for call in (lambda: mailbox.receive(key("n0", view=1), "activation"), lambda: mailbox.check(1),
                 lambda: mailbox.receive_any(frozenset([key("n0", view=1)]), "record")):
        with pytest.raises(InterruptedByView) as caught:
            call()
        assert caught.value.view == 2


def test_a_view_that_was_adopted_is_never_left_for_an_older_one(nodes: Nodes) -> None:
    nodes.adopt(5)
    nodes.adopt(3)
    assert nodes.mailboxes[N1].view == 5


def test_an_abort_frees_every_blocked_receive_twice_in_a_row(nodes: Nodes) -> None:
    began_s = time.monotonic()
    for view in (1, 2):
        waiting = Waiting()
        following = dict(zip(nodes.ids, (*nodes.ids[1:], nodes.ids[0]), strict=True))
        waiting.start({
            node: (lambda box=nodes.mailboxes[node], peer=peer, v=view: box.receive(key(peer, view=v), "activation"))
            for node, peer in following.items()
        })
        until(lambda: are_blocked(list(nodes.mailboxes.values())), "three blocked receives")
        nodes.adopt(view + 1)
        outcomes = waiting.ended()
        assert {node: type(outcome) for node, outcome in outcomes.items()} == dict.fromkeys(nodes.ids, InterruptedByView)
        assert {outcome.view for outcome in outcomes.values()} == {view + 1}
    nodes.posts[N0].send(N1, Parcel(key("n0", view=3)))
    nodes.mailboxes[N1].receive(key("n0", view=3), "activation")
    assert time.monotonic() - began_s < MINUTE_S  # no deadline freed anybody


def test_an_abort_frees_whoever_waits_for_the_first_of_several(nodes: Nodes) -> None:
    waiting = Waiting()
    waiting.start({N0: lambda: nodes.mailboxes[N0].receive_any(frozenset([key("n1"), key("n2")]), "record")})
    until(lambda: are_blocked([nodes.mailboxes[N0]]), "a blocked receive")
    nodes.adopt(2)
    assert isinstance(waiting.ended()[N0], InterruptedByView)


def test_the_first_of_several_is_taken_and_the_others_stay(nodes: Nodes) -> None:
    nodes.posts[N2].send(N0, Parcel(key("n2")))
    found = nodes.mailboxes[N0].receive_any(frozenset([key("n1"), key("n2")]), "record")
    assert found.key == key("n2")
    nodes.posts[N1].send(N0, Parcel(key("n1")))
    assert nodes.mailboxes[N0].receive(key("n1"), "record").key == key("n1")


def test_a_silent_peer_is_named_with_what_was_awaited_and_where(impatient: Nodes) -> None:
    mailbox = impatient.mailboxes[N0]
    with pytest.raises(PeerLost, match="no gradient from n1 in step 7, micro-batch 3 of view 1") as caught:
        mailbox.receive(key("n1", step=7, micro_batch=3, kind="gradient"), "gradient")
    error = caught.value
    assert (error.peers, error.operation, error.view, error.step, error.micro_batch) == (("n1",), "gradient", 1, 7, 3)
    with pytest.raises(PeerLost, match="no gradient sum from n1 in step 7 of view 1") as caught:
        mailbox.receive(key("n1", step=7, kind="sum"), "gradient sum")
    assert caught.value.micro_batch is None
    with pytest.raises(PeerLost, match="no record from n1, n2 in step 7 of view 1"):
        mailbox.receive_any(frozenset([key("n2", step=7, kind="exchange"), key("n1", step=7, kind="exchange")]), "record")


def reduction(nodes: Nodes, node: NodeId, source: torch.Tensor, pairs: dict[str, list[int]], expected: int = 3,
              view: int = 1) -> Reduction:
    return Reduction(
        node=node, group=nodes.ids, name="unit", where=Where(view, 0, 0), source=[source], pairs=pairs,
        expected={"unit/layer": expected}, mailbox=nodes.mailboxes[node], post=nodes.posts[node],
    )


def reduced(nodes: Nodes, sources: dict[NodeId, torch.Tensor], pairs: dict[NodeId, list[int]], view: int = 1) -> dict[Any, Any]:
    def call(node: NodeId) -> Any:
        one = reduction(nodes, node, sources[node], {"unit/layer": pairs[node]}, view=view)
        one.post_parts()
        target = torch.empty_like(sources[node])
        return one.finish([target]), target

    waiting = Waiting()
    waiting.start({node: (lambda node=node: call(node)) for node in sources})
    return waiting.ended()


ONCE = {N0: [1], N1: [0, 2], N2: []}


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 1000])
def test_a_reduction_gives_every_member_the_same_bits_and_all_pairs(nodes: Nodes, length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sources = {node: torch.randn(length, generator=generator) for node in nodes.ids}
    found = reduced(nodes, sources, ONCE)
    wanted = sources[N0] + sources[N1] + sources[N2]
    for pairs, total in found.values():
        assert pairs == {"unit/layer": [0, 1, 2]}
        assert torch.equal(total, wanted)


@pytest.mark.parametrize("pairs", [{N0: [1], N1: [0, 1, 2], N2: []}, {N0: [], N1: [0, 2], N2: []}], ids=["twice", "never"])
def test_a_reduction_whose_books_do_not_add_up_is_refused_by_everybody(nodes: Nodes, pairs: dict[NodeId, list[int]]) -> None:
    found = reduced(nodes, {node: torch.ones(5) for node in nodes.ids}, pairs)
    assert {type(outcome) for outcome in found.values()} == {EngineError}
    assert "should count micro-batches 0..2 once each" in str(found[N0])


def test_an_abort_frees_a_reduction_that_a_member_never_joined_twice_in_a_row(nodes: Nodes) -> None:
    for view in (1, 2):
        waiting = Waiting()
        for node in (N0, N1):
            one = reduction(nodes, node, torch.ones(6), {"unit/layer": ONCE[node]}, view=view)
            one.post_parts()
            waiting.start({node: (lambda one=one: one.finish([torch.zeros(6)]))})
        until(lambda: are_blocked([nodes.mailboxes[N0], nodes.mailboxes[N1]]), "two blocked reductions")
        nodes.adopt(view + 1)
        assert {type(outcome) for outcome in waiting.ended().values()} == {InterruptedByView}
    found = reduced(nodes, {node: torch.ones(6) for node in nodes.ids}, ONCE, view=3)
    assert all(total.tolist() == [3.0] * 6 for _, total in found.values())
