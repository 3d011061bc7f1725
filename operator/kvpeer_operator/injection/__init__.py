"""Whether and how a pod gets an agent: `inject`, a pure function from a pod to a patch or the reason why it is left
alone. docs/operator.md has the rules for people.
"""

from __future__ import annotations

from kvpeer_operator.injection.inject import Patch, inject, skip_patch
from kvpeer_operator.injection.names import (
    CLUSTER_LABEL,
    INJECTED_ANNOTATION,
    MEMBER_LABEL,
    POLICY_ANNOTATION,
    SETTINGS_ANNOTATION,
    SKIPPED_ANNOTATION,
)
from kvpeer_operator.injection.reasons import Skip, SkipReason
from kvpeer_operator.injection.settings import policy_variables, settings_digest

__all__ = [
    "CLUSTER_LABEL",
    "INJECTED_ANNOTATION",
    "MEMBER_LABEL",
    "POLICY_ANNOTATION",
    "SETTINGS_ANNOTATION",
    "SKIPPED_ANNOTATION",
    "Patch",
    "Skip",
    "SkipReason",
    "inject",
    "policy_variables",
    "settings_digest",
    "skip_patch",
]
