"""What a step and a token of a prompt take, by the latest steps."""

from __future__ import annotations

import math

import pytest
from kvpeer.engines.pace import Pace


def test_at_first_nothing_is_known() -> None:
    assert Pace() == Pace(step_s=0.0, token_s=math.inf)


def test_the_first_step_is_believed_and_later_ones_move_what_is_known() -> None:
    pace = Pace()
    pace.step_took(0.2, 1000, has_prompt=True)
    assert pace == Pace(step_s=0.2, token_s=0.0002)
    for _ in range(50):
        pace.step_took(0.1, 1000, has_prompt=True)
    assert pace.step_s == pytest.approx(0.1, rel=0.01)
    assert pace.token_s == pytest.approx(0.0001, rel=0.01)


def test_steps_that_only_generate_say_nothing_about_prompts() -> None:
    pace = Pace()
    pace.step_took(0.2, 1000, has_prompt=True)
    for _ in range(50):
        pace.step_took(0.01, 4, has_prompt=False)
    assert pace.step_s == pytest.approx(0.01, rel=0.1)
    assert pace.token_s == 0.0002
