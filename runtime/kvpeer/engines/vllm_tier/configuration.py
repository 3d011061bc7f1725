"""The tier's settings and what it adds to the namespace. Nothing here imports vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpeer.engines.vllm.settings import Settings, load_settings
from kvpeer.model import ConfigError

__all__ = ["TIER_TYPE", "row_fields", "tier_entry", "tier_options"]

TIER_TYPE = "kvpeer"
"""The tier's type in `secondary_tiers`."""

_KEYS_OF_VLLM = frozenset({"type", "module_path", "backpressure"})
"""Of the same JSON object; vLLM takes them out before a tier sees it."""


def tier_entry(extra_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the tier's entry in kv_connector_extra_config.

    Raises:
        ConfigError: there is none, or more than one, or no tiering at all.
    """
    tiers = extra_config.get("secondary_tiers") or []
    entries = [tier for tier in tiers if isinstance(tier, Mapping) and tier.get("type") == TIER_TYPE]
    if len(entries) != 1:
        raise ConfigError(
            f"kv_connector_extra_config has {len(entries)} secondary tiers of type {TIER_TYPE!r} and this connector "
            f'needs one: set "spec_name": "TieringOffloadingSpec" and "secondary_tiers": [{{"type": "{TIER_TYPE}"}}]'
        )
    return entries[0]


def tier_options(entry: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
    """Returns the effective settings; they are those of the connector.

    Raises:
        ConfigError: a key is unknown (the message names the nearest one) or a value does not fit.
    """
    own = {key: value for key, value in entry.items() if key not in _KEYS_OF_VLLM}
    return load_settings(own, environment, f"the secondary tier {TIER_TYPE!r}")


def row_fields(*, row_bytes: int, blocks: int, is_canonical: bool, is_replicated: bool) -> dict[str, str]:
    """Returns what decides the bytes of a row beyond what decides those of a block. The connector has none of these
    fields, so that a block and a row never have the same key.

    blocks: in a row. is_canonical: whether vLLM orders its bytes independently of the ranks. is_replicated: whether it
    holds one copy of what all ranks have.
    """
    return {
        "offload_row": f"bytes={row_bytes},blocks={blocks}",
        "offload_layout": f"canonical={is_canonical},replicated={is_replicated}",
    }
