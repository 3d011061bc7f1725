"""The tier's entry in vLLM's configuration, and what separates its pages from those of other adapters."""

from __future__ import annotations

from typing import Any

import pytest
from kvpeer.core.chain import Chain, loose_pages, namespace_digest
from kvpeer.engines.vllm_tier.configuration import row_fields, tier_entry, tier_options
from kvpeer.model import ConfigError

BLOCK_FIELDS = {"engine": "vllm", "weights": "w", "layout": "l"}
ROW: dict[str, Any] = {"row_bytes": 8192, "blocks": 1, "is_canonical": False, "is_replicated": False}


def test_a_row_never_has_the_key_of_a_block_with_the_same_hash() -> None:
    page_hash = b"h" * 32
    block = Chain(namespace_digest(BLOCK_FIELDS))
    block.extend([page_hash])
    row = namespace_digest({**BLOCK_FIELDS, **row_fields(**ROW)})
    assert loose_pages(row, [page_hash]).keys != block.slice(0, 1).keys
    assert row != namespace_digest(BLOCK_FIELDS)


@pytest.mark.parametrize(
    "change", [{"row_bytes": 4096}, {"blocks": 2}, {"is_canonical": True}, {"is_replicated": True}]
)
def test_whatever_changes_the_bytes_of_a_row_separates(change: dict[str, Any]) -> None:
    assert namespace_digest(row_fields(**ROW)) != namespace_digest(row_fields(**{**ROW, **change}))


def test_equal_rows_of_equal_engines_are_shared() -> None:
    assert row_fields(**ROW) == row_fields(**dict(ROW))


def test_the_tier_is_found_among_others() -> None:
    entry = {"type": "kvpeer", "namespace_salt": "s"}
    assert tier_entry({"secondary_tiers": [{"type": "fs", "root_dir": "/x"}, entry]}) is entry


@pytest.mark.parametrize("tiers", [None, [], [{"type": "fs"}], [{"type": "kvpeer"}] * 2, ["kvpeer"]])
def test_no_tier_or_two_are_refused_with_the_fix(tiers: Any) -> None:
    with pytest.raises(ConfigError, match=r'"secondary_tiers": \[\{"type": "kvpeer"\}\]'):
        tier_entry({"secondary_tiers": tiers})


def test_settings_are_those_of_the_connector_without_the_keys_of_vllm() -> None:
    entry = {"type": "kvpeer", "backpressure": {}, "weights_identity": "w", "load_timeout_s": 1}
    settings = tier_options(entry, {"KVPEER_CONNECTOR_LOAD_TIMEOUT_S": "2"})
    assert (settings.weights_identity, settings.load_timeout_s) == ("w", 2.0)


def test_an_unknown_setting_is_refused_with_the_nearest_one_and_the_place() -> None:
    with pytest.raises(ConfigError, match=r"'weights_identty' in the secondary tier 'kvpeer'.*'weights_identity'"):
        tier_options({"type": "kvpeer", "weights_identty": "w"}, {})
