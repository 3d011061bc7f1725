"""What the API server would say of an object, offline: defaults, unknown fields, the structural schema, CEL rules.

Structure is judged by `jsonschema`, rules by `cel-python` with Kubernetes' `quantity` added. Not judged here: the cost
of a rule, and what else the API server refuses in a schema; for these the manifests have to be applied to a real one.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import celpy
import jsonschema
from celpy import celtypes

_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_RULES = "x-kubernetes-validations"


def schema_of(crd: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a CRD's only version."""
    (version,) = crd["spec"]["versions"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


def admit(crd: Mapping[str, Any], given: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The object with its defaults.

    Raises:
        ValueError: it is refused; one line `path: reason` for each fault.
    """
    schema = schema_of(crd)
    whole = with_defaults(schema, given)
    before = with_defaults(schema, old) if old is not None else None
    faults = [*_unknown(schema, whole, ""), *_structural(schema, whole)]
    # The API server looks at rules only when the structure is right, as a rule may rely on it.
    faults = faults or [*_repeated(schema, whole, ""), *_broken_rules(schema, whole, before, "")]
    if faults:
        raise ValueError("\n".join(faults))
    return whole


def with_defaults(schema: Mapping[str, Any], value: Any) -> Any:
    """The value with the schema's defaults filled in, as deep as there are objects."""
    if isinstance(value, list):
        return [with_defaults(schema.get("items", {}), item) for item in value]
    if not isinstance(value, Mapping):
        return value
    filled = copy.deepcopy(dict(value))
    for name, part in schema.get("properties", {}).items():
        if name not in filled and "default" in part:
            filled[name] = copy.deepcopy(part["default"])
        if name in filled:
            filled[name] = with_defaults(part, filled[name])
    return filled


def _unknown(schema: Mapping[str, Any], value: Any, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown(schema.get("items", {}), item, f"{path}[{index}]")
    if not isinstance(value, Mapping) or "properties" not in schema:
        return
    known = schema["properties"]
    for name, part in value.items():
        if name in known:
            yield from _unknown(known[name], part, f"{path}.{name}".lstrip("."))
        elif path or name not in ("apiVersion", "kind", "metadata"):
            yield f"{path}.{name}: unknown field".lstrip(".")


def _structural(schema: Mapping[str, Any], value: Any) -> Iterator[str]:
    for error in jsonschema.Draft202012Validator(schema).iter_errors(value):
        yield f"{_path(error.absolute_path)}: {error.message}"


def _path(parts: Any) -> str:
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")


def _repeated(schema: Mapping[str, Any], value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, part in schema.get("properties", {}).items():
            if name in value:
                yield from _repeated(part, value[name], f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys")
        if keys or schema.get("x-kubernetes-list-type") == "set":
            seen = [tuple(item[key] for key in keys) if keys else item for item in value]
            yield from (f"{path}[{i}]: Duplicate value: {item!r}" for i, item in enumerate(seen) if item in seen[:i])


def _broken_rules(schema: Mapping[str, Any], value: Any, old: Any, path: str) -> Iterator[str]:
    for each in schema.get(_RULES, ()):
        is_transition = re.search(r"\boldSelf\b", each["rule"]) is not None
        if (not is_transition or old is not None) and not holds(each["rule"], value, old):
            yield f"{path}: {each['message']}".lstrip(": ")
    if isinstance(value, Mapping):
        for name, part in schema.get("properties", {}).items():
            if name in value:
                before = old.get(name) if isinstance(old, Mapping) else None
                yield from _broken_rules(part, value[name], before, f"{path}.{name}".lstrip("."))


def holds(rule: str, value: Any, old: Any = None) -> bool:
    """Whether a CEL rule is true of a value (and the one before)."""
    activation = {"self": celpy.json_to_cel(value)}
    if old is not None:
        activation["oldSelf"] = celpy.json_to_cel(old)
    return bool(_program(rule).evaluate(activation))


@cache
def _program(rule: str) -> Any:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule), functions={"quantity": _quantity, "compareTo": _compare})


def _quantity(text: celtypes.StringType) -> celtypes.IntType:
    match = re.fullmatch(r"(\d+)(Ki|Mi|Gi|Ti)", str(text))
    assert match, f"{text} is no quantity in a binary unit"
    return celtypes.IntType(int(match[1]) * _UNITS[match[2]])


def _compare(left: Any, right: Any) -> celtypes.IntType:
    return celtypes.IntType((left > right) - (left < right))
