"""What of a told policy reaches the settings of a running adapter."""

from __future__ import annotations

import logging

import pytest
from kvpeer.engines.sglang.settings import ENVIRONMENT_PREFIX, LIVE, Settings
from kvpeer.engines.told_settings import ToldSettings
from kvpeer.wire.messages import PolicyTold

LOGGER = logging.getLogger("test")


def told(**settings: str) -> PolicyTold:
    return PolicyTold(1, "p", {ENVIRONMENT_PREFIX + name.upper(): value for name, value in settings.items()})


def test_each_word_starts_from_the_settings_of_the_start() -> None:
    """What a later policy does not say is as it was when the engine started, not as the policy before it said."""
    running = ToldSettings(Settings(mode="off", margin=0.5), ENVIRONMENT_PREFIX, LIVE, LOGGER)
    assert running.changed(told(mode="on", get_timeout_max_s="2")) == Settings(
        mode="on", margin=0.5, get_timeout_max_s=2.0
    )
    assert running.changed(told(mode="shadow")) == Settings(mode="shadow", margin=0.5)
    assert running.changed(told(margin="0.1")) == Settings(mode="off", margin=0.5)


@pytest.mark.parametrize("settings", [{"mode": "maybe"}, {"mode": ""}, {"get_timeout_max_s": "0"}])
def test_what_does_not_fit_is_logged_and_changes_nothing(
    settings: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    running = ToldSettings(Settings(), ENVIRONMENT_PREFIX, LIVE, LOGGER)
    assert running.changed(told(**settings)) is None
    assert "policy p is not used" in caplog.text


def test_the_same_word_is_no_news() -> None:
    running = ToldSettings(Settings(), ENVIRONMENT_PREFIX, LIVE, LOGGER)
    assert running.changed(None) is None
    assert running.changed(told(mode="off")) is not None
    assert running.changed(told(mode="off")) is None
