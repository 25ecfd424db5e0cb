"""Marks tie an odd line of code to the one test that explains it.

A line that drops something says ``mark("member.stale-answer-dropped")``; a test of it runs inside
``with expect("member.stale-answer-dropped"):`` and fails when the line was not reached. Outside of ``expect`` a mark
does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[set[str] | None] = ContextVar("everstep-marks", default=None)


def mark(name: str) -> None:
    """Say that the line was reached."""
    reached = _listener.get()
    if reached is not None:
        reached.add(name)


@contextmanager
def expect(*names: str) -> Iterator[None]:
    """Fail unless every mark of ``names`` was reached inside.

    Raises:
        AssertionError: one was not.
    """
    reached: set[str] = set()
    before = _listener.set(reached)
    try:
        yield
    finally:
        _listener.reset(before)
    missing = [name for name in names if name not in reached]
    assert not missing, f"not reached: {', '.join(missing)} (reached: {', '.join(sorted(reached)) or 'none'})"
