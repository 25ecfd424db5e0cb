"""Calls a command as a person would, and says what came of it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from everstep.cli.main import main


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


class Caller:
    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *arguments: object) -> Answer:
        self._capture.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        said = self._capture.readouterr()
        return Answer(ended.value.code or 0, said.out, said.err)
