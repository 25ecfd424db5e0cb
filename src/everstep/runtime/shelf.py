"""Which checkpoints of a run may be used, as its agent sees them: listed often, read through only when one is to be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from everstep.controller import INITIAL
from everstep.errors import CheckpointError
from everstep.planner.policies.situation import CheckpointInfo
from everstep.runtime import checkpoints


class Shelf:
    """The checkpoints under one folder. ``passed_over(path, why)`` is told, once each, of those that are of no use."""

    def __init__(self, root: Path, passed_over: Callable[[str, str], None]) -> None:
        self.root = root
        self._passed_over = passed_over
        self._useless: set[str] = set()
        self._sound: set[str] = set()

    def newest(self) -> CheckpointInfo | None:
        """The newest one that is complete and not known to be damaged."""
        for checkpoint in checkpoints.complete(self.root):
            path = str(checkpoint.path.resolve())
            if path not in self._useless:
                return CheckpointInfo(step=checkpoint.step, path=path)
        return None

    def is_damaged(self, path: str) -> bool:
        """Read it through. A damaged one is not proposed again."""
        if path == INITIAL or path in self._sound:
            return False
        try:
            checkpoints.verify(checkpoints.read(Path(path)))
        except CheckpointError as error:
            self._useless.add(path)
            self._passed_over(error.path, str(error))
            return True
        self._sound.add(path)
        return False

    def newest_sound(self) -> CheckpointInfo | None:
        """The newest one whose every byte is right."""
        while (found := self.newest()) is not None and self.is_damaged(found.path):
            pass
        return found
