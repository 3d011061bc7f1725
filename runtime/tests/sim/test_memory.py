"""The reader's rule on modelled memory: what was read is a hit only if the slot was the same page all the time."""

from __future__ import annotations

import pytest
from kvpeer.model import Outcome
from kvpeer.sim.memory import Header, Part, SlotState, checksum, page_bytes_of, verified

RUN, KEY = b"r" * 16, b"k" * 16
PAYLOAD = page_bytes_of(KEY, 100)
PARTS = (Part(0, 60, checksum(PAYLOAD[:60])), Part(60, 40, checksum(PAYLOAD[60:])))
HEADER = Header(RUN, SlotState.COMMITTED, 7, KEY, PARTS)


def test_the_page_that_was_wanted_is_a_hit_whole_or_in_parts():
    assert verified(HEADER, PAYLOAD, HEADER, HEADER) is Outcome.HIT
    assert verified(HEADER, PAYLOAD[60:], HEADER, HEADER, part=1) is Outcome.HIT


@pytest.mark.parametrize(
    "change",
    [
        {"generation": 8}, {"key": b"x" * 16}, {"run_id": b"x" * 16}, {"state": SlotState.WITHDRAWN},
        {"state": SlotState.WRITING},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_another_use_of_the_slot_is_stale_whenever_it_began(change):
    other = HEADER._replace(**change)
    assert verified(other, PAYLOAD, other, HEADER) is Outcome.STALE
    assert verified(HEADER, PAYLOAD, other, HEADER) is Outcome.STALE
    assert verified(other, PAYLOAD, HEADER, HEADER) is Outcome.STALE


@pytest.mark.parametrize("part", [None, 1])
def test_other_bytes_under_an_unchanged_header_are_corrupt(part):
    changed = bytearray(PAYLOAD)
    changed[99] ^= 1
    read = bytes(changed) if part is None else bytes(changed[60:])
    assert verified(HEADER, read, HEADER, HEADER, part) is Outcome.CORRUPT


def test_a_slot_that_was_never_used_is_stale():
    assert verified(None, b"", None, HEADER) is Outcome.STALE
