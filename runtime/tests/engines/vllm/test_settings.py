"""Settings of the connector: order of sources, conversions, and errors that name the fix."""

from __future__ import annotations

import pytest
from kvpeer.engines.vllm.settings import Settings, load_settings
from kvpeer.model import ConfigError


def test_without_anything_given_the_defaults_hold() -> None:
    assert load_settings({}, {}) == Settings()


def test_the_environment_wins_over_the_extra_config() -> None:
    settings = load_settings({"min_cached_token_delta": 100, "publish": True}, {"KVPEER_CONNECTOR_PUBLISH": "off"})
    assert (settings.min_cached_token_delta, settings.publish) == (100, False)


def test_other_variables_of_kvpeer_are_not_ours() -> None:
    assert load_settings({}, {"KVPEER_POOL_CAPACITY_BYTES": "1", "KVPEER_VLLM_PYTHON": "x"}) == Settings()


@pytest.mark.parametrize(
    ("extra_config", "environment", "message"),
    [
        ({"min_cached_tokens": 1}, {}, "'min_cached_tokens'.*'min_cached_token_delta'"),
        ({}, {"KVPEER_CONNECTOR_LOAD_TIMEOUT": "1"}, "KVPEER_CONNECTOR_LOAD_TIMEOUT.*'load_timeout_s'"),
        ({"lookup_timeout_s": "soon"}, {}, "lookup_timeout_s is 'soon': it must be of type float"),
        ({"lookup_timeout_s": 0}, {}, "greater than 0"),
        ({"load_timeout_s": float("inf")}, {}, "finite"),
        ({"load_timeout_s": float("nan")}, {}, "greater than 0"),
        ({"min_cached_token_delta": 0}, {}, "greater than 0"),
        ({"deferred_requests_max": True}, {}, "must be of type int"),
        ({"publish": "maybe"}, {}, "publish is 'maybe'"),
        ({"min_cached_token_delta": "few"}, {}, "must be of type int"),
        ({"calibrated_pull_s": 0.1}, {}, "give all four, or none"),
        ({"mode": "auto"}, {}, "off, shadow, on"),
    ],
)
def test_a_wrong_setting_is_named_with_its_fix(
    extra_config: dict[str, object], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(extra_config, environment).policy()


def test_the_floor_may_be_left_to_the_measured_costs() -> None:
    assert load_settings({"min_cached_token_delta": "auto"}, {}).policy().min_cached_token_delta is None
    assert (
        load_settings({}, {"KVPEER_CONNECTOR_MIN_CACHED_TOKEN_DELTA": "auto"}).policy().min_cached_token_delta is None
    )
    assert load_settings({}, {}).policy().min_cached_token_delta == 512


def test_a_calibration_is_where_costs_start_from() -> None:
    calibrated = {
        "calibrated_pull_s": 0.1,
        "calibrated_pull_s_per_byte": 1e-10,
        "calibrated_prefill_s_per_token": 1e-5,
        "calibrated_prefill_s_per_pair": 1e-10,
    }
    calibration = load_settings(calibrated, {}).policy().calibration
    assert calibration.is_calibrated
    assert (calibration.pull_floor_s, calibration.prefill_s_per_pair) == (0.1, 1e-10)
    assert not load_settings({}, {}).policy().calibration.is_calibrated
