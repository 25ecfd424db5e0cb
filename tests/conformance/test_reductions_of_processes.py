"""Both ways to reduce among processes sum alike, and an abort frees whoever is left, however a member was lost.

Every wait has a minute; what ends sooner was freed by the abort.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.conformance.peers import KINDS, peers, source_of
from tests.conformance.transports import MINUTE_S

LENGTH = 100_000


def freed(kind: str, names: list[str]) -> bool:
    """By its own abort; over gloo perhaps by that of a peer, which ends the connection between them."""
    return names == ["InterruptedByView", "abort"] or (kind == "gloo" and names == ["EngineError", "abort"])


@pytest.mark.parametrize("kind", KINDS)
def test_processes_sum_alike_and_survive_members_that_die_and_freeze_within_a_reduction(kind: str, tmp_path: Path) -> None:
    with peers(kind, 4, tmp_path) as group:
        members = [0, 1, 2, 3]
        group.ask(members, "open", 1, members)

        # Whole numbers have one sum; others the same bits everywhere, and the right ones but for the order.
        for length in (LENGTH, 3, 1):
            totals = [total for _, total in group.ask(members, "reduce", length, True, 1).values()]
            wanted = torch.stack([source_of(rank, length, True) for rank in members]).sum(0)
            assert all(torch.equal(total, wanted) for total in totals)
        totals = [total for _, total in group.ask(members, "reduce", LENGTH, False, 1).values()]
        assert all(torch.equal(total, totals[0]) for total in totals)
        wanted = torch.stack([source_of(rank, LENGTH, False).double() for rank in members]).sum(0)
        assert float((totals[0].double() - wanted).abs().max()) < 1e-5

        # One is killed while all reduce without end.
        began_s = time.monotonic()
        group.tell(members, "reduce", LENGTH, True, 1_000_000_000)
        assert group.answers(members, within_s=0.3) == {}
        group.kill(3)
        survivors = [0, 1, 2]
        noticed = group.answers(survivors, within_s=0.3)  # gloo tells whoever was connected to it, and nobody else
        assert {name for name, _ in noticed.values()} <= {"EngineError"}
        group.tell(survivors, "abort", 2)
        said = group.all_answers({rank: 1 if rank in noticed else 2 for rank in survivors})
        assert all(names == ["abort"] if rank in noticed else freed(kind, names) for rank, names in said.items()), said
        assert time.monotonic() - began_s < MINUTE_S / 2

        # One freezes: nobody gets so much as a reset, so all others are blocked, and only the abort frees them.
        group.ask(survivors, "open", 2, survivors)
        group.freeze(2)
        left = [0, 1]
        group.tell(left, "reduce", LENGTH, True, 1)
        assert group.answers(left, within_s=0.3) == {}
        group.tell(left, "abort", 3)
        said = group.all_answers(dict.fromkeys(left, 2))
        assert all(freed(kind, names) for names in said.values()), said
        assert time.monotonic() - began_s < MINUTE_S / 2

        # Those who are left form a new group.
        group.ask(left, "open", 3, left)
        wanted = source_of(0, LENGTH, True) + source_of(1, LENGTH, True)
        assert all(torch.equal(total, wanted) for _, total in group.ask(left, "reduce", LENGTH, True, 1).values())
