"""`KVPeerOffloadingConnector`: vLLM's `OffloadingConnector`, which tells kvpeer's tier what the engine is.

A tier lives in the scheduler's process and is told little of the engine; what decides the bytes of a page (weights,
attention, layout) is known to the ranks. So each rank states its facts in vLLM's handshake, as with `KVPeerConnector`,
and the tier is attached to its agent when all of them agree. Everything else is vLLM's.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvpeer.engines.vllm.connection import engine_name
from kvpeer.engines.vllm.facts import rank_layout
from kvpeer.engines.vllm.metadata import RankFacts, agreed_facts
from kvpeer.engines.vllm.namespace import refuse_unshareable
from kvpeer.engines.vllm.sharing import unshared_reason
from kvpeer.engines.vllm_tier.configuration import TIER_TYPE, tier_entry, tier_options
from kvpeer.model import ConfigError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvpeer.engines.vllm_tier.tier import KVPeerTier

__all__ = ["KVPeerOffloadingConnector"]

KVConnectorHandshakeMetadata.register(RankFacts)
SecondaryTierFactory.register_tier(TIER_TYPE, "kvpeer.engines.vllm_tier.tier", "KVPeerTier")


class KVPeerOffloadingConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """See the module docstring.

    Raises:
        ConfigError: the engine's pages cannot be shared, or a setting is wrong; the message names the fix.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        refuse_unshareable(vllm_config, kv_cache_config)
        entry = tier_entry(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._settings = tier_options(entry, os.environ)
        self._rank_facts: RankFacts | None = None
        self._tier: KVPeerTier
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self._tier = _tier_of(self.scheduler.manager)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Worker: takes note of this rank's facts.

        Raises:
            ConfigError: this engine's pages cannot be named.
        """
        super().register_kv_caches(kv_caches)
        self._rank_facts = rank_layout(self._vllm_config, self._kv_cache_config, kv_caches, self._settings).facts

    def get_handshake_metadata(self) -> RankFacts | None:
        """Worker: what the scheduler side needs to know of this rank."""
        return self._rank_facts

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Scheduler: connects the tier to its agent, under the namespace that all ranks agree on.

        Raises:
            ConfigError: ranks differ in something that decides the bytes of a page.
        """
        facts = agreed_facts([metadata[key] for key in sorted(metadata)])
        self._tier.attach(facts, engine_name(self._vllm_config, self._settings))

    def on_new_request(self, request: Request) -> None:
        """Scheduler: a request whose pages must not be shared is vLLM's alone."""
        super().on_new_request(request)
        reason = unshared_reason(request)
        if reason:
            self._tier.unshare(request.request_id, reason)

    def reset_cache(self) -> bool | None:
        """Scheduler: the weights may have changed, so pages of before must not be found any more."""
        is_reset: bool | None = super().reset_cache()
        self._tier.reset()
        return is_reset


def _tier_of(manager: Any) -> KVPeerTier:
    """The tier that the offloading spec made, if it makes tiers."""
    for tier in getattr(manager, "secondary_tiers", ()):
        if tier.tier_type == TIER_TYPE:
            found: KVPeerTier = tier
            return found
    raise ConfigError(
        'the offloading spec has no secondary tiers: set "spec_name": "TieringOffloadingSpec" in '
        "kv_connector_extra_config"
    )
