"""What agents and clients send: frames, messages and packed columns, up to the machines that take them in.

The first byte says what the rest is: a stream of frames in pieces of so many bytes, or the body of one message.
"""

from __future__ import annotations

import functools
import random

import numpy as np
from kvpeer.core.chain import ChainSlice
from kvpeer.core.directory import DirectoryShard
from kvpeer.core.locate.answers import Answers, checked
from kvpeer.core.membership import Membership, MembershipSettings, heard
from kvpeer.core.owner_answers import take_streamed
from kvpeer.core.ring import Ring
from kvpeer.model import AgentId, KvPeerError, RemoteProtocolError
from kvpeer.wire.codec import decode_client, decode_peer, encode
from kvpeer.wire.framing import BODY_BYTES_MAX, FRAME_BYTES_MAX, FrameReader, pack_frame
from kvpeer.wire.messages import (
    AgentInfo,
    Apply,
    ClientMessage,
    Digests,
    Fetch,
    Gossip,
    Holders,
    Locate,
    Lookup,
    PeerMessage,
    PeerWelcome,
    Ping,
    PingAck,
    PingRequest,
    Repair,
    Reserve,
    StaleReport,
    Synced,
)
from kvpeer.wire.packing import n_chain_keys
from oracles.directory_oracle import DirectoryOracle

from fuzz.shapes import changed_body, changed_frames

OWN, PEER = (AgentId(bytes([number]) * 16) for number in (1, 2))
BODY_OF_PEER, BODY_OF_CLIENT = 0, 1
RECORDS_MAX = 64

__all__ = ["BODY_OF_CLIENT", "BODY_OF_PEER", "changed", "take"]


def take(data: bytes) -> None:
    if not data:
        return
    if data[0] == BODY_OF_PEER:
        take_peer(data[1:])
    elif data[0] == BODY_OF_CLIENT:
        take_client(data[1:])
    else:
        take_stream(data[1:], data[0])


def changed(data: bytes, rng: random.Random) -> bytes:
    """Another input that is as well formed as this one."""
    change = changed_body if data[0] in (BODY_OF_PEER, BODY_OF_CLIENT) else changed_frames
    return data[:1] + change(data[1:], rng)


def take_stream(stream: bytes, piece_bytes: int) -> None:
    """Frames come out as they went in, whatever the pieces."""
    reader = FrameReader()
    sent = b""
    for start in range(0, len(stream), piece_bytes):
        try:
            frames = reader.feed(stream[start : start + piece_bytes])
        except RemoteProtocolError:
            assert reader.n_buffered == 0
            return
        for frame in frames:
            assert len(frame.body) <= BODY_BYTES_MAX
            sent += pack_frame(frame.kind, frame.id, frame.body, frame.deadline_ms)
            take_peer(frame.body)
            take_client(frame.body)
        assert reader.n_buffered < FRAME_BYTES_MAX
    assert stream == sent + stream[len(sent) :]
    assert reader.n_buffered == len(stream) - len(sent)


def take_peer(body: bytes) -> None:
    try:
        message = decode_peer(body)
    except RemoteProtocolError:
        return
    assert decode_peer(encode(message)) == message
    try:
        deliver(message)
    except KvPeerError:
        return


def take_client(body: bytes) -> None:
    try:
        message = decode_client(body)
    except RemoteProtocolError:
        return
    assert decode_client(encode(message)) == message
    if isinstance(message, Locate | Fetch | Reserve):
        take_chain(message)


def take_chain(message: Locate | Fetch | Reserve) -> None:
    """What the agent checks is what the core relies on."""
    try:
        n = n_chain_keys(message.first, message.keys, message.anchors)
    except RemoteProtocolError:
        return
    chain = ChainSlice(message.first, message.keys, message.anchors)
    assert len(chain) == len(chain.partitions()) == n


def deliver(message: PeerMessage | ClientMessage) -> None:
    """To the machine that takes in such messages, with a state that was never touched before."""
    if isinstance(message, Ping | PingAck | PingRequest | Gossip | PeerWelcome):
        deliver_to_membership(message)
    elif isinstance(message, Holders):
        deliver_holders(message)
    elif isinstance(message, Apply | Repair | Synced | Digests | StaleReport | Lookup):
        deliver_to_shard(message)


def deliver_to_shard(message: Apply | Repair | Synced | Digests | StaleReport | Lookup) -> None:
    shard = DirectoryShard(OWN, DirectoryOracle(RECORDS_MAX), agents_max=4)
    shard.members_changed(ring(), {OWN, PEER})
    if isinstance(message, Lookup):
        answer = shard.lookup(message)
        assert len(answer.statuses) == len(message.partitions) // 2
    elif isinstance(message, StaleReport):
        shard.stale(message)
    else:
        take_streamed(shard, PEER, message)
        if isinstance(message, Apply):
            take_streamed(shard, PEER, message)
    assert shard.stats().records <= len(encode(message)) // 16


@functools.cache
def ring() -> Ring:
    return Ring.build([OWN])


def deliver_holders(message: Holders) -> None:
    n = len(message.statuses)
    statuses, counts, holders = checked(message, n)
    answers = Answers(n)
    awaited = np.ones(n, dtype=np.bool_)
    answers.add(np.arange(n, dtype=np.uint32), counts, holders, message.agents, awaited, OWN)
    found, in_order = answers.in_key_order()
    assert len(statuses) == n
    assert int(found.sum(dtype=np.int64)) == len(in_order)


def deliver_to_membership(message: Ping | PingAck | PingRequest | Gossip | PeerWelcome) -> None:
    info = AgentInfo(OWN, "own", "10.0.0.1", 1, 2)
    machine = Membership(info, MembershipSettings(), random.Random(0), 0.0)
    machine.hello(AgentInfo(PEER, "peer", "10.0.0.2", 1, 2), 0.0)
    if isinstance(message, PeerWelcome):
        machine.joined(message.members, 1.0)
    else:
        heard(machine, PEER, message, 1.0)
    machine.tick(2.0)
    assert OWN in {member.agent_id for member in machine.alive()}
