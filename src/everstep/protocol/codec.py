"""Messages as bytes, and back. What comes from a peer is not trusted: whatever is wrong with it is that peer's error."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from everstep.errors import LocalProtocolError, RemoteProtocolError
from everstep.protocol.messages import ExchangeMessage, ToLeader, ToMember

MAX_MESSAGE_BYTES = 64 * 2**20
"""No message is longer, whoever sends it."""

Message = ExchangeMessage | ToLeader | ToMember
_Decoded = TypeVar("_Decoded")

_encoder = msgspec.msgpack.Encoder()
_exchange: msgspec.msgpack.Decoder[ExchangeMessage] = msgspec.msgpack.Decoder(ExchangeMessage)
_to_leader: msgspec.msgpack.Decoder[ToLeader] = msgspec.msgpack.Decoder(ToLeader)
_to_member: msgspec.msgpack.Decoder[ToMember] = msgspec.msgpack.Decoder(ToMember)


def encode(message: Message) -> bytes:
    """``message`` as MessagePack.

    Raises:
        LocalProtocolError: it is longer than ``MAX_MESSAGE_BYTES``.
    """
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise LocalProtocolError(f"a {type(message).__name__} of {len(data)} bytes, at most {MAX_MESSAGE_BYTES} may be sent")
    return data


def decode_exchange(data: bytes, peer: str | None = None) -> ExchangeMessage:
    """A record or a union. Raises RemoteProtocolError, naming ``peer``, for anything else."""
    return _decoded(_exchange, data, "a record or a union", peer)


def decode_to_leader(data: bytes, peer: str | None = None) -> ToLeader:
    """What a member tells its leader. Raises RemoteProtocolError, naming ``peer``, for anything else."""
    return _decoded(_to_leader, data, "a message to the leader", peer)


def decode_to_member(data: bytes, peer: str | None = None) -> ToMember:
    """An order of the leader. Raises RemoteProtocolError, naming ``peer``, for anything else."""
    return _decoded(_to_member, data, "an order of the leader", peer)


def _decoded(decoder: msgspec.msgpack.Decoder[_Decoded], data: bytes, expected: str, peer: str | None) -> _Decoded:
    if len(data) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"expected {expected}, got {len(data)} bytes, more than {MAX_MESSAGE_BYTES}", peer)
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"expected {expected}, got {len(data)} bytes that are none: {error}", peer) from error
