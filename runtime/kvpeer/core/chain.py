"""Keys of pages, and where in the directory they belong.

A prompt is a *chain* of pages. Each page has a key; the key of the first page of every group of `ANCHOR_GROUP_PAGES`
pages is the *anchor* of the whole group and decides its directory partition, so that a long prompt asks few owners.
Which group a page is in depends only on its place in the prompt: every agent derives the same anchor for it. Engines
that do not say where in their prompts their pages are (SGLang) use *loose* pages, each its own anchor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpeer.model import ANCHOR_GROUP_PAGES, KEY_BYTES, LocalProtocolError, PageKey

__all__ = [
    "NAMESPACE_BYTES",
    "Chain",
    "ChainSlice",
    "loose_pages",
    "namespace_digest",
    "page_key",
    "partitions_of_anchors",
    "take_keys",
]

NAMESPACE_BYTES = 32

_NAMESPACE_DOMAIN = b"kvpeer namespace 1\n"
"""Hashed first, with the version: a change of the encoding below can never collide with an older one."""

_PARTITION_SHIFT = 4
"""A partition is the top 12 bits of an anchor: 2**12 = N_PARTITIONS."""


def namespace_digest(fields: Mapping[str, str]) -> bytes:
    """Returns 32 bytes that are equal exactly when the fields are equal, in whatever order they are given.

    Names and values are hashed with their lengths, so that no two different mappings have the same encoding.

    Raises:
        LocalProtocolError: there are no fields: such a namespace would be shared by everybody.
    """
    if not fields:
        raise LocalProtocolError(
            "a namespace needs at least one field that says what must be equal for two engines to share pages"
        )
    digest = hashlib.sha256(_NAMESPACE_DOMAIN)
    for name in sorted(fields):
        for text in (name, fields[name]):
            encoded = text.encode("utf-8")
            digest.update(len(encoded).to_bytes(8, "big"))
            digest.update(encoded)
    return digest.digest()


def page_key(namespace: bytes, page_hash: bytes, group: int = 0) -> PageKey:
    """Returns the 16-byte key of a page: SHA-256 over namespace, KV group and the engine's own page hash, cut.

    Raises:
        LocalProtocolError: the namespace is not 32 bytes or the group is not in [0, 2**32).
    """
    digest = _key_prefix(namespace, group)
    digest.update(page_hash)
    return PageKey(digest.digest()[:KEY_BYTES])


def loose_pages(namespace: bytes, page_hashes: Iterable[bytes], group: int = 0) -> ChainSlice:
    """Returns the pages with these engine hashes, each its own anchor.

    Raises:
        LocalProtocolError: the namespace is not 32 bytes or the group is not in [0, 2**32).
    """
    prefix, keys = _key_prefix(namespace, group), []
    for page_hash in page_hashes:
        digest = prefix.copy()
        digest.update(page_hash)
        keys.append(digest.digest()[:KEY_BYTES])
    return ChainSlice(0, b"".join(keys), b"")


def partitions_of_anchors(anchors: bytes) -> npt.NDArray[np.uint16]:
    """Returns the partition of each packed 16-byte anchor key: its first 12 bits, read big-endian."""
    columns = np.frombuffer(anchors, dtype=">u2").reshape(-1, KEY_BYTES // 2)
    return (columns[:, 0] >> _PARTITION_SHIFT).astype(np.uint16)


def take_keys(keys: bytes, indices: npt.NDArray[np.int64]) -> bytes:
    """Returns the packed keys at these places of packed keys."""
    return np.frombuffer(keys, dtype=np.uint8).reshape(-1, KEY_BYTES)[indices].tobytes()


@dataclass(frozen=True, slots=True)
class ChainSlice:
    """Pages [first, first + n) of a chain, self-contained: the anchors of their groups travel with the keys.

    `keys` is n packed keys; `anchors` one packed key for each group of `ANCHOR_GROUP_PAGES` that the pages touch, or
    empty: then each page is its own anchor, and `first` means nothing.

    Raises:
        LocalProtocolError: the lengths do not fit together.
    """

    first: int
    keys: bytes
    anchors: bytes

    def __post_init__(self) -> None:
        if self.first < 0:
            raise LocalProtocolError(f"a chain slice cannot start at page {self.first}")
        if len(self.keys) % KEY_BYTES:
            raise LocalProtocolError(f"keys are {KEY_BYTES} bytes each, but {len(self.keys)} bytes were given")
        n_groups = _n_groups(self.first, len(self))
        if self.anchors and len(self.anchors) != n_groups * KEY_BYTES:
            raise LocalProtocolError(
                f"{len(self)} pages from page {self.first} touch {n_groups} groups and need "
                f"{n_groups * KEY_BYTES} bytes of anchors, not {len(self.anchors)}"
            )

    def __len__(self) -> int:
        return len(self.keys) // KEY_BYTES

    def part(self, start: int, stop: int) -> ChainSlice:
        """Returns the pages [start, stop) of this slice, counted from its own first page.

        Raises:
            LocalProtocolError: the range is not within the slice.
        """
        _check_range(start, stop, len(self))
        first = self.first + start
        first_group = first // ANCHOR_GROUP_PAGES - self.first // ANCHOR_GROUP_PAGES
        stop_group = first_group + _n_groups(first, stop - start)
        return ChainSlice(
            first,
            self.keys[start * KEY_BYTES : stop * KEY_BYTES],
            self.anchors[first_group * KEY_BYTES : stop_group * KEY_BYTES],
        )

    def partitions(self) -> npt.NDArray[np.uint16]:
        """Returns the directory partition of each page, u16 [n]."""
        if not self.anchors:
            return partitions_of_anchors(self.keys)
        groups = (self.first + np.arange(len(self))) // ANCHOR_GROUP_PAGES - self.first // ANCHOR_GROUP_PAGES
        return partitions_of_anchors(self.anchors)[groups]


class Chain:
    """The growing chain of page keys of one prompt in one namespace and KV group. Not thread-safe.

    Raises:
        LocalProtocolError: the namespace is not 32 bytes or the group is not in [0, 2**32).
    """

    def __init__(self, namespace: bytes, group: int = 0) -> None:
        self._prefix = _key_prefix(namespace, group)
        self._keys = bytearray()

    def __len__(self) -> int:
        return len(self._keys) // KEY_BYTES

    def extend(self, page_hashes: Iterable[bytes]) -> None:
        """Appends the pages with these engine hashes, in prompt order."""
        for page_hash in page_hashes:
            digest = self._prefix.copy()
            digest.update(page_hash)
            self._keys += digest.digest()[:KEY_BYTES]

    def slice(self, first: int, stop: int) -> ChainSlice:
        """Returns the pages [first, stop) of the chain.

        Raises:
            LocalProtocolError: the range is not within the chain.
        """
        _check_range(first, stop, len(self))
        first_group = first // ANCHOR_GROUP_PAGES
        group_bytes = ANCHOR_GROUP_PAGES * KEY_BYTES
        anchors = b"".join(
            self._keys[group * group_bytes : group * group_bytes + KEY_BYTES]
            for group in range(first_group, first_group + _n_groups(first, stop - first))
        )
        return ChainSlice(first, bytes(self._keys[first * KEY_BYTES : stop * KEY_BYTES]), anchors)


def _key_prefix(namespace: bytes, group: int) -> hashlib._Hash:
    if len(namespace) != NAMESPACE_BYTES:
        raise LocalProtocolError(f"a namespace is {NAMESPACE_BYTES} bytes (see namespace_digest), not {len(namespace)}")
    if not 0 <= group < 1 << 32:
        raise LocalProtocolError(f"KV group {group} is not in [0, 2**32)")
    return hashlib.sha256(namespace + group.to_bytes(4, "big"))


def _n_groups(first: int, n: int) -> int:
    return (first + n - 1) // ANCHOR_GROUP_PAGES - first // ANCHOR_GROUP_PAGES + 1 if n else 0


def _check_range(start: int, stop: int, n: int) -> None:
    if not 0 <= start <= stop <= n:
        raise LocalProtocolError(f"pages [{start}, {stop}) are not within the {n} pages there are")
