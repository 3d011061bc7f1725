"""Taking turns, and the statistics of it. Pure: a subject is a function that returns one number.

A shared machine drifts by more than what is to be measured, so absolute numbers of different minutes say nothing about
each other. Product and reference therefore take turns, round after round, and the result is the median of the ratios
of each round: what slows a whole round down cancels out, and a disturbed round is one of many.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvpeer.bench.rows import Budget, Row
from kvpeer.model import LocalProtocolError

__all__ = ["Comparison", "Experiment", "measure", "quartiles", "row_of", "take_turns"]

Subject = Callable[[], float]
"""Measures once, and returns the number in the unit of its comparisons."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One row to be: `subject` against `reference`, by their names in the experiment. `reference_name` is what people
    read. The other fields are those of `Row`."""

    name: str
    unit: str
    subject: str
    reference: str | None = None
    reference_name: str | None = None
    page_bytes: int | None = None
    threads: int | None = None
    budget: str | None = None


@dataclass(frozen=True, slots=True)
class Experiment:
    """What takes turns, in this order, and which rows come of it.

    Raises:
        LocalProtocolError: a comparison names no subject of it.
    """

    subjects: Mapping[str, Subject]
    comparisons: Sequence[Comparison]

    def __post_init__(self) -> None:
        for comparison in self.comparisons:
            named = {comparison.subject, comparison.reference} - {None}
            if not named <= self.subjects.keys():
                raise LocalProtocolError(f"{comparison.name} compares {named}, but there is {set(self.subjects)}")


def take_turns(subjects: Mapping[str, Subject], n_rounds: int) -> Iterator[tuple[str, float]]:
    """Yields (name, number) of each turn: all subjects in order, n_rounds times. The first, unmeasured round before
    that pays for what is paid once (page faults, connections, caches)."""
    for subject in subjects.values():
        subject()
    for _ in range(n_rounds):
        for name, subject in subjects.items():
            yield name, subject()


def measure(experiment: Experiment, n_rounds: int) -> list[Row]:
    """Returns the rows of an experiment after so many rounds."""
    samples: dict[str, list[float]] = {name: [] for name in experiment.subjects}
    for name, number in take_turns(experiment.subjects, n_rounds):
        samples[name].append(number)
    return [row_of(comparison, samples) for comparison in experiment.comparisons]


def row_of(comparison: Comparison, samples: Mapping[str, Sequence[float]]) -> Row:
    """Returns the row of one comparison. samples: by subject, one number a round."""
    values = samples[comparison.subject]
    value, reference, ratio, spread = statistics.median(values), None, None, quartiles(values)
    if comparison.reference is not None:
        references = samples[comparison.reference]
        ratios = [ours / theirs for ours, theirs in zip(values, references, strict=True)]
        reference, ratio, spread = statistics.median(references), statistics.median(ratios), quartiles(ratios)
    budget = comparison.budget
    return Row(
        name=comparison.name,
        page_bytes=comparison.page_bytes,
        threads=comparison.threads,
        value=value,
        unit=comparison.unit,
        reference_name=comparison.reference_name,
        reference=reference,
        ratio=ratio,
        spread=spread,
        budget=budget,
        holds=None if budget is None else Budget.parse(budget).holds(value, reference, ratio),
    )


def quartiles(numbers: Sequence[float]) -> tuple[float, float]:
    """Returns the lower and upper quartile: half of the rounds lie between them. Of one number, twice that number."""
    if len(numbers) == 1:
        return numbers[0], numbers[0]
    lower, _, upper = statistics.quantiles(numbers, n=4, method="inclusive")
    return lower, upper
