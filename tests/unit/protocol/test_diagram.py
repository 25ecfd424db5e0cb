"""The documentation draws the tables that run."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.protocol import leader, member
from everstep.protocol.diagram import markdown
from everstep.simulator import node as simulated

DOCUMENT = Path(__file__).parents[3] / "docs" / "protocol.md"


@pytest.mark.parametrize(("name", "machine"), [("member", member), ("leader", leader)])
def test_the_documentation_draws_the_table_that_runs(name: str, machine: object) -> None:
    begin, end = f"<!-- {name} table -->\n", f"\n<!-- end of {name} table -->"
    text = DOCUMENT.read_text()
    assert begin in text and end in text
    drawn = text.split(begin)[1].split(end)[0]
    assert drawn == markdown(machine.TRANSITIONS), "write what markdown() prints between the markers"  # type: ignore[attr-defined]


def test_a_table_has_a_row_an_event_and_a_column_a_phase() -> None:
    table = markdown({
        (member.Phase.JOINING, member.ViewSeen): member.Phase.DRAINING,
        (member.Phase.DRAINING, member.Drained): (member.Phase.PLANNING, member.Phase.HALTED),
    })
    assert table.splitlines() == [
        "|  | joining | draining |", "| --- | --- | --- |", "| `ViewSeen` | draining | · |",
        "| `Drained` | · | planning / halted |",
    ]


def test_the_documentation_names_each_rule_that_can_be_switched_off() -> None:
    text = DOCUMENT.read_text()
    missing = [rule for rule in simulated.Rules.__dataclass_fields__ if f"`{rule}`" not in text]
    assert not missing
