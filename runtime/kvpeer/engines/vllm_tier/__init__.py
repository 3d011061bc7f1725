"""kvpeer as a secondary tier of vLLM's own offloading, for engines that use `TieringOffloadingSpec`.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVPeerOffloadingConnector",
        "kv_connector_module_path": "kvpeer.engines.vllm_tier", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
        "secondary_tiers": [{"type": "kvpeer"}]}}'

The connector is vLLM's `OffloadingConnector`; it only tells the tier what the engine is, which vLLM does not tell tiers
and without which pages of different engines could be taken for each other. Inside this package a page is what vLLM
calls a chunk: the row of its primary tier with all ranks' bytes of one or more blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpeer.engines.vllm_tier.connector import KVPeerOffloadingConnector

__all__ = ["KVPeerOffloadingConnector"]


def __getattr__(name: str) -> Any:
    if name == "KVPeerOffloadingConnector":
        from kvpeer.engines.vllm_tier.connector import KVPeerOffloadingConnector

        return KVPeerOffloadingConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
