"""The namespaces that this agent holds pages of, and what their clients said about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from kvpeer.core.chain import NAMESPACE_BYTES
from kvpeer.core.slot_effects import PageShape
from kvpeer.model import PARTS_MAX, CapacityError, RemoteProtocolError
from kvpeer.wire.messages import ClientHello

__all__ = ["COHORTS_MAX", "Cohort", "CohortStatus", "Cohorts"]

COHORTS_MAX = 64
"""Namespaces known at once. An engine has one or, with adapters and tenants, a few; each costs a description in the
status."""


DESCRIPTION_BYTES_MAX = 16 << 10
"""Names and values of a namespace's description together; it goes into every status."""


@dataclass
class Cohort:
    """Clients and pages of one namespace. `parts`: (offset, bytes) in the page of each part that a client
    registered."""

    namespace: bytes
    description: dict[str, str]
    shape: PageShape
    n_clients: int = 0
    is_adopted: bool = False
    """No client was there yet: all that is known of it comes from pages on the disk."""
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.shape.cohort


@dataclass(frozen=True, slots=True)
class CohortStatus:
    """One namespace, for status and metrics."""

    namespace: bytes
    description: dict[str, str]
    page_bytes: int
    n_parts: int
    n_clients: int
    n_pages: int


class Cohorts:
    """All cohorts of an agent, the least recently joined first. Not safe for concurrent access."""

    def __init__(self, page_bytes_max: int) -> None:
        self._page_bytes_max = page_bytes_max
        self._by_namespace: dict[bytes, Cohort] = {}
        self._last_number = 0

    def __iter__(self) -> Iterator[Cohort]:
        return iter(self._by_namespace.values())

    def __len__(self) -> int:
        return len(self._by_namespace)

    def join(self, hello: ClientHello) -> tuple[Cohort, Cohort | None]:
        """The cohort of a client, made if it is the first, and a cohort that had to make room and whose pages must go.

        Raises:
            RemoteProtocolError: what the client says about its pages cannot be, or is not what the others of its
            namespace said;
                the message names the value.
            CapacityError: COHORTS_MAX namespaces have clients.
        """
        dropped = self._unadopt(hello)
        self._check(hello)
        cohort = self._by_namespace.pop(hello.namespace, None)
        if cohort is None and dropped is not None:
            cohort = self._make(hello.namespace, hello.description, hello.page_bytes, hello.n_parts)
        elif cohort is None:
            dropped = self._make_room()
            cohort = self._make(hello.namespace, hello.description, hello.page_bytes, hello.n_parts)
        elif cohort.is_adopted:
            cohort.description, cohort.is_adopted = dict(hello.description), False
        self._by_namespace[hello.namespace] = cohort
        if hello.part >= 0:
            cohort.parts[hello.part] = (hello.part_offset, hello.part_bytes)
        cohort.n_clients += 1
        return cohort, dropped

    def adopt(self, namespace: bytes, page_bytes: int, n_parts: int) -> tuple[Cohort, Cohort | None]:
        """The cohort of pages that were found on the disk, made if there is none, and a cohort that had to make room.

        Raises:
            CapacityError: COHORTS_MAX namespaces have clients.
        """
        cohort = self._by_namespace.get(namespace)
        if cohort is not None:
            return cohort, None
        dropped = self._make_room()
        cohort = self._by_namespace[namespace] = self._make(namespace, {}, page_bytes, n_parts)
        cohort.is_adopted = True
        return cohort, dropped

    def statuses(self, n_pages: Mapping[int, int]) -> list[CohortStatus]:
        """All namespaces known here; `n_pages`: by number, 0 where none is given."""
        return [
            CohortStatus(
                cohort.namespace, cohort.description, cohort.shape.page_bytes, cohort.shape.n_parts, cohort.n_clients,
                n_pages.get(cohort.number, 0),
            )
            for cohort in self
        ]  # fmt: skip

    def numbered(self, number: int) -> Cohort | None:
        """The cohort of this number, if it is still known."""
        return next((cohort for cohort in self._by_namespace.values() if cohort.number == number), None)

    def leave(self, cohort: Cohort) -> None:
        """A client of the cohort is gone."""
        cohort.n_clients -= 1

    def _make(self, namespace: bytes, description: Mapping[str, str], page_bytes: int, n_parts: int) -> Cohort:
        self._last_number += 1
        return Cohort(namespace, dict(description), PageShape(page_bytes, n_parts, self._last_number))

    def _unadopt(self, hello: ClientHello) -> Cohort | None:
        """Engines know the shape of their pages; what a disk says of it, which is no longer right, gives way."""
        cohort = self._by_namespace.get(hello.namespace)
        if cohort is None or not cohort.is_adopted:
            return None
        if (hello.page_bytes, hello.n_parts) == (cohort.shape.page_bytes, cohort.shape.n_parts):
            return None
        return self._by_namespace.pop(hello.namespace)

    def _make_room(self) -> Cohort | None:
        if len(self._by_namespace) < COHORTS_MAX:
            return None
        idle = next((cohort for cohort in self._by_namespace.values() if not cohort.n_clients), None)
        if idle is None:
            raise CapacityError(f"{COHORTS_MAX} namespaces have engines at this agent: give some engines another agent")
        return self._by_namespace.pop(idle.namespace)

    def _check(self, hello: ClientHello) -> None:
        if len(hello.namespace) != NAMESPACE_BYTES:
            raise RemoteProtocolError(f"namespace: {len(hello.namespace)} bytes instead of {NAMESPACE_BYTES}")
        if sum(len(name) + len(value) for name, value in hello.description.items()) > DESCRIPTION_BYTES_MAX:
            raise RemoteProtocolError(f"description: more than {DESCRIPTION_BYTES_MAX} characters")
        if not 1 <= hello.page_bytes <= self._page_bytes_max:
            raise RemoteProtocolError(
                f"page_bytes: {hello.page_bytes} does not fit into the pool's extents of {self._page_bytes_max} bytes; "
                "raise the agent's pool.extent_size"
            )
        if not 1 <= hello.n_parts <= PARTS_MAX:
            raise RemoteProtocolError(f"n_parts: {hello.n_parts} is not within 1 and {PARTS_MAX}")
        if not -1 <= hello.part < hello.n_parts:
            raise RemoteProtocolError(
                f"part: {hello.part} is none of the {hello.n_parts} parts, nor -1 for a scheduler"
            )
        self._check_part(hello)

    def _check_part(self, hello: ClientHello) -> None:
        cohort = self._by_namespace.get(hello.namespace)
        if cohort is not None and (hello.page_bytes, hello.n_parts) != (cohort.shape.page_bytes, cohort.shape.n_parts):
            raise RemoteProtocolError(
                f"page_bytes, n_parts: ({hello.page_bytes}, {hello.n_parts}), but other engines of this namespace have "
                f"({cohort.shape.page_bytes}, {cohort.shape.n_parts}); whatever differs belongs into the namespace"
            )
        if hello.part < 0:
            return
        stop = hello.part_offset + hello.part_bytes
        if hello.part_offset < 0 or hello.part_bytes < 1 or stop > hello.page_bytes:
            raise RemoteProtocolError(f"part {hello.part}: bytes {hello.part_offset} to {stop} are not within the page")
        extents = dict({} if cohort is None else cohort.parts)
        if extents.setdefault(hello.part, (hello.part_offset, hello.part_bytes)) != (
            hello.part_offset,
            hello.part_bytes,
        ):
            raise RemoteProtocolError(
                f"part {hello.part}: another engine of this namespace has other bytes of the page"
            )
        covered = sum(part_bytes for _, part_bytes in extents.values())
        ordered = sorted(extents.values())
        if any(start + length > following for (start, length), (following, _) in pairwise(ordered)):
            raise RemoteProtocolError(f"part {hello.part}: its bytes of the page overlap with another part's")
        if len(extents) == hello.n_parts and covered != hello.page_bytes:
            raise RemoteProtocolError(
                f"the parts of a page are {covered} bytes together, but page_bytes is {hello.page_bytes}"
            )
