"""What becomes of bytes: decided by seed, position and time alone."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpeer.chaos.faults import TRIAL_BYTES, Direction, Fault, FaultKind
from kvpeer.chaos.stream import End, Step, Stream
from kvpeer.model import ConfigError

TO, FROM = Direction.TO_AGENT, Direction.FROM_AGENT
BYTES = random.Random(0).randbytes(40 * TRIAL_BYTES)


class Run:
    """A stream that began at time 0, and what came out of it."""

    def __init__(self, *faults: Fault, seed: int = 1, direction: Direction = TO) -> None:
        self.counts: Counter[FaultKind] = Counter()
        jitter = random.Random(-seed)
        self.stream = Stream(direction, faults, 0.0, random.Random(seed), jitter, self.counts)
        self.sent = b""
        self.end: End | None = None
        self.times: list[float] = []

    def take(self, chunk: bytes, now: float = 0.0) -> Run:
        if self.end is None and chunk:
            self._perform(self.stream.take(chunk, now))
        return self

    def finish(self, now: float = 0.0) -> Run:
        self._perform(self.stream.finish(now))
        return self

    def _perform(self, steps: list[Step]) -> None:
        for step in steps:
            self.sent += step.data
            self.end = self.end or step.end
            self.times.append(step.at)


def n_bits_changed(sent: bytes) -> int:
    return sum((a ^ b).bit_count() for a, b in zip(sent, BYTES, strict=False))


STRIKES = st.lists(
    st.builds(
        Fault,
        kind=st.sampled_from([kind for kind in FaultKind if kind.strikes]),
        probability=st.sampled_from([0.001, 0.05, 0.5, 1.0]),
        after_bytes=st.none() | st.integers(0, len(BYTES)),
    )
    | st.builds(
        Fault, kind=st.sampled_from([kind for kind in FaultKind if kind.strikes]), after_bytes=st.integers(0, 5000)
    ),
    max_size=4,
)


@given(STRIKES, st.lists(st.integers(0, len(BYTES)), max_size=30), st.integers(0, 5))
def test_a_seed_strikes_at_the_same_bytes_however_they_are_cut(faults: list[Fault], cuts: list[int], seed: int) -> None:
    jitter = Fault(FaultKind.DELAY, jitter_ms=10)  # drawn once a read, and must not move the strikes
    whole, cut = Run(*faults, jitter, seed=seed).take(BYTES), Run(*faults, jitter, seed=seed)
    for start, stop in pairwise([0, *sorted(cuts), len(BYTES)]):
        cut.take(BYTES[start:stop])
    assert (whole.sent, whole.end) == (cut.sent, cut.end)
    del whole.counts[FaultKind.DELAY], cut.counts[FaultKind.DELAY]
    assert whole.counts == cut.counts


def test_without_faults_every_byte_passes_at_once() -> None:
    run = Run().take(BYTES, 5.0).finish(6.0)
    assert (run.sent, run.end, run.times) == (BYTES, End.HALF, [5.0, 6.0])
    assert run.counts.total() == 0


def test_another_seed_strikes_elsewhere() -> None:
    fault = Fault(FaultKind.CORRUPT, probability=0.5)
    assert Run(fault, seed=1).take(BYTES).sent != Run(fault, seed=2).take(BYTES).sent


def test_corruption_flips_one_bit_a_strike_and_changes_nothing_else() -> None:
    run = Run(Fault(FaultKind.CORRUPT, probability=1)).take(BYTES)
    assert len(run.sent) == len(BYTES)
    assert run.counts[FaultKind.CORRUPT] == n_bits_changed(run.sent) == len(BYTES) // TRIAL_BYTES
    changed = [idx // TRIAL_BYTES for idx, (a, b) in enumerate(zip(run.sent, BYTES, strict=True)) if a != b]
    assert changed == list(range(len(BYTES) // TRIAL_BYTES)), "one in each KiB"


def test_a_probability_is_that_of_each_kib() -> None:
    run = Run(Fault(FaultKind.CORRUPT, probability=0.02))
    for _ in range(1000):
        run.stream.take(BYTES, 0.0)
    expected = 0.02 * 1000 * len(BYTES) / TRIAL_BYTES
    assert run.counts[FaultKind.CORRUPT] == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize(
    ("kind", "end"),
    [(FaultKind.TRUNCATE, End.CLOSE), (FaultKind.RESET, End.RESET), (FaultKind.BLACKHOLE, End.SILENT)],
)
def test_what_ends_a_stream_after_some_bytes_does_so_at_exactly_that_byte_and_once(kind: FaultKind, end: End) -> None:
    run = Run(Fault(kind, after_bytes=1500)).take(BYTES[:1500])
    assert (run.sent, run.end, run.counts[kind]) == (BYTES[:1500], None, 0)
    run.take(BYTES[1500:1501]).take(BYTES[1501:])
    if run.end is None:
        run.finish()
    assert (run.sent, run.end, run.counts[kind]) == (BYTES[:1500], end, 1)


def test_a_swallowed_stream_tells_nobody_how_it_ended_and_a_changed_fault_does_not_bring_it_back() -> None:
    run = Run(Fault(FaultKind.BLACKHOLE, after_bytes=10)).take(BYTES)
    run.stream.change([], 1.0)
    run.take(BYTES, 2.0)
    assert run.sent == BYTES[:10]
    assert [step.end for step in run.stream.broke(3.0)] == [End.SILENT]


def test_an_error_of_the_sender_reaches_the_receiver_as_a_reset() -> None:
    assert [step.end for step in Run().stream.broke(1.0)] == [End.RESET]


@pytest.mark.parametrize(("now", "n_struck"), [(1.9, 0), (2.0, 1), (2.9, 1), (3.0, 0)])
def test_a_fault_strikes_only_while_it_is_in_force(now: float, n_struck: int) -> None:
    run = Run(Fault(FaultKind.CORRUPT, after_bytes=0, from_s=2, until_s=3)).take(BYTES, now)
    assert run.counts[FaultKind.CORRUPT] == n_bits_changed(run.sent) == n_struck


def test_a_fault_of_one_direction_leaves_the_other_alone() -> None:
    faults = [
        Fault(FaultKind.CORRUPT, FROM, after_bytes=0),
        Fault(FaultKind.FREEZE, FROM),
        Fault(FaultKind.DELAY, FROM, delay_ms=1),
    ]
    assert Run(*faults, direction=TO).take(BYTES).sent == BYTES
    assert Run(*faults, direction=TO).stream.held_until(1.0) == 1.0
    assert Run(*faults, direction=FROM).take(BYTES).sent != BYTES
    assert Run(*faults, direction=FROM).stream.held_until(1.0) > 1.0


def test_a_delay_is_at_least_its_time_at_most_its_jitter_longer_and_keeps_the_order() -> None:
    run = Run(Fault(FaultKind.DELAY, delay_ms=50, jitter_ms=20))
    sent_at = [n * 0.003 for n in range(200)]
    for now in sent_at:
        run.take(b"x", now)
    run.finish(sent_at[-1])
    delays = [at - now for at, now in zip(run.times, sent_at, strict=False)]
    assert min(delays) >= 0.05
    assert max(delays) <= 0.07 + 1e-9
    assert max(delays) - min(delays) > 0.01
    assert run.times == sorted(run.times)
    assert run.counts[FaultKind.DELAY] == 200


def test_a_delay_that_is_over_lets_nothing_overtake() -> None:
    run = Run(Fault(FaultKind.DELAY, delay_ms=1000, until_s=1)).take(b"a", 0.5).take(b"b", 1.1).take(b"c", 2.0)
    assert run.times == [1.5, 1.5, 2.0]


def test_a_freeze_holds_for_its_time_and_is_counted_once_a_hold() -> None:
    stream = (run := Run(Fault(FaultKind.FREEZE, from_s=5, until_s=8))).stream
    assert [stream.held_until(now) for now in (4.9, 5.0, 6.0, 8.0, 9.0)] == [4.9, 8.0, 8.0, 8.0, 9.0]
    assert run.counts[FaultKind.FREEZE] == 1


def test_a_changed_fault_counts_time_and_bytes_from_the_change() -> None:
    run = Run(Fault(FaultKind.CORRUPT, probability=1, after_bytes=10**9)).take(BYTES[:100], 50.0)
    run.stream.change([Fault(FaultKind.TRUNCATE, after_bytes=20, until_s=10)], 60.0)
    run.take(BYTES[100:110], 61.0).take(BYTES[110:], 62.0)
    assert (run.sent, run.end) == (BYTES[:120], End.CLOSE)


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"kind": FaultKind.CORRUPT}, "probability is missing: corrupt needs it"),
        ({"kind": FaultKind.CORRUPT, "probability": 0}, "probability is 0, but must be from 1e-09 to 1"),
        ({"kind": FaultKind.CORRUPT, "probability": float("nan")}, "probability is nan"),
        ({"kind": FaultKind.RESET, "after_bytes": -1}, "after_bytes is -1"),
        (
            {"kind": FaultKind.RESET, "after_bytes": 1, "delay_ms": 5},
            "delay_ms and jitter_ms have no meaning for",
        ),
        ({"kind": FaultKind.DELAY}, "delay_ms is missing"),
        ({"kind": FaultKind.DELAY, "delay_ms": 1e9}, "delay_ms is 1000000000.0, but must be from 0 to 600000"),
        ({"kind": FaultKind.FREEZE, "probability": 0.1}, "probability has no meaning for freeze"),
        ({"kind": FaultKind.FREEZE, "from_s": 5, "until_s": 5}, "until_s is 5, but must be after from_s, which is 5"),
    ],
)
def test_values_that_make_no_fault_are_refused_by_name(values: dict, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Fault(**values)
    assert str(caught.value).startswith(fault)
