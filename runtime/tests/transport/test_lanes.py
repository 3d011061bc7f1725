"""Which lanes carry pages: pairs of rails, accidents, lanes that are out, probes."""

from __future__ import annotations

import pytest
from kvpeer.native import RAILS_MAX
from kvpeer.transport import Lanes
from kvpeer.transport.lanes import FAILURES_MAX, PROBE_EVERY_S, Standing


class Scene:
    def __init__(self, n_own: int, n_theirs: int) -> None:
        self.now_ns = 1 << 40
        self.changes: list[tuple[int, str]] = []
        self.lanes = Lanes(n_own, lambda *told: self.changes.append(told), lambda: self.now_ns)
        self.lanes.learn(n_theirs)

    def standings(self) -> list[Standing]:
        return [self.lanes.standing(number) for number in range(len(self.lanes))]


@pytest.fixture
def scene() -> Scene:
    return Scene(2, 2)


@pytest.mark.parametrize(
    ("n_own", "n_theirs", "pairs"),
    [
        (1, 1, [(0, 0)]),
        (2, 2, [(0, 0), (1, 1)]),
        (1, 3, [(0, 0), (0, 1), (0, 2)]),
        (3, 1, [(0, 0), (1, 0), (2, 0)]),
        (2, 3, [(0, 0), (1, 1), (0, 2)]),
    ],
)
def test_every_rail_of_both_sides_is_in_a_lane(n_own, n_theirs, pairs):
    lanes = Scene(n_own, n_theirs).lanes
    assert [lanes.ends(number) for number in range(len(lanes))] == pairs


def test_there_are_no_more_lanes_than_a_fetch_takes():
    assert len(Scene(1, RAILS_MAX + 1).lanes) == RAILS_MAX


def test_a_lane_is_out_when_it_failed_often_in_a_row_and_that_is_said_once(scene):
    for _ in range(FAILURES_MAX - 1):
        scene.lanes.failed(1, "broke")
    assert scene.standings() == [Standing.IN, Standing.IN]
    scene.lanes.failed(1, "broke again")
    scene.lanes.failed(1, "broke late")
    assert scene.standings() == [Standing.IN, Standing.OUT]
    assert scene.changes == [(1, "broke again")]
    assert (scene.lanes.n_out, scene.lanes.reason) == (1, "broke again")


def test_accidents_between_pages_that_came_take_no_lane_out(scene):
    for _ in range(FAILURES_MAX + 1):
        scene.lanes.failed(0, "broke")
        scene.lanes.worked(0)
    assert scene.standings() == [Standing.IN, Standing.IN]
    assert scene.changes == []


def test_a_lane_that_cannot_be_opened_is_out_at_once(scene):
    scene.lanes.failed(0, "no way there", is_certain=True)
    assert scene.standings() == [Standing.OUT, Standing.IN]


def test_a_lane_that_is_out_is_probed_by_one_fetch_at_a_time(scene):
    scene.lanes.failed(0, "broke", is_certain=True)
    scene.now_ns += round(PROBE_EVERY_S * 1e9) - 1
    assert scene.lanes.standing(0) is Standing.OUT
    scene.now_ns += 1
    assert [scene.lanes.standing(0) for _ in range(2)] == [Standing.DUE, Standing.OUT]
    scene.now_ns += round(PROBE_EVERY_S * 1e9)
    assert scene.lanes.standing(0) is Standing.DUE


def test_a_lane_whose_probe_came_through_carries_pages_again(scene):
    scene.lanes.failed(0, "broke", is_certain=True)
    scene.lanes.worked(0)
    assert scene.standings() == [Standing.IN, Standing.IN]
    assert scene.changes == [(0, "broke"), (0, "")]
    assert scene.lanes.n_out == 0


def test_of_queue_pairs_that_knew_the_same_the_first_failure_counts_alone(scene):
    opened_ns = scene.now_ns - 1
    for _ in range(FAILURES_MAX + 1):
        scene.lanes.failed(0, "a key that holds no longer", opened_ns=opened_ns)
    assert scene.standings() == [Standing.IN, Standing.IN]
    scene.lanes.failed(0, "and with a new queue pair", opened_ns=scene.now_ns)
    assert scene.standings() == [Standing.OUT, Standing.IN]


def test_before_the_producers_rails_are_known_each_lane_asks_for_another_one():
    lanes = Lanes(3, lambda *told: None)
    assert [lanes.ends(number) for number in range(3)] == [(0, 0), (1, 1), (2, 2)]
