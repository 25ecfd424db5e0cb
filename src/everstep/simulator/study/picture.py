"""Pictures of a study, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from everstep import png
from everstep.simulator.study.compare import Report
from everstep.trace import Trace


def draw(report: Report, traces: Sequence[Trace], path: Path) -> None:
    """Samples over time on the first trace with its nodes below, and failure-scaled efficiency over all traces.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = png.blank(10.0, 6.0)
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 1), width_ratios=(3, 2))
    over_time, nodes, bars = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[:, 1])
    for name, outcomes in report.outcomes.items():
        at_s, done = zip(*outcomes[0].progress, strict=True)
        over_time.plot([moment / 3600 for moment in at_s], done, label=name)
    over_time.set_ylabel("samples")
    over_time.legend(fontsize=7)
    count, steps = len(traces[0].nodes), [(0.0, len(traces[0].nodes))]
    for change in traces[0].changes:
        count += len(change.joined) - len(change.lost)
        steps.append((change.at_s / 3600, count))
    nodes.step([at for at, _ in steps], [number for _, number in steps], where="post", color="black")
    nodes.set_ylabel("nodes")
    nodes.set_xlabel(f"hours of {traces[0].name}")
    bar(bars, {name: row.fse for name, row in report.rows.items()}, "rate by survivors / N × rate without failures")
    png.save(figure, path)


def bar(axes: object, values: Mapping[str, float], label: str) -> None:
    """Horizontal bars with their values, the first on top."""
    names = list(values)
    found = axes.barh(names, [values[name] for name in names], color="#4878a8")  # type: ignore[attr-defined]
    axes.bar_label(found, fmt="%.3f", fontsize=8, padding=2)  # type: ignore[attr-defined]
    axes.invert_yaxis()  # type: ignore[attr-defined]
    axes.set_xlabel(label)  # type: ignore[attr-defined]
    axes.set_xlim(0, 1.15 * max(values.values()))  # type: ignore[attr-defined]


def ladder(rows: Mapping[str, Mapping[str, float]], label: str, path: Path) -> None:
    """One group of horizontal bars for each key of ``rows``, side by side."""
    figure = png.blank(4.5 * len(rows), 5.0)
    for index, (title, values) in enumerate(rows.items()):
        axes = figure.add_subplot(1, len(rows), index + 1)
        bar(axes, values, label)
        axes.set_title(title, fontsize=9)
    png.save(figure, path)
