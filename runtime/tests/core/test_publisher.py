"""The producer's side: each owner hears of each change once, in order, and differences do not last."""

from __future__ import annotations

import numpy as np
import pytest
from core.directory_actors import ALPHA, BETA, OWN, Row, ask, key_of, numbers, op_columns, shard_with
from kvpeer.core import owner_stream
from kvpeer.core.directory_stream import APPLY_OPS_MAX, unpack_apply, unpack_entries
from kvpeer.core.directory_table import Op
from kvpeer.core.owner_stream import RETRY_MAX_S, RETRY_MIN_S
from kvpeer.core.publisher import Publisher
from kvpeer.core.ring import Ring
from kvpeer.model import N_PARTITIONS, LocalProtocolError, RemoteProtocolError
from kvpeer.wire.messages import Applied, Apply, Digests, DigestsChecked, Repair, Synced
from oracles.directory_oracle import DirectoryOracle

EVERY_PARTITION = np.arange(4096, dtype=np.uint16)


class Agent:
    """A publisher, and a network that holds every message until the test answers it."""

    def __init__(self, *owners, replicas: int = 2, registry_records_max: int = 1000, interval_s: float = 30.0) -> None:
        self.publisher = Publisher(OWN, DirectoryOracle(registry_records_max, makes_room=False), interval_s)
        self.unanswered = []
        self.now = 0.0
        self.join(*owners, replicas=replicas)

    def join(self, *owners, replicas: int = 2) -> None:
        self.unanswered += self.publisher.ring_changed(Ring.build(owners, replicas), self.now)

    def publish(self, *rows: Row) -> None:
        ops = op_columns(*rows)
        keys = b"".join(key_of(row[0]) for row in rows)
        self.unanswered += self.publisher.published(keys, ops.partitions, ops.slots, ops.generations, ops.lengths)

    def withdraw(self, *rows: Row) -> None:
        ops = op_columns(*rows)
        keys = b"".join(key_of(row[0]) for row in rows)
        self.unanswered += self.publisher.withdrawn(keys, ops.partitions, ops.slots, ops.generations)

    def tick(self, now: float) -> None:
        self.now = now
        self.unanswered += self.publisher.tick(now)

    def answer(self, answer=None, repair=(), differing=()):
        """Answers the oldest message, as an owner would that is content with everything, and returns the message."""
        sent = self.unanswered.pop(0)
        if answer is None and isinstance(sent.message, Digests):
            answer = DigestsChecked(np.array(differing, dtype=np.uint16).tobytes())
        elif answer is None:
            n = len(sent.message.ops) if isinstance(sent.message, Apply) else 1
            answer = Applied(sent.message.sequence + n, np.array(repair, dtype=np.uint16).tobytes())
        self.unanswered += self.publisher.acknowledged(sent.owner, sent.message, answer, self.now)
        return sent.message

    def fail(self) -> None:
        sent = self.unanswered.pop(0)
        self.publisher.failed(sent.owner, sent.message, self.now)

    def answer_all(self):
        messages = []
        while self.unanswered:
            messages.append(self.answer())
        return messages


def synced_agent(*owners, **arguments) -> Agent:
    agent = Agent(*owners, **arguments)
    assert all(isinstance(message, Synced) for message in agent.answer_all())
    return agent


def rows_of(message: Apply):
    ops = unpack_apply(message)
    columns = (ops.ops, ops.partitions, ops.slots, ops.generations)
    keys = [key.tobytes() for key in ops.keys]
    return list(zip(keys, *(column.tolist() for column in columns), strict=True))


# ---- changes ---------------------------------------------------------------------------------------------------------


def test_a_change_goes_to_the_owners_of_its_partition_and_nobody_else():
    owners = [bytes([number]) * 16 for number in range(1, 6)]
    agent = synced_agent(*owners)
    ring = Ring.build(owners)
    agent.publish(*[(f"p{partition}", partition, partition, 1) for partition in range(0, 4096, 97)])
    assert len(agent.unanswered) == len(owners), "one message an owner"
    for sent in agent.unanswered:
        partitions = [row[2] for row in rows_of(sent.message)]
        assert partitions == [partition for partition in range(0, 4096, 97) if ring.owned_by(sent.owner)[partition]]


