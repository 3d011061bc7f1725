"""The ring: fair, stable under change, and the same for everybody who knows the same members."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpeer.core.ring import EPOCH_BYTES, Ring
from kvpeer.model import N_PARTITIONS, AgentId, LocalProtocolError

EVERY_PARTITION = np.arange(N_PARTITIONS, dtype=np.uint16)


def agents(n: int, seed: int = 0) -> list[AgentId]:
    return [AgentId(hashlib.sha256(f"{seed}/{idx}".encode()).digest()[:16]) for idx in range(n)]


def owner_ids(ring: Ring) -> list[list[AgentId | None]]:
    return [[ring.members[idx] if idx >= 0 else None for idx in row] for row in ring.owners(EVERY_PARTITION)]


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 64), st.integers(0, 2**32), st.integers(1, 3))
def test_no_agent_has_much_more_than_its_share(n, seed, replicas):
    """160 points an agent: shares have a standard deviation of about 8 %, so that six of them hold for any 64 ids."""
    ring = Ring.build(agents(n, seed), replicas)
    counts = np.array([ring.owned_by(member).sum() for member in ring.members])
    share = N_PARTITIONS * min(replicas, n) / n
    assert counts.max() <= 1.5 * share + 3
    assert counts.min() >= 0.5 * share - 3


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**32))
def test_a_join_moves_only_the_partitions_that_the_new_agent_takes(n, seed):
    *before, joined = agents(n + 1, seed)
    old, new = owner_ids(Ring.build(before)), owner_ids(Ring.build([*before, joined]))
    moved = [(old_row, new_row) for old_row, new_row in zip(old, new, strict=True) if old_row != new_row]
    assert all(joined in new_row for _, new_row in moved)
    for old_row, new_row in moved:
        kept = [member for member in new_row if member != joined]
        assert kept == old_row[: len(kept)]
    assert len(moved) <= 1.6 * N_PARTITIONS * min(2, n + 1) / (n + 1)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 40), st.integers(0, 2**32))
def test_a_leave_changes_only_the_partitions_that_the_agent_had(n, seed):
    *rest, left = agents(n, seed)
    old, new = owner_ids(Ring.build([*rest, left])), owner_ids(Ring.build(rest))
    for old_row, new_row in zip(old, new, strict=True):
        kept = [member for member in old_row if member != left]
        assert new_row[: len(kept)] == kept


@settings(deadline=None)
@given(st.permutations(agents(9)), st.integers(1, 3))
def test_the_order_and_repetition_of_members_do_not_matter(shuffled, replicas):
    ring, other = Ring.build(agents(9), replicas), Ring.build([*shuffled, shuffled[0]], replicas)
    assert ring.epoch == other.epoch
    assert ring.members == other.members
    assert (ring.owners(EVERY_PARTITION) == other.owners(EVERY_PARTITION)).all()


def test_the_epoch_tells_assignments_apart():
    rings = [Ring.build(agents(n)) for n in range(4)] + [Ring.build(agents(3), 1), Ring.build(agents(3), 2, 80)]
    assert len({ring.epoch for ring in rings}) == len(rings)
    assert all(len(ring.epoch) == EPOCH_BYTES for ring in rings)


def test_the_epoch_is_a_constant_of_the_format():
    """Agents of different builds must agree, so it may change only together with the version that is hashed in."""
    assert Ring.build(agents(3)).epoch.hex() == "08aefbb63ec2758420cf9c32e8bfd963"


def test_the_smallest_ring_has_one_point_and_its_agent_owns_all():
    ring = Ring.build(agents(1), replicas=1, virtual_nodes=1)
    assert ring.owned_by(ring.members[0]).all()
    assert ring.owned_by(agents(2)[1]).dtype == np.bool_
    assert ring.owners(EVERY_PARTITION).dtype == np.int32


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 40), st.integers(0, 2**32))
def test_a_leave_moves_about_one_share_and_no_more(n, seed):
    *rest, left = agents(n, seed)
    old, new = owner_ids(Ring.build([*rest, left])), owner_ids(Ring.build(rest))
    n_moved = sum(old_row != new_row for old_row, new_row in zip(old, new, strict=True))
    assert n_moved <= 1.6 * N_PARTITIONS * min(2, n) / n


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4])
def test_with_fewer_members_than_replicas_the_rest_is_minus_one(n):
    owners = Ring.build(agents(n), replicas=3).owners(EVERY_PARTITION)
    assert owners.shape == (N_PARTITIONS, 3)
    assert ((owners >= 0).sum(axis=1) == min(n, 3)).all()
    assert (owners[:, min(n, 3) :] == -1).all()


@pytest.mark.parametrize("replicas", [2, 3])
def test_the_owners_of_a_partition_are_distinct(replicas):
    ring = Ring.build(agents(5), replicas)
    assert all(len(set(row)) == replicas for row in owner_ids(ring))


def test_owned_by_is_the_inverse_of_owners():
    ring = Ring.build(agents(7))
    owners = ring.owners(EVERY_PARTITION)
    for idx, member in enumerate(ring.members):
        assert (ring.owned_by(member) == (owners == idx).any(axis=1)).all()
    assert not ring.owned_by(agents(8)[7]).any()


def test_owners_follow_the_definition():
    """A second way to the same answer: walk the circle point by point."""
    members = sorted(agents(4))
    circle = sorted(
        (
            int.from_bytes(
                hashlib.blake2b(member + node.to_bytes(4, "big"), digest_size=8, person=b"kvpeer point 1").digest(),
                "big",
            ),
            member,
        )
        for member in members
        for node in range(160)
    )
    assert all(point < after for (point, _), (after, _) in pairwise(circle))
    expected = []
    for partition in range(0, N_PARTITIONS, 37):
        position = partition << 52
        walk = [member for point, member in circle if point >= position] + [member for _, member in circle]
        expected.append(list(dict.fromkeys(walk))[:2])
    ring = Ring.build(members)
    assert [[ring.members[idx] for idx in row] for row in ring.owners(EVERY_PARTITION[::37])] == expected


def test_a_ring_cannot_be_changed_through_what_it_hands_out():
    ring = Ring.build(agents(3))
    before = ring.owners(EVERY_PARTITION).copy()
    ring.owners(EVERY_PARTITION)[:] = 0
    assert (ring.owners(EVERY_PARTITION) == before).all()


@pytest.mark.parametrize(("members", "replicas", "nodes"), [([b"short"], 2, 160), ([], 0, 160), ([], 2, 0)])
def test_nonsense_is_refused(members, replicas, nodes):
    with pytest.raises(LocalProtocolError):
        Ring.build(members, replicas, nodes)
