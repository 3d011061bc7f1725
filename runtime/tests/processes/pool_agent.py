"""A minimal agent: pool and client server, no peers. Runs as `python pool_agent.py <json settings>`."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import time

from kvpeer.agent.clients import ClientLimits, ClientServer
from kvpeer.agent.pool import NoPeers, PoolService
from kvpeer.core.slots import SlotSettings, SlotTable
from kvpeer.metrics import build
from kvpeer.model import AgentId, Verify
from kvpeer.native import Pool
from prometheus_client import CollectorRegistry


async def serve(settings: dict) -> None:
    extent_bytes = settings.get("extent_bytes", 1 << 20)
    agent_id = AgentId(secrets.token_bytes(16))
    pool = Pool(settings.get("capacity_bytes", 4 << 20), extent_bytes, agent_id)
    table = SlotTable(SlotSettings(extent_bytes, pool.n_extents, **settings.get("slots", {})))
    peers = NoPeers()
    service = PoolService(pool, table, time.monotonic, peers)
    limits = ClientLimits(**settings.get("limits", {}))
    server = ClientServer(
        settings["socket"],
        agent_id,
        service,
        pool.payload_bytes,
        extent_bytes,
        Verify.FULL,
        peers,
        peers,
        time.monotonic,
        build(CollectorRegistry()),
        limits,
    )
    service.start()
    await service.ready()
    await server.start()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    print("ready", flush=True)
    await stopped.wait()
    await server.close()
    await service.close()
    pool.close()


if __name__ == "__main__":
    asyncio.run(serve({"socket": os.environ.get("KVPEER_AGENT_SOCKET", ""), **json.loads(sys.argv[1])}))
