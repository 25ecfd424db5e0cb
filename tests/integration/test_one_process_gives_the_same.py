"""``python train.py`` is the same run on one worker in one process; and the demonstration's check sees a double count."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.catalog import scripts, texts
from everstep.cli import demo
from everstep.engine.stage import Stage
from everstep.telemetry.summary import Summary
from tests.integration.harness import ROOT, SCRIPTS, train


def test_a_script_run_by_python_alone_gives_the_losses_of_a_run(tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, str(SCRIPTS / "small.py"), "--steps", "8"], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ).stdout
    alone = [float(line.split()[2]) for line in told.splitlines()]
    run = train(tmp_path, "small.py", "--steps", "8", workers=4)
    assert len(alone) == len(run.losses) == 8
    assert max(abs(a - b) for a, b in zip(alone, run.losses, strict=True)) < 1e-12


def losses_of_the_example(steps: int) -> list[float]:
    example: dict[str, Any] = {"__name__": "example"}
    exec(compile(scripts.path("tiny_gpt").read_text(), "tiny_gpt.py", "exec"), example)
    job = everstep.Job(
        layers=example["layers"], loss=example["loss"], clip_norm=1.0, lr=lambda step: min(1.0, (step + 1) / 20),
        optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01),
        data=everstep.Indexed(example["Windows"](texts.path("kjv").read_bytes()), batch=32, micro=4, seed=7),
    )
    return [step.run().loss for step in job.steps(until=steps)]


@pytest.fixture
def one_gradient_counted_twice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In step 2 the first block's gradient of one micro-batch is added twice, behind the books' back."""
    plain = Stage.backward

    def backward(self: Stage, micro_batch: int, index: int, gradients: list[Any]) -> list[Any]:
        unit = self._held.units["block.0"]  # type: ignore[index]
        before = unit.flat.clone()
        found = plain(self, micro_batch, index, gradients)
        if self._step == 2 and micro_batch == 3:
            unit.flat.add_(unit.flat - before)
        return found

    monkeypatch.setattr(Stage, "backward", backward)
    yield
    monkeypatch.undo()


def summary_of(losses: list[float]) -> Summary:
    return Summary(
        steps=len(losses), loss=tuple(losses), samples_seen=32 * len(losses), samples_lost=0, samples_repeated=0, events=(),
        state_hash={}, seed=7, numerics="fp32", outcome="done", rolled_back=(), goodput=None, step_s_p50=None,
    )


def test_the_demonstration_fails_when_one_micro_batch_of_one_layer_counts_twice(one_gradient_counted_twice: None) -> None:
    wrong = losses_of_the_example(8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "backward", _plain_backward)
        right = losses_of_the_example(8)
        again = losses_of_the_example(8)
    entropy = texts.unigram_entropy(texts.path("kjv").read_bytes())
    assert demo.compare(summary_of(again), summary_of(right), entropy, 8, 0).problems == ()
    found = demo.compare(summary_of(wrong), summary_of(right), entropy, 8, 0)
    assert found.max_difference > 3 * demo.LOSS_BOUND
    assert any("losses differ" in problem for problem in found.problems)


_plain_backward = Stage.backward
