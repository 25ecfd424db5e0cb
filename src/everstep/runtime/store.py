"""The view store of one host: a SQLite file in the run's folder, one transaction a swap, owned by no process.

Two writes are the only commit points of the protocol: a view (compare-and-swap on its number) and the plan of a view
(written once, while that view is the current one). Each checks in the same transaction that the writer's token is the
newest, so a leader that was replaced cannot commit.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec

from everstep.errors import ConfigError
from everstep.protocol.messages import PlanOrdered
from everstep.view import View

_SCHEMA = """
CREATE TABLE IF NOT EXISTS lease (token INTEGER PRIMARY KEY, holder TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS views (number INTEGER PRIMARY KEY, view BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS plans (view INTEGER PRIMARY KEY, plan BLOB NOT NULL);
"""


class LocalStore:
    """Views and plans. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def __enter__(self) -> LocalStore:
        try:
            self._connection = sqlite3.connect(self._path, isolation_level=None, timeout=10)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.executescript(_SCHEMA)
            (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise sqlite3.DatabaseError(found)
        except sqlite3.DatabaseError as error:
            self.__exit__()
            raise ConfigError(f"{self._path}: not a view store that can be used: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @property
    def _db(self) -> sqlite3.Connection:
        assert self._connection is not None, "the store is used inside its context"
        return self._connection

    def take_lease(self, holder: str) -> int:
        """The right to write: a token newer than all before. Whoever held an older one can write no more."""
        with _transaction(self._db):
            self._db.execute("INSERT INTO lease (token, holder) SELECT COALESCE(MAX(token), 0) + 1, ? FROM lease", (holder,))
            return int(self._db.execute("SELECT MAX(token) FROM lease").fetchone()[0])

    def current(self) -> View | None:
        """The newest view, or None before the first."""
        row = self._db.execute("SELECT view FROM views ORDER BY number DESC LIMIT 1").fetchone()
        return msgspec.json.decode(row[0], type=View) if row else None

    def swap_view(self, expected: int, view: View, token: int) -> bool:
        """Make ``view`` the current one if the current number is ``expected`` (0: none) and ``token`` is the newest."""
        with _transaction(self._db):
            (number,) = self._db.execute("SELECT COALESCE(MAX(number), 0) FROM views").fetchone()
            if number != expected or view.number != expected + 1 or not self._is_newest(token):
                return False
            self._db.execute("INSERT INTO views (number, view) VALUES (?, ?)", (view.number, msgspec.json.encode(view)))
            return True

    def write_plan(self, order: PlanOrdered, token: int) -> bool:
        """Write the plan of the current view, once. Of the order the hash of its plan is enough to tell two apart."""
        with _transaction(self._db):
            (number,) = self._db.execute("SELECT COALESCE(MAX(number), 0) FROM views").fetchone()
            taken = self._db.execute("SELECT 1 FROM plans WHERE view = ?", (order.view,)).fetchone()
            if number != order.view or taken or not self._is_newest(token):
                return False
            # MessagePack: a union may hold a loss that is not a number, for which JSON has no word.
            self._db.execute("INSERT INTO plans (view, plan) VALUES (?, ?)", (order.view, msgspec.msgpack.encode(order)))
            return True

    def plan_of(self, view: int) -> PlanOrdered | None:
        row = self._db.execute("SELECT plan FROM plans WHERE view = ?", (view,)).fetchone()
        return msgspec.msgpack.decode(row[0], type=PlanOrdered) if row else None

    def _is_newest(self, token: int) -> bool:
        (newest,) = self._db.execute("SELECT COALESCE(MAX(token), 0) FROM lease").fetchone()
        return bool(newest == token)


class _transaction:  # noqa: N801 - reads as a statement
    """Everything inside or nothing; writers wait for one another."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *_: object) -> None:
        self._connection.execute("COMMIT" if kind is None else "ROLLBACK")
