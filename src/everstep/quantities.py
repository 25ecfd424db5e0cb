"""Identities and units of measure. The unit is the last word of a name: ``_s`` seconds, ``_bytes``, ``_bytes_per_s``."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import NewType

NodeId = NewType("NodeId", str)
"""A process that takes part, new after a restart: ``n7``."""

HostId = NewType("HostId", str)
"""A machine. Nodes of one host share its cores."""

SiteId = NewType("SiteId", str)
"""A place whose machines are near each other, such as an institution's cluster; between sites links are slow."""

UnitName = NewType("UnitName", str)
"""A piece of state that moves: a layer's own parameters and buffers, or a tie group."""

_SUFFIXES = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@lru_cache(maxsize=1 << 16)
def node_number(node: NodeId) -> int:
    """The number in a node's name, for sorting ``n2`` before ``n10``.

    Raises:
        ValueError: ``node`` is not of the form ``n<number>``.
    """
    if not re.fullmatch(r"n\d+", node):
        raise ValueError(f"not a node: {node!r} (want for example n7)")
    return int(node[1:])


def parse_bytes(text: str | int | float) -> int:
    """``"24MB"`` → 24,000,000; ``"2GiB"`` → 2,147,483,648; a bare number is bytes.

    Raises:
        ValueError: not a non-negative number with a known suffix.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        if not 0 <= text < math.inf:
            raise ValueError(f"bytes cannot be negative or endless: {text}")
        return int(text)
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if not found or found[2] not in _SUFFIXES:
        raise ValueError(f"not a size: {text!r} (want for example 24MB or 2GiB)")
    count = float(found[1]) * _SUFFIXES[found[2]]
    if count == math.inf:
        raise ValueError(f"bytes cannot be endless: {str(text)[:20]}…")
    return int(count)


def parse_seconds(text: str | int | float) -> float:
    """``"10m"`` → 600.0; a bare number is seconds.

    Raises:
        ValueError: not a non-negative number with a known suffix.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        if not text >= 0:
            raise ValueError(f"a duration cannot be negative: {text}")
        try:
            return float(text)
        except OverflowError as error:
            raise ValueError("a duration cannot be of more than 308 digits") from error
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(text))
    if not found or (found[2] or "s") not in _SECONDS:
        raise ValueError(f"not a duration: {text!r} (want for example 30s, 10m or 1h)")
    return float(found[1]) * _SECONDS[found[2] or "s"]


def human_bytes(count: float, *, up: bool = False) -> str:
    """``24.0 MB``: three digits a person reads. ``up``: never less than there are, for what has to be enough."""
    for suffix in ("B", "KB", "MB", "GB", "TB"):
        if abs(count) < 1000 or suffix == "TB":
            count = math.ceil(count * 10) / 10 if up else count
            return f"{count:.0f} {suffix}" if suffix == "B" else f"{count:.1f} {suffix}"
        count /= 1000
    raise AssertionError("unreachable")


def human_seconds(duration_s: float) -> str:
    """``0.21 s``, ``4.0 ms``, ``10 min``, ``2 min 5 s``: what a person reads."""
    if duration_s < 0.01:
        return f"{duration_s * 1000:.1f} ms"
    if duration_s < 120:
        return f"{duration_s:.2f} s"
    if duration_s >= 7200:
        return f"{duration_s / 3600:.1f} h"
    minutes, seconds = divmod(round(duration_s), 60)
    return f"{minutes} min {seconds} s" if seconds else f"{minutes} min"
