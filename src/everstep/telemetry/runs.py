"""A run, read from its folder: what the agent wrote and what every node wrote. Nothing is changed there.

A folder holds ``agent.jsonl``, ``nodes/<node>.jsonl``, ``logs/<node>.txt``, ``checkpoints/`` and ``store.sqlite``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep import records
from everstep.errors import ConfigError
from everstep.quantities import NodeId

AGENT_FILE = "agent.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All records of one folder. ``nodes`` also has those that died: their account stays on disk."""

    directory: Path
    agent: tuple[records.Record, ...]
    nodes: Mapping[NodeId, tuple[records.Record, ...]]

    @property
    def started(self) -> records.RunStarted:
        """The head of the run; a continuation has another one further down."""
        head = self.agent[0]
        assert isinstance(head, records.RunStarted), "read() refuses a run without a head"
        return head

    @property
    def ended(self) -> records.RunEnded | None:
        """How the run, or its last continuation, ended. None while it goes on, or when its agent was killed."""
        last = self.sessions[-1][-1]
        return last if isinstance(last, records.RunEnded) else None

    @property
    def sessions(self) -> tuple[tuple[records.Record, ...], ...]:
        """The agent's records, cut where the run was started and resumed. Times begin at zero in each."""
        cuts = [index for index, record in enumerate(self.agent) if isinstance(record, records.RunStarted)]
        return tuple(self.agent[first:end] for first, end in zip(cuts, [*cuts[1:], len(self.agent)], strict=True))


def find(path: Path | None = None, root: Path = Path("runs")) -> Path:
    """The folder of the run at ``path``, or the newest one under ``root``.

    Raises:
        ConfigError: there is none; says what was looked for.
    """
    if path is not None:
        if not (path / AGENT_FILE).is_file():
            raise ConfigError(f"{path}: not the folder of a run (it has no {AGENT_FILE})")
        return path
    found = sorted(_agent_files(root), key=lambda file: (file.stat().st_mtime_ns, str(file)))
    if not found:
        raise ConfigError(f"no run under {root}/; start one with 'everstep run', or name the folder of a run")
    return found[-1].parent


def read(directory: Path) -> Run:
    """Read a run that has ended or still goes on.

    Raises:
        ConfigError: a file cannot be read, or holds something else than records.
    """
    agent = tuple(records.read(directory / AGENT_FILE))
    if not agent or not isinstance(agent[0], records.RunStarted):
        raise ConfigError(f"{directory / AGENT_FILE}: does not begin with the start of a run; has it begun?")
    nodes = {NodeId(file.stem): tuple(records.read(file)) for file in sorted((directory / "nodes").glob("*.jsonl"))}
    return Run(directory=directory, agent=agent, nodes=nodes)


def _agent_files(root: Path) -> Iterator[Path]:
    # One level deeper too: a demonstration keeps its two runs in one folder.
    yield from root.glob(f"*/{AGENT_FILE}")
    yield from root.glob(f"*/*/{AGENT_FILE}")
