"""What a training script imports."""

from __future__ import annotations

from everstep.api.data import Indexed
from everstep.api.job import Job, Step
from everstep.engine.model import sequential

__all__ = ["Indexed", "Job", "Step", "sequential"]
