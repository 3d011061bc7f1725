"""What adapters count has a definition: the metric, and every label value that stands in the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvpeer.metrics.engines import SGLANG_METRICS, VLLM_METRICS
from kvpeer.metrics.policy import POLICY_METRICS

ENGINES = Path(__file__).parents[2] / "kvpeer" / "engines"
KNOWN = {**VLLM_METRICS, **SGLANG_METRICS, **POLICY_METRICS}


def _texts(node: ast.expr) -> list[str]:
    """The texts that an argument may be, as far as the code says it."""
    return [each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)]


def _counted() -> Iterator[tuple[str, str, list[str]]]:
    """Place, metric and label values of each call that counts under a literal name."""
    for path in sorted(ENGINES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            is_counting = node.func.attr in ("count", "set_gauge") and node.args
            if is_counting and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                is_said = len(node.args) > 1 and not isinstance(node.args[1], ast.JoinedStr)
                labels = _texts(node.args[1]) if is_said else []
                yield f"{path.name}:{node.lineno}", node.args[0].value, labels


CALLS = list(_counted())


@pytest.mark.parametrize(("place", "metric", "values"), CALLS, ids=[place for place, *_ in CALLS])
def test_a_counted_label_value_is_listed(place: str, metric: str, values: list[str]) -> None:
    listed = next(iter(KNOWN[metric].labels.values()), ())
    assert not listed or set(values) <= set(listed), place


def test_the_calls_are_found() -> None:
    assert {"lookups", "published_pages", "unshared_requests", "guarded"} <= {metric for _, metric, _ in CALLS}
    assert {"not_awaited", "deferred_full", "revoked"} <= {value for *_, values in CALLS for value in values}
