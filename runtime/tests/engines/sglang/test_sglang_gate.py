"""What SGLang is told of: the own pool always, peers by mode, floor and calibrated costs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from kvpeer.engines.sglang.gate import PullGate
from kvpeer.engines.sglang.settings import load_settings
from kvpeer.model import ConfigError

PAGE_TOKENS, PAGE_BYTES = 64, 1_000_000
CALIBRATED = {
    "calibrated_pull_s": 0.1,
    "calibrated_pull_s_per_byte": 1e-9,
    "calibrated_prefill_s_per_token": 1e-4,
    "calibrated_prefill_s_per_pair": 1e-10,
}
AUTO = {"min_cached_token_delta": "auto", **CALIBRATED}


def usable(statuses: list[int], **settings: object) -> tuple[int, dict[str, float]]:
    counted: Counter[str] = Counter()

    def count(metric: str, label: str, amount: float) -> None:
        counted[f"{metric} {label}"] += amount  # type: ignore[assignment]

    gate = PullGate(load_settings(settings, {}).policy(), count)
    return gate.usable_pages(np.array(statuses, np.uint8), PAGE_TOKENS, PAGE_BYTES), dict(counted)


def test_by_default_all_pages_before_the_first_gap_are_told_of() -> None:
    assert usable([1, 2, 2, 0, 2]) == (3, {"decisions pull": 1})
    assert usable([1, 1]) == (2, {"decisions reload": 1})
    assert usable([0, 2]) == (0, {"decisions nothing_found": 1})


@pytest.mark.parametrize("mode", ["off", "shadow"])
def test_without_pulls_only_the_own_pool_is_told_of(mode: str) -> None:
    n_pages, counted = usable([1, 2, 2], mode=mode)
    assert n_pages == 1
    assert set(counted) == {"decisions mode_off" if mode == "off" else "decisions shadow"}


@pytest.mark.parametrize(("mode", "told"), [("off", [0, 1, 0]), ("shadow", [0, 1, 0]), ("on", [0, 1, 1])])
def test_states_at_peers_are_told_of_only_where_pulls_are_made(mode: str, told: list[int]) -> None:
    gate = PullGate(load_settings({"mode": mode}, {}).policy(), lambda metric, label, amount: None)
    assert gate.usable_states(np.array([0, 1, 2], np.uint8)).tolist() == [bool(each) for each in told]


def test_shadow_counts_what_pulls_would_save_by_the_calibrated_costs() -> None:
    n_pages, counted = usable([2] * 100, mode="shadow", **CALIBRATED)
    assert n_pages == 0
    assert counted["shadow_effect saved"] == pytest.approx(0.64 - 0.2, abs=0.05)


def test_few_pages_at_peers_are_hidden_by_the_floor_or_where_they_do_not_pay() -> None:
    assert usable([1, 2, 2], min_cached_token_delta=129)[0] == 1
    assert usable([1, 2, 2], min_cached_token_delta=128)[0] == 3
    assert usable([2] * 10, **AUTO) == (0, {"decisions not_worth_it": 1})
    assert usable([2] * 100, **AUTO)[0] == 100


def test_an_unknown_mode_is_named_with_its_fix() -> None:
    with pytest.raises(ConfigError, match="use one of off, shadow, on"):
        load_settings({"mode": "auto"}, {})
