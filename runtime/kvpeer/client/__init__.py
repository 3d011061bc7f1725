"""The client library: what engine adapters call. Needs the standard library, numpy and msgspec; starts no event
loop."""

from kvpeer.client.client import Client, LocateResult, PublishResult
from kvpeer.client.device import Copier, EngineLayout, NativeCopier, SlotPages
from kvpeer.client.settings import ClientSettings, Registration

__all__ = [
    "Client",
    "ClientSettings",
    "Copier",
    "EngineLayout",
    "LocateResult",
    "NativeCopier",
    "PublishResult",
    "Registration",
    "SlotPages",
]
