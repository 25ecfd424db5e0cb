"""Whatever a file contains, it is read or refused in one message that names it; never anything else."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep import catalog
from everstep import cluster as clusters
from everstep import workload as workloads
from everstep.catalog.files import load_cluster, load_workload
from everstep.catalog.trace_files import load_trace
from everstep.errors import ConfigError
from everstep.trace import problems
from tests.unit.cli.calling import Caller

SHIPPED = Path(catalog.__file__).parent
TABLES = ["cluster-8", "cluster-2x16", "cluster-48", "workload-tiny-gpt", "workload-gpt-124m"]
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def load(path: Path) -> str:
    """What is said of the file, or nothing where it is read and all is well."""
    try:
        if path.name.startswith("cluster"):
            assert clusters.problems(load_cluster(str(path))) == []
        elif path.name.startswith("workload"):
            assert workloads.problems(load_workload(str(path))) == []
        else:
            assert problems(load_trace(str(path))) == []
    except ConfigError as error:
        assert str(error).startswith(f"{path}")
        assert "\n" not in str(error)
        return str(error).removeprefix(str(path))
    return ""


@QUICK
@given(st.sampled_from(TABLES), st.data())
def test_a_file_that_was_cut_off_is_read_or_refused(tmp_path: Path, name: str, data: st.DataObject) -> None:
    whole = (SHIPPED / f"{name}.toml").read_bytes()
    path = tmp_path / f"{name}.toml"
    path.write_bytes(whole[:data.draw(st.integers(0, len(whole)))])
    load(path)


@QUICK
@given(st.sampled_from(TABLES), st.binary(min_size=1, max_size=4), st.data())
def test_a_file_with_other_bytes_in_it_is_read_or_refused(tmp_path: Path, name: str, other: bytes, data: st.DataObject) -> None:
    whole = (SHIPPED / f"{name}.toml").read_bytes()
    at = data.draw(st.integers(0, len(whole)))
    path = tmp_path / f"{name}.toml"
    path.write_bytes(whole[:at] + other + whole[at + len(other):])
    load(path)


@pytest.mark.parametrize("name", ["cluster.toml", "workload.toml", "trace.csv", "trace.txt", "trace.json"])
def test_what_is_not_text_is_told_by_its_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"# one\n# two \xff\n")
    assert load(path) == ", line 2: not text in UTF-8"


WRONG: list[Any] = [
    -1, 0, 2.5, "", "many", "-3MB", "5 parsecs", True, float("inf"), float("nan"), -float("inf"), 10**400, [], {},
]


def written(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool | float) else str(value)


@QUICK
@given(st.sampled_from(TABLES), st.sampled_from(WRONG), st.data())
def test_a_wrong_value_is_told_by_its_line(tmp_path: Path, name: str, value: Any, data: st.DataObject) -> None:
    lines = (SHIPPED / f"{name}.toml").read_text().splitlines()
    keys = [number for number, line in enumerate(lines) if re.match(r"\w+ = [^\[]", line)]
    number = data.draw(st.sampled_from(keys))
    key = lines[number].split(" = ")[0]
    path = tmp_path / f"{name}.toml"
    path.write_text("\n".join([*lines[:number], f"{key} = {written(value)}", *lines[number + 1:]]))
    said = load(path)
    # Another name may clash, or leave somebody else's name without its owner: that is told by the other's line.
    if said and key not in ("name", "site"):
        assert said.startswith(f", line {number + 1}: ")
        assert key in said


@QUICK
@given(st.sampled_from(TABLES), st.data())
def test_a_misspelt_key_is_told_by_its_line_with_the_nearest(tmp_path: Path, name: str, data: st.DataObject) -> None:
    lines = (SHIPPED / f"{name}.toml").read_text().splitlines()
    keys = [number for number, line in enumerate(lines) if re.match(r"\w{4,} = ", line)]
    number = data.draw(st.sampled_from(keys))
    key = lines[number].split(" = ")[0]
    cut = data.draw(st.integers(1, len(key) - 1))
    path = tmp_path / f"{name}.toml"
    path.write_text("\n".join([*lines[:number], lines[number].replace(key, key[:cut] + key[cut + 1:], 1), *lines[number + 1:]]))
    assert tomllib.loads(path.read_text())
    said = load(path)
    assert re.match(rf", line {number + 1}: .*unknown key '\w+'; did you mean \w+\?$", said), said


@QUICK
@given(st.binary(max_size=80), st.sampled_from(["trace.csv", "trace.txt", "trace.json"]))
def test_any_bytes_are_a_trace_or_refused(tmp_path: Path, text: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(text)
    load(tmp_path / name)


_CELL = st.sampled_from(
    ["0", "5", "-1", "1e400", "nan", "9" * 400, "add", "remove", "a", "b", "", "2021-12-11", "11:11:30", "x"],
)
_LINES = st.lists(st.lists(_CELL, min_size=1, max_size=4).map(", ".join), max_size=4).map("\n".join)


@QUICK
@given(_LINES, st.sampled_from(["csv", "txt"]))
def test_any_lines_are_a_trace_or_refused(tmp_path: Path, text: str, ending: str) -> None:
    (tmp_path / f"trace.{ending}").write_text(text)
    load(tmp_path / f"trace.{ending}")


_ENTRY = st.fixed_dictionaries({}, optional={
    "node_id": st.sampled_from(["a", "b", 3, None, []]),
    "event_time": st.sampled_from([0, 1.5, -1, "2", "soon", None, 10**400, float("nan")]),
    "event_type": st.sampled_from(["fault_start", "fault_end", "fault", None, 1]),
})


@QUICK
@given(st.lists(_ENTRY, max_size=4))
def test_any_faults_are_a_trace_or_refused(tmp_path: Path, entries: list[dict[str, Any]]) -> None:
    (tmp_path / "trace.json").write_text(json.dumps(entries))
    load(tmp_path / "trace.json")


def test_brackets_without_an_end_are_refused(tmp_path: Path) -> None:
    for name in ("cluster.toml", "trace.json"):
        (tmp_path / name).write_text(("x = " if name.endswith("toml") else "") + "[" * 100_000)
        assert re.match(": not valid (TOML|JSON)", load(tmp_path / name))


@pytest.mark.parametrize(("text", "code", "said"), [
    ("[[hosts]]\nname = 'h'\nnodes = 2\nmemory = '1GB'\n", 2, "line 4: hosts 1: unknown key 'memory'; did you mean memory_"),
    ("[[hosts]]\nname = 'h'\nnodes = 2\nmemory_bytes = '1 apple'\n", 2, "line 4: hosts 1: memory_bytes: not a size: '1 apple'"),
    ("[[hosts]]\nname = 'h'\nnodes = 2\nmemory_bytes = -5\n", 2, "line 4: hosts 1: memory_bytes: bytes cannot be negative"),
    ("[[hosts]]\nname = 'h'\nnodes = 2\nmemory_bytes = '1MB'\n", 1, "It would fit with"),
    ("[[hosts]]\nname = 'h'\nnodes = \xff", 2, "not valid TOML"),
    ("", 2, "a cluster needs at least one node"),
])
def test_the_command_says_so_in_one_line(text: str, code: int, said: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "mine.toml").write_text(text)
    answer = Caller(capsys)("plan", "--cluster", tmp_path / "mine.toml", "--workload", "workload-tiny-gpt")
    assert (answer.code, answer.out) == (code, "")
    assert said in answer.err
    assert answer.err.count("\n") == 1
