"""Texts that are shipped for examples and tests. ``SOURCES.md`` says where each is from and under what licence."""

from __future__ import annotations

import math
from collections import Counter
from importlib import resources
from pathlib import Path

from everstep.errors import ConfigError

_SUFFIX = ".txt"


def names() -> tuple[str, ...]:
    """The texts there are, by name."""
    return tuple(sorted(
        entry.name.removesuffix(_SUFFIX) for entry in _folder().iterdir() if entry.name.endswith(_SUFFIX)
    ))


def path(name: str) -> Path:
    """Where the text ``name`` lies.

    Raises:
        ConfigError: there is no such text; says which there are.
    """
    if name not in names():
        raise ConfigError(f"no text is called {name!r}; there are: {', '.join(names())}")
    return _folder() / f"{name}{_SUFFIX}"


def unigram_entropy(data: bytes) -> float:
    """Nats per byte of a model that knows how often each byte occurs, and nothing of what stands before it.

    H = −Σ p(b) ln p(b). A model of the text has learned something once its cross-entropy is clearly below this.

    Raises:
        ValueError: ``data`` is empty.
    """
    if not data:
        raise ValueError("an empty text has no entropy")
    return -sum(count / len(data) * math.log(count / len(data)) for count in Counter(data).values())


def _folder() -> Path:
    # A wheel is always installed unpacked, so the package's resources are files with a path.
    return Path(str(resources.files("everstep.catalog")))
