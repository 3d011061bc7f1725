"""Connecting one engine process to its agent.

An agent that is not there yet, or is lost later, is the client's business: it connects in the background, and until
then everything is a miss. So whatever is wrong with the agent or its peers, the engine comes up and says so.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvpeer.client import Client, ClientSettings, Registration
from kvpeer.client.embedded import runtime_folder
from kvpeer.client.engine_name import claim_engine_name
from kvpeer.client.settings import SOCKET_VARIABLE
from kvpeer.core.chain import namespace_digest
from kvpeer.engines.vllm.metadata import RankFacts
from kvpeer.engines.vllm.settings import Settings

if TYPE_CHECKING:
    from kvpeer.engines.vllm.facts import RankLayout

__all__ = ["connect_rank", "connect_scheduler", "engine_name"]

_logger = init_logger("vllm.kvpeer")

SCHEDULER_PART = -1
"""The scheduler moves no bytes."""


def engine_name(config: Any, settings: Settings) -> str:
    """Returns the engine's name: the same in all its processes, and after a restart.

    Raises:
        ConfigError: no name can be claimed.
    """
    if settings.engine_name:
        return settings.engine_name
    served = config.model_config.served_model_name
    model = served[0] if isinstance(served, list) else served or config.model_config.model
    base = f"vllm:{model}:dp{config.parallel_config.data_parallel_rank}"
    if settings.agent_socket or os.environ.get(SOCKET_VARIABLE):
        return base
    return claim_engine_name(base, config.kv_transfer_config.engine_id, runtime_folder(os.environ))


def connect_rank(rank: RankLayout, settings: Settings, name: str) -> Client:
    """Returns this rank's client with its memory registered.

    Raises:
        ConfigError: there can be no agent as things are; the message names the fix.
    """
    client = _connect(rank.facts, rank.facts.part, settings, name)
    client.register_layout(rank.layout, rank.copier)
    return client


def connect_scheduler(facts: RankFacts, settings: Settings, name: str) -> Client:
    """Returns the scheduler's client.

    Raises:
        ConfigError: there can be no agent as things are; the message names the fix.
    """
    for field, value in sorted(facts.namespace_fields.items()):
        _logger.info("kvpeer: namespace %s = %s", field, value)
    return _connect(facts, SCHEDULER_PART, settings, name)


def _connect(facts: RankFacts, part: int, settings: Settings, name: str) -> Client:
    registration = Registration(
        name=name,
        namespace=namespace_digest(facts.namespace_fields),
        description=facts.namespace_fields,
        page_bytes=facts.part_bytes * facts.n_parts,
        n_parts=facts.n_parts,
        part=part,
        part_offset=facts.part_bytes * max(part, 0),
        part_bytes=facts.part_bytes if part != SCHEDULER_PART else 0,
    )
    client = Client.connect(
        ClientSettings.from_environment(os.environ, engine=name, socket=settings.agent_socket), registration
    )
    role = "scheduler" if part == SCHEDULER_PART else f"part {part} of {facts.n_parts}"
    namespace = registration.namespace.hex()[:16]
    if client.healthy:
        _logger.info("kvpeer: %s of %s is connected, namespace %s", role, name, namespace)
    else:
        _logger.warning(
            "kvpeer: %s of %s has no agent yet; the engine serves without sharing pages until there is one", role, name
        )
    return client
