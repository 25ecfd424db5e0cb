"""How commands speak: words or JSON on standard output, complaints on standard error."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from everstep.errors import ConfigError

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of words.")]
RunFolder = Annotated[Path | None, typer.Argument(metavar="RUN", help="Folder of a run; the newest under runs/ if left out.")]


def to_json(value: Any) -> str:
    """Indented JSON. What is not finite becomes null, since JSON has no word for it."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def show(value: Any) -> None:
    """Print ``value`` as JSON."""
    say(to_json(value))


def say(words: str) -> None:
    print(words, flush=True)


def complain(words: str) -> None:
    print(f"everstep: {words}", file=sys.stderr, flush=True)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` to a file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_json(value) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
