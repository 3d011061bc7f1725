"""The pages of one host pool of one rank, at the agent: found, read and published under one key function.

Two ways to the bytes. By page number: straight between the agent's pool and the host pool, one copy. By tensor: between
the agent's pool and flat pages that SGLang made (its copying interface), or that were made here for a host pool that
only gives copies. A key names the same bytes either way. Thread-safe; every call ends by its deadline.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvpeer.client.device import EngineLayout, NativeCopier, SlotPages
from kvpeer.core.chain import ChainSlice, loose_pages
from kvpeer.core.policy import Decision, RequestFacts, located_tokens
from kvpeer.core.traces import unnamed_request
from kvpeer.engines.sglang.layout import PageLayout
from kvpeer.engines.traces import NO_TRACES, DecisionTraces, Lookup, TraceSender
from kvpeer.model import Outcome, Verify
from kvpeer.wire.messages import PolicyTold

__all__ = ["AddressCopier", "PoolPages"]

BOUNCE_BYTES = 32 << 20
"""Flat copies of pages that are made at a time: enough that messages do not count, small next to a host pool."""

Mask = npt.NDArray[np.bool_]
PageNumbers = npt.NDArray[np.int64]


class PageClient(Protocol):
    """What is needed of `kvpeer.client.Client`. No method raises for anything a peer, an agent or a deadline does."""

    @property
    def policy(self) -> PolicyTold | None: ...
    def locate(self, chain: ChainSlice, request: str, deadline_s: float) -> Any: ...
    def fetch(
        self, chain: ChainSlice, blocks: PageNumbers, request: str, deadline_s: float, copier: Any = None
    ) -> npt.NDArray[np.uint8]: ...
    def publish(self, chain: ChainSlice, blocks: PageNumbers, deadline_s: float, *, copier: Any = None) -> Any: ...
    def reset(self, reason: str) -> bool: ...
    def close(self, wait_s: float) -> None: ...


class AddressCopier:
    """Copies pages whose blocks are addresses of `page_bytes` bytes in one run, anywhere in this process."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes

    def fence(self) -> object:
        """See `NativeCopier.fence`."""
        return None

    def wait_for(self, fence: object) -> None:
        """See `NativeCopier.wait_for`."""

    def seconds_since(self, fence: object) -> float:
        """See `NativeCopier.seconds_since`."""
        return math.inf

    def gather(
        self, pool: Any, offsets: npt.NDArray[np.uint64], part_offset: int, blocks: PageNumbers
    ) -> npt.NDArray[np.uint64]:
        """See `Copier.gather`."""
        copier, blocks = self._rebased(blocks)
        return copier.gather(pool, offsets, part_offset, blocks)

    def scatter(
        self, pool: Any, pages: SlotPages, part: int, part_offset: int, blocks: PageNumbers, verify: Verify
    ) -> npt.NDArray[np.uint8]:
        """See `Copier.scatter`."""
        copier, blocks = self._rebased(blocks)
        return copier.scatter(pool, pages, part, part_offset, blocks, verify)

    def _rebased(self, addresses: PageNumbers) -> tuple[NativeCopier, PageNumbers]:
        """A strided layout from the lowest address on in which block numbers count bytes."""
        base = int(addresses.min())
        layout = EngineLayout(
            np.array([base], np.uint64), np.array([1], np.uint64), np.array([self._page_bytes], np.uint32)
        )
        return NativeCopier(layout), addresses - base


