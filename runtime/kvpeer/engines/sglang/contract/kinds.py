"""The kinds of model that the suite knows, without SGLang in it: both sides of the process boundary import this."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["KINDS", "Attachment", "Kind", "Stored"]


@dataclass(frozen=True)
class Kind:
    """page_tokens: of a page. n_pages: of the prompts that are stored, at least a window of every pool. side_pool: the
    pool beside the KV pool, "" for none. components: SGLang's names of what the tree keeps."""

    name: str
    page_tokens: int
    n_pages: int
    side_pool: str
    components: tuple[str, ...]
    config: dict[str, Any]
    layouts: tuple[str, ...] = ("page_first_direct", "layer_first")


KINDS = {
    kind.name: kind
    for kind in (
        Kind("full", 16, 8, "", ("FULL",), {"num_layers": 4}),
        Kind("swa", 16, 8, "swa", ("FULL", "SWA"), {"sliding_window_size": 32, "kv_size": 512}),
        Kind(
            "mamba",
            64,
            8,
            "mamba",
            ("FULL", "MAMBA"),
            {
                "enable_mamba_extra_buffer": True,
                "mamba_cache_size": 60,
                "kv_size": 1024,
                "max_context_len": 1024,
            },
            ("page_first_direct",),
        ),
    )
}


@dataclass(frozen=True)
class Attachment:
    """How a process attaches the backend. `is_v1`: SGLang's zero-copy interface for KV pages (others are always read by
    v2), else its copying one. rank: fields of SGLang's `HiCacheStorageConfig` that make this another rank than the only
    one; such a cache only stores and reads pages, there is nobody to agree with on restoring.
    """

    backend: str
    extra_config: dict[str, Any]
    is_v1: bool = True
    layout: str = "page_first_direct"
    model_name: str = "contract-model"
    rank: dict[str, int] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stored:
    """Pages of one prompt in a process's host pools: their hashes, and by pool a digest of each page's bytes (by page
    number in the prompt)."""

    hashes: list[str]
    digests: dict[str, dict[int, str]]
