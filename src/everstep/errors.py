"""Every error of Everstep, split by whose fault it is. Errors carry fields, not only prose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class EverstepError(Exception):
    """The root of the tree. Its text says what was expected, what came, and what to do."""


class ConfigError(EverstepError):
    """The user's: a wrong file, key, type, value or argument."""


class UnsupportedError(ConfigError):
    """The user's: something that cannot be trained this way, refused early and by name."""


class UserCodeError(EverstepError):
    """The user's: their code raised. It is shown once and is never retried.

    Fields say where: ``layer`` (name or None), ``step``, ``micro_batch``, ``node``.
    """

    def __init__(
        self, message: str, *, layer: str | None = None, step: int | None = None, micro_batch: int | None = None,
        node: str | None = None,
    ) -> None:
        super().__init__(message)
        self.layer, self.step, self.micro_batch, self.node = layer, step, micro_batch, node


class InfeasibleError(EverstepError):
    """Nobody's: no plan fits. ``rejected`` maps each thing tried to why it does not fit."""

    def __init__(self, message: str, rejected: Mapping[str, str]) -> None:
        super().__init__(message)
        self.rejected = dict(rejected)


class LocalProtocolError(EverstepError):
    """Ours: an event that the protocol does not allow here. Stop."""


class RemoteProtocolError(EverstepError):
    """A peer's: bytes or a message that cannot be right. Drop the peer, keep the run. ``peer`` names it."""

    def __init__(self, message: str, peer: str | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class EngineError(EverstepError):
    """Ours or the machine's: a step could not be carried out."""


class PeerLost(EngineError):
    """A peer is gone or silent. Names the peer, the operation and where the job was."""

    def __init__(self, *, peers: Sequence[str], operation: str, view: int, step: int, micro_batch: int | None) -> None:
        where = f"step {step}" if micro_batch is None else f"step {step}, micro-batch {micro_batch}"
        super().__init__(f"no {operation} from {', '.join(peers)} in {where} of view {view}")
        self.peers, self.operation, self.view, self.step, self.micro_batch = (
            tuple(peers), operation, view, step, micro_batch,
        )


class TransferError(EverstepError):
    """A piece of state could not be moved or is not what was sent."""


class CheckpointError(EverstepError):
    """A checkpoint cannot be used: torn, damaged, or of another model. ``path`` says which file."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path
