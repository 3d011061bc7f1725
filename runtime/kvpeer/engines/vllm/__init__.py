"""The vLLM adapter: `KVPeerConnector`, a `KVConnectorBase_V1` that loads pages from peers and from the own pool.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVPeerConnector",
        "kv_connector_module_path": "kvpeer.engines.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute"}'

The class is imported on first use, so that the parts without vLLM in them (everything but `connector`, `stats` and
`facts`) can be used and tested where vLLM is not installed. Inside this package a page is what vLLM calls a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpeer.engines.vllm.connector import KVPeerConnector

__all__ = ["KVPeerConnector"]


def __getattr__(name: str) -> Any:
    if name == "KVPeerConnector":
        from kvpeer.engines.vllm.connector import KVPeerConnector

        return KVPeerConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
