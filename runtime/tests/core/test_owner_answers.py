"""Streams between producers and owners: each message has its place in the shard, and one kind of answer."""

from __future__ import annotations

import pytest
from kvpeer.core.owner_answers import checked_holders, checked_stream_answer, take_streamed
from kvpeer.model import AgentId, RemoteProtocolError
from kvpeer.wire.messages import Applied, Apply, Digests, DigestsChecked, Holders, Repair, Synced

PRODUCER = AgentId(b"p" * 16)
HOLDERS = Holders(b"", b"", b"", b"")


class Shard:
    """Says which of its methods was called."""

    def __getattr__(self, name: str):
        return lambda producer, message: (name, producer, message)


def message_of(kind: type):
    """One of this kind; its fields do not matter here."""
    return kind(*(None for _ in kind.__struct_fields__))


@pytest.mark.parametrize(
    ("kind", "name"), [(Apply, "apply"), (Repair, "repair"), (Synced, "synced"), (Digests, "digests")]
)
def test_each_message_of_a_stream_goes_to_its_part_of_the_shard(kind, name):
    message = message_of(kind)
    assert take_streamed(Shard(), PRODUCER, message) == (name, PRODUCER, message)


@pytest.mark.parametrize("kind", [Applied, DigestsChecked])
def test_an_answer_to_a_stream_is_handed_on(kind):
    answer = message_of(kind)
    assert checked_stream_answer(message_of(Apply), answer) is answer


def test_holders_are_handed_on():
    assert checked_holders(HOLDERS) is HOLDERS


def test_another_answer_is_the_peers_mistake_and_named():
    with pytest.raises(RemoteProtocolError, match="an answer to Apply must be Applied or DigestsChecked, not Holders"):
        checked_stream_answer(message_of(Apply), HOLDERS)
    with pytest.raises(RemoteProtocolError, match="an answer to Lookup must be Holders, not Applied"):
        checked_holders(message_of(Applied))
