"""What SGLang's objects say of a rank and its host pools, read for the namespace."""

from __future__ import annotations

import os
from typing import Any

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.runtime_context import get_server_args

from kvpeer.engines.sglang.layout import PageLayout
from kvpeer.engines.sglang.namespace import PoolFacts, RankFacts
from kvpeer.engines.sglang.settings import Settings
from kvpeer.engines.weights import checkpoint_folder, digest_cache_folder, weights_identity
from kvpeer.model import ConfigError

__all__ = ["ENGINE_VERSION", "engine_name", "model_arguments", "model_weights", "pool_facts", "rank_facts"]

ENGINE_VERSION = str(sglang.__version__)

_ARGUMENTS = (
    "dtype",
    "quantization",
    "quantization_param_path",
    "kv_cache_dtype",
    "torchao_config",
    "json_model_override_args",
    "context_length",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "mamba_ssm_dtype",
    "enable_int8_mamba_checkpoint",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
)
"""Of the server: they change KV that is computed from equal tokens and weights, or how backends order it. Draft models
keep layers in the same pools."""

_VARIABLES = ("SGLANG_USE_HND_KVCACHE", "SGLANG_AITER_KV_CACHE_LAYOUT")
"""Of the environment: they change the order of bytes within a page, which its host pool does not tell."""

_DEFAULT_PORT = 30000


def rank_facts(config: HiCacheStorageConfig) -> RankFacts:
    """Returns where this process is among its engine's ranks.

    Raises:
        ConfigError: SGLang says something impossible.
    """
    return RankFacts(
        tp_rank=config.tp_rank,
        tp_size=config.tp_size,
        pp_rank=config.pp_rank,
        pp_size=config.pp_size,
        cp_rank=config.attn_cp_rank,
        cp_size=config.attn_cp_size,
        is_replicated=config.is_mla_model,
    )


def pool_facts(name: str, pool: Any, layout: PageLayout, rank: RankFacts) -> PoolFacts:
    """Returns what a host pool is. MLA's latent KV is the same on all tensor-parallel ranks; Mamba states and the KV of
    a draft model with heads are not, whatever the model they belong to."""
    has_own_shard = name == PoolName.MAMBA or isinstance(pool, MHATokenToKVPoolHost)
    # Mamba has one for each part of a state.
    dtypes = {f"{attribute}={value}" for attribute, value in vars(pool).items() if isinstance(value, torch.dtype)}
    return PoolFacts(
        name=name,
        kind=type(pool).__name__,
        dtype=",".join(sorted(dtypes)),
        layout=layout.description,
        page_tokens=layout.page_tokens,
        page_bytes=layout.page_bytes,
        layers=f"{getattr(pool, 'start_layer', '')}-{getattr(pool, 'end_layer', '')}/{getattr(pool, 'layer_num', '')}",
        heads=f"{getattr(pool, 'head_num', '')}x{getattr(pool, 'head_dim', '')}",
        page_format=str(getattr(pool, "storage_format_tag", None) or ""),
        is_sharded=has_own_shard or not rank.is_replicated,
    )


def model_weights(settings: Settings) -> str:
    """Returns what names the weights of the model, and of its draft model. Reads samples of the checkpoints, once per
    checkpoint and machine.

    Raises:
        ConfigError: the weights cannot be told from others; the message names the setting that declares them.
    """
    if settings.weights_identity:
        return f"declared:{settings.weights_identity}"
    arguments = _server_args()
    if arguments is None:
        raise ConfigError(
            "SGLang does not say which model this process runs: set weights_identity in "
            "--hicache-storage-backend-extra-config to a string that names its weights"
        )
    if getattr(arguments, "lora_paths", None):
        raise ConfigError(
            "adapters of --lora-paths are known by their paths, not by content: set weights_identity in "
            "--hicache-storage-backend-extra-config to a string that names the weights of model and adapters"
        )
    weights = _sampled(arguments.model_path, arguments.revision, arguments.load_format, arguments.download_dir)
    draft = getattr(arguments, "speculative_draft_model_path", None)
    if draft and draft != arguments.model_path:
        draft_format = getattr(arguments, "speculative_draft_load_format", None) or arguments.load_format
        draft_revision = getattr(arguments, "speculative_draft_model_revision", None)
        weights += f";draft={_sampled(draft, draft_revision, draft_format, arguments.download_dir)}"
    return weights


def model_arguments() -> dict[str, str]:
    """Returns the arguments and variables of the server that belong into the namespace, by name."""
    arguments = _server_args()
    given = {name: str(getattr(arguments, name, "")) for name in _ARGUMENTS} if arguments is not None else {}
    return {**given, **{name: os.environ[name] for name in _VARIABLES if name in os.environ}}


def engine_name(model_name: str) -> str:
    """Returns a name for this engine that is the same in all its processes and after a restart."""
    port = getattr(_server_args(), "port", _DEFAULT_PORT)
    return f"sglang:{model_name}:{port}"


def _sampled(model: str, revision: str | None, load_format: Any, download_folder: str | None) -> str:
    load_format = str(getattr(load_format, "value", load_format))
    if load_format == "dummy":
        raise ConfigError(
            "weights of --load-format dummy have no content to name them by: set weights_identity in "
            "--hicache-storage-backend-extra-config"
        )
    return weights_identity(
        declared="",
        load_format=load_format,
        seed=0,
        model=model,
        folder=checkpoint_folder(model, revision, download_folder),
        cache_folder=digest_cache_folder(os.environ),
    )


def _server_args() -> Any:
    """The server's arguments, None in a process that runs no server."""
    try:
        return get_server_args()
    except (ValueError, RuntimeError, AttributeError):
        return None
