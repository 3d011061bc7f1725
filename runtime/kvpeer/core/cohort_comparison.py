"""Which engines of a cluster share pages, and for those that do not, what differs: field by field, with what to do.

Pure. What is secret in a namespace is never shown: salts and resets are told apart by a short digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["EngineGroup", "compare", "shown"]

_SECRET_FIELDS = frozenset({"salt", "reset", "namespace_salt"})

_FIXES = {
    "weights": "Serve the same revision of the model, or set the same weights_identity on engines that do.",
    "model_config": "Start the engines with the same model configuration (--hf-overrides, rope scaling).",
    "engine": "Engines of different kinds share no pages.",
    "engine_version": "Run the same release of the engine.",
    "dtype": "Start the engines with the same --dtype.",
    "kv_dtype": "Start the engines with the same KV-cache dtype (--kv-cache-dtype).",
    "quantization": "Serve the same quantization of the model.",
    "page_tokens": "Start the engines with the same page size (vLLM: --block-size).",
    "layout": "Run the same attention backend and cache layout on both.",
    "attention": "Run the same attention backend, and on CPUs the same instruction set.",
    "parallel": "Start the engines with the same tensor parallel size.",
    "hash": "Set the same --prefix-caching-hash-algo and PYTHONHASHSEED on all engines.",
    "speculative": "Start the engines with the same speculative decoding, or all without.",
    "salt": "They are kept apart on purpose: set the same namespace_salt where they should share.",
    "reset": "An engine was reset and may have other weights: restart it to let it share again.",
    "fields_version": "Run the same release of kvpeer.",
}
_FIX_OTHER = "Make it equal on all engines that should share pages."


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Engines at one agent with one namespace, 16 hex digits of its digest. `description`: what it was made of."""

    agent: str
    namespace: str
    description: Mapping[str, str]
    page_bytes: int
    n_parts: int
    n_engines: int
    n_pages: int


def shown(description: Mapping[str, str]) -> dict[str, str]:
    """The description as anybody may see it."""
    return {
        name: f"digest {hashlib.sha256(value.encode()).hexdigest()[:8]}" if name in _SECRET_FIELDS else value
        for name, value in description.items()
    }


def compare(groups: Iterable[EngineGroup]) -> list[dict[str, Any]]:
    """The cohorts, the one with most engines first. Each other one names the larger cohort that is most like it, the
    fields that differ from that one, and how to make them equal."""
    by_namespace: dict[str, list[EngineGroup]] = {}
    for group in groups:
        by_namespace.setdefault(group.namespace, []).append(group)
    ordered = sorted(by_namespace.values(), key=lambda members: (-_n_engines(members), members[0].namespace))
    return [_cohort(members, ordered[:place]) for place, members in enumerate(ordered)]


def _n_engines(members: Iterable[EngineGroup]) -> int:
    return sum(member.n_engines for member in members)


def _cohort(members: list[EngineGroup], larger: list[list[EngineGroup]]) -> dict[str, Any]:
    nearest, differing = "", list[dict[str, str]]()
    description = _description(members)
    for others in larger:
        found = _differences(description, _description(others))
        if description and (not nearest or len(found) < len(differing)):
            nearest, differing = others[0].namespace, found
    return {
        "namespace": members[0].namespace,
        "engines": _n_engines(members),
        "pages": sum(member.n_pages for member in members),
        "page_bytes": members[0].page_bytes,
        "n_parts": members[0].n_parts,
        "agents": sorted({member.agent for member in members}),
        "description": description,
        "compared_with": nearest,
        "differing": differing,
    }


def _description(members: Iterable[EngineGroup]) -> dict[str, str]:
    """Pages that were found on a disk come without one."""
    return next((dict(member.description) for member in members if member.description), {})


def _differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[dict[str, str]]:
    names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    return [
        {"field": name, "here": ours.get(name, ""), "there": theirs.get(name, ""), "fix": _FIXES.get(name, _FIX_OTHER)}
        for name in names
    ]
