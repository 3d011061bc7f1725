"""A patch makes one object of the other, by the judgement of an independent implementation."""

from __future__ import annotations

import copy
from typing import Any

import jsonpatch
from hypothesis import given
from hypothesis import strategies as st
from kvpeer_operator.json_patch import json_patch

_KEYS = st.sampled_from(["a", "b", "kvpeer.io/injected", "a~b", ""])
_OBJECTS = st.dictionaries(
    _KEYS,
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(0, 2), st.sampled_from(["", "x"])),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_KEYS, inner, max_size=3)),
        max_leaves=8,
    ),
    max_size=3,
)


@given(_OBJECTS, _OBJECTS)
def test_the_patch_leads_from_one_object_to_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    untouched = copy.deepcopy(before)
    changed = jsonpatch.apply_patch(before, json_patch(before, after))
    assert repr(_sorted(changed)) == repr(_sorted(after))  # by repr: True is no 1 here
    assert before == untouched


@given(_OBJECTS)
def test_equal_objects_need_no_patch(one: dict[str, Any]) -> None:
    assert json_patch(one, copy.deepcopy(one)) == []


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value
