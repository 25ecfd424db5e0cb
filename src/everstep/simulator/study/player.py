"""What the world and whoever plays in it say to each other.

A *standing* is who stands where: a layout of the model, or a plan of the planner with what nodes hold. The world asks a
player what to do after each change; the answer is an option: the standing that it leads to, what is trained on until then,
and how long everything takes as predicted. What is true may differ, and the player sees it through records alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, Self, TypeVar

Way = Literal["now", "blocking", "behind", "restore", "wait"]


class Standing(Protocol):
    """Who stands where."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The living."""

    @property
    def busy(self) -> tuple[str, ...]:
        """The living that compute."""

    @property
    def kind(self) -> str:
        """The family whose members are mispredicted alike."""

    def without(self, lost: Iterable[str]) -> Self: ...

    def joined_by(self, nodes: Sequence[str]) -> Self:
        """With ``nodes`` idle."""

    def bare(self) -> Self:
        """The same nodes, and nobody holds anything."""


S = TypeVar("S", bound=Standing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What changes cost, in seconds."""

    move_s: float
    """To move the state of a re-partition: tau."""
    exposed_s: float = 1.0
    """Of a move behind training, what is seen of it. With the planner in the loop: of any change of plan."""
    restart_s: float | None = None
    """To restore a checkpoint, its lost work not counted; None: half a minute and twice ``move_s``."""
    checkpoint_every_s: float = 600.0
    """Of training."""
    checkpoint_every_steps: int | None = None
    """Instead, if given."""
    checkpoint_write_s: float = 0.0
    """How long training stands for one."""
    redone_steps: float = 0.0
    """Steps done again after a loss."""
    keep_progress: bool = False
    """Whether a move behind training that a change broke off goes on where it was."""

    @property
    def restore_s(self) -> float:
        return 30.0 + 2 * self.move_s if self.restart_s is None else self.restart_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Option(Generic[S]):
    """One way to go on. All stand for ``pause_s``; train on ``meanwhile`` for ``copy_s``; stand for ``stall_s``; then train on
    ``target``."""

    policy: str
    way: Way
    target: S
    step_s: float
    """Predicted, of ``target``."""
    now_s: float = math.inf
    """Predicted, of ``meanwhile``."""
    pause_s: float = 0.0
    copy_s: float = 0.0
    stall_s: float = 0.0
    moves: str = ""
    """The kind of move whose predicted time may be wrong; empty: nothing moves."""
    meanwhile: S | None = None
    """None: what stood before."""
    arrivals: tuple[tuple[float, str, str], ...] = ()
    """When after the pause which node has what, as predicted: what a move that is broken off leaves behind."""
    value: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation(Generic[S]):
    """What a player is told: who is where, and what it may know of times."""

    layout: S
    """Without who is gone; newcomers are idle."""
    gap_s: float
    """The true mean."""
    seen_gap_s: float
    """From the history."""
    costs: Costs
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    unsaved_steps: float = 0.0
    """Trained since the last checkpoint."""
    seen: Mapping[str, float] = field(default_factory=dict)
    """Measured by predicted, of ``step`` and a kind, ``move`` and a kind, or ``node`` and a name, as far as records tell."""
    step_ratio: Callable[[S], float] = field(default=lambda layout: 1.0)
    """The same for a standing, with a guess where nothing is known."""
    move_ratio: Callable[[str], float] = field(default=lambda move: 1.0)


class Player(Protocol[S]):
    """What the world asks of a policy."""

    @property
    def name(self) -> str: ...

    @property
    def batch(self) -> int:
        """Samples of a step."""

    @property
    def is_free(self) -> bool:
        """Whether nothing costs anything."""

    @property
    def rethinks(self) -> bool:
        """Whether it chooses again when a step is other than predicted, not only at changes."""

    @property
    def loses_work(self) -> bool:
        """Whether a blocking move goes back to the last checkpoint."""

    def start(self, nodes: tuple[str, ...]) -> S | None: ...

    def bare(self, nodes: tuple[str, ...]) -> S:
        """Where all begin who cannot start."""

    def step_s(self, layout: S) -> float:
        """Predicted; infinite where it cannot train on ``layout`` as it is."""

    def true_step_s(self, layout: S, factor: Callable[[str], float]) -> float:
        """The same if each node takes ``factor(node)`` times as long."""

    def react(self, situation: Situation[S]) -> Option[S]: ...

    def kept(self, option: Option[S], copied_s: float, layout: S) -> S:
        """``layout``, on which ``option`` was broken off after copying for so long, with what had arrived."""

    def pace_of_a_node(self, num_nodes: int) -> float:
        """Samples a second of one of so many nodes, if none ever failed."""
