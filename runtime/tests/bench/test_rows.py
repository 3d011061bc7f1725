"""Rows keep their form, and budgets are judged right in both directions."""

from __future__ import annotations

import json

import pytest
from kvpeer.bench import Budget, Row, decode_rows, encode_rows
from kvpeer.bench.command import exit_status
from kvpeer.bench.report import summary, table
from kvpeer.model import ConfigError

UNCOMPARED = dict.fromkeys(("page_bytes", "threads", "reference_name", "reference", "ratio", "budget", "holds"))


def row(**changes) -> Row:
    values = {
        "name": "fetch.shm.full",
        "page_bytes": 1 << 20,
        "threads": 4,
        "value": 7.0,
        "unit": "GB/s",
        "reference_name": "memcpy",
        "reference": 10.0,
        "ratio": 0.7,
        "spread": (0.6, 0.8),
        "budget": "ratio >= 0.7",
        "holds": True,
    }
    return Row(**{**values, **changes})


def test_a_document_is_a_list_of_rows_with_exactly_these_fields():
    (written,) = json.loads(encode_rows([row()]))
    assert list(written) == [
        *("name", "page_bytes", "threads", "value", "unit", "reference_name", "reference", "ratio", "spread"),
        *("budget", "holds"),
    ]
    assert written["spread"] == [0.6, 0.8]


def test_rows_come_back_as_they_were_written():
    rows = [row(), row(page_bytes=None, threads=None, reference=None, ratio=None, budget=None, holds=None)]
    assert decode_rows(encode_rows(rows)) == rows


@pytest.mark.parametrize("document", [b"{}", b'[{"name": "x"}]', b"[", json.dumps([{"name": 1}]).encode()])
def test_anything_else_is_refused(document):
    with pytest.raises(ConfigError, match="not a list of benchmark rows"):
        decode_rows(document)


@pytest.mark.parametrize(
    ("budget", "value", "reference", "holds"),
    [
        ("ratio >= 0.9", 9.0, 10.0, True),
        ("ratio >= 0.9", 8.9, 10.0, False),
        ("ratio <= 1.1", 11.0, 10.0, True),
        ("ratio <= 1.1", 11.1, 10.0, False),
        ("excess <= 150", 230.0, 80.0, True),
        ("excess <= 150", 231.0, 80.0, False),
        ("value < 80", 79.9, None, True),
        ("value < 80", 80.0, None, False),
        ("value <= 0.5", 0.5, 9.0, True),
        ("value <= 0.5", 0.51, 0.01, False),
    ],
)
def test_a_budget_judges_in_its_own_direction(budget, value, reference, holds):
    ratio = None if reference is None else value / reference
    assert Budget.parse(budget).holds(value, reference, ratio) is holds


@pytest.mark.parametrize("text", ["", "ratio", "ratio > 1", "speed >= 1", "ratio >= -1", "ratio >= 0.9x"])
def test_what_is_no_budget_is_refused(text):
    with pytest.raises(ConfigError, match="is not a budget such as"):
        Budget.parse(text)


@pytest.mark.parametrize("text", ["ratio <= 1", "excess <= 1"])
def test_a_budget_about_a_reference_needs_one(text):
    with pytest.raises(ConfigError, match="needs a reference"):
        Budget.parse(text).holds(1.0, None, None)


def test_the_table_says_what_was_measured_against_what_and_what_came_of_it():
    head, _, good, bad, plain = table(
        [
            row(),
            row(ratio=0.5, holds=False, page_bytes=128 << 10, threads=1),
            row(name="agent.idle.memory", value=65.64, unit="MB", spread=(65.0, 66.0), **UNCOMPARED),
        ]
    ).splitlines()
    assert head.split() == ["what", "value", "reference", "ratio", "quartiles", "budget", "holds"]
    assert good.split() == [
        "fetch.shm.full",
        "1",
        "MiB",
        "4",
        "threads",
        "7",
        "GB/s",
        "10",
        "memcpy",
        "0.70",
        "0.60-0.80",
        "ratio",
        ">=",
        "0.7",
        "yes",
    ]
    assert bad.split()[:6] == ["fetch.shm.full", "128", "KiB", "1", "thread", "7"]
    assert bad.endswith("NO")
    assert plain.split() == ["agent.idle.memory", "65.6", "MB", "65-66"]


def test_the_summary_names_what_does_not_hold():
    rows = [row(), row(holds=False, name="publish.copy", threads=1), row(budget=None, holds=None)]
    assert summary(rows) == "1 of 2 budgets hold; not: publish.copy 1 MiB 1 thread"
    assert summary(rows[:1]) == "1 of 1 budgets hold"


@pytest.mark.parametrize(
    ("holds", "is_check", "status"), [(False, True, 1), (False, False, 0), (True, True, 0), (None, True, 0)]
)
def test_a_broken_budget_is_a_status_only_for_those_who_ask(holds, is_check, status):
    assert exit_status([row(), row(holds=holds)], is_check=is_check) == status
