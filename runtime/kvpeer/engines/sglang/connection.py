"""Connecting the host pools of one rank to its agent.

An agent that is not there yet, or is lost later, is the client's business: it connects in the background, and until
then everything is a miss. So attaching never waits.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

from kvpeer.client import Client, ClientSettings, Registration
from kvpeer.core.chain import namespace_digest
from kvpeer.engines.sglang import facts
from kvpeer.engines.sglang.layout import page_layout
from kvpeer.engines.sglang.namespace import namespace_fields, shard_of
from kvpeer.engines.sglang.pages import PoolPages
from kvpeer.engines.sglang.settings import Settings
from kvpeer.engines.traces import TraceSender

__all__ = ["RankConnection"]

_logger = logging.getLogger(__name__)


class RankConnection:
    """What this rank is, to the agent and to other engines.

    Raises:
        ConfigError: the weights cannot be named; the message names the fix.
    """

    def __init__(self, config: HiCacheStorageConfig, settings: Settings) -> None:
        self._settings = settings
        self._rank = facts.rank_facts(config)
        self._model_name = config.model_name or ""
        self._weights = facts.model_weights(settings)
        self._engine_name = settings.engine_name or facts.engine_name(self._model_name)

    def connect(self, name: str, host_pool: Any) -> PoolPages:
        """Returns the pool's pages, connected or still connecting.

        Raises:
            ConfigError: the pool's layout is not supported; names it and the fix.
        """
        layout = page_layout(name, host_pool)
        pool = facts.pool_facts(name, host_pool, layout, self._rank)
        shard = shard_of(pool, self._rank)
        fields = namespace_fields(
            pool,
            self._rank,
            model_name=self._model_name,
            engine_version=facts.ENGINE_VERSION,
            weights=self._weights,
            arguments=facts.model_arguments(),
            salt=self._settings.namespace_salt,
        )
        registration = Registration(
            name=f"{self._engine_name}/{name}/{shard}",
            namespace=namespace_digest(fields),
            description=fields,
            page_bytes=layout.page_bytes,
            n_parts=1,
            part=0,
            part_offset=0,
            part_bytes=layout.page_bytes,
        )
        settings = ClientSettings.from_environment(os.environ, self._engine_name, self._settings.agent_socket)
        client = Client.connect(settings, registration, wait_s=0.0)
        if layout.segments is not None:
            client.register_layout(layout.segments)
        _logger.info(
            "kvpeer: host pool %s of %s is shard %d of namespace %s",
            *(name, self._engine_name, shard, registration.namespace.hex()[:16]),
        )
        for field, value in sorted(fields.items()):
            _logger.info("kvpeer: host pool %s: namespace %s = %s", name, field, value)
        return PoolPages(host_pool, layout, client, registration.namespace, shard, TraceSender(client.tell))
