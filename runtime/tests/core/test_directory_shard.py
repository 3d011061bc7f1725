"""An owner's shard: the newest word of each producer counts, the dead hold nothing, and doubt is said."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from core.directory_actors import (
    ALPHA,
    BETA,
    GAMMA,
    OWN,
    ask,
    digests_of,
    key_of,
    numbers,
    put,
    remove,
    repair,
    shard_with,
    synced,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpeer.core import directory
from kvpeer.core.directory import PREVIOUS_OWNER_S
from kvpeer.core.ring import Ring
from kvpeer.model import CapacityError, LookupStatus, PeerUnavailableError, RemoteProtocolError
from kvpeer.wire.messages import Apply, Lookup, StaleReport

KNOWN, MISS, UNSURE = LookupStatus


def stale(producer, page, partition, slot, generation):
    columns = (
        np.array([value], dtype=dtype).tobytes()
        for value, dtype in ((partition, "<u2"), (slot, "<u4"), (generation, "<u4"))
    )
    return StaleReport(producer, key_of(page), *columns)


# ---- streams ---------------------------------------------------------------------------------------------------------


def test_a_page_is_found_where_its_producers_put_it():
    shard = shard_with(ALPHA, BETA)
    shard.apply(ALPHA, put(0, ("p", 5, 1, 1), ("q", 6, 2, 1)))
    shard.apply(BETA, put(0, ("p", 5, 7, 3)))
    assert ask(shard, ("p", 5), ("q", 6), ("p", 6)) == [
        (KNOWN, {(ALPHA, 1, 1), (BETA, 7, 3)}),
        (KNOWN, {(ALPHA, 2, 1)}),
        (UNSURE, set()),
    ]


def test_an_answer_says_which_number_comes_next():
    shard = shard_with(ALPHA)
    assert shard.apply(ALPHA, put(0, ("p", 5, 1, 1), ("q", 5, 2, 1))).next_sequence == 2
    assert shard.repair(ALPHA, repair(2, 5)).next_sequence == 3
    assert shard.synced(ALPHA, synced(3)).next_sequence == 4


@pytest.mark.parametrize(
    "old",
    [put(0, ("p", 5, 1, 1)), remove(1, ("p", 5, 2, 2)), repair(2, 5), synced(2)],
    ids=["put", "remove", "repair", "synced"],
)
def test_an_old_message_changes_nothing_and_is_acknowledged(old):
    shard = shard_with(ALPHA)
    shard.apply(ALPHA, put(0, ("p", 5, 1, 1), ("p", 5, 3, 3), ("p", 5, 2, 2)))
    handle = {"Apply": shard.apply, "Repair": shard.repair, "Synced": shard.synced}[type(old).__name__]
    assert handle(ALPHA, old).next_sequence == 3
    assert ask(shard, ("p", 5)) == [(KNOWN, {(ALPHA, 2, 2)})]


def test_of_a_message_that_overlaps_only_the_new_part_is_applied():
    shard = shard_with(ALPHA)
    shard.apply(ALPHA, put(0, ("p", 5, 1, 1), ("p", 5, 2, 2)))
    shard.apply(ALPHA, remove(2, ("p", 5, 2, 2)))
    assert shard.apply(ALPHA, put(1, ("p", 5, 2, 2), ("x", 5, 8, 8), ("q", 5, 3, 3))).next_sequence == 4
    assert [status for status, _ in ask(shard, ("p", 5), ("x", 5), ("q", 5))] == [UNSURE, UNSURE, KNOWN]


def test_behind_a_gap_ops_count_and_everything_is_to_be_compared():
    shard = shard_with(ALPHA)
    shard.synced(ALPHA, synced(0))
    assert ask(shard, ("q", 6)) == [(MISS, set())]
    answer = shard.apply(ALPHA, put(5, ("p", 5, 1, 1)))
    assert answer.next_sequence == 6
    assert numbers(answer.repair) == list(range(4096))
    assert ask(shard, ("p", 5), ("q", 6)) == [(KNOWN, {(ALPHA, 1, 1)}), (UNSURE, set())]
    assert shard.counters.n_gaps == 1


def test_what_a_gap_left_out_is_asked_for_again_until_it_is_settled():
    """The answer that says so may be lost; the next one says it again."""
    shard = shard_with(ALPHA)
    shard.apply(ALPHA, put(5, ("p", 5, 1, 1)))
    shard.digests(ALPHA, digests_of(("p", 5, 1, 1), partitions=list(range(4000))))
    assert numbers(shard.apply(ALPHA, put(5, ("p", 5, 1, 1))).repair) == list(range(4000, 4096))
    assert numbers(shard.synced(ALPHA, synced(6, range(4000, 4096))).repair) == []


@settings(deadline=None)
@given(st.data())
def test_whatever_arrives_in_whatever_order_the_newest_op_wins(drawn):
    """Puts of one page, cut into messages that arrive shuffled and repeated: the highest number that arrived counts."""
    n = drawn.draw(st.integers(1, 12))
    starts = [0, *sorted(drawn.draw(st.sets(st.integers(1, n), max_size=4))), n]
    messages = [
        put(start, *(("p", 5, number, 1) for number in range(start, stop)))
        for start, stop in pairwise(starts)
        if start < stop
    ]
    shard = shard_with(ALPHA)
    newest = -1
    for message in drawn.draw(st.lists(st.sampled_from(messages), max_size=10)):
        shard.apply(ALPHA, message)
        newest = max(newest, message.sequence + len(message.ops) - 1)
        assert ask(shard, ("p", 5)) == [(KNOWN, {(ALPHA, newest, 1)})]


def test_a_repair_replaces_the_producers_entries_of_its_partition_only():
    shard = shard_with(ALPHA, BETA)
    shard.apply(ALPHA, put(0, ("p", 5, 1, 1), ("q", 6, 2, 1)))
    shard.apply(BETA, put(0, ("p", 5, 7, 1)))
    shard.repair(ALPHA, repair(2, 5, ("r", 5, 3, 1)))
    assert [held for _, held in ask(shard, ("p", 5), ("q", 6), ("r", 5))] == [
        {(BETA, 7, 1)},
        {(ALPHA, 2, 1)},
        {(ALPHA, 3, 1)},
    ]


def test_synced_partitions_hold_nothing_of_the_producer_any_more():
    shard = shard_with(ALPHA, BETA)
    shard.apply(ALPHA, put(0, ("p", 5, 1, 1), ("q", 6, 2, 1)))
    shard.apply(BETA, put(0, ("p", 5, 7, 1)))
    shard.synced(ALPHA, synced(2, [5]))
    assert [held for _, held in ask(shard, ("p", 5), ("q", 6))] == [{(BETA, 7, 1)}, {(ALPHA, 2, 1)}]


# ---- sure and unsure -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["synced", "repair", "digests"])
def test_a_miss_is_a_miss_when_every_living_producer_confirmed_the_partition(way):
    shard = shard_with(ALPHA, BETA)
    shard.synced(ALPHA, synced(0))
    assert ask(shard, ("p", 5)) == [(UNSURE, set())]
    if way == "synced":
        shard.synced(BETA, synced(0, [5]))
    elif way == "repair":
        shard.repair(BETA, repair(0, 5, ("other", 5, 1, 1)))
    else:
        shard.digests(BETA, digests_of(partitions=[5]))
    assert ask(shard, ("p", 5), ("p", 6)) == [(MISS, set()), (UNSURE, set())]
    assert shard.n_unsure_partitions() == 4095


def test_when_the_last_unconfirmed_producer_ends_the_rest_decides():
    shard = shard_with(ALPHA)
    shard.members_changed(Ring.build([OWN]), {OWN})
    assert ask(shard, ("p", 5)) == [(MISS, set())]


def test_a_partition_of_somebody_else_is_never_a_miss():
    ring = Ring.build([OWN, ALPHA], replicas=1)
    shard = shard_with()
    shard.members_changed(ring, {OWN})
    owned = ring.owned_by(OWN)
    mine, other = int(np.flatnonzero(owned)[0]), int(np.flatnonzero(~owned)[0])
    assert ask(shard, ("p", mine), ("p", other)) == [(MISS, set()), (UNSURE, set())]


def test_a_partition_that_was_lost_and_comes_back_is_unsure_again():
    shard = shard_with()
    other = int(np.flatnonzero(~Ring.build([OWN, ALPHA], replicas=1).owned_by(OWN))[0])
    shard.members_changed(Ring.build([OWN, ALPHA], replicas=1), {OWN})
    shard.members_changed(Ring.build([OWN]), {OWN})
    assert ask(shard, ("p", other)) == [(UNSURE, set())]
    assert other in numbers(shard.apply(OWN, put(1)).repair)


def test_digests_that_differ_are_named_and_make_the_partition_unsure():
    shard = shard_with()
    shard.apply(OWN, put(1, ("p", 5, 1, 1)))
    assert ask(shard, ("q", 5)) == [(MISS, set())]
    answer = shard.digests(OWN, digests_of(("p", 5, 1, 2), ("r", 7, 1, 1), partitions=[4, 5, 6, 7]))
    assert numbers(answer.differing) == [5, 7]
    assert ask(shard, ("q", 5), ("q", 6)) == [(UNSURE, set()), (MISS, set())]


# ---- members ---------------------------------------------------------------------------------------------------------


def test_entries_of_an_ended_producer_are_void_at_once_and_freed_in_slices():
    shard = shard_with(ALPHA, BETA)
    shard.apply(ALPHA, put(0, ("p", 5, 1, 1), ("q", 4095, 2, 1)))
    shard.apply(BETA, put(0, ("p", 5, 7, 1)))
    shard.members_changed(Ring.build([OWN]), {OWN, BETA})
    assert ask(shard, ("p", 5), ("q", 4095)) == [(KNOWN, {(BETA, 7, 1)}), (UNSURE, set())]
    assert shard.stats().holders == 3
    assert shard.sweep(100, now=0.0)
    assert shard.stats().holders == 2
    assert not shard.sweep(4096, now=0.0)
    assert shard.stats().holders == 1


def test_who_is_not_an_alive_member_cannot_write():
    shard = shard_with(ALPHA)
    shard.members_changed(Ring.build([OWN]), {OWN})
    for agent in (ALPHA, GAMMA):
        with pytest.raises(PeerUnavailableError, match="not an alive member"):
            shard.apply(agent, put(0, ("p", 5, 1, 1)))
    assert shard.stats().holders == 0


def test_a_producer_that_was_believed_dead_starts_anew():
    shard = shard_with(ALPHA)
    shard.apply(ALPHA, put(0, ("p", 5, 1, 1)))
    shard.members_changed(Ring.build([OWN]), {OWN})
    shard.members_changed(Ring.build([OWN]), {OWN, ALPHA})
    assert ask(shard, ("p", 5)) == [(UNSURE, set())]
    answer = shard.apply(ALPHA, put(1, ("q", 5, 2, 1)))
    assert len(numbers(answer.repair)) == 4096
    while shard.sweep(1000, now=0.0):
        pass
    assert [held for _, held in ask(shard, ("p", 5), ("q", 5))] == [set(), {(ALPHA, 2, 1)}]


def test_an_index_is_used_again_only_after_its_entries_are_gone():
    shard = shard_with(ALPHA, agents_max=2)
    shard.apply(ALPHA, put(0, ("p", 4000, 1, 1)))
    shard.members_changed(Ring.build([OWN]), {OWN, BETA})
    with pytest.raises(CapacityError, match="2 producers"):
        shard.apply(BETA, put(0, ("q", 5, 1, 1)))
    assert ask(shard, ("p", 4000), ("x", 4000)) == [(UNSURE, set()), (UNSURE, set())]
    while shard.sweep(1000, now=0.0):
        pass
    shard.apply(BETA, put(0, ("q", 5, 1, 1)))
    assert [held for _, held in ask(shard, ("p", 4000), ("q", 5))] == [set(), {(BETA, 1, 1)}]


def test_a_lost_partition_stays_readable_for_a_while():
    shard = shard_with()
    ring = Ring.build([OWN, ALPHA], replicas=1)
    lost = int(np.flatnonzero(~ring.owned_by(OWN))[0])
    shard.apply(OWN, put(1, ("p", lost, 1, 1)))
    shard.members_changed(ring, {OWN})
    shard.sweep(100, now=50.0)
    shard.sweep(100, now=50.0 + PREVIOUS_OWNER_S - 0.1)
    assert ask(shard, ("p", lost)) == [(KNOWN, {(OWN, 1, 1)})]
    shard.sweep(100, now=50.0 + PREVIOUS_OWNER_S)
    assert ask(shard, ("p", lost)) == [(UNSURE, set())]
    assert shard.stats().records == 0


def test_lost_partitions_are_dropped_some_at_a_time_whatever_put_records_there():
    shard = shard_with()
    ring = Ring.build([OWN, ALPHA], replicas=1)
    lost = np.flatnonzero(~ring.owned_by(OWN))[:5].tolist()
    for number, partition in enumerate(lost):
        shard.repair(OWN, repair(1 + number, partition, ("p", partition, number, 1)))
    shard.members_changed(ring, {OWN})
    assert not shard.sweep(2, now=50.0)
    left = []
    while shard.sweep(2, now=50.0 + PREVIOUS_OWNER_S):
        left.append(shard.stats().records)
    assert left == [3, 1]
    assert shard.stats().records == 0


def test_the_time_of_a_lost_partition_starts_anew_when_it_came_back_in_between():
    shard = shard_with()
    ring = Ring.build([OWN, ALPHA], replicas=1)
    lost = int(np.flatnonzero(~ring.owned_by(OWN))[0])
    shard.apply(OWN, put(1, ("p", lost, 1, 1)))
    shard.members_changed(ring, {OWN})
    shard.sweep(100, now=50.0)
    shard.members_changed(Ring.build([OWN]), {OWN})
    shard.members_changed(ring, {OWN})
    shard.sweep(100, now=59.0)
    shard.sweep(100, now=59.0 + PREVIOUS_OWNER_S - 0.1)
    assert ask(shard, ("p", lost)) == [(KNOWN, {(OWN, 1, 1)})]


def test_what_came_early_counts_unless_it_was_dropped_before_the_take_over():
    """Producers may see the new ring before the new owner does."""
    ring = Ring.build([OWN, ALPHA], replicas=1)
    kept, dropped = np.flatnonzero(~ring.owned_by(OWN))[:2].tolist()
    shard = shard_with()
    shard.members_changed(ring, {OWN})
    shard.repair(OWN, repair(1, dropped, ("p", dropped, 1, 1)))
    shard.sweep(100, now=0.0)
    shard.sweep(100, now=PREVIOUS_OWNER_S)
    shard.repair(OWN, repair(2, kept, ("p", kept, 1, 1)))
    shard.members_changed(Ring.build([OWN]), {OWN})
    assert ask(shard, ("p", kept), ("x", kept)) == [(KNOWN, {(OWN, 1, 1)}), (MISS, set())]
    assert ask(shard, ("p", dropped)) == [(UNSURE, set())]


# ---- stale reports ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("way", "said"), [("synced", synced(0, [5])), ("digests", digests_of(partitions=[5]))])
def test_what_was_confirmed_early_is_forgotten_too_when_the_take_over_does_not_come(way, said):
    """Its producer saw another ring for a moment, and does not tell this shard any more what it publishes there."""
    shard = shard_with(ALPHA, owners=(ALPHA,))
    getattr(shard, way)(ALPHA, said)
    shard.sweep(5000, now=0.0)
    shard.sweep(5000, now=PREVIOUS_OWNER_S)
    shard.members_changed(Ring.build([OWN]), {OWN, ALPHA})
    shard.synced(OWN, synced(1))
    assert ask(shard, ("a", 5)) == [(UNSURE, set())]
    shard.synced(ALPHA, synced(1, [5]))
    assert ask(shard, ("a", 5)) == [(MISS, set())]


def test_a_stale_report_takes_away_exactly_the_location_it_names():
    shard = shard_with(ALPHA, BETA)
    shard.apply(ALPHA, put(0, ("p", 5, 1, 1)))
    shard.apply(BETA, put(0, ("p", 5, 1, 1)))
    for other in (stale(ALPHA, "p", 5, 1, 2), stale(ALPHA, "p", 5, 2, 1), stale(GAMMA, "p", 5, 1, 1)):
        shard.stale(other)
    assert ask(shard, ("p", 5)) == [(KNOWN, {(ALPHA, 1, 1), (BETA, 1, 1)})]
    shard.stale(stale(ALPHA, "p", 5, 1, 1))
    assert ask(shard, ("p", 5)) == [(KNOWN, {(BETA, 1, 1)})]
    shard.stale(stale(BETA, "p", 5, 1, 1))
    assert shard.counters.n_stale_removed == 2


def test_after_a_wrong_stale_report_the_producer_has_the_last_word():
    shard = shard_with(ALPHA)
    shard.apply(ALPHA, put(0, ("p", 5, 1, 1)))
    shard.stale(stale(ALPHA, "p", 5, 1, 1))
    shard.apply(ALPHA, put(0, ("p", 5, 1, 1)))
    assert not ask(shard, ("p", 5))[0][1], "an old message put it back"
    assert numbers(shard.digests(ALPHA, digests_of(("p", 5, 1, 1), partitions=[5])).differing) == [5]
    shard.repair(ALPHA, repair(1, 5, ("p", 5, 1, 1)))
    assert ask(shard, ("p", 5)) == [(KNOWN, {(ALPHA, 1, 1)})]


# ---- limits ----------------------------------------------------------------------------------------------------------


FULL = [(f"page {number}", 5, number, 1) for number in range(16)]
"""All places of partition 5 in a shard with 16 of them."""


def differing(shard, producer, *rows):
    """What the shard asks the producer to repair, if these are its pages in partition 5."""
    return numbers(shard.digests(producer, digests_of(*rows, partitions=[5])).differing)


def test_the_newest_pages_of_a_producer_alone_fill_its_partition():
    shard = shard_with(ALPHA, partition_records_max=16)
    shard.apply(ALPHA, put(0, *FULL, ("new", 5, 99, 1)))
    assert [held for _, held in ask(shard, ("new", 5), FULL[0][:2], FULL[1][:2])] == [
        {(ALPHA, 99, 1)},
        set(),
        {(ALPHA, 1, 1)},
    ]
    assert shard.stats().dropped_holders == 1


def test_a_producer_that_has_to_give_way_is_not_repaired_before_there_is_room():
    shard = shard_with(ALPHA, partition_records_max=16)
    shard.apply(ALPHA, put(0, *FULL))
    own = [("own", 5, 50, 1), ("other", 5, 51, 1)]
    shard.apply(OWN, put(1, own[0]))
    assert [held for _, held in ask(shard, ("own", 5), FULL[0][:2])] == [{(OWN, 50, 1)}, set()]
    assert differing(shard, ALPHA, *FULL) == []
    shard.apply(OWN, remove(2, own[0]))
    assert differing(shard, ALPHA, *FULL) == [], "one free place is no room"
    shard.apply(ALPHA, remove(16, FULL[1]))
    assert differing(shard, ALPHA, FULL[0], *FULL[2:]) == [5]
    shard.repair(ALPHA, repair(17, 5, FULL[0], *FULL[2:]))
    assert ask(shard, FULL[0][:2])[0][1] == {(ALPHA, 0, 1)}
    assert differing(shard, ALPHA, FULL[0], *FULL[2:]) == []


def test_a_producer_that_withdrew_half_of_its_share_may_fill_it_again():
    shard = shard_with(ALPHA, partition_records_max=16)
    kept_out, left = FULL[:8], FULL[8:]
    shard.apply(ALPHA, put(0, *FULL))
    shard.apply(OWN, put(1, *[(f"own {number}", 5, 50 + number, 1) for number in range(20)]))
    assert differing(shard, ALPHA, *FULL) == []
    for n in range(4):
        assert differing(shard, ALPHA, *kept_out, *left[n:]) == []
        shard.apply(ALPHA, remove(16 + n, left[n]))
        shard.apply(OWN, put(21 + n, (f"own {20 + n}", 5, 80 + n, 1)))
    assert differing(shard, ALPHA, *kept_out, *left[4:]) == [5]
    shard.repair(ALPHA, repair(20, 5, *kept_out, *left[4:]))
    assert differing(shard, ALPHA, *kept_out, *left[4:]) == []
    held = [row for _, holders in ask(shard, *[row[:2] for row in FULL]) for row in holders]
    assert held == [(ALPHA, number, 1) for number in [*range(4, 8), *range(12, 16)]]


def test_a_producer_whose_kept_out_pages_are_gone_is_repaired_like_any_other():
    shard = shard_with(ALPHA, partition_records_max=16)
    shard.apply(ALPHA, put(0, *FULL, ("new", 5, 99, 1)))
    assert differing(shard, ALPHA, *FULL[1:], ("new", 5, 99, 1)) == []
    assert differing(shard, ALPHA, *FULL[1:], ("new", 5, 99, 2)) == [5]


def test_behind_a_gap_a_full_partition_is_repaired_once():
    shard = shard_with(ALPHA, partition_records_max=16)
    shard.apply(ALPHA, put(0, *FULL, ("new", 5, 99, 1)))
    assert differing(shard, ALPHA, *FULL, ("new", 5, 99, 2)) == []
    shard.apply(ALPHA, put(18, ("x", 6, 100, 1)))
    assert differing(shard, ALPHA, *FULL, ("new", 5, 99, 2)) == [5]
    shard.repair(ALPHA, repair(19, 5, *FULL, ("new", 5, 99, 2)))
    assert differing(shard, ALPHA, *FULL, ("new", 5, 99, 2)) == []
    assert ask(shard, ("new", 5))[0][1] == {(ALPHA, 99, 2)}


def test_after_a_wrong_stale_report_a_full_partition_is_repaired_too():
    shard = shard_with(ALPHA, partition_records_max=16)
    pages = [*FULL, ("new", 5, 99, 1)]
    shard.apply(ALPHA, put(0, *pages))
    shard.stale(stale(ALPHA, "new", 5, 99, 1))
    assert differing(shard, ALPHA, *pages) == [5]
    shard.repair(ALPHA, repair(17, 5, *pages))
    assert ask(shard, ("new", 5))[0][1] == {(ALPHA, 99, 1)}
    assert differing(shard, ALPHA, *pages) == []


@pytest.mark.parametrize("way", ["repair", "stale"])
def test_another_try_in_one_full_partition_is_none_in_another(way):
    shard = shard_with(ALPHA, partition_records_max=16)
    pages = [*FULL, ("new", 5, 99, 1)]
    elsewhere = [(f"else {number}", 6, 200 + number, 1) for number in range(17)]
    shard.apply(ALPHA, put(0, *pages, *elsewhere))
    if way == "repair":
        shard.repair(ALPHA, repair(34, 5, *FULL[1:], ("new", 5, 99, 1)))
        assert differing(shard, ALPHA, *pages) == [5], "it holds all that the producer said that it has"
    else:
        shard.stale(stale(ALPHA, "new", 5, 99, 1))
    assert numbers(shard.digests(ALPHA, digests_of(*elsewhere, partitions=[6])).differing) == []


def test_a_repair_of_one_producer_keeps_out_what_it_drops_of_another():
    shard = shard_with(ALPHA, partition_records_max=16)
    shard.apply(ALPHA, put(0, *FULL))
    shard.repair(OWN, repair(1, 5, *[(f"own {number}", 5, 50 + number, 1) for number in range(20)]))
    assert shard.stats().records == 16
    assert differing(shard, ALPHA, *FULL) == []


def test_what_an_ended_producer_had_kept_out_is_forgotten_with_its_index():
    shard = shard_with(ALPHA, partition_records_max=16, agents_max=2)
    shard.apply(ALPHA, put(0, *FULL, ("new", 5, 99, 1)))
    shard.members_changed(Ring.build([OWN]), {OWN, BETA})
    while shard.sweep(1000, now=0.0):
        pass
    assert differing(shard, BETA, *FULL) == [5]


@pytest.mark.parametrize("way", ["apply", "repair"])
def test_a_full_partition_is_not_repaired_over_and_over_but_again_when_there_is_room(way):
    shard = shard_with(ALPHA, partition_records_max=1)
    shard.apply(OWN, put(1, ("p", 5, 1, 1)))
    pages = digests_of(("q", 5, 2, 1), partitions=[5])
    assert numbers(shard.digests(ALPHA, pages).differing) == [5]
    if way == "apply":
        shard.apply(ALPHA, put(0, ("q", 5, 2, 1)))
    else:
        shard.repair(ALPHA, repair(0, 5, ("q", 5, 2, 1)))
    assert numbers(shard.digests(ALPHA, pages).differing) == []
    shard.apply(OWN, remove(2, ("p", 5, 1, 1)))
    assert numbers(shard.digests(ALPHA, pages).differing) == [5]


def test_a_large_answer_lists_fewer_holders_of_each_key_and_none_of_no_key(monkeypatch):
    monkeypatch.setattr(directory, "ANSWER_HOLDERS_MAX", 5)
    shard = shard_with(ALPHA, BETA, GAMMA)
    for agent in (ALPHA, BETA, GAMMA):
        shard.apply(agent, put(0, ("p", 5, 1, 1), ("q", 6, 2, 1)))
    shard.apply(ALPHA, put(2, ("r", 7, 3, 1)))
    answers = ask(shard, ("p", 5), ("nobody has it", 5), ("q", 6), ("r", 7))
    assert [len(held) for _, held in answers] == [1, 0, 1, 1]
    assert answers[2][1] <= {(agent, 2, 1) for agent in (ALPHA, BETA, GAMMA)}


# ---- what peers may not do -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        Apply(0, b"\x03", bytes(16), bytes(2), bytes(4), bytes(4), bytes(4), b"\x02"),
        Apply(0, b"\x00", bytes(16), bytes(2), bytes(4), bytes(4), bytes(4), b"\x02"),
        Apply(0, b"\x01", bytes(15), bytes(2), bytes(4), bytes(4), bytes(4), b"\x02"),
        Apply(0, b"\x01", bytes(16), b"\xff\xff", bytes(4), bytes(4), bytes(4), b"\x02"),
        Apply(0, b"\x01", bytes(16), bytes(2), bytes(8), bytes(4), bytes(4), b"\x02"),
        Apply(0, b"\x01" * 8193, bytes(16 * 8193), bytes(2 * 8193), *[bytes(4 * 8193)] * 3, b"\x02" * 8193),
    ],
    ids=["unknown op", "op 0", "ragged keys", "no such partition", "lengths differ", "too many"],
)
def test_a_malformed_message_is_refused_and_changes_nothing(message):
    shard = shard_with(ALPHA)
    with pytest.raises(RemoteProtocolError):
        shard.apply(ALPHA, message)
    assert shard.apply(ALPHA, put(0)).next_sequence == 0
    assert shard.stats().records == 0


def test_a_lookup_beyond_the_limit_is_refused():
    with pytest.raises(RemoteProtocolError, match="65537"):
        shard_with().lookup(Lookup(bytes(16 * 65_537), bytes(2 * 65_537)))
