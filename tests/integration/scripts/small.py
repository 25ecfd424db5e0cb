"""A small float64 job for tests. No parameter has a gradient that is zero but for rounding."""

import argparse
import os
import time
from pathlib import Path

import torch

import everstep
from everstep.config import CheckpointConfig, PlannerConfig, RunConfig
from tests.engine.models import Tokens, adamw, layers, token_loss

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=16)
parser.add_argument("--dtype", default="float64")
parser.add_argument("--pace", type=float, default=0.0, help="seconds that each step's user code takes")
parser.add_argument("--rally", default="", help="FOLDER:N: before step 3 wait until N workers have begun this script")
options = parser.parse_args()
folder, _, number = options.rally.rpartition(":")
if folder:
    Path(folder, f"begun-{os.getpid()}").touch()

job = everstep.Job(
    layers=layers(dtype=getattr(torch, options.dtype), dropout=0.1), loss=token_loss, optimizer=adamw, clip_norm=0.05,
    ties=[("embed.weight", "head.weight")], lr=lambda step: min(1.0, (step + 1) / 3),
    data=everstep.Indexed(Tokens(100), batch=16, micro=2, seed=5),  # an epoch ends in a batch of 4
    # Too little for the whole model on one node, so that there are pipelines; a checkpoint at the end shows the state.
    config=RunConfig(
        planner=PlannerConfig(worker_memory_bytes=60_000, gap_s=10.0),
        checkpoint=CheckpointConfig(every_steps=options.steps),
    ),
)
for step in job.steps(until=options.steps):
    while folder and step.number == 3 and len(list(Path(folder).glob("begun-*"))) < int(number):
        time.sleep(0.05)
    result = step.run()
    if job.is_reporter:
        print(step.number, step.attempt, result.loss, result.committed, flush=True)
    time.sleep(options.pace)
