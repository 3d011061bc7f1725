"""The SGLang adapter: `KVPeerStorage`, a HiCache L3 backend whose pages lie in the pools of kvpeer's agents.

    sglang serve MODEL --enable-hierarchical-cache --hicache-storage-backend dynamic
        --hicache-storage-backend-extra-config '{"backend_name": "kvpeer", "module_path": "kvpeer.engines.sglang",
        "class_name": "KVPeerStorage", "interface_v1": 1}'

The class is imported on first use, so that the parts without SGLang in them (everything but `storage`, `facts` and
`contract`) can be used and tested where SGLang is not installed. `contract` is a test suite for any L3 backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpeer.engines.sglang.storage import KVPeerStorage

__all__ = ["KVPeerStorage"]


def __getattr__(name: str) -> Any:
    if name == "KVPeerStorage":
        from kvpeer.engines.sglang.storage import KVPeerStorage

        return KVPeerStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
