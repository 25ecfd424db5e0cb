"""Sum a flat tensor over a group of nodes, with its books.

The tensor is cut into one part per member; each member sums its own part over all members in the group's order, then
sends the result to the others. So every holder ends with the same bits. The pairs that a contribution contains travel
with it: a result is taken only if the contributors' pairs are disjoint and make up all that are expected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
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


def parts_of(length: int, num_parts: int) -> list[slice]:
    """Cut ``length`` elements into ``num_parts`` slices that differ by one element at most."""
    bounds = [length * k // num_parts for k in range(num_parts + 1)]
    return [slice(bounds[k], bounds[k + 1]) for k in range(num_parts)]


class Reduction:
    """One all-reduce of one bucket. ``post_parts`` first, ``finish`` later, so that buckets overlap."""

    def __init__(
        self, *, node: NodeId, group: tuple[NodeId, ...], name: str, where: Where, source: Tensor,
        pairs: Mapping[str, Sequence[int]], expected: Mapping[str, int], mailbox: Mailbox, post: Post,
    ) -> None:
        self._node, self._group, self._name, self._where = node, group, name, where
        self._source, self._pairs, self._expected = source, {use: list(p) for use, p in pairs.items()}, expected
        self._mailbox, self._post = mailbox, post
        self._parts = parts_of(source.numel(), len(group))
        self._mine = group.index(node)

    def _key(self, kind: str, source: NodeId) -> Key:
        where = self._where
        return Key(where.view, where.step, where.attempt, kind, 0, 0, source, self._name)

    def post_parts(self) -> None:
        """Send every other member its part of this node's sums."""
        for member, part in zip(self._group, self._parts, strict=True):
            if member != self._node:
                self._post.send(member, Parcel(self._key("part", self._node), [self._source[part]], self._pairs))

    def finish(self, target: Tensor) -> Pairs:
        """Sum this node's part, send it, take the others' results into ``target`` (which may be the source).

        Returns the pairs in the sums. Raises as ``Mailbox.receive``, and EngineError when the books do not add up.
        """
        mine = self._parts[self._mine]
        contributions, books = [], []
        for member in self._group:
            if member == self._node:
                contributions.append(self._source[mine])
                books.append(self._pairs)
            else:
                parcel = self._mailbox.receive(self._key("part", member), "gradient part")
                contributions.append(parcel.tensors[0])
                books.append(parcel.note)
        pairs = merged(books, self._expected, f"sums of {self._name}")
        if len(self._group) == 1 and target is self._source:
            return pairs
        total = contributions[0].clone()
        for contribution in contributions[1:]:
            total.add_(contribution)
        for member in self._group:
            if member != self._node:
                self._post.send(member, Parcel(self._key("sum", self._node), [total], pairs))
        target[mine] = total
        for member, part in zip(self._group, self._parts, strict=True):
            if member == self._node:
                continue
            parcel = self._mailbox.receive(self._key("sum", member), "gradient sum")
            if parcel.note != pairs:
                raise EngineError(f"sums of {self._name}: {member} counted {parcel.note}, {self._node} counted {pairs}")
            target[part] = parcel.tensors[0]
        return pairs


def bucket(tensors: Sequence[Tensor]) -> Tensor:
    """One flat tensor of several; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def unbucket(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write ``flat`` back into the tensors that it was made from."""
    if len(tensors) == 1 and tensors[0] is flat:
        return
    offset = 0
    for tensor in tensors:
        tensor.copy_(flat[offset : offset + tensor.numel()])
        offset += tensor.numel()
