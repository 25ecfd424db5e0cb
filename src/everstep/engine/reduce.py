"""Sum flat tensors over a group of nodes, with their books.

The tensors are taken as one row and cut into one part per member, so a part is a run of pieces; they are never copied
together. Each member sums its own part over all members in the group's order, then sends the result to the others. So every
holder ends with the same bits. The pairs that a contribution contains travel with it: a result is taken only if the
contributors' pairs are disjoint and make up all that are expected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from everstep.engine.links import Key, Mailbox, Parcel, Post
from everstep.errors import EngineError
from everstep.quantities import NodeId

Pairs = dict[str, list[int]]
"""``unit/layer`` → micro-batches counted."""


@dataclass(frozen=True)
class Where:
    """Whose reduction this is: view, step and attempt."""

    view: int
    step: int
    attempt: int


def merged(contributions: Sequence[Mapping[str, Sequence[int]]], expected: Mapping[str, int], what: str) -> Pairs:
    """All pairs of all contributions.

    Args:
        expected: use → number of micro-batches that must be in, each once.

    Raises:
        EngineError: a pair is there twice or not at all: our own bug, found before any harm.
    """
    pairs: Pairs = {use: sorted(m for part in contributions for m in part.get(use, ())) for use in expected}
    for use, micro_batches in pairs.items():
        if micro_batches != list(range(expected[use])):
            raise EngineError(f"{what}: {use} should count micro-batches 0..{expected[use] - 1} once each, got {micro_batches}")
    return pairs


def parts_of(tensors: Sequence[Tensor], num_parts: int) -> list[list[Tensor]]:
    """Cut a row of flat tensors into ``num_parts`` runs of views, whose lengths differ by one element at most."""
    length = sum(tensor.numel() for tensor in tensors)
    bounds = [length * k // num_parts for k in range(num_parts + 1)]
    parts: list[list[Tensor]] = [[] for _ in range(num_parts)]
    begin = 0
    for tensor in tensors:
        end = begin + tensor.numel()
        for part, first, last in zip(parts, bounds, bounds[1:], strict=False):
            if first < end and last > begin:
                part.append(tensor[max(first, begin) - begin : min(last, end) - begin])
        begin = end
    return parts


class Reduction:
    """One all-reduce of one bucket of tensors. ``post_parts`` first, ``finish`` later, so that buckets overlap."""

    def __init__(
        self, *, node: NodeId, group: tuple[NodeId, ...], name: str, where: Where, source: Sequence[Tensor],
        pairs: Mapping[str, Sequence[int]], expected: Mapping[str, int], mailbox: Mailbox, post: Post,
    ) -> None:
        self._node, self._group, self._name, self._where = node, group, name, where
        self._pairs, self._expected = {use: list(p) for use, p in pairs.items()}, expected
        self._mailbox, self._post = mailbox, post
        self._parts = parts_of(source, len(group))

    def _key(self, kind: str, source: NodeId) -> Key:
        where = self._where
        return Key(where.view, where.step, where.attempt, kind, 0, 0, source, self._name)

    def post_parts(self) -> None:
        """Send every other member its part of this node's sums."""
        for member, part in zip(self._group, self._parts, strict=True):
            if member != self._node:
                self._post.send(member, Parcel(self._key("part", self._node), part, self._pairs))

    def finish(self, target: Sequence[Tensor]) -> Pairs:
        """Sum this node's part, send it, take the others' results into ``target`` (which may be the source).

        Returns the pairs in the sums. Raises as ``Mailbox.receive``, and EngineError when the books do not add up.
        """
        contributions, books = [], []
        for member, part in zip(self._group, self._parts, strict=True):
            if member == self._node:
                contributions.append(part)
                books.append(self._pairs)
            else:
                parcel = self._mailbox.receive(self._key("part", member), "gradient part")
                contributions.append(parcel.tensors)
                books.append(parcel.note)
        pairs = merged(books, self._expected, f"sums of {self._name}")
        total = self._summed(contributions)
        for member in self._group:
            if member != self._node:
                self._post.send(member, Parcel(self._key("sum", self._node), total, pairs))
        for member, part in zip(self._group, parts_of(target, len(self._group)), strict=True):
            if member == self._node:
                _write(part, total)
                continue
            parcel = self._mailbox.receive(self._key("sum", member), "gradient sum")
            if parcel.note != pairs:
                raise EngineError(f"sums of {self._name}: {member} counted {parcel.note}, {self._node} counted {pairs}")
            _write(part, parcel.tensors)
        return pairs

    def _summed(self, contributions: list[list[Tensor]]) -> list[Tensor]:
        """Piece by piece, in the group's order; alone, this node's own pieces."""
        first, *others = contributions
        for count, contribution in enumerate(others):
            if [piece.shape for piece in contribution] != [piece.shape for piece in first]:
                raise EngineError(f"sums of {self._name}: members cut it differently")
            # What the first addition makes is ours to change; the contributions themselves may still be wanted.
            first = [
                whole.add_(piece) if count else whole + piece for whole, piece in zip(first, contribution, strict=True)
            ]
        return first


def _write(target: list[Tensor], source: list[Tensor]) -> None:
    for to, piece in zip(target, source, strict=True):
        if to.data_ptr() != piece.data_ptr():
            to.copy_(piece)
