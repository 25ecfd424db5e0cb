"""Answers kept for the newest values that were asked about, told apart by identity.

Comparing two plans of thousands of routes takes longer than most of what is asked about one. Plans, workloads and clusters
never change once made, so one object has one answer; what is kept holds on to the object, so no other can take its identity.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Same:
    """Values that are equal to the very same ones only."""

    __slots__ = ("_code", "_values")

    def __init__(self, values: tuple[object, ...]) -> None:
        self._values = values
        self._code = hash(tuple(map(id, values)))

    @property
    def values(self) -> tuple[Any, ...]:
        return self._values

    def __hash__(self) -> int:
        return self._code

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and all(map(_is, self._values, other._values))


def _is(one: object, other: object) -> bool:
    return one is other


def remembered(most: int) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """For a function of values that never change: the answers to its newest ``most`` questions are kept."""
    def wrap(work_out: Callable[_P, _R]) -> Callable[_P, _R]:
        by_values = cast(Callable[..., _R], work_out)

        @lru_cache(maxsize=most)
        def known(asked: _Same) -> _R:
            return by_values(*asked.values)

        @wraps(work_out)
        def answer(*values: _P.args, **_: _P.kwargs) -> _R:
            return known(_Same(values))

        return cast(Callable[_P, _R], answer)
    return wrap
