"""Faults by which a location outlives the page that it names: the reader gets the bytes of another page."""

from __future__ import annotations

import time

from faults.fault import EIGHT_PAGES, Fault, Observation, finds, publish_all
from faults.protocol import CALL_PAGES_MAX, Read
from faults.system import Shape, System

__all__ = ["FAULTS"]

ROUNDS = 20

N_THREADS, N_EACH, STEP = 4, 16, 4
PUBLISH_S = 4.0
PUBLISH_ROUNDS = 6
"""Whether a put passes a delete is a matter of luck."""

QUIET_S = 2.0
"""Longer than anything that a reader remembers of locations (PeerCache: 1 s)."""

MANY_PAGES = Shape(16 << 10, 512)
"""A record has to lose both of its owners to the nodes that join (1 in 6), and in PeerCache a page has two records."""

N_OLD, N_NEW = 384, 640
"""Old ones with some room to spare; new ones more than the pool has slots, so that no old one stays."""


def _evicted_before_read(system: System) -> Observation:
    reader, owner = system.start(2, EIGHT_PAGES)
    before = after = Read()
    for number in range(ROUNDS):
        pages = list(range(1000 * number, 1000 * number + EIGHT_PAGES.n_pages))
        publish_all(owner, pages)
        finds(reader, pages)
        before += reader.engine.ask("read", pages[:2])
        publish_all(owner, [page + 500 for page in pages])
        after += reader.engine.ask("read", pages[2:])
    n_pages = ROUNDS * (EIGHT_PAGES.n_pages - 2)
    text = f"{after.n_wrong} of {n_pages} pages read with another page's bytes, {after.n_missed} missed"
    return Observation(after.n_wrong > 0 if before.n_right else None, f"{text}; before, {before.n_right} read right")


def _put_after_delete(system: System) -> Observation:
    reader, owner = system.start(2, EIGHT_PAGES)
    n_listed, total = 0, Read()
    for number in range(PUBLISH_ROUNDS):
        first = 1000 * number
        owner.engine.ask("publish_from_threads", first, N_THREADS, N_EACH, STEP, PUBLISH_S)
        time.sleep(QUIET_S)
        n_found, read = reader.engine.ask("probe", list(range(first, first + N_THREADS * N_EACH)))
        n_listed, total = n_listed + n_found, total + read
        if total.n_wrong:
            break
    n_stale = total.n_wrong + total.n_missed
    text = f"{n_stale} of {n_listed} listed pages are gone: {total.n_wrong} read with another page's bytes, "
    return Observation(n_stale > 0 if n_listed else None, f"{text}{total.n_missed} cannot be read")


def _zombie_records(system: System) -> Observation:
    reader, owner = system.start(2, MANY_PAGES)
    old, new = range(N_OLD), range(1000, 1000 + N_NEW)
    publish_all(owner, old)
    finds(reader, old)
    joined = system.start(2, MANY_PAGES)
    finds(joined[0], old)
    publish_all(owner, new)
    for node in joined:
        node.stop()
    system.settle()
    live = new[-CALL_PAGES_MAX:]
    finds(reader, live)
    n_found, read = reader.engine.ask("probe", list(old))
    n_right = reader.engine.ask("read", list(live)).n_right
    text = f"{n_found} of {N_OLD} evicted pages are listed again; {read.n_wrong} read with another page's bytes"
    return Observation(read.n_wrong > 0 if n_right else None, f"{text}; {n_right} of {len(live)} live ones right")


FAULTS = [
    Fault(
        "evict, then read",
        "A reader is told where 8 pages are; before it reads 6 of them, their pool of 8 takes 8 others. "
        f"{ROUNDS} rounds",
        _evicted_before_read,
    ),
    Fault(
        "put after delete",
        f"{N_THREADS} threads publish {N_THREADS * N_EACH} pages in turn into a pool of {EIGHT_PAGES.n_pages} for "
        f"{PUBLISH_S:g} s; {QUIET_S:g} s later another node reads what is listed. Up to {PUBLISH_ROUNDS} rounds",
        _put_after_delete,
    ),
    Fault(
        "zombie records after a ring change",
        "Two nodes join, all pages of the owner are evicted for others, the two leave; another node looks for the old",
        _zombie_records,
    ),
]