def test_changes_keep_their_order_and_number_while_one_message_is_outstanding():
    agent = synced_agent(ALPHA)
    agent.publish(("p", 5, 1, 1))
    agent.publish(("q", 5, 2, 1), ("p", 5, 3, 1))
    agent.withdraw(("q", 5, 2, 1))
    first = agent.answer()
    second = agent.answer()
    assert not agent.unanswered
    assert second.sequence == first.sequence + 1
    assert rows_of(first) == [(key_of("p"), Op.PUT, 5, 1, 1)]
    assert rows_of(second) == [
        (key_of("q"), Op.PUT, 5, 2, 1),
        (key_of("p"), Op.PUT, 5, 3, 1),
        (key_of("q"), Op.REMOVE, 5, 2, 1),
    ]


def test_what_changes_nothing_is_not_sent():
    agent = synced_agent(ALPHA)
    agent.publish(("p", 5, 1, 1))
    agent.answer_all()
    agent.publish(("p", 5, 1, 1))
    agent.withdraw(("p", 5, 1, 2), ("q", 5, 1, 1))
    assert not agent.unanswered


def test_messages_stay_within_the_limit():
    agent = synced_agent(ALPHA)
    agent.publish(("first", 5, 1, 1))
    agent.publish(*[(f"p{number}", number % 4096, number, 1) for number in range(APPLY_OPS_MAX + 10)])
    assert [len(message.ops) for message in agent.answer_all()] == [1, APPLY_OPS_MAX, 10]


def test_what_its_own_table_has_no_room_for_is_not_published():
    agent = synced_agent(ALPHA, registry_records_max=1)
    agent.publish(("p", 5, 1, 1), ("q", 5, 2, 1))
    assert len(rows_of(agent.answer())) == 1
    agent.publish(("r", 5, 3, 1), ("s", 5, 4, 1))
    assert agent.publisher.n_not_published == 3


def test_columns_of_different_lengths_are_refused():
    ops = op_columns(("p", 5, 1, 1))
    with pytest.raises(LocalProtocolError):
        Publisher(OWN, DirectoryOracle()).published(b"", ops.partitions, ops.slots, ops.generations, ops.lengths)


# ---- owners come and go ----------------------------------------------------------------------------------------------


def test_a_new_owner_gets_its_partitions_whole_and_hears_of_the_empty_ones():
    agent = Agent()
    agent.publish(("p", 5, 1, 1), ("q", 5, 2, 1), ("r", 6, 3, 1))
    agent.join(ALPHA)
    messages = agent.answer_all()
    assert [type(message) for message in messages] == [Repair, Repair, Synced]
    assert [(message.partition, len(unpack_entries(message)[0])) for message in messages[:2]] == [(5, 2), (6, 1)]
    assert numbers(messages[2].partitions) == [partition for partition in range(4096) if partition not in (5, 6)]
    assert [message.sequence for message in messages] == [0, 1, 2]


def test_an_owner_that_stays_gets_only_what_it_gained():
    agent = synced_agent(ALPHA, BETA, replicas=1)
    before = Ring.build([ALPHA, BETA], replicas=1).owned_by(ALPHA)
    agent.join(ALPHA, replicas=1)
    (message,) = agent.answer_all()
    assert numbers(message.partitions) == np.flatnonzero(~before).tolist()


def test_an_owner_that_loses_a_partition_does_not_hear_of_what_waited_for_it():
    ring = Ring.build([ALPHA, BETA], replicas=1)
    of_alpha, of_beta = (int(np.flatnonzero(ring.owned_by(owner))[0]) for owner in (ALPHA, BETA))
    agent = synced_agent(ALPHA, BETA)
    agent.publish(("first", of_alpha, 1, 1), ("first", of_beta, 2, 1))
    agent.publish(("waits", of_alpha, 3, 1), ("waits", of_beta, 4, 1))
    agent.join(ALPHA, BETA, replicas=1)
    heard = {ALPHA: [], BETA: []}
    while agent.unanswered:
        owner = agent.unanswered[0].owner
        heard[owner] += unpack_apply(agent.answer()).partitions.tolist()
    assert heard == {ALPHA: [of_alpha, of_beta, of_alpha], BETA: [of_alpha, of_beta, of_beta]}


