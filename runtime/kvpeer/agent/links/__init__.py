"""The control channel between agents: TLS connections that carry many requests in both directions.

`PeerLinks` is what the rest of the agent uses. A connection is a `Link`; `handshake` decides who may have one.
"""

from kvpeer.agent.links.dispatch import Handler, Handlers
from kvpeer.agent.links.peer_links import LinkEvents, PeerLinks
from kvpeer.agent.links.settings import LinkEnd, LinkSettings, PeerRefusedError

__all__ = ["Handler", "Handlers", "LinkEnd", "LinkEvents", "LinkSettings", "PeerLinks", "PeerRefusedError"]
