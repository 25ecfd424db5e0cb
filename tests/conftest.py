"""Options of the whole suite, and what all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.integration.harness", "tests.engine.cluster")

# Scripts that workers run import from here too; the fork server takes its environment from the first test that starts it.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="accept what commands print now as their snapshots")
    parser.addoption("--thorough", action="store_true", help="run all cases of what otherwise runs a slice: every policy")
