"""Settings: checked when made, the nearest name for a wrong one, and what wins over what."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.config import (
    CheckpointConfig,
    DetectorConfig,
    EngineConfig,
    PlannerConfig,
    RunConfig,
    from_file,
    from_mapping,
    from_settings,
    values_of_file,
    values_of_settings,
)
from everstep.errors import ConfigError
from tests.untimed import UNTIMED


def test_defaults_are_valid_and_frozen() -> None:
    config = RunConfig()
    assert from_mapping({}) == config
    with pytest.raises(FrozenInstanceError):
        config.respawn = True  # type: ignore[misc]


def test_nested_tables_and_dotted_keys_say_the_same() -> None:
    nested = from_mapping({"planner": {"policy": "spare", "gap_s": 30}, "respawn": True})
    assert nested == from_mapping({"planner.policy": "spare", "planner.gap_s": 30.0, "respawn": True})
    assert nested == from_mapping({"planner": {"policy": "spare"}, "planner.gap_s": "30s", "respawn": True})
    assert nested.planner == PlannerConfig(policy="spare", gap_s=30.0)


def test_what_is_not_named_stays_as_it_was() -> None:
    base = from_mapping({"detector": {"suspect_after_s": 9}, "checkpoint.keep": 4})
    changed = from_mapping({"detector.heartbeat_interval_s": 0.5}, base)
    assert changed.detector == DetectorConfig(heartbeat_interval_s=0.5, suspect_after_s=9.0)
    assert changed.checkpoint.keep == 4


def test_sizes_and_durations_are_read_as_people_write_them() -> None:
    config = from_mapping({"planner": {"worker_memory_bytes": "24MB", "gap_s": "10m"}, "orphan_after_s": "500ms"})
    assert (config.planner.worker_memory_bytes, config.planner.gap_s, config.orphan_after_s) == (24_000_000, 600.0, 0.5)
    assert from_mapping({"planner.worker_memory_bytes": None}, config).planner.worker_memory_bytes is None


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"planer": {}}, r"unknown key 'planer'; did you mean planner\?"),
    ({"planner": {"polcy": "auto"}}, r"unknown key 'planner.polcy'; did you mean planner.policy\?"),
    ({"policy": "auto"}, r"unknown key 'policy'; did you mean planner.policy\?"),
    ({"suspect_after": 3}, r"unknown key 'suspect_after'; did you mean detector.suspect_after_s\?"),
    ({"xyzzy": 3}, "unknown key 'xyzzy'; known here: detector, checkpoint, planner, engine"),
    ({"planner.policy.deep": 1}, "planner.policy must be one of"),
    ({"planner": 3}, "planner is a table of settings, got 3"),
    ({"planner": 3, "planner.gap_s": 1}, "planner is a table of settings, got 3"),
    ({"planner.gap_s": 1, "planner": 3}, "planner is a table of settings, got 3"),
    ({"planner.policy": "rerout"}, "must be one of auto, .*, got 'rerout'; did you mean 'reroute'"),
    ({"planner.policy": 3}, "planner.policy must be one of auto"),
    ({"planner.policy": None}, "planner.policy must be one of auto"),
    ({"planner.policy": ["auto"]}, "planner.policy must be one of auto"),
    ({"planner.gap_s": "soon"}, "planner.gap_s: not a duration: 'soon'"),
    ({"planner.gap_s": float("nan")}, "planner.gap_s: a duration"),
    ({"planner.gap_s": 0}, "planner: gap_s must be positive, got 0"),
    ({"planner.worker_memory_bytes": "much"}, "planner.worker_memory_bytes: not a size: 'much'"),
    ({"planner.worker_memory_bytes": float("inf")}, "planner.worker_memory_bytes: .*bytes"),
    ({"planner.worker_memory_bytes": 0}, "worker_memory_bytes must be positive"),
    ({"planner.max_stages": 0}, "max_stages must be at least 1"),
    ({"planner.max_stages": 2.5}, "planner.max_stages must be a whole number, got 2.5"),
    ({"planner.max_stages": True}, "planner.max_stages must be a whole number, got True"),
    ({"respawn": "yes"}, "respawn must be true or false, got 'yes'"),
    ({"respawn": 1}, "respawn must be true or false, got 1"),
    ({"engine.threads": "2"}, "engine.threads must be a whole number, got '2'"),
    ({"engine.threads": 0}, "engine: threads must be at least 1, got 0"),
    ({"engine.numerics": "fp23"}, "did you mean 'fp32'"),
    ({"checkpoint.keep": 0}, "checkpoint: need every_steps >= 0 and keep >= 1, got 50 and 0"),
    ({"checkpoint.every_steps": -1}, "need every_steps >= 0"),
    ({"detector.suspect_after_s": 0.1}, "detector: need 0 < heartbeat_interval_s < suspect_after_s, got 0.2 and 0.1"),
    ({"orphan_after_s": 0}, "run: orphan_after_s must be positive"),
]


@pytest.mark.parametrize(("values", "said"), WRONG, ids=[str(values) for values, _ in WRONG])
def test_a_wrong_setting_is_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^here: .*{said}"):
        from_mapping(values, source="here")


@pytest.mark.parametrize("make", [
    lambda: DetectorConfig(heartbeat_interval_s=2, suspect_after_s=1), lambda: CheckpointConfig(keep=0),
    lambda: PlannerConfig(gap_s=-1), lambda: EngineConfig(threads=0), lambda: RunConfig(orphan_after_s=-1),
])
def test_settings_are_checked_when_they_are_made(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


def test_a_file_is_read_and_named_when_it_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('respawn = true\n[planner]\npolicy = "shrink"\nworker_memory_bytes = "1GiB"\n[detector]\n')
    assert from_file(path).planner == PlannerConfig(policy="shrink", worker_memory_bytes=2**30)
    for content, said in (
        (b"[planner]\npolcy = 1", "unknown key 'planner.polcy'; did you mean planner.policy"),
        (b"planner = ", "not valid TOML"), (b"\xff\xfe", "not valid TOML"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f"run.toml: {said}"):
            from_file(path)
    with pytest.raises(ConfigError, match=r"nothing\.toml: cannot be read: No such file"):
        from_file(tmp_path / "nothing.toml")


def test_what_is_set_on_the_command_line_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[checkpoint]\nkeep = 5\nevery_steps = 7\n")
    config = from_settings(["checkpoint.keep=9", "planner.policy = spare"], from_file(path))
    assert (config.checkpoint, config.planner.policy) == (CheckpointConfig(keep=9, every_steps=7), "spare")
    assert values_of_file(path) == {"checkpoint.keep": 5, "checkpoint.every_steps": 7}


def test_settings_are_numbers_truths_or_words() -> None:
    assert values_of_settings(["a.b=1", "c=true", "d=10m", 'e="x"', "f=1.5", "g={h = 2}", "i="]) == {
        "a.b": 1, "c": True, "d": "10m", "e": "x", "f": 1.5, "g.h": 2, "i": "",
    }
    for setting in ("planner.policy", "=3", " =3", ""):
        with pytest.raises(ConfigError, match=r"want key=value, for example --set planner\.policy=reroute"):
            values_of_settings([setting])


names = sorted({f"{table.name}.{inner.name}" for table in fields(RunConfig)
                if is_dataclass(value := getattr(RunConfig(), table.name)) for inner in fields(value)})


@given(st.sampled_from(names), st.data())
@UNTIMED
def test_a_slip_in_a_name_is_put_right(name: str, data: st.DataObject) -> None:
    table, _, key = name.partition(".")
    at = data.draw(st.integers(0, len(key) - 1))
    slipped = key[:at] + key[at + 1 :]
    with pytest.raises(ConfigError) as caught:
        from_mapping({f"{table}.{slipped}": 1})
    assert f"did you mean {table}.{key}?" in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2), max_leaves=4,
)
some_keys = st.sampled_from(
    [*names, "planner", "respawn", "orphan_after_s", "detector", "x", "planner.x", "a.b.c", "", ".", "planner."]
)


@given(st.dictionaries(some_keys, json_values, max_size=3))
@UNTIMED
def test_whatever_is_set_is_taken_or_refused_as_the_users_mistake(values: dict[str, Any]) -> None:
    try:
        config = from_mapping(values)
    except ConfigError:
        return
    assert isinstance(config, RunConfig)
