"""Answers kept for the newest values that were asked about, told apart by identity.

Comparing two plans of thousands of routes takes longer than most of what is asked about one. Plans, workloads and clusters
never change once made, so one object has one answer; what is kept holds on to the object, so no other can take its identity.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Generic, ParamSpec, TypeVar, cast

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")


class Same(Generic[_T]):
    """A value that equals itself alone: an argument of a function whose answers are kept beside others that are compared."""

    __slots__ = ("value",)

    def __init__(self, value: _T) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value


def remembered(most: int) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """For a function of values that never change: its answers are kept until there are ``most``, then all are forgotten."""
    def wrap(work_out: Callable[_P, _R]) -> Callable[_P, _R]:
        by_values = cast(Callable[..., _R], work_out)
        known: dict[object, tuple[tuple[object, ...], _R]] = {}

        @wraps(work_out)
        def answer(*values: _P.args, **_: _P.kwargs) -> _R:
            name = id(values[0]) if len(values) == 1 else tuple(map(id, values))
            found = known.get(name)
            if found is None:
                if len(known) >= most:
                    known.clear()
                found = known[name] = (values, by_values(*values))
            return found[1]

        return cast(Callable[_P, _R], answer)
    return wrap
