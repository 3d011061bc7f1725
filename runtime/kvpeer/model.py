"""The value types that every other module speaks in, and the error tree.

Plain values: nothing here reads a clock, opens a file or knows a protocol. Words are those of docs/glossary.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NewType

import numpy as np

__all__ = [
    "AGENT_ID_BYTES",
    "ANCHOR_GROUP_PAGES",
    "HOLDERS_MAX",
    "HOLDER_DTYPE",
    "KEY_BYTES",
    "N_PARTITIONS",
    "PARTS_MAX",
    "AdmissionRefusedError",
    "AgentAddress",
    "AgentId",
    "CapacityError",
    "ConfigError",
    "InternalError",
    "KvPeerError",
    "LocalProtocolError",
    "LookupStatus",
    "Outcome",
    "PageKey",
    "PeerUnavailableError",
    "RemoteProtocolError",
    "Tier",
    "Verify",
]

KEY_BYTES = 16
AGENT_ID_BYTES = 16

PARTS_MAX = 64
"""Parts (TP x PP ranks of one pod) in a page: the part table has room for 64."""

HOLDERS_MAX = 16
"""Holders of one record; equal to KVP_HOLDERS_MAX."""

N_PARTITIONS = 4096
"""Fixed hash partitions of the directory; the ring assigns each to its owners."""

ANCHOR_GROUP_PAGES = 32
"""Pages of a chain that share a ring position: the key of the group's first page is the anchor of all of them, so that
a prompt of n pages asks at most ceil(n / 32) owners."""

PageKey = NewType("PageKey", bytes)
"""16 bytes naming a page: SHA-256(namespace digest, engine page hash, KV group), cut."""

AgentId = NewType("AgentId", bytes)
"""16 random bytes, new for every run of an agent: the incarnation that fences records, slots and capabilities."""


class Tier(IntEnum):
    """Where a page lies. L1 (device) is the engine's own business and never appears in the directory."""

    HOST = 2
    DISK = 4


class Outcome(IntEnum):
    """What a fetch did to one page; six different things. Values equal the native enum."""

    HIT = 0
    MISS = 1
    STALE = 2
    CORRUPT = 3
    TIMEOUT = 4
    REFUSED = 5


class LookupStatus(IntEnum):
    """What an owner's answer for one page is worth; the numbers of the wire."""

    KNOWN = 0
    MISS = 1
    """Nobody has it: said only of a partition that this owner knows all of."""
    UNSURE = 2


class Verify(IntEnum):
    """How a reader proves that it got the bytes of the key it asked for. Values equal the native enum."""

    GENERATION = 1
    """Header before and after the copy. Trusts every client of the producer's pod not to scribble over its own pool."""
    FULL = 2
    """The payload's checksum as well."""


HOLDER_DTYPE = np.dtype([("agent", "<u4"), ("slot", "<u4"), ("generation", "<u4"), ("length", "<u4"), ("tier", "<u4")])
"""One holder of a page, as the native table and the wire hold it (20 bytes). `agent` indexes a table of agent ids that
travels with the array, or the local table of interned ids: who hands out the array says which."""


@dataclass(frozen=True, slots=True)
class AgentAddress:
    """Where an agent listens: one IP (numeric, never 0.0.0.0), its control port and its data port."""

    host: str
    control_port: int
    data_port: int


class KvPeerError(Exception):
    """Root of every error that kvpeer raises on purpose."""


class ConfigError(KvPeerError):
    """A setting is wrong; the message names the key and the fix. Raised at start only."""


class LocalProtocolError(KvPeerError):
    """Our own side broke a protocol: a bug here."""


class RemoteProtocolError(KvPeerError):
    """The other side broke a protocol: drop the connection."""


class PeerUnavailableError(KvPeerError):
    """The other side cannot be reached, did not answer by the deadline, or is gone."""


class AdmissionRefusedError(PeerUnavailableError):
    """The producer did not admit this reader: the capability was unknown, used, expired, or meant for another run."""


class CapacityError(KvPeerError):
    """A named limit is reached: the pool is full of pinned pages, a queue is full, a peer throttles."""


class InternalError(KvPeerError):
    """A broken invariant. The agent stops: a lost cache is cheap, a wrong one is not."""
