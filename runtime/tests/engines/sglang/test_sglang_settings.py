"""Settings of the adapter: SGLang's own keys are none of them, unknown ones are named, time limits grow with pages."""

from __future__ import annotations

import pytest
from kvpeer.engines.sglang.settings import Settings, load_settings
from kvpeer.model import ConfigError

OF_SGLANG = {"backend_name": "kvpeer", "module_path": "m", "class_name": "C", "interface_v1": 1}


def test_sglangs_own_keys_are_no_settings_of_ours() -> None:
    assert load_settings(OF_SGLANG, {}) == Settings()


def test_the_environment_wins_over_the_extra_config() -> None:
    settings = load_settings({"exists_timeout_s": 0.1}, {"KVPEER_SGLANG_EXISTS_TIMEOUT_S": "0.4"})
    assert settings.exists_timeout_s == 0.4


@pytest.mark.parametrize(
    ("extra_config", "environment", "message"),
    [
        ({"exist_timeout_s": 1}, {}, "'exist_timeout_s' in --hicache-storage-backend-extra-config.*'exists_timeout_s'"),
        ({}, {"KVPEER_SGLANG_ENGINE": "x"}, "KVPEER_SGLANG_ENGINE.*'engine_name'"),
        ({"set_timeout_s": 0}, {}, "set_timeout_s is 0: it must be greater than 0"),
    ],
)
def test_a_wrong_setting_is_named_with_its_fix(
    extra_config: dict[str, object], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(extra_config, environment)


def test_reading_more_bytes_may_take_longer_up_to_a_limit() -> None:
    settings = Settings(get_timeout_base_s=0.5, get_timeout_s_per_mib=0.1, get_timeout_max_s=2.0)
    assert settings.get_timeout_s(0) == 0.5
    assert settings.get_timeout_s(5 << 20) == pytest.approx(1.0)
    assert settings.get_timeout_s(5 << 30) == 2.0
