"""Transition tables as Markdown: the tables in the documentation are made from those that run."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import TypeVar

_Item = TypeVar("_Item")


def markdown(transitions: Mapping[tuple[enum.Enum, type], enum.Enum | tuple[enum.Enum, ...]]) -> str:
    """One row an event, one column a phase, in the order of the table; ``·``: not legal there."""
    phases = _in_order(phase for phase, _ in transitions)
    events = _in_order(event for _, event in transitions)
    rows = [["", *(str(phase.value) for phase in phases)], ["---"] * (len(phases) + 1)]
    for event in events:
        rows.append([f"`{event.__name__}`", *(_cell(transitions.get((phase, event), ())) for phase in phases)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(leads_to: enum.Enum | tuple[enum.Enum, ...]) -> str:
    phases = leads_to if isinstance(leads_to, tuple) else (leads_to,)
    return " / ".join(str(phase.value) for phase in phases) or "·"


def _in_order(items: Iterable[_Item]) -> list[_Item]:
    return list(dict.fromkeys(items))
