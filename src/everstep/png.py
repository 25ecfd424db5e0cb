"""Empty figures, and writing them to PNG files: the one place that knows how pictures are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everstep.errors import ConfigError


def blank(width: float, height: float) -> Any:
    """A matplotlib figure of so many inches, tied to no screen."""
    # Imported here: matplotlib takes half a second, and most commands draw nothing.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path) -> None:
    """Write ``figure`` as a PNG, whatever ``path`` ends in; its folder is made.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:  # given a path, matplotlib would add an ending of its own
            figure.savefig(file, dpi=120, format="png")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