def test_partitions_gained_during_a_comparison_are_sent_whatever_it_finds():
    agent = synced_agent(ALPHA, BETA, replicas=1)
    agent.tick(30.0)
    while not isinstance(agent.unanswered[0].message, Digests) or agent.unanswered[0].owner != ALPHA:
        agent.answer()
    agent.unanswered = agent.unanswered[:1]
    agent.join(ALPHA, replicas=1)
    messages = agent.answer_all()
    gained = np.flatnonzero(~Ring.build([ALPHA, BETA], replicas=1).owned_by(ALPHA)).tolist()
    assert [numbers(message.partitions) for message in messages if isinstance(message, Synced)] == [gained]


def test_a_publisher_without_owners_looks_again_after_an_interval():
    assert Agent(interval_s=30.0).publisher.next_wakeup(7.0) == 37.0


def test_changes_in_a_partition_that_will_be_sent_whole_are_not_sent_twice():
    agent = Agent(ALPHA)
    agent.publish(("p", 5, 1, 1))
    agent.withdraw(("p", 5, 1, 1))
    agent.publish(("p", 5, 2, 2), ("q", 5, 3, 1))
    assert [type(message) for message in agent.answer_all()] == [Synced, Apply]

    agent = Agent()
    agent.publish(*[(f"p{number}", number, 1, 1) for number in range(3)])
    agent.join(ALPHA)
    agent.publish(("late", 2, 2, 1))
    messages = agent.answer_all()
    assert [type(message) for message in messages] == [Repair, Repair, Repair, Synced]
    assert len(unpack_entries(messages[2])[0]) == 2


def test_changes_and_repairs_take_turns():
    agent = Agent()
    agent.publish(*[(f"p{number}", number, 1, 1) for number in range(100)])
    agent.join(ALPHA)
    agent.answer()
    agent.publish(("in a sent partition", 0, 2, 1))
    kinds = [type(agent.answer()) for _ in range(4)]
    assert kinds.index(Apply) <= 1


def test_an_owner_that_returns_gets_higher_numbers_than_ever():
    """It may be the same run that this agent wrongly believed dead: lower numbers would be old to it."""
    agent = synced_agent(ALPHA)
    agent.publish(("p", 5, 1, 1), ("q", 5, 2, 1))
    highest = agent.answer().sequence + 1
    agent.join()
    agent.join(BETA)
    agent.join(ALPHA)
    assert all(message.sequence > highest for message in agent.answer_all())


def test_answers_to_a_stream_that_is_gone_are_ignored():
    agent = Agent(ALPHA)
    old = agent.unanswered.pop()
    agent.join()
    agent.join(ALPHA)
    new = agent.unanswered.pop()
    assert agent.publisher.acknowledged(ALPHA, old.message, Applied(1, b""), 0.0) == []
    agent.publisher.failed(ALPHA, old.message, 0.0)
    assert agent.publisher.streams[ALPHA].outstanding is new.message
    assert agent.publisher.next_wakeup(0.0) > RETRY_MIN_S, "the new message does not wait for a retry"


# ---- failures --------------------------------------------------------------------------------------------------------


def test_a_failed_message_is_sent_again_unchanged_after_growing_pauses():
    agent = Agent(ALPHA, interval_s=1e6)
    message = agent.unanswered[0].message
    pauses = []
    for _ in range(12):
        agent.fail()
        pauses.append(agent.publisher.next_wakeup(agent.now) - agent.now)
        agent.tick(agent.now + pauses[-1] * 0.99)
        assert not agent.unanswered
        agent.tick(agent.publisher.next_wakeup(agent.now))
        assert [sent.message for sent in agent.unanswered] == [message]
    assert pauses[0] == pytest.approx(RETRY_MIN_S)
    assert pauses[1] == pytest.approx(2 * RETRY_MIN_S)
    assert max(pauses) == pytest.approx(RETRY_MAX_S)
    assert agent.publisher.streams[ALPHA].n_failures == len(pauses)
    agent.answer()
    agent.publish(("p", 5, 1, 1))
    agent.fail()
    assert agent.publisher.next_wakeup(agent.now) - agent.now == pytest.approx(RETRY_MIN_S)


