"""A run, watched live in a terminal; plain lines where there is none.

The display takes the agent's records as they come and decides nothing. It keeps no thread of its own: it draws when a
record arrives, and a step is a record.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from everstep import records
from everstep.telemetry import grid, words
from everstep.telemetry.status import Status, Tracker, progress

_BAR_COLUMNS = 36

_PLAIN_LINES = 20
"""Lines of progress in a whole run where there is no terminal."""

_REDRAW_AFTER_S = 0.1
"""Steps may be shorter than a picture takes to draw, and it is the agent that waits for it."""


class Logs:
    """The output of the workers as it grows, a line at a time. It is read from files: a reader that dies hurts nobody."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, BinaryIO] = {}
        self._begun: dict[Path, bytes] = {}

    def new_lines(self) -> Iterator[tuple[str, str]]:
        """(node, line) of every line that is complete since the last call."""
        for path in sorted(self._folder.glob("*.txt")):
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = path.open("rb")
            *lines, self._begun[path] = (self._begun.get(path, b"") + file.read()).split(b"\n")
            for line in lines:
                yield path.stem, line.decode(errors="replace")

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


class Display:
    """Shows one run: ``with Display(console, logs) as display: display.on(record)``."""

    def __init__(self, console: Console, logs: Path | None = None, title: str = "") -> None:
        """``logs`` is the folder with the workers' output, shown above the display as it appears."""
        self.tracker = Tracker()
        self._console, self._title = console, title
        self._logs = None if logs is None else Logs(logs)
        self._live: Live | None = None
        self._drawn_s = float("-inf")

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live = Live(self.render(), console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
    ) -> None:
        self._print_logs()
        if self._logs is not None:
            self._logs.close()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def on(self, record: records.Record) -> None:
        """Take a record and show what it changes."""
        self.tracker.on(record)
        now = self.tracker.status
        if not isinstance(record, records.StepSeen) or not 0 <= now.time_s - self._drawn_s < _REDRAW_AFTER_S:
            self._drawn_s = now.time_s
            self._print_logs()
            if self._live is not None:
                self._live.update(self.render(), refresh=True)
        if self._live is None:
            for line in self._plain(record, now):
                self._say(line)

    def render(self) -> RenderableType:
        """The picture of the moment."""
        status = self.tracker.status
        parts: list[RenderableType] = []
        if status.plan is not None:
            parts.append(grid.rich_table(grid.grid(status.plan, frozenset(status.lost))))
        row = Table.grid(padding=(0, 1))
        bar = [ProgressBar(total=status.until, completed=status.step, width=_BAR_COLUMNS)] if status.until else []
        row.add_row(*bar, Text(progress(status)))
        parts.append(row)
        parts += [Text(f"• {sentence}", style="yellow") for sentence in status.events]
        return Panel(Group(*parts), title=Text(self._title or status.script), title_align="left", expand=False)

    def _print_logs(self) -> None:
        for node, line in self._logs.new_lines() if self._logs is not None else ():
            self._say(f"{node} │ {line}")

    def _say(self, line: str) -> None:
        # What a script prints may look like markup; it is text.
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _plain(self, record: records.Record, now: Status) -> Iterator[str]:
        match record:
            case records.PlanCommitted():
                yield f"{words.plan_by(record.policy)}, from step {record.step}:"
                yield from (f"  {line}" for line in grid.text(grid.grid(record.plan, frozenset(now.lost))).splitlines())
            case records.StepSeen():
                every = max(1, (now.until or 0) // _PLAIN_LINES)
                if record.step % every == 0 or now.step == now.until:
                    yield progress(now)
            case records.EventSeen() | records.RolledBack():
                yield from now.events[-1:]
            case records.CheckpointWritten():
                yield f"checkpoint of step {record.step}"
            case records.CheckpointPassedOver():
                yield f"passed over a checkpoint: {record.why}"
            case _:
                return


def last_words(sentences: str, *, well: bool) -> Text:
    """The last words of a run, with a green or a red bar beside them."""
    bar = ("┃ ", "green" if well else "red")
    return Text("\n").join(Text.assemble(bar, line) for line in sentences.splitlines())
