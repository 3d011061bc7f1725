"""What owners say to producers and readers: which part of a shard a message of a stream is for, and what counts as an
answer."""

from __future__ import annotations

from kvpeer.core.directory import DirectoryShard
from kvpeer.core.owner_stream import StreamMessage
from kvpeer.model import AgentId, RemoteProtocolError
from kvpeer.wire.messages import Applied, Apply, DigestsChecked, Holders, PeerMessage, Repair, Synced

__all__ = ["checked_holders", "checked_stream_answer", "take_streamed"]


def take_streamed(shard: DirectoryShard, producer: AgentId, message: StreamMessage) -> Applied | DigestsChecked:
    """Returns the shard's answer to the next message of this producer's stream.

    Raises:
        KvPeerError: as the shard's methods.
    """
    if isinstance(message, Apply):
        return shard.apply(producer, message)
    if isinstance(message, Repair):
        return shard.repair(producer, message)
    if isinstance(message, Synced):
        return shard.synced(producer, message)
    return shard.digests(producer, message)


def checked_stream_answer(message: StreamMessage, answer: PeerMessage) -> Applied | DigestsChecked:
    """Returns the answer to a message of a stream.

    Raises:
        RemoteProtocolError: it is something else.
    """
    if not isinstance(answer, Applied | DigestsChecked):
        sent, got = type(message).__name__, type(answer).__name__
        raise RemoteProtocolError(f"an answer to {sent} must be Applied or DigestsChecked, not {got}")
    return answer


def checked_holders(answer: PeerMessage) -> Holders:
    """Returns the answer to a Lookup.

    Raises:
        RemoteProtocolError: it is something else.
    """
    if not isinstance(answer, Holders):
        raise RemoteProtocolError(f"an answer to Lookup must be Holders, not {type(answer).__name__}")
    return answer