def test_an_owner_that_falls_too_far_behind_gets_whole_partitions_and_the_queue_stays_bounded(monkeypatch):
    monkeypatch.setattr(owner_stream, "QUEUE_OPS_MAX", 100)
    agent = synced_agent(ALPHA)
    agent.publish(("first", 4000, 1, 1))
    agent.fail()
    for number in range(100):
        agent.publish((f"p{number}", number % 7, number, 1))
    assert agent.publisher.streams[ALPHA].n_overflows == 0
    for number in range(100, 110):
        agent.publish((f"p{number}", number % 7, number, 1))
    assert agent.publisher.streams[ALPHA].n_overflows == 1
    agent.tick(0.5)
    messages = agent.answer_all()
    assert [type(message) for message in messages] == [Apply] + [Repair] * 7
    assert sum(len(unpack_entries(message)[0]) for message in messages[1:]) == 110


@pytest.mark.parametrize(
    "answer", [Applied(77, b""), Applied(0, b""), DigestsChecked(b""), Applied(1, b"\xff\xff"), Applied(1, b"\1")]
)
def test_a_wrong_answer_is_the_owners_fault_and_the_message_goes_again(answer):
    agent = Agent(ALPHA)
    message = agent.unanswered[0].message
    with pytest.raises(RemoteProtocolError):
        agent.answer(answer)
    agent.tick(1.0)
    assert [sent.message for sent in agent.unanswered] == [message]
    agent.answer_all()
    assert agent.publisher.streams[ALPHA].is_idle


# ---- comparing -------------------------------------------------------------------------------------------------------


def test_everything_is_compared_once_an_interval_and_what_differs_is_repaired():
    agent = synced_agent(ALPHA)
    agent.publish(("p", 5, 1, 1))
    agent.answer_all()
    agent.tick(30.0)
    compared = []
    while agent.unanswered:
        differing = [5, 6] if not compared else []
        message = agent.answer(differing=differing)
        compared += numbers(message.partitions) if isinstance(message, Digests) else []
        if isinstance(message, Repair):
            assert message.partition == 5
        if isinstance(message, Synced):
            assert numbers(message.partitions) == [6]
    assert compared == EVERY_PARTITION.tolist()
    agent.tick(59.9)
    assert not agent.unanswered
    agent.tick(60.0)
    assert agent.unanswered


def test_a_change_during_the_comparison_is_covered_by_the_repair():
    agent = synced_agent(ALPHA)
    agent.publish(("p", 5, 1, 1))
    agent.answer(repair=[5])
    agent.publish(("q", 5, 2, 1))
    agent.answer(differing=[5])
    (message,) = agent.answer_all()
    assert isinstance(message, Repair)
    assert len(unpack_entries(message)[0]) == 2


def test_partitions_that_an_owner_asks_about_are_compared_at_once():
    agent = synced_agent(ALPHA)
    agent.publish(("p", 5, 1, 1))
    agent.answer(repair=[5, 9])
    assert numbers(agent.answer(differing=[9]).partitions) == [5, 9]
    assert isinstance(agent.answer(), Synced)
    assert not agent.unanswered


