"""Traces from files: those that are shipped by bare name (``p3``), others by path.

Three formats, told apart by the file's ending:

- ``.csv``: ``milliseconds,add|remove,node`` a line, in the order of time.
- ``.txt``: ``date, time, count`` a line: how many instances were there. Lines are sorted here, since the published ones
  are not. Which instance left is not recorded: it is drawn, always alike.
- ``.json``: a list of ``{"node_id", "event_time", "event_type"}``, times in days, types ``fault_start`` and ``fault_end``.

Whatever is wrong is a ``ConfigError`` that names the file, the line (in JSON: the entry) and what was expected.
"""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

from everstep import trace as traces
from everstep.catalog.tables import text_of
from everstep.errors import ConfigError
from everstep.trace import Trace

_HERE = Path(__file__).parent / "traces"

SHIPPED: Mapping[str, str] = {
    "p3": "bamboo/p3-trace.csv", "g4dn": "bamboo/g4dn-trace.csv", "gcp-a100": "bamboo/a100x1-east1b.txt",
    "gcp-v100": "bamboo/v100x1-east1c.txt", "parcae-p3": "parcae/p3trace.csv",
    **{f"oobleck-{gap}": f"oobleck/{gap}.csv" for gap in ("5m", "10m", "30m", "1h", "3h", "6h")},
    "oobleck-p3": "oobleck/scale_p3-trace.csv", "oobleck-gcp": "oobleck/scale_gcp-trace.csv",
    "infinitehbd": "infinitehbd/fault_trace.json",
}
"""Names on the command line and the files behind them, as their authors published them; licences stand beside."""

INFINITEHBD_SERVERS = 400
"""Servers of the InfiniteHBD cluster; its file names only those that failed."""

_DAY_S = 86400.0


def load_trace(name: str) -> Trace:
    """A shipped trace by name, or a file by path.

    Raises:
        ConfigError: no such file, or something in it is wrong.
    """
    path = _HERE / SHIPPED[name] if name in SHIPPED else Path(name)
    where = path.name if name in SHIPPED else str(path)
    if not path.is_file():
        near = difflib.get_close_matches(name, list(SHIPPED), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"no trace {name!r}: no such file, and shipped are {', '.join(SHIPPED)}{hint}")
    readers = {".csv": _events, ".txt": _counts, ".json": _faults}
    if path.suffix not in readers:
        raise ConfigError(f"{where}: a trace ends in .csv, .txt or .json")
    text = text_of(path, where)
    found = traces.of_events(name if name in SHIPPED else path.stem, readers[path.suffix](text, where))
    wrong = traces.problems(found)
    if wrong:
        raise ConfigError(f"{where}: {wrong[0]}")
    return found


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield number, [cell.strip() for cell in line.split(",")]


def _events(text: str, where: str) -> Iterator[tuple[float, bool, str]]:
    alive: set[str] = set()
    last_ms = 0.0
    for number, cells in _lines(text):
        at = f"{where}, line {number}"
        if len(cells) != 3:
            raise ConfigError(f"{at}: want milliseconds,add|remove,node, got {','.join(cells)!r}")
        at_ms = _number(cells[0], at, "milliseconds")
        if at_ms < last_ms:
            raise ConfigError(f"{at}: not sorted by time: {at_ms:g} comes after {last_ms:g}")
        kind, node = cells[1:]
        if kind not in ("add", "remove"):
            raise ConfigError(f"{at}: want add or remove, got {kind!r}")
        if kind == "remove" and node not in alive:
            raise ConfigError(f"{at}: {node!r} is removed, but no such node is there")
        if kind == "add" and node in alive:
            raise ConfigError(f"{at}: {node!r} is added, but it is there already")
        alive ^= {node}
        last_ms = at_ms
        yield at_ms / 1000, kind == "add", node


def _counts(text: str, where: str) -> Iterator[tuple[float, bool, str]]:
    counts: dict[datetime, int] = {}
    for number, cells in _lines(text):
        at = f"{where}, line {number}"
        if len(cells) != 3:
            raise ConfigError(f"{at}: want date, time, count, got {', '.join(cells)!r}")
        try:
            moment = datetime.strptime(f"{cells[0]} {cells[1]}", "%Y-%m-%d %H:%M:%S")
        except ValueError as error:
            raise ConfigError(f"{at}: want a moment such as 2021-12-11, 11:11:30, got {cells[0]}, {cells[1]}") from error
        counts[moment] = int(_number(cells[2], at, "a count"))
    chance = random.Random(0)
    alive: list[str] = []
    total = 0
    for moment in sorted(counts):
        at_s = (moment - min(counts)).total_seconds()
        while len(alive) < counts[moment]:
            total += 1
            alive.append(f"node{total}")
            yield at_s, True, alive[-1]
        while len(alive) > counts[moment]:
            yield at_s, False, alive.pop(chance.randrange(len(alive)))


def _faults(text: str, where: str) -> Iterator[tuple[float, bool, str]]:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{where}: want a list of faults, each with node_id, event_time and event_type")
    known = dict.fromkeys(str(entry.get("node_id")) for entry in entries)
    healthy = (f"healthy{number}" for number in range(1, INFINITEHBD_SERVERS - len(known) + 1))
    for node in (*known, *healthy):
        yield 0.0, True, node
    down: dict[str, int] = dict.fromkeys(known, 0)
    last_days = 0.0
    for number, entry in enumerate(entries, start=1):
        at = f"{where}, entry {number}"
        days = _number(entry.get("event_time"), at, "event_time in days")
        if days < last_days:
            raise ConfigError(f"{at}: not sorted by time: {days:g} comes after {last_days:g}")
        last_days = days
        kind, node = entry.get("event_type"), str(entry.get("node_id"))
        if kind not in ("fault_start", "fault_end"):
            raise ConfigError(f"{at}: want fault_start or fault_end, got {kind!r}")
        starts = kind == "fault_start"
        if not starts and not down[node]:
            raise ConfigError(f"{at}: {node} ends a fault, but it has none")
        down[node] += 1 if starts else -1
        # Of several faults at once the first takes a node away, the last gives it back.
        if down[node] == (1 if starts else 0):
            yield days * _DAY_S, not starts, node


def _number(value: object, at: str, wanted: str) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ConfigError(f"{at}: want {wanted}, got {value!r}")
    return number
