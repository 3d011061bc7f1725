"""Product and reference take turns, and the ratio is that of their turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpeer.bench import Comparison, Experiment, measure
from kvpeer.bench.rounds import quartiles
from kvpeer.model import LocalProtocolError


class Machine:
    """Two subjects on a machine that slows down with time: absolute numbers drift, ratios do not."""

    def __init__(self, ours: float, theirs: float, drift: float) -> None:
        self.turns: list[str] = []
        self._speed = {"ours": ours, "theirs": theirs}
        self._drift = drift

    def subject(self, name: str):
        def sample() -> float:
            n_round = len(self.turns) // 2
            self.turns.append(name)
            return self._speed[name] * self._drift**n_round

        return sample

    def experiment(self, **comparison) -> Experiment:
        values = {"subject": "ours", "reference": "theirs", "reference_name": "they", **comparison}
        return Experiment(
            {name: self.subject(name) for name in ("theirs", "ours")}, [Comparison("n", "GB/s", **values)]
        )


def test_all_take_turns_and_the_first_round_does_not_count():
    machine = Machine(8.0, 10.0, drift=1.0)
    (row,) = measure(machine.experiment(), 3)
    assert machine.turns == ["theirs", "ours"] * 4
    assert (row.value, row.reference, row.ratio, row.spread) == (8.0, 10.0, 0.8, (0.8, 0.8))


def test_a_drifting_machine_does_not_move_the_ratio():
    (row,) = measure(Machine(8.0, 10.0, drift=0.7).experiment(), 15)
    assert row.ratio == pytest.approx(0.8)
    assert row.spread == pytest.approx((0.8, 0.8))
    assert row.value < 8.0


def test_the_ratio_is_the_median_of_the_rounds_and_not_the_quotient_of_the_medians():
    ours, theirs = iter([0.0, 1.0, 2.0, 9.0]), iter([1.0, 1.0, 4.0, 3.0])
    subjects = {"theirs": lambda: next(theirs), "ours": lambda: next(ours)}
    comparison = Comparison("n", "s", "ours", "theirs", "they")
    (row,) = measure(Experiment(subjects, [comparison]), 3)
    assert (row.value, row.reference, row.ratio) == (2.0, 3.0, 1.0)


@pytest.mark.parametrize(("budget", "holds"), [("ratio >= 0.8", True), ("ratio <= 0.7", False), (None, None)])
def test_the_row_says_whether_its_budget_holds(budget, holds):
    (row,) = measure(Machine(8.0, 10.0, drift=1.0).experiment(budget=budget), 3)
    assert (row.budget, row.holds) == (budget, holds)


def test_without_a_reference_the_spread_is_of_the_value():
    (row,) = measure(Machine(8.0, 0.0, drift=1.0).experiment(reference=None, reference_name=None), 1)
    assert (row.value, row.reference, row.ratio, row.spread) == (8.0, None, None, (8.0, 8.0))


def test_a_comparison_of_what_is_not_there_is_refused():
    with pytest.raises(LocalProtocolError, match="nobody"):
        Machine(1.0, 1.0, drift=1.0).experiment(reference="nobody")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_a_quarter_of_the_numbers_lies_on_either_side_of_the_quartiles(numbers):
    lower, upper = quartiles(numbers)
    assert min(numbers) <= lower <= upper <= max(numbers)
    for is_beyond in (lambda number: number <= lower, lambda number: number >= upper):
        assert 4 * sum(map(is_beyond, numbers)) >= len(numbers)
