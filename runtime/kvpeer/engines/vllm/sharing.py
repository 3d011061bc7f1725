"""Which requests' pages may be shared at all."""

from __future__ import annotations

from typing import Any

__all__ = ["unshared_reason"]


def unshared_reason(request: Any) -> str:
    """Returns why the pages of this request must not be shared; empty when they may be."""
    if request.lora_request is not None:
        # vLLM's hash has the adapter's name and path in it, and neither says what the adapter's weights are.
        return "lora"
    if request.resumable:
        # A streaming session rewrites its own tokens, and with them hashes that were already used.
        return "streaming_session"
    return ""
