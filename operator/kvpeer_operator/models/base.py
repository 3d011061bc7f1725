"""What all resources are made of: the base model, sizes and durations with their rules, labels, conditions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

__all__ = [
    "API_GROUP",
    "API_VERSION",
    "RULES",
    "Condition",
    "Duration",
    "Labels",
    "Metadata",
    "Model",
    "Size",
    "duration_bounds",
    "rule",
    "size_bounds",
]

API_GROUP = "kvpeer.io"
API_VERSION: Literal["kvpeer.io/v1alpha1"] = "kvpeer.io/v1alpha1"

RULES = "x-kubernetes-validations"
"""Where a schema keeps its CEL rules."""

LABELS_MAX = 16
"""Labels of one selector. Nobody selects by more, and the API server charges CEL rules by the largest object."""

_LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"


class Model(BaseModel):
    """Base of all parts: frozen values, camelCase in objects, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)


class Metadata(BaseModel):
    """What is read of an object's metadata. The API server owns the rest."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)

    name: str
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None


def rule(expression: str, message: str) -> dict[str, str]:
    """One CEL rule. The message says what to do about it."""
    return {"rule": expression, "message": message}


Size = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,9}(Ki|Mi|Gi|Ti)$", max_length=12)]
"""A Kubernetes quantity in a binary unit."""

Duration = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,5}(ms|s|m)$", max_length=8)]
"""A whole number of milliseconds, seconds or minutes."""


def size_bounds(least: str, most: str) -> dict[str, Any]:
    """The rule that a size lies between two sizes, both included."""
    low, high = (f"quantity(self).compareTo(quantity('{bound}'))" for bound in (least, most))
    return {RULES: [rule(f"{low} >= 0 && {high} <= 0", f"must be from {least} to {most}")]}


def duration_bounds(least: str, most: str) -> dict[str, Any]:
    """The rule that a duration lies between two durations, both included."""
    within = f"duration(self) >= duration('{least}') && duration(self) <= duration('{most}')"
    return {RULES: [rule(within, f"must be from {least} to {most}")]}


class Labels(Model):
    """Pods by their labels."""

    match_labels: Annotated[
        dict[str, Annotated[str, StringConstraints(max_length=63, pattern=_LABEL_VALUE)]],
        Field(max_length=LABELS_MAX, description="Labels that a pod must have, all of them. Empty: every pod."),
    ] = {}

    def matches(self, labels: dict[str, str]) -> bool:
        """Whether a pod with these labels is one of them."""
        return self.match_labels.items() <= labels.items()


class Condition(Model):
    """One thing that is true or not of an object, and why."""

    type: Annotated[str, Field(max_length=64, description="What this is about.")]
    status: Annotated[Literal["True", "False", "Unknown"], Field(description="Whether it is so.")]
    reason: Annotated[
        str, Field(max_length=64, pattern=r"^[A-Za-z][A-Za-z0-9]*$", description="Why, in one word for machines.")
    ]
    message: Annotated[str, Field(max_length=1024, description="Why, for people, with the fix.")] = ""
    last_transition_time: Annotated[
        str, Field(json_schema_extra={"format": "date-time"}, description="When the status last changed.")
    ]
    observed_generation: Annotated[int, Field(ge=0, description="Generation of the object that was judged.")] = 0
