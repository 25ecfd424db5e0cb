"""Tables of a TOML file that know on which line they stand, so that whatever is wrong can be told by file and line.

The standard parser keeps no lines; they are looked for in the text: headers ``[name]`` and ``[[name]]``, and keys at the
beginning of a line. A key inside an inline table is told by the line of the table it is in, or by the file alone.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.errors import ConfigError
from everstep.quantities import parse_bytes, parse_seconds

MOST = 10**6
"""More nodes than this, or speeds this far from 1, are a slip of the pen."""

MOST_BYTES, MOST_S = 10**18, 10.0**9
"""So are more bytes or seconds."""

_ABSENT: Any = object()
_HEADER = re.compile(r"\s*(\[\[?)\s*([A-Za-z0-9_-]+)\s*\]")
_KEY = re.compile(r"""\s*["']?([A-Za-z0-9_-]+)["']?\s*=""")

_Place = tuple[str, int]
"""A table: its name, and which of that name it is, from 1; ``("", 0)``: the top of the file."""

_TOP: _Place = ("", 0)


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean memory_bytes?``, or nothing where no name is like ``name``."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def read(path: Path, called: str) -> Table:
    """The top of the file at ``path``, which errors call ``called``.

    Raises:
        ConfigError: it cannot be read, or is not TOML in UTF-8.
    """
    text = text_of(path, called)
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # the parser raises plain ValueError for a number of too many digits
        raise ConfigError(f"{called}: not valid TOML: {error}") from error
    return Table(called, values, _lines(text))


def text_of(path: Path, called: str) -> str:
    """What is in the file at ``path``, which errors call ``called``; line ends as they are.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    try:
        content = path.read_bytes()
        return content.decode()
    except OSError as error:
        raise ConfigError(f"{called}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = content[:error.start].count(b"\n") + 1
        raise ConfigError(f"{called}, line {line}: not text in UTF-8") from error


def _lines(text: str) -> dict[tuple[_Place, str], int]:
    """The line of each table, under the empty key, and of each of its keys."""
    found: dict[tuple[_Place, str], int] = {}
    counts: dict[str, int] = {}
    place, quoted = _TOP, False
    for number, line in enumerate(text.split("\n"), start=1):
        begins_quoted = quoted
        quoted ^= (line.count('"""') + line.count("'''")) % 2 == 1
        if begins_quoted:
            continue
        if header := _HEADER.match(line):
            name = header[2]
            counts[name] = counts.get(name, 0) + 1
            place = (name, counts[name] if header[1] == "[[" else 0)
            found[place, ""] = number
        elif key := _KEY.match(line):
            found.setdefault((place, key[1]), number)
    return found


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a file. Every ``ConfigError`` raised here names the file, the line, the table and what was expected."""

    called: str
    """The file."""
    values: Mapping[str, Any]
    lines: Mapping[tuple[_Place, str], int] = field(repr=False)
    place: _Place = _TOP

    def at(self, key: str = "") -> str:
        """Where ``key`` stands, or the table: ``mine.toml, line 7: hosts 1``."""
        candidates = [(self.place, key), (self.place, "")]
        if self.place == _TOP:  # the header of a table, or the first of a list of them
            candidates = [(_TOP, key), ((key, 0), ""), ((key, 1), "")]
        else:  # an inline table
            candidates.append((_TOP, self.place[0]))
        line = next((self.lines[place] for place in candidates if place in self.lines), None)
        name, number = self.place
        words = f"{self.called}, line {line}" if line else self.called
        return f"{words}: {name} {number}" if number else f"{words}: {name}" if name else words

    def wrong(self, key: str, expected: str) -> ConfigError:
        """That the value of ``key`` is not what was expected."""
        value = repr(self.values.get(key))
        return ConfigError(f"{self.at(key)}: {key} {expected}, got {value if len(value) <= 80 else f'{value[:80]}…'}")

    def only(self, known: set[str]) -> Table:
        for key in self.values:
            if key not in known:
                hint = nearest(key, known) or f"; known here: {', '.join(sorted(known))}"
                raise ConfigError(f"{self.at(key)}: unknown key {key!r}{hint}")
        return self

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def inner(self, key: str) -> Table:
        """The table ``key``; empty where there is none."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, f"must be a table, [{key}]")
        return Table(self.called, value, self.lines, (key, 0))

    def inner_list(self, key: str) -> list[Table]:
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise self.wrong(key, f"must be a list of tables, [[{key}]]")
        return [Table(self.called, entry, self.lines, (key, number)) for number, entry in enumerate(value, start=1)]

    def text(self, key: str, default: Any = _ABSENT) -> str:
        value = self._value(key, default)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "must be text")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.wrong(key, "must be a list of names")
        return value

    def count(self, key: str, default: Any = _ABSENT) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(key, "must be a whole number from 1")
        if value > MOST:
            raise self.wrong(key, f"must be at most {MOST:,}")
        return value

    def positive(self, key: str, default: Any = _ABSENT) -> float:
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(key, "must be a number")
        if not value > 0:
            raise self.wrong(key, "must be positive")
        if not 1 / MOST <= value <= MOST:
            raise self.wrong(key, f"must be between {1 / MOST:f} and {MOST:,}")
        return float(value)

    def size(self, key: str, default: Any = _ABSENT, *, least: int = 0) -> int:
        value = self._value(key, default)
        try:
            found = parse_bytes(value)
        except ValueError as error:
            raise ConfigError(f"{self.at(key)}: {key}: {error}") from error
        if found < least:
            raise self.wrong(key, "must be positive")
        if found > MOST_BYTES:
            raise self.wrong(key, f"must be at most {MOST_BYTES:,} bytes")
        return found

    def seconds(self, key: str, default: Any = _ABSENT) -> float:
        value = self._value(key, default)
        try:
            found = parse_seconds(value)
        except ValueError as error:
            raise ConfigError(f"{self.at(key)}: {key}: {error}") from error
        if found > MOST_S:
            raise self.wrong(key, f"must be at most {MOST_S:,.0f} seconds")
        return found

    def _value(self, key: str, default: Any = _ABSENT) -> Any:
        value = self.values.get(key, default)
        if value is _ABSENT:
            raise ConfigError(f"{self.at()}: {key} is missing")
        return value
