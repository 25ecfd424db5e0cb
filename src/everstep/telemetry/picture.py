"""A picture of a run that was disturbed beside one that was not: the same losses, if recovery is right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from everstep import png
from everstep.telemetry.summary import Summary

_FLOOR = 1e-9
"""The smallest difference drawn: equal losses have none on a logarithmic scale."""


def differences(disturbed: Sequence[float], undisturbed: Sequence[float]) -> list[float]:
    """|a − b| of each step that both have."""
    return [abs(a - b) for a, b in zip(disturbed, undisturbed, strict=False)]


def draw(disturbed: Summary, undisturbed: Summary, entropy: float, path: Path) -> None:
    """Write a PNG to ``path``. ``entropy`` in nats a byte: what knowing the bytes' frequencies alone would give."""
    figure = png.blank(9, 6)
    losses, apart = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    losses.plot(undisturbed.loss, color="0.6", linewidth=4, label="undisturbed")
    losses.plot(disturbed.loss, color="tab:blue", linewidth=1.2, label="with kills")
    losses.axhline(entropy, color="tab:green", linestyle=":", label=f"unigram entropy, {entropy:.2f}")
    for axes in (losses, apart):
        for number, step in enumerate(_kill_steps(disturbed)):
            axes.axvline(step, color="tab:red", linewidth=0.8, alpha=0.7, label=None if number else "kill")
    losses.set_ylabel("loss, nats a byte")
    losses.legend()
    gaps = [max(_FLOOR, gap) for gap in differences(disturbed.loss, undisturbed.loss)]
    apart.semilogy(gaps, color="tab:blue", linewidth=1)
    apart.axhline(1e-5, color="0.6", linestyle="--")
    apart.set_ylabel("difference")
    apart.set_xlabel("step")
    png.save(figure, path)


def _kill_steps(value: Summary) -> list[int]:
    return sorted({event.step for event in value.events if event.kind in ("lost", "silent")})
