"""In which order the groups of a plan sum up their gradients: those that share no node at the same time.

With pipelines that are cut alike, groups share no node and there is one round. With other cuts a node is in a group for each
range of layers whose holders are the same, and neighbours in the order of layers share a node: one after the other they would
wait for each other like a chain, however many nodes could work at the same time. Groups are the vertices of a conflict graph,
with an edge where two share a node; the colours of a greedy colouring are the rounds.

Every node works off its own groups in the order of the rounds. This is one order for all nodes, so nobody can wait in a ring:
of the groups that are not done, the first in that order has all its members free for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

_Member = TypeVar("_Member", bound=Hashable)


def rounds(groups: Mapping[tuple[_Member, ...], float]) -> tuple[tuple[tuple[_Member, ...], ...], ...]:
    """Groups by round. ``groups``: members, and the bytes that they sum up.

    Two greedy colourings are tried, largest groups first and in the order given; the one that is through sooner is taken.
    The order given, by layers, needs the fewest rounds that there can be, since groups on a node are neighbours in it;
    largest first puts large ones together.
    """
    by_size = sorted(groups, key=lambda group: -groups[group])
    found = [_coloured(order) for order in (by_size, list(groups))]
    return min(found, key=lambda each: longest_path([group for alike in each for group in alike], groups))


def in_rounds(groups: Mapping[tuple[_Member, ...], float]) -> list[tuple[_Member, ...]]:
    """The groups one after the other, round by round."""
    return [group for alike in rounds(groups) for group in alike]


def longest_path(order: Iterable[tuple[_Member, ...]], groups: Mapping[tuple[_Member, ...], float]) -> float:
    """When all are through that work off their groups in ``order``, each group taking as long as it has bytes."""
    free: dict[_Member, float] = {}
    for group in order:
        end = max(free.get(member, 0.0) for member in group) + groups[group]
        free.update(dict.fromkeys(group, end))
    return max(free.values(), default=0.0)


def _coloured(order: Iterable[tuple[_Member, ...]]) -> tuple[tuple[tuple[_Member, ...], ...], ...]:
    """Each group goes into the first round in which none of its members has another."""
    busy: dict[_Member, int] = {}
    """By member: a bit for each round in which it has a group."""
    found: list[list[tuple[_Member, ...]]] = []
    for group in order:
        taken = 0
        for member in group:
            taken |= busy.get(member, 0)
        index = (~taken & (taken + 1)).bit_length() - 1
        if index == len(found):
            found.append([])
        found[index].append(group)
        for member in group:
            busy[member] = busy.get(member, 0) | 1 << index
    return tuple(map(tuple, found))