def test_an_owner_cannot_ask_for_partitions_that_it_does_not_have():
    agent = synced_agent(ALPHA, BETA, replicas=1)
    ring = Ring.build([ALPHA, BETA], replicas=1)
    partition = int(np.flatnonzero(ring.owned_by(ALPHA))[0])
    agent.publish(("p", partition, 1, 1))
    agent.answer(repair=EVERY_PARTITION)
    asked, sent = [], []
    while agent.unanswered:
        message = agent.answer(differing=EVERY_PARTITION)
        (asked if isinstance(message, Digests) else sent).append(message)
    owned = np.flatnonzero(ring.owned_by(ALPHA)).tolist()
    assert {partition for message in asked for partition in numbers(message.partitions)} <= set(owned)
    assert [type(message) for message in sent] == [Repair, Synced]
    assert [sent[0].partition, *numbers(sent[1].partitions)] == owned


def test_partitions_with_changes_on_the_way_are_not_compared(monkeypatch):
    """Their digests would differ although nothing is wrong."""
    monkeypatch.setattr(owner_stream, "APPLY_OPS_MAX", 1)
    agent = synced_agent(ALPHA)
    agent.publish(("p", 5, 1, 1))
    agent.publish(("q", 6, 1, 1))
    agent.publish(("r", 7, 1, 1))
    agent.answer(repair=[6, 7, 8])
    messages = agent.answer_all()
    assert [type(message) for message in messages] == [Digests, Apply, Digests, Apply, Digests]
    assert [numbers(message.partitions) for message in messages[::2]] == [[8], [6], [7]]


# ---- together with a shard -------------------------------------------------------------------------------------------


def test_a_shard_that_forgot_a_producer_learns_all_again():
    """Its owner believed this agent dead for a moment; this agent never noticed."""
    shard = shard_with(ALPHA)
    agent = Agent(OWN)

    def serve():
        handle = {Apply: shard.apply, Repair: shard.repair, Synced: shard.synced, Digests: shard.digests}
        while agent.unanswered:
            message = agent.unanswered[0].message
            agent.answer(handle[type(message)](ALPHA, message))

    agent.publish(("p", 5, 1, 1), ("q", 6, 2, 1))
    serve()
    shard.members_changed(Ring.build([OWN]), {OWN})
    shard.members_changed(Ring.build([OWN]), {OWN, ALPHA})
    assert [held for _, held in ask(shard, ("p", 5), ("q", 6))] == [set(), set()]
    agent.publish(("r", 7, 3, 1))
    serve()
    assert [held for _, held in ask(shard, ("p", 5), ("q", 6), ("r", 7))] == [
        {(ALPHA, 1, 1)},
        {(ALPHA, 2, 1)},
        {(ALPHA, 3, 1)},
    ]
    assert shard.n_unsure_partitions() == 0


@pytest.fixture
def stream_at_rest() -> owner_stream.OwnerStream:
    """Towards an owner of everything, which has heard that there is nothing."""
    stream = owner_stream.OwnerStream(0)
    stream.own(np.ones(N_PARTITIONS, dtype=np.bool_))
    assert isinstance(stream.next_message(DirectoryOracle()), Synced)
    stream.answered(Applied(stream.sequence, b""))
    assert stream.next_message(DirectoryOracle()) is None
    assert stream.is_idle
    return stream


def test_a_stream_at_rest_notices_a_change(stream_at_rest):
    stream_at_rest.enqueue(op_columns(("a", 5, 0, 1)))
    assert isinstance(stream_at_rest.next_message(DirectoryOracle()), Apply)


def test_a_stream_at_rest_notices_what_its_owner_gained(stream_at_rest):
    everything = np.ones(N_PARTITIONS, dtype=np.bool_)
    stream_at_rest.own(~everything)
    assert stream_at_rest.next_message(DirectoryOracle()) is None
    stream_at_rest.own(everything)
    assert isinstance(stream_at_rest.next_message(DirectoryOracle()), Synced)


def test_a_stream_at_rest_notices_what_is_to_be_compared_and_then_what_differed(stream_at_rest):
    stream_at_rest.compare(np.arange(N_PARTITIONS) == 5)
    assert isinstance(stream_at_rest.next_message(DirectoryOracle()), Digests)
    stream_at_rest.answered(DigestsChecked(np.array([5], dtype=np.uint16).tobytes()))
    assert isinstance(stream_at_rest.next_message(DirectoryOracle()), Synced)
