"""What members send is the event of its kind."""

from __future__ import annotations

import pytest
from kvpeer.core.membership import heard
from kvpeer.model import AgentId
from kvpeer.wire.messages import Gossip, Ping, PingAck, PingRequest

SENDER = AgentId(b"s" * 16)


class Machine:
    """Says which of its methods was called."""

    def __getattr__(self, name: str):
        return lambda sender, message, now: (name, sender, message, now)


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (Ping(1, []), "ping"), (PingAck(2, SENDER, []), "ack"), (PingRequest(3, SENDER, []), "ping_request"),
        (Gossip([]), "gossip"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_each_message_is_the_event_of_its_kind(message, name):
    assert heard(Machine(), SENDER, message, 1.5) == (name, SENDER, message, 1.5)
