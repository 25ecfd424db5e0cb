"""Clusters and workloads from files: those that are shipped by bare name (``cluster-8``), others by path.

An unknown key, a wrong unit or a negative figure is a ``ConfigError`` that names the file, the key and what was expected.
Sizes are bytes or text like ``24MB``, durations seconds or text like ``0.2ms``; rates are bytes in a second, ``25GB``.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep import cluster as clusters
from everstep import workload as workloads
from everstep.cluster import Cluster, Link, Node
from everstep.errors import ConfigError
from everstep.quantities import HostId, NodeId, UnitName, parse_bytes, parse_seconds
from everstep.workload import LayerCost, Unit, Workload

_HERE = Path(__file__).parent

_LINK = {"alpha_s", "bytes_per_s"}
_HOST = {"name", "count", "nodes", "cores", "memory_bytes", "speed"}
_UNIT_SIZES = ("parameter_bytes", "state_bytes", "gradient_bytes")
_LAYER = {
    "name", "count", "ties", "forward_s", "backward_input_s", "backward_weight_s", "optimizer_s", "output_bytes",
    "activation_bytes", *_UNIT_SIZES,
}


def names(kind: str) -> tuple[str, ...]:
    """The shipped files of a ``kind``, ``"cluster"`` or ``"workload"``, as they are named on the command line."""
    return tuple(sorted(path.stem for path in _HERE.glob(f"{kind}-*.toml")))


def load_cluster(name: str) -> Cluster:
    """A shipped cluster by name, or a file by path. Nodes are numbered through, host by host.

    A host with a count becomes ``host0``, ``host1``, ….

    Raises:
        ConfigError: no such file, or something in it is wrong.
    """
    table = _read(name, "cluster").only({"link", "hosts"})
    link = table.inner("link").only(_LINK)
    nodes: dict[NodeId, Node] = {}
    cores: dict[HostId, int | None] = {}
    for host in table.inner_list("hosts"):
        host.only(_HOST)
        count = host.count("count", 1)
        for repeat in range(count):
            host_id = HostId(host.text("name") if count == 1 else f"{host.text('name')}{repeat}")
            cores[host_id] = host.count("cores") if "cores" in host.values else None
            for _ in range(host.count("nodes")):
                node_id = NodeId(f"n{len(nodes)}")
                nodes[node_id] = Node(
                    node_id=node_id, host=host_id, speed=host.number("speed", 1.0),
                    memory_bytes=host.size("memory_bytes") if "memory_bytes" in host.values else None,
                )
    found = Cluster(
        nodes=nodes, host_cores=cores,
        link=Link(alpha_s=link.seconds("alpha_s", 2e-4), bytes_per_s=float(link.size("bytes_per_s", 10**9))),
    )
    _no_problems(clusters.problems(found), table.where)
    return found


def load_workload(name: str) -> Workload:
    """A shipped workload by name, or a file by path. A layer with a count becomes ``block.0``, ``block.1``, ….

    Raises:
        ConfigError: no such file, or something in it is wrong.
    """
    table = _read(name, "workload").only({"micro_batches", "micro_batch_samples", "fixed_s", "layers", "tied"})
    costs: list[LayerCost] = []
    units: dict[UnitName, Unit] = {}
    users: dict[str, list[int]] = {}
    for layer in table.inner_list("layers"):
        layer.only(_LAYER)
        count = layer.count("count", 1)
        for repeat in range(count):
            called = layer.text("name") if count == 1 else f"{layer.text('name')}.{repeat}"
            for tie in layer.texts("ties"):
                users.setdefault(tie, []).append(len(costs))
            if any(layer.size(key, 0) for key in _UNIT_SIZES):
                units[UnitName(called)] = _unit(called, (len(costs),), layer)
            costs.append(LayerCost(
                name=called, forward_s=layer.seconds("forward_s"), backward_input_s=layer.seconds("backward_input_s"),
                backward_weight_s=layer.seconds("backward_weight_s"), optimizer_s=layer.seconds("optimizer_s", 0.0),
                output_bytes=layer.size("output_bytes", 0), activation_bytes=layer.size("activation_bytes", 0),
            ))
    for tied in table.inner_list("tied"):
        tied.only({"name", *_UNIT_SIZES})
        called = tied.text("name")
        if called not in users:
            raise ConfigError(f"{tied.where}: name: no layer has ties = [{called!r}]{_nearest(called, users)}")
        units[UnitName(called)] = _unit(called, tuple(users.pop(called)), tied)
    if users:
        raise ConfigError(f"{table.where}: tied: nothing is called {', '.join(sorted(users))}, but layers name it in ties")
    found = Workload(
        layers=tuple(costs), units=units, num_micro_batches=table.count("micro_batches"),
        micro_batch_samples=table.count("micro_batch_samples", 1), fixed_s=table.seconds("fixed_s", 0.0), measured=True,
    )
    _no_problems(workloads.problems(found), table.where)
    return found


def _unit(name: str, layers: tuple[int, ...], table: _Table) -> Unit:
    return Unit(
        name=UnitName(name), layers=layers, parameter_bytes=table.size("parameter_bytes"),
        state_bytes=table.size("state_bytes"), gradient_bytes=table.size("gradient_bytes", 0),
    )


def _read(name: str, kind: str) -> _Table:
    shipped = _HERE / f"{name}.toml"
    path = shipped if "/" not in name and shipped.is_file() else Path(name)
    if path is not shipped and not path.is_file():
        shipped_names = ", ".join(names(kind))
        raise ConfigError(f"no {kind} {name!r}: no such file, and shipped are {shipped_names}{_nearest(name, names(kind))}")
    try:
        return _Table(path.name if path is shipped else str(path), tomllib.loads(path.read_text()))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def _no_problems(found: Sequence[str], where: str) -> None:
    if found:
        raise ConfigError(f"{where}: {'; '.join(found)}")


def _nearest(name: str, known: Mapping[str, object] | Sequence[str] | set[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


_ABSENT: Any = object()


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of a file, and the words that say where it stands."""

    where: str
    values: Mapping[str, Any]

    def only(self, known: set[str]) -> _Table:
        for key in self.values:
            if key not in known:
                hint = _nearest(key, known) or f"; known here: {', '.join(sorted(known))}"
                raise ConfigError(f"{self.where}: unknown key {key!r}{hint}")
        return self

    def inner(self, key: str) -> _Table:
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where}: {key} must be a table, got {value!r}")
        return _Table(f"{self.where}: {key}", value)

    def inner_list(self, key: str) -> list[_Table]:
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise ConfigError(f"{self.where}: {key} must be a list of tables, [[{key}]], got {value!r}")
        return [_Table(f"{self.where}: {key} {number}", entry) for number, entry in enumerate(value, start=1)]

    def text(self, key: str) -> str:
        value = self._value(key)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{self.where}: {key} must be text, got {value!r}")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._value(key, [])
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise ConfigError(f"{self.where}: {key} must be a list of names, got {value!r}")
        return value

    def count(self, key: str, default: Any = _ABSENT) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{self.where}: {key} must be a whole number from 1, got {value!r}")
        return value

    def number(self, key: str, default: Any = _ABSENT) -> float:
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ConfigError(f"{self.where}: {key} must be a number, got {value!r}")
        return float(value)

    def size(self, key: str, default: Any = _ABSENT) -> int:
        try:
            return parse_bytes(self._value(key, default))
        except ValueError as error:
            raise ConfigError(f"{self.where}: {key}: {error}") from error

    def seconds(self, key: str, default: Any = _ABSENT) -> float:
        try:
            return parse_seconds(self._value(key, default))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{self.where}: {key}: {error}") from error

    def _value(self, key: str, default: Any = _ABSENT) -> Any:
        value = self.values.get(key, default)
        if value is _ABSENT:
            raise ConfigError(f"{self.where}: {key} is missing")
        return value
