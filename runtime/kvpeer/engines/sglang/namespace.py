"""What must be equal for two SGLang engines to share pages of a host pool, and how ranks keep theirs apart.

SGLang's page hash covers the tokens, and through its seed what a request brings along (`extra_key`, `cache_salt`,
the identifier of a LoRA adapter). It covers nothing of the engine; that is what the namespace is for. Each host pool
has a namespace of its own. Ranks whose bytes differ share one and have a *shard* number, which is part of every key:
ranks read and write independently of each other, on one host or several, and SGLang takes the minimum of what they
found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvpeer.model import ConfigError

__all__ = ["PoolFacts", "RankFacts", "namespace_fields", "shard_of"]

_FIELDS_VERSION = "1"
"""Raised when the meaning of a field changes, so that engines before and after never share."""


@dataclass(frozen=True)
class PoolFacts:
    """One host pool of one rank. `is_sharded`: whether tensor-parallel ranks hold different bytes."""

    name: str
    kind: str
    dtype: str
    layout: str
    page_tokens: int
    page_bytes: int
    layers: str
    heads: str
    page_format: str
    is_sharded: bool


@dataclass(frozen=True)
class RankFacts:
    """Where this process is among its engine's ranks, as SGLang tells a storage backend."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    is_replicated: bool

    def __post_init__(self) -> None:
        for name, rank, size in (
            ("tp", self.tp_rank, self.tp_size),
            ("pp", self.pp_rank, self.pp_size),
            ("attn_cp", self.cp_rank, self.cp_size),
        ):
            if not 0 <= rank < size:
                raise ConfigError(f"{name}_rank is {rank}, but {name}_size is {size}")


def namespace_fields(
    pool: PoolFacts,
    rank: RankFacts,
    *,
    model_name: str,
    engine_version: str,
    weights: str,
    arguments: Mapping[str, str],
    salt: str,
) -> dict[str, str]:
    """Returns everything that decides the bytes of a page or their meaning, as text.

    arguments: of the server, those that change what is computed from equal tokens and weights.
    """
    tp = f"tp={rank.tp_size}" if pool.is_sharded else "tp=any"
    fields = {
        "fields_version": _FIELDS_VERSION,
        "engine": "sglang",
        "engine_version": engine_version,
        "model_name": model_name,
        "weights": weights,
        "pool": pool.name,
        "pool_kind": pool.kind,
        "dtype": pool.dtype,
        "page_tokens": str(pool.page_tokens),
        "page_bytes": str(pool.page_bytes),
        "page_format": pool.page_format,
        "layout": pool.layout,
        "layers": pool.layers,
        "heads": pool.heads,
        "parallel": f"{tp},pp={rank.pp_rank}/{rank.pp_size},cp={rank.cp_size}",
        "replicated": str(rank.is_replicated),
        "hash": "sha256-token-chain",
        **{f"argument_{name}": value for name, value in arguments.items()},
    }
    if salt:
        fields["salt"] = salt
    return fields


def shard_of(pool: PoolFacts, rank: RankFacts) -> int:
    """Returns the number of this rank among those with a page of the pool's: equal exactly for ranks whose bytes are
    equal. (Pipeline ranks have other layers, and so other namespaces.)"""
    return rank.cp_rank * rank.tp_size + rank.tp_rank if pool.is_sharded else rank.cp_rank
