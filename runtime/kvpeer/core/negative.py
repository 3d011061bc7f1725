"""The negative cache: what need not be asked or fetched again for a short while.

Two kinds: a *location* (page, producer, slot, generation) whose fetch failed, and a plain *miss* of a page. Both are
kept as 64-bit fingerprints in fixed arrays, one entry a place: a newer entry replaces an older one at the same place,
which forgets the older and is harmless. Two entries with one fingerprint (2**-64 a pair) would make a page a miss for a
moment.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvpeer.model import AGENT_ID_BYTES, HOLDER_DTYPE, KEY_BYTES, ConfigError, LocalProtocolError

__all__ = ["MISS_TTL_S_MAX", "NEGATIVE_ENTRIES_MAX", "NegativeCache"]

MISS_TTL_S_MAX = 0.2
"""A page that was missing may be published at any moment, and nobody tells its readers: a miss is remembered only for a
burst of requests with the same prefix."""

NEGATIVE_ENTRIES_MAX = 1 << 16
"""Entries of each kind: 2 x 1 MiB. Locations fail by the pool of a producer at most, and misses are short-lived."""

Fingerprints = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


class NegativeCache:
    """Bounded and O(1) a page, whole batches at once; no Python object per page. Not thread-safe.

    Keys come packed (16 bytes each). Holders come as HOLDER_DTYPE [n], one for each key, with `agents`, the packed ids
    that their `agent` field indexes.

    Raises:
        ConfigError: a time is out of range.
        LocalProtocolError: (any method) keys and holders do not fit together.
    """

    def __init__(self, location_ttl_s: float = 10.0, miss_ttl_s: float = MISS_TTL_S_MAX) -> None:
        if not 0 < location_ttl_s < math.inf:
            raise ConfigError(f"negative.location_ttl_s must be a positive number, not {location_ttl_s}")
        if not 0 <= miss_ttl_s <= MISS_TTL_S_MAX:
            raise ConfigError(f"negative.miss_ttl_s must be in [0, {MISS_TTL_S_MAX}], not {miss_ttl_s}")
        self._location_ttl_s = location_ttl_s
        self._miss_ttl_s = miss_ttl_s
        self._locations = _ExpiringSet(NEGATIVE_ENTRIES_MAX)
        self._misses = _ExpiringSet(NEGATIVE_ENTRIES_MAX)

    def add_locations(self, keys: bytes, holders: npt.NDArray[np.void], agents: bytes, now: float) -> None:
        """These fetches failed: stale, corrupt or refused."""
        self._locations.add(_location_fingerprints(keys, holders, agents), now + self._location_ttl_s)

    def has_locations(self, keys: bytes, holders: npt.NDArray[np.void], agents: bytes, now: float) -> Mask:
        """Which locations failed a moment ago, bool [n]."""
        return self._locations.contains(_location_fingerprints(keys, holders, agents), now)

    def add_misses(self, keys: bytes, now: float) -> None:
        """Synced owners know no holder of these pages."""
        self._misses.add(_key_fingerprints(keys), now + self._miss_ttl_s)

    def has_misses(self, keys: bytes, now: float) -> Mask:
        """Which pages were missing a moment ago, bool [n]."""
        return self._misses.contains(_key_fingerprints(keys), now)


class _ExpiringSet:
    """A direct-mapped table of fingerprints with times of expiry. `capacity` is a power of two."""

    def __init__(self, capacity: int) -> None:
        self._fingerprints = np.zeros(capacity, dtype=np.uint64)
        self._expires = np.full(capacity, -math.inf)
        self._mask = np.uint64(capacity - 1)

    def add(self, fingerprints: Fingerprints, expires: float) -> None:
        places = fingerprints & self._mask
        self._fingerprints[places] = fingerprints
        self._expires[places] = expires

    def contains(self, fingerprints: Fingerprints, now: float) -> Mask:
        places = fingerprints & self._mask
        found: Mask = (self._fingerprints[places] == fingerprints) & (self._expires[places] > now)
        return found


def _key_fingerprints(keys: bytes) -> Fingerprints:
    """The second half of each key: keys are cut SHA-256, so any 64 bits of them are as good as a hash."""
    if len(keys) % KEY_BYTES:
        raise LocalProtocolError(f"keys are {KEY_BYTES} bytes each, but {len(keys)} bytes were given")
    fingerprints: Fingerprints = np.frombuffer(keys, dtype="<u8").reshape(-1, 2)[:, 1].astype(np.uint64)
    return fingerprints


def _location_fingerprints(keys: bytes, holders: npt.NDArray[np.void], agents: bytes) -> Fingerprints:
    fingerprints = _key_fingerprints(keys)
    if holders.dtype != HOLDER_DTYPE or holders.shape != fingerprints.shape:
        raise LocalProtocolError(f"{len(fingerprints)} keys need as many holders, not {holders.dtype} {holders.shape}")
    if len(agents) % AGENT_ID_BYTES or (len(holders) and int(holders["agent"].max()) >= len(agents) // AGENT_ID_BYTES):
        raise LocalProtocolError(f"{len(agents)} bytes of agent ids do not cover the holders' agents")
    # Agent ids are random: half of one is enough, too.
    producers = np.frombuffer(agents, dtype="<u8").reshape(-1, 2)[:, 0][holders["agent"]]
    # The upper half has the slot, the lower one the generation; folding makes both count for the place in the table.
    places = (holders["slot"].astype(np.uint64) << np.uint64(32)) | holders["generation"]
    mixed = fingerprints ^ producers ^ places
    folded: Fingerprints = mixed ^ (mixed >> np.uint64(32))
    return folded
