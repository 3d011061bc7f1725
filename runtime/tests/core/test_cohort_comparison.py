"""Which engines share, and what keeps the others from it."""

from __future__ import annotations

from kvpeer.core.cohort_comparison import EngineGroup, compare, shown

BASE = {"weights": "w1", "dtype": "bfloat16", "parallel": "tp=1", "engine_version": "0.32.0"}


def group(agent: str, namespace: str, n_engines: int = 1, **fields: str) -> EngineGroup:
    return EngineGroup(agent, namespace, {**BASE, **fields}, 4096, 1, n_engines, 10)


def test_engines_with_one_namespace_are_one_cohort_the_largest_first() -> None:
    cohorts = compare([group("c", "bb", dtype="float16"), group("b", "aa"), group("a", "aa", 2)])
    assert [(cohort["namespace"], cohort["engines"], cohort["pages"]) for cohort in cohorts] == [
        ("aa", 3, 20),
        ("bb", 1, 10),
    ]
    assert cohorts[0]["agents"] == ["a", "b"]
    assert cohorts[0]["differing"] == []


def test_a_cohort_names_what_differs_from_the_larger_one_that_is_most_like_it() -> None:
    cohorts = compare(
        [
            group("a", "aa", 3),
            group("b", "bb", 2, weights="w2", dtype="float16"),
            group("c", "cc", 1, weights="w2", dtype="float16", parallel="tp=2"),
        ]
    )
    last = cohorts[2]
    assert last["compared_with"] == "bb"
    assert [(found["field"], found["here"], found["there"]) for found in last["differing"]] == [
        ("parallel", "tp=2", "tp=1")
    ]
    assert "tensor parallel" in last["differing"][0]["fix"]


def test_a_field_that_only_one_has_differs_and_an_unknown_one_has_advice() -> None:
    cohorts = compare([group("a", "aa", 3), group("b", "bb", 1, novelty="x")])
    assert cohorts[1]["differing"] == [
        {"field": "novelty", "here": "x", "there": "", "fix": "Make it equal on all engines that should share pages."}
    ]


def test_salts_are_told_apart_and_never_shown() -> None:
    one, other = shown({"salt": "tenant a", "dtype": "x"}), shown({"salt": "tenant b"})
    assert one["dtype"] == "x"
    assert one["salt"] != other["salt"]
    assert "tenant" not in str(one) + str(other)
