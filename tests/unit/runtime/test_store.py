"""The view store: one view a number, one plan a view, and only the newest leader writes."""

from __future__ import annotations

import math
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.errors import ConfigError
from everstep.runtime.store import LocalStore
from everstep.view import View
from tests.unit.protocol.makers import N0, N1, N2, order, union, view


def test_a_view_follows_the_one_that_was_expected(tmp_path: Path) -> None:
    with LocalStore(tmp_path / "store.sqlite") as store:
        token = store.take_lease("a")
        assert store.current() is None
        assert not store.swap_view(0, view(2, N0), token)
        assert not store.swap_view(1, view(2, N0), token)
        assert store.swap_view(0, view(1, N0, N1), token)
        assert not store.swap_view(0, view(1, N0), token)
        assert not store.swap_view(1, view(3, N0), token)
        assert store.current() == view(1, N0, N1)
        assert store.swap_view(1, view(2, N1), token)
        assert store.current() == view(2, N1)


def test_a_plan_is_written_once_while_its_view_is_the_current_one(tmp_path: Path) -> None:
    with LocalStore(tmp_path / "store.sqlite") as store:
        token = store.take_lease("a")
        assert not store.write_plan(order(1, N0, N1), token)
        store.swap_view(0, view(1, N0, N1), token)
        assert not store.write_plan(order(2, N0, N1), token)
        assert store.plan_of(1) is None
        assert store.write_plan(order(1, N0, N1), token)
        assert not store.write_plan(order(1, N1, N0), token)
        store.swap_view(1, view(2, N0), token)
        assert not store.write_plan(order(1, N1, N0), token)
        assert store.plan_of(1) == order(1, N0, N1)
        assert store.plan_of(2) is None


def test_a_plan_comes_back_as_it_was_written_with_numbers_that_are_none(tmp_path: Path) -> None:
    whole = order(1, N0, N1, union=union(losses={0: (math.inf, 2.0), 1: (3.0, 4.0)}), rollbacks=((9, 5, 2),), restore="a/b")
    with LocalStore(tmp_path / "store.sqlite") as store:
        token = store.take_lease("a")
        store.swap_view(0, view(1, N0, N1), token)
        assert store.write_plan(whole, token)
        assert store.plan_of(1) == whole


def test_a_leader_that_was_replaced_can_write_no_more(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with LocalStore(path) as old, LocalStore(path) as new:
        old_token = old.take_lease("a")
        assert old.swap_view(0, view(1, N0, N1), old_token)
        new_token = new.take_lease("b")
        assert new_token > old_token
        assert not old.swap_view(1, view(2, N0), old_token)
        assert not old.write_plan(order(1, N0, N1), old_token)
        assert not old.swap_view(1, view(2, N0), new_token + 1)
        assert new.write_plan(order(1, N0, N1), new_token)
        assert new.swap_view(1, view(2, N1), new_token)
        assert old.current() == view(2, N1) and old.plan_of(1) == order(1, N0, N1)


WRITER = """
import sys
from pathlib import Path
from everstep.quantities import NodeId
from everstep.runtime.store import LocalStore
from everstep.view import Member, View

with LocalStore(Path(sys.argv[1])) as store:
    sys.stdin.readline()
    tokens = [store.take_lease("me") for _ in range(20)]
    print(*tokens, flush=True)
    won, token = [], int(sys.stdin.readline())
    while (number := (view.number if (view := store.current()) else 0)) < 100:
        if store.swap_view(number, View(number + 1, (Member(NodeId(sys.argv[2])),)), token):
            won.append(number + 1)
    print(*won)
"""


def test_of_two_processes_that_write_at_once_each_view_and_token_has_one_winner(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with LocalStore(path) as store:
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(path), node], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for node in (N1, N2)
        ]
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        tokens = [int(word) for writer in writers for word in writer.stdout.readline().split()]  # type: ignore[union-attr]
        assert sorted(tokens) == list(range(1, 41))
        newest = store.take_lease("the test")
        won = {N1: set[int](), N2: set[int]()}
        for writer in writers:
            writer.stdin.write(f"{newest}\n")  # type: ignore[union-attr]
            writer.stdin.flush()  # type: ignore[union-attr]
        for node, writer in zip(won, writers, strict=True):
            won[node] = {int(word) for word in writer.communicate()[0].split()}
            assert writer.returncode == 0
        assert won[N1].isdisjoint(won[N2]) and won[N1] | won[N2] == set(range(1, 101))
        owner = {number: node for node, numbers in won.items() for number in numbers}
        assert store.current() == view(100, owner[100])


def test_views_outlive_the_process_that_wrote_them(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with LocalStore(path) as store:
        store.swap_view(0, view(1, N0), store.take_lease("a"))
    with LocalStore(path) as again:
        assert again.current() == View(1, view(1, N0).members)
        assert again.take_lease("b") == 2


def test_an_error_within_a_write_leaves_nothing_behind(tmp_path: Path) -> None:
    with LocalStore(tmp_path / "store.sqlite") as store:
        token = store.take_lease("a")
        with pytest.raises(TypeError):
            store.swap_view(0, View(1, (object(),)), token)  # type: ignore[arg-type]
        assert store.current() is None
        assert store.swap_view(0, view(1, N0), token)


def filled(path: Path) -> bytes:
    with LocalStore(path) as store:
        token = store.take_lease("a")
        for number in range(1, 60):
            store.swap_view(number - 1, view(number, N0, N1, N2), token)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return path.read_bytes()


DAMAGE = {
    "not a database": lambda data: b"these are no views" * 100,
    "cut short": lambda data: data[: len(data) // 2],
    "overwritten": lambda data: data[:100] + b"\xff" * (len(data) - 100),
    "overwritten in the middle": lambda data: data[:4096] + b"\x5a" * 4096 + data[8192:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_store_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "store.sqlite"
    path.write_bytes(DAMAGE[damage](filled(path)))
    with pytest.raises(ConfigError, match=r"store.sqlite: not a view store that can be used"):
        LocalStore(path).__enter__()


def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a view store that can be used: unable to open"):
        LocalStore(tmp_path / "nowhere" / "store.sqlite").__enter__()