class PoolPages:
    """See the module docstring. `host_pool` is SGLang's; `client` and `sender` are closed by `close`. `tell` belongs to
    one thread."""

    def __init__(
        self,
        host_pool: Any,
        layout: PageLayout,
        client: PageClient,
        namespace: bytes,
        shard: int,
        sender: TraceSender | None = None,
    ) -> None:
        self._sender = sender
        self._traces = NO_TRACES if sender is None else DecisionTraces(sender.add)
        self.host_pool = host_pool
        self.page_bytes = layout.page_bytes
        self.page_tokens = layout.page_tokens
        self._layout = layout
        self._client = client
        self._namespace = namespace
        self._shard = shard
        self._by_address = AddressCopier(layout.page_bytes)

    @property
    def policy(self) -> PolicyTold | None:
        """What the agent told last of the engine's policy."""
        return self._client.policy

    def statuses(self, keys: Sequence[str], deadline: float) -> npt.NDArray[np.uint8]:
        """Where these pages are, u8 [n]: 0 nowhere as far as anybody could say in time, 1 in the own pool, 2 at a
        peer."""
        if not keys:
            return np.zeros(0, np.uint8)
        statuses: npt.NDArray[np.uint8] = self._client.locate(self._chain(keys), "", _left(deadline)).statuses
        return statuses

    def tell(self, keys: Sequence[str], statuses: npt.NDArray[np.uint8], decision: Decision, lookup_s: float) -> None:
        """Lets the agent know what was decided of these pages, for people who ask later. Never blocks."""
        request = unnamed_request(self._chain(keys[:1]).keys)
        facts = RequestFacts(request, len(keys) * self.page_tokens + 1, self.page_tokens, self.page_bytes)
        located = located_tokens(statuses, 0, self.page_tokens)
        self._traces.decided(facts, 0, located, (), decision, Lookup(lookup_s))
        self._traces.over(request)

    def page_numbers(self, host_indices: Any, n_pages: int) -> PageNumbers | None:
        """The pages of the host pool that these indices are, `page_tokens` indices a page; None if they are not
        `n_pages` whole pages of it."""
        page_tokens = self._layout.page_tokens
        if host_indices is None or len(host_indices) != n_pages * page_tokens:
            return None
        first = np.asarray(host_indices, dtype=np.int64)[::page_tokens]
        numbers, rest = np.divmod(first, page_tokens)
        if rest.any() or (numbers < 0).any() or (numbers >= self._layout.n_pages).any():
            return None
        return np.ascontiguousarray(numbers)

    # ---- by page number

    def read(self, keys: Sequence[str], pages: PageNumbers, deadline: float) -> Mask:
        """Reads pages into the host pool; which arrived, bool [n]. The others hold anything."""
        if self._layout.segments is not None:
            return _hits(self._client.fetch(self._chain(keys), pages, "", _left(deadline)))
        arrived = np.zeros(len(keys), np.bool_)
        for start, stop in self._bounces(len(keys)):
            flat = [self.host_pool.get_dummy_flat_data_page() for _ in range(start, stop)]
            arrived[start:stop] = self.read_into(keys[start:stop], flat, deadline)
            for place in np.flatnonzero(arrived[start:stop]).tolist():
                index = int(pages[start + place]) * self._layout.page_tokens
                self.host_pool.set_from_flat_data_page(index, flat[place])
        return arrived

    def write(self, keys: Sequence[str], pages: PageNumbers, deadline: float) -> Mask:
        """Publishes pages of the host pool; which can be had now, bool [n]."""
        if self._layout.segments is not None:
            return _stored(self._client.publish(self._chain(keys), pages, _left(deadline)))
        stored = np.zeros(len(keys), np.bool_)
        for start, stop in self._bounces(len(keys)):
            indices = (pages[start:stop] * self._layout.page_tokens).tolist()
            flat = [self.host_pool.get_data_page(index, flat=True) for index in indices]
            stored[start:stop] = self.write_from(keys[start:stop], flat, deadline)
        return stored

    # ---- by tensor

    def read_into(self, keys: Sequence[str], flat_pages: Sequence[Any], deadline: float) -> Mask:
        """Reads pages into contiguous tensors of `page_bytes` each; which arrived, bool [n].

        Raises:
            ValueError: a tensor is not such a one.
        """
        addresses = np.array([self._address(page) for page in flat_pages], np.int64)
        return _hits(self._client.fetch(self._chain(keys), addresses, "", _left(deadline), copier=self._by_address))

    def write_from(self, keys: Sequence[str], flat_pages: Sequence[Any], deadline: float) -> Mask:
        """Publishes tensors of `page_bytes` each; which can be had now, bool [n].

        Raises:
            ValueError: a tensor is not such a one.
        """
        contiguous = [page.contiguous() for page in flat_pages]
        addresses = np.array([self._address(page) for page in contiguous], np.int64)
        chain = self._chain(keys)
        return _stored(self._client.publish(chain, addresses, _left(deadline), copier=self._by_address))

    # ---- the rest

    def withdraw_all(self) -> bool:
        """Withdraws all pages of the namespace from the own agent's pool; whether that is done."""
        return self._client.reset("SGLang clears its storage")

    def close(self, deadline: float) -> None:
        """Ends the connection; waits for what still runs, until the deadline at most."""
        if self._sender is not None:
            self._sender.close()
        self._client.close(_left(deadline))

    def _chain(self, keys: Sequence[str]) -> ChainSlice:
        return loose_pages(self._namespace, map(str.encode, keys), self._shard)

    def _address(self, page: Any) -> int:
        if page.nbytes != self.page_bytes or not page.is_contiguous() or page.device.type != "cpu":
            raise ValueError(
                f"a page of this host pool has {self.page_bytes} bytes in one run of host memory, but got "
                f"{page.nbytes} bytes on {page.device}"
            )
        address: int = page.data_ptr()
        return address

    def _bounces(self, n_pages: int) -> list[tuple[int, int]]:
        step = max(1, BOUNCE_BYTES // self.page_bytes)
        return [(start, min(start + step, n_pages)) for start in range(0, n_pages, step)]


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _hits(outcomes: npt.NDArray[np.uint8]) -> Mask:
    hits: Mask = outcomes == Outcome.HIT
    return hits


def _stored(result: Any) -> Mask:
    is_there: Mask = result.is_there
    return is_there
